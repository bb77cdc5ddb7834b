package delivery

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// Audience is the audience of the tokens with which pods read.
const Audience = "latticekeep"

// Server is a deployment from which credentials are read. It is safe for concurrent use.
type Server struct {
	url, caFile string
	options     []client.Option

	mu     sync.Mutex
	pem    []byte // authorities of the client
	client *client.V2
	http   *http.Transport // transport of the client
}

// NewServer returns the server at a URL. Its certificate is verified with the authorities in caFile, or with
// those of the system if caFile is "". The file is read again for each read, since it may be replaced. A read is one
// attempt: whoever asks knows when to ask again, and a server cannot have it wait.
func NewServer(url, caFile string, options ...client.Option) (*Server, error) {
	s := &Server{url: url, caFile: caFile, options: options}
	_, err := s.connect()
	return s, err
}

// connect returns the client for the authorities that are in the file now.
func (s *Server) connect() (*client.V2, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.caFile == "" && s.client != nil {
		return s.client, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13}
	var pem []byte
	if s.caFile != "" {
		var err error
		if pem, err = os.ReadFile(s.caFile); err != nil {
			return nil, fmt.Errorf("reading --ca-file: %w", err)
		}
		if s.client != nil && bytes.Equal(pem, s.pem) {
			return s.client, nil
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--ca-file %s has no certificate: give the authority of the server's certificate as PEM", s.caFile)
		}
	}
	transport := http.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // nobody replaces it
	transport.TLSClientConfig = config
	c, err := client.New(s.url, append(slices.Clone(s.options), client.WithRetries(0),
		client.WithHTTPClient(&http.Client{Transport: shortAnswers{transport}, Timeout: readTimeout}))...)
	if err != nil {
		return nil, err
	}
	if s.http != nil {
		s.http.CloseIdleConnections() // they were verified with the previous authorities
	}
	s.client, s.pem, s.http = c.V2, pem, transport
	return s.client, nil
}

const (
	readTimeout = 65 * time.Second // longer than the longest wait
	maxAnswer   = 4 << 20          // bytes; a credential has at most a few hundred thousand, and JSON escapes some
)

// shortAnswers ends an answer that is longer than any of a vault, before it fills the memory.
type shortAnswers struct{ http.RoundTripper }

// RoundTrip implements [http.RoundTripper].
func (s shortAnswers) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := s.RoundTripper.RoundTrip(r)
	if err == nil {
		answer.Body = &shortBody{answer.Body, maxAnswer}
	}
	return answer, err
}

type shortBody struct {
	io.ReadCloser
	left int // bytes
}

// Read implements [io.Reader].
func (b *shortBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left -= n; b.left < 0 {
		return 0, fmt.Errorf("the answer has more than %d bytes, so it is no vault's", maxAnswer)
	}
	return n, err
}

// Credential is a version of a credential.
type Credential struct {
	ID      string
	Version int64
	Tag     string // entity tag, for [client.OtherThan]
	Values  map[string]secret.Bytes
}

// Zero overwrites the values.
func (c Credential) Zero() { secret.ZeroAll(c.Values) }

// Read reads a credential by its name, as the ServiceAccount of a token. With the token "", it uses the API key
// that was given to [NewServer]. Errors say what to do: [client.ErrNotModified], fault.Forbidden,
// fault.Unauthenticated; fault.Exhausted and fault.Unavailable, which may pass.
func (s *Server) Read(ctx context.Context, token, name string, options ...client.CallOption) (Credential, error) {
	var c Credential
	v2, err := s.connect()
	if err != nil {
		return c, fault.Wrap(fault.Unavailable, err.Error(), err)
	}
	if token != "" {
		options = append(options, client.Bearer(token))
	}
	answer, err := v2.UnsealCredentialByName(ctx, name, append(options, client.EntityTag(&c.Tag))...)
	if err != nil {
		return c, s.explain(err, name, token)
	}
	c.ID, c.Version, c.Values = answer.CredentialId, answer.Version, ValuesOf(answer)
	return c, nil
}

