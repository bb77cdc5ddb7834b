package kms

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	googleauth "github.com/latticekeep/latticekeep/internal/google"
)

// google is a key of Google Cloud KMS. It uses the REST interface:
// https://cloud.google.com/kms/docs/reference/rest
type google struct {
	client *http.Client
	base   *url.URL // scheme and host of the service
	name   string
}

var googleName = regexp.MustCompile(`^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$`)

// openGCP opens gcpkms://projects/P/locations/L/keyRings/R/cryptoKeys/K. The parameter endpoint
// sets another address than Google's, such as a regional or private one.
func openGCP(ctx context.Context, u *url.URL, o Options) (*Key, error) {
	values, err := parameters(u, "endpoint")
	if err != nil {
		return nil, err
	}
	name := path.Join(u.Host, u.Path)
	if !googleName.MatchString(name) {
		return nil, unfit("name the key of Google Cloud KMS as gcpkms://projects/P/locations/L/keyRings/R/cryptoKeys/K, without a version")
	}
	g, err := dialGoogle(ctx, values["endpoint"], o)
	if err != nil {
		return nil, err
	}
	if err := try(ctx, o.Logger, "reading the key's purpose", func(ctx context.Context) error { return g.check(ctx, name) }); err != nil {
		_ = g.close()
		return nil, needs("cloudkms.cryptoKeys.get", err)
	}
	return &Key{id: "gcpkms:" + g.name, service: g}, nil
}

func dialGoogle(ctx context.Context, endpoint string, o Options) (*google, error) {
	g := &google{base: &url.URL{Scheme: "https", Host: "cloudkms.googleapis.com"}}
	if endpoint != "" {
		u, err := url.Parse(endpoint)
		if err != nil || strings.Trim(u.Path, "/") != "" {
			return nil, unfit("the parameter endpoint of gcpkms is no address: give https://host")
		}
		if err := checkAddress(u); err != nil {
			return nil, err
		}
		g.base = &url.URL{Scheme: u.Scheme, Host: u.Host}
	}
	transport := newTransport(http.DefaultTransport.(*http.Transport), o)
	if g.base.Scheme == "http" { // on this machine; credentials stay local
		g.client = &http.Client{Transport: transport, CheckRedirect: followNone}
		return g, nil
	}
	credentials, err := googleauth.Find(ctx, googleauth.Universe)
	if fault.Of(err) == fault.Invalid {
		return nil, err
	} else if err != nil {
		return nil, fault.Wrap(fault.Invalid, "there are no Google credentials: give the pod a workload identity, or set GOOGLE_APPLICATION_CREDENTIALS", err)
	}
	g.client = credentials.Client(transport)
	return g, nil
}

// followNone makes a client return a redirect as the answer. A redirect could take a plaintext
// elsewhere.
func followNone(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// These types hold the fields of Google's messages that this package uses. Bytes are base64.
type (
	googleKey struct {
		Name    string         `json:"name"`
		Purpose string         `json:"purpose"`
		Primary *googleVersion `json:"primary"`
	}
	googleVersion struct {
		Name        string    `json:"name"`
		State       string    `json:"state"`
		Algorithm   string    `json:"algorithm"`
		DestroyTime time.Time `json:"destroyTime"`
	}
	googleVersions struct {
		Versions      []googleVersion `json:"cryptoKeyVersions"`
		NextPageToken string          `json:"nextPageToken"`
	}
	googleText struct {
		Plaintext  []byte `json:"plaintext,omitempty"`
		Ciphertext []byte `json:"ciphertext,omitempty"`
	}
)

// googleError is an answer that reports a failure.
type googleError struct {
	code    int    // HTTP status
	status  string // Google's name of the error; "" when another server answered
	message string
}

func (e *googleError) Error() string {
	return fmt.Sprintf("Google Cloud KMS answers %d %s: %s", e.code, e.status, e.message)
}

// call makes one request. resource is a name followed by the method; in is nil for a GET.
func (g *google) call(ctx context.Context, resource string, query url.Values, in, out any) error {
	method, body := http.MethodGet, []byte(nil)
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return fmt.Errorf("encoding a request: %w", err)
		}
		method = http.MethodPost
		defer clear(body)
	}
	address := *g.base
	address.Path, address.RawQuery = "/v1/"+resource, query.Encode()
	r, err := http.NewRequestWithContext(ctx, method, address.String(), bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("making a request: %w", err)
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := g.client.Do(r)
	switch {
	case fault.Of(err) == fault.Unavailable, fault.Of(err) == fault.Forbidden: // there is no token
		return credentials(err)
	case err != nil:
		return failed(err, true)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body) // newTransport bounds it
	if err != nil {
		return failed(err, true)
	}
	defer clear(answer)
	if resp.StatusCode == http.StatusOK {
		if err := json.Unmarshal(answer, out); err != nil {
			return unavailable(fmt.Errorf("reading the answer: %w", err))
		}
		return nil
	}
	var refusal struct {
		Error struct {
			Status  string `json:"status"`
			Message string `json:"message"`
		} `json:"error"`
	}
	_ = json.Unmarshal(answer, &refusal) // an answer of another server lacks these fields
	e := &googleError{resp.StatusCode, refusal.Error.Status, refusal.Error.Message}
	if e.refuses() {
		return forbidden(e)
	}
	return failed(e, !e.lasts())
}

