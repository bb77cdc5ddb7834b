// Package google finds the credentials of Google Cloud and adds them to HTTP requests.
//
// It uses Application Default Credentials: the file that GOOGLE_APPLICATION_CREDENTIALS names (a
// service account, workload identity federation, impersonation), the file of gcloud, or the
// metadata server of a machine or pod, which provides the workload identity of GKE. Google's own
// clients do the same, but add gRPC to the binary (docs/adr/0014-size.md).
package google

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"cloud.google.com/go/compute/metadata"
	"golang.org/x/oauth2"
	oauth2google "golang.org/x/oauth2/google"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// Universe is the domain of the services of Google's public cloud.
const Universe = "googleapis.com"

const (
	scope        = "https://www.googleapis.com/auth/cloud-platform"
	tokenTimeout = 10 * time.Second // limit for one token request
)

// Credentials hold a source of tokens. They are safe for concurrent use.
type Credentials struct {
	tokens       oauth2.TokenSource
	quotaProject string // project that pays for the calls of a user; "" for the project of the resource
	email        string // address of the service account in the file
	privateKey   []byte // PEM; nil when no file contains one
}

// file holds the fields of a credentials file that oauth2 does not return.
type file struct {
	Type         string `json:"type"`
	Email        string `json:"client_email"`
	PrivateKey   string `json:"private_key"`
	QuotaProject string `json:"quota_project_id"`
	Universe     string `json:"universe_domain"`
}

// Find returns the default credentials for the services of a universe, whose domain is [Universe] in
// Google's public cloud. ctx limits only the search. It returns an error when there are
// no credentials, and fault.Invalid for credentials of another universe.
func Find(ctx context.Context, universe string) (*Credentials, error) {
	// The token source keeps the context, so it must not end with ctx.
	lasting := context.WithValue(context.WithoutCancel(ctx), oauth2.HTTPClient, &http.Client{Timeout: tokenTimeout})
	found, err := oauth2google.FindDefaultCredentials(lasting, scope)
	if err != nil {
		return nil, err
	}
	c := &Credentials{tokens: found.TokenSource}
	var f file
	if len(found.JSON) > 0 {
		if err := json.Unmarshal(found.JSON, &f); err != nil {
			return nil, fmt.Errorf("reading the file of credentials: %w", err)
		}
	}
	if f.Universe != "" && f.Universe != universe {
		return nil, fault.New(fault.Invalid, fmt.Sprintf("the credentials in GOOGLE_APPLICATION_CREDENTIALS are for the universe_domain %s, "+
			"but the service is one of %s: give credentials of %s", f.Universe, universe, universe))
	}
	c.quotaProject = cmp.Or(os.Getenv("GOOGLE_CLOUD_QUOTA_PROJECT"), f.QuotaProject)
	if f.Type == "service_account" {
		// A service account signs its tokens itself, which saves a request.
		if c.tokens, err = oauth2google.JWTAccessTokenSourceWithScope(found.JSON, scope); err != nil {
			return nil, err
		}
		c.email, c.privateKey = f.Email, []byte(f.PrivateKey)
	}
	return c, nil
}

// PrivateKey returns the private key of a service account in PEM, or nil for other credentials.
func (c *Credentials) PrivateKey() []byte { return c.privateKey }

// Email returns the address of the service account from the file or the metadata server, or "" for
// credentials of another kind.
func (c *Credentials) Email(ctx context.Context) (string, error) {
	if c.email != "" || !metadata.OnGCE() {
		return c.email, nil
	}
	return metadata.EmailWithContext(ctx, "")
}

// Client returns a client whose requests carry a token. It follows no redirect, because a redirect
// could send the token elsewhere.
func (c *Credentials) Client(next http.RoundTripper) *http.Client {
	return &http.Client{Transport: transport{c, next}, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
}

type transport struct {
	credentials *Credentials
	next        http.RoundTripper
}

// RoundTrip implements [http.RoundTripper].
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	token, err := t.credentials.token(r.Context())
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		kind := fault.Unavailable
		if isRefusal(err) {
			kind = fault.Forbidden
		}
		return nil, fault.Wrap(kind, "there is no token for Google now: give the pod a workload identity, or set GOOGLE_APPLICATION_CREDENTIALS", err)
	}
	r = r.Clone(r.Context())
	token.SetAuthHeader(r)
	if t.credentials.quotaProject != "" {
		r.Header.Set("X-Goog-User-Project", t.credentials.quotaProject)
	}
	return t.next.RoundTrip(r)
}

// isRefusal reports whether another request for a token would get the same answer: the answer was a
// 4xx that does not ask to wait.
func isRefusal(err error) bool {
	var code int
	var undefined metadata.NotDefinedError
	if of := new(metadata.Error); errors.As(err, &of) {
		code = of.Code
	} else if of := new(oauth2.RetrieveError); errors.As(err, &of) && of.Response != nil {
		code = of.Response.StatusCode
	} else if errors.As(err, &undefined) {
		code = http.StatusNotFound
	}
	return code/100 == 4 && code != http.StatusRequestTimeout && code != http.StatusTooManyRequests
}

// token waits for a token as long as ctx allows, because token sources take no context.
func (c *Credentials) token(ctx context.Context) (*oauth2.Token, error) {
	type answer struct {
		token *oauth2.Token
		err   error
	}
	answered := make(chan answer, 1)
	go func() {
		token, err := c.tokens.Token()
		answered <- answer{token, err}
	}()
	select {
	case a := <-answered:
		return a.token, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