// ValuesOf returns all values of an answer, those that are no text too.
func ValuesOf(answer *v2.UnsealedCredential) map[string]secret.Bytes {
	values := make(map[string]secret.Bytes, len(answer.Values))
	for key, value := range answer.Values {
		values[key] = secret.Bytes(value)
	}
	if answer.BinaryValues != nil {
		for key, value := range *answer.BinaryValues {
			values[key] = value
		}
	}
	return values
}

// explain says why a credential could not be read, and what to do. The text ends with the command that helps, so that it
// can be pasted.
func (s *Server) explain(err error, name, token string) error {
	account := accountOf(token)
	switch {
	case errors.Is(err, client.ErrNotModified):
		return err
	case errors.Is(err, client.ErrForbidden) && account.name != "":
		return fault.New(fault.Forbidden, account.denial(name))
	case errors.Is(err, client.ErrForbidden) && token != "":
		return fault.New(fault.Forbidden, fmt.Sprintf("credential %s cannot be read: it is not there, or it has expired, or the holder of the token, which is no ServiceAccount, may not read it", name))
	case errors.Is(err, client.ErrForbidden):
		return fault.New(fault.Forbidden, fmt.Sprintf("credential %s cannot be read: it is not there, or it has expired, or a policy keeps it away, or the API key lacks the scope vault:read", name))
	case errors.Is(err, client.ErrUnauthenticated) && token != "" && account.name == "":
		return fault.New(fault.Unauthenticated, s.url+" does not accept the token, which is no ServiceAccount's: mount a projected serviceAccountToken with the audience "+Audience)
	case errors.Is(err, client.ErrUnauthenticated) && token != "":
		return fault.New(fault.Unauthenticated, fmt.Sprintf("%s does not accept the token of ServiceAccount %s: it needs the audience %s, and must be one of the cluster in which the server runs", s.url, account, Audience))
	case errors.Is(err, client.ErrUnauthenticated):
		return fault.New(fault.Unauthenticated, s.url+" does not accept the API key: it was revoked, or has expired; make another one")
	case errors.Is(err, client.ErrRateLimited):
		return fault.New(fault.Exhausted, fmt.Sprintf("credential %s cannot be read now: %s says that there are too many requests", name, s.url))
	case errors.Is(err, client.ErrNoAnswer), errors.Is(err, context.DeadlineExceeded):
		return fault.New(fault.Unavailable, fmt.Sprintf("credential %s cannot be read now: %s does not answer: %v", name, s.url, err))
	}
	return fault.New(fault.Unavailable, fmt.Sprintf("credential %s cannot be read now: %v", name, err))
}

// account is a ServiceAccount.
type account struct{ namespace, name string }

func (a account) String() string { return a.namespace + "/" + a.name }

// accountOf returns the ServiceAccount that a token names, for messages only: nothing is verified.
func accountOf(token string) (a account) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return a
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	var claims struct {
		Subject string `json:"sub"`
	}
	if err == nil && json.Unmarshal(payload, &claims) == nil {
		if of, ok := strings.CutPrefix(claims.Subject, "system:serviceaccount:"); ok {
			a.namespace, a.name, _ = strings.Cut(of, ":")
		}
	}
	return a
}

var (
	plain      = regexp.MustCompile(`^[-._/a-zA-Z0-9]+$`)  // what a shell takes as it is
	objectName = regexp.MustCompile(`^[-.a-z0-9]{1,100}$`) // what can be a part of the name of an object
)

// denial is the one text for all that the vault refuses with its one answer.
func (a account) denial(name string) string {
	role, quoted := name, name
	if !objectName.MatchString(name) {
		digest := sha256.Sum256([]byte(name))
		role = hex.EncodeToString(digest[:4])
	}
	role = "unseal-" + role + "-" + a.name // one for each pair, so that it is not there yet
	if !plain.MatchString(name) {
		quoted = "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
	}
	return fmt.Sprintf("credential %[1]s cannot be read: it is not there, or it has expired, or a policy keeps it away, or ServiceAccount %[2]s/%[3]s lacks unseal on it: "+
		"kubectl create role %[4]s --namespace %[2]s --verb=unseal --resource=sealedcredentials.latticekeep.dev --resource-name=%[5]s && "+
		"kubectl create rolebinding %[4]s --namespace %[2]s --role=%[4]s --serviceaccount=%[2]s:%[3]s", name, a.namespace, a.name, role, quoted)
}