// refuses reports whether the answer is about the caller's credentials.
func (e *googleError) refuses() bool {
	if e.status == "" {
		return e.code == http.StatusUnauthorized || e.code == http.StatusForbidden
	}
	return e.status == "PERMISSION_DENIED" || e.status == "UNAUTHENTICATED"
}

// lasts reports whether a retry would get the same answer.
func (e *googleError) lasts() bool {
	if e.status == "" {
		return slices.Contains([]int{http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound}, e.code)
	}
	return slices.Contains([]string{
		"PERMISSION_DENIED", "UNAUTHENTICATED", "FAILED_PRECONDITION", "NOT_FOUND", "INVALID_ARGUMENT", "UNIMPLEMENTED",
	}, e.status)
}

// check verifies that the key exists, is symmetric and usable, and stores its name.
func (g *google) check(ctx context.Context, name string) error {
	var key googleKey
	if err := g.call(ctx, name, nil, nil, &key); err != nil {
		return err
	}
	switch primary := key.Primary; {
	case key.Purpose != "ENCRYPT_DECRYPT":
		return unfit("the purpose of the KMS key is %s: RSA and EC wrapping is opened by a quantum computer; make a key for ENCRYPT_DECRYPT", key.Purpose)
	case primary == nil:
		return unfit("the KMS key has no primary version: make one")
	case primary.Algorithm != "GOOGLE_SYMMETRIC_ENCRYPTION":
		return unfit("the algorithm of the KMS key is %s: make a key of GOOGLE_SYMMETRIC_ENCRYPTION", primary.Algorithm)
	case primary.State != "ENABLED":
		return unfit("the primary version of the KMS key is %s: enable it", primary.State)
	case !googleName.MatchString(key.Name):
		return unfit("what answers at the address of Google Cloud KMS is not it")
	}
	g.name = key.Name
	return nil
}

// errNotGoogle is the error for a successful answer that Google would not send, such as one from a
// proxy. It says nothing about the key.
var errNotGoogle = errors.New("the answer is not that of Google Cloud KMS: check the proxy and the parameter endpoint")

func (g *google) encrypt(ctx context.Context, plaintext []byte) ([]byte, error) {
	var out googleText
	err := g.call(ctx, g.name+":encrypt", nil, googleText{Plaintext: plaintext}, &out)
	if err == nil && len(out.Ciphertext) == 0 {
		err = unavailable(errNotGoogle)
	}
	return out.Ciphertext, err
}

func (g *google) decrypt(ctx context.Context, ciphertext []byte) ([]byte, error) {
	var out googleText
	err := g.call(ctx, g.name+":decrypt", nil, googleText{Ciphertext: ciphertext}, &out)
	if e := new(googleError); errors.As(err, &e) && e.status == "INVALID_ARGUMENT" {
		return nil, ErrForeign
	}
	if err == nil && len(out.Plaintext) == 0 { // a Key never wraps an empty plaintext
		err = unavailable(errNotGoogle)
	}
	return out.Plaintext, err
}

func (g *google) destroy(ctx context.Context) (Destruction, error) {
	d := Destruction{Undo: "gcloud kms keys versions restore, for each of its versions, then enable"}
	for page := (url.Values{}); ; {
		var list googleVersions
		if err := g.call(ctx, g.name+"/cryptoKeyVersions", page, nil, &list); err != nil {
			return Destruction{}, err
		}
		if len(list.Versions) == 0 && !page.Has("pageToken") { // every key that was opened has a version
			return Destruction{}, unavailable(errNotGoogle)
		}
		for _, v := range list.Versions {
			if !strings.HasPrefix(v.Name, g.name+"/cryptoKeyVersions/") {
				return Destruction{}, unavailable(errNotGoogle)
			}
			switch v.State {
			case "ENABLED", "DISABLED": // a disabled version could be enabled again and open what it wrapped
				var destroyed googleVersion
				if err := g.call(ctx, v.Name+":destroy", nil, struct{}{}, &destroyed); err != nil {
					return Destruction{}, err
				}
				if destroyed.State != "DESTROY_SCHEDULED" && destroyed.State != "DESTROYED" {
					return Destruction{}, unavailable(errNotGoogle)
				}
				v = destroyed
			case "DESTROY_SCHEDULED": // scheduled earlier, or by an attempt that failed later
			default:
				continue
			}
			if v.DestroyTime.After(d.When) {
				d.When = v.DestroyTime.UTC()
			}
		}
		if list.NextPageToken == "" {
			return d, nil
		}
		page.Set("pageToken", list.NextPageToken)
	}
}

func (g *google) close() error {
	g.client.CloseIdleConnections()
	return nil
}
