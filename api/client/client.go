// Package client is the Go client of the REST interface. [Client.V2] has a method for every
// operation of version 2, and [Client.V1] for every operation of version 1. Requests and answers
// are the types that packages api/openapi/v2 and api/openapi/v1 generate from the contract.
//
// # Credentials
//
// With an API key ([WithAPIKey]) every call carries the key. After [V2.Login] the calls of V2 carry
// the user's access token instead, until [V2.Logout]. When the server rejects the token as expired,
// one exchange of the refresh token serves all calls in flight, and each is sent once more. The
// client keeps tokens in memory only. It sends no credential to operations that need none.
//
// # Errors and retries
//
// Every answer other than a success is an [*Error]; errors.Is tests its kind. For an empty id or
// name a method returns [ErrInvalid] and sends nothing. A call that began before another Login or a
// Logout and is then rejected returns [ErrUnauthenticated]: the client does not send it again as
// another principal.
//
// The client repeats a call that got status 429 after the time that the server asks for, because
// the server has done nothing. After a 503 or a broken connection the outcome is unknown. Then the
// client repeats only calls that are safe to repeat: those that read, encrypt, sign or set a
// complete state, and [V2.SealCredential], which carries an idempotency key. The context bounds
// everything, pauses included.
//
// The package follows no redirects, keeps no cookies besides the refresh token, and uses plain HTTP
// only to loopback unless [WithPlainHTTP] is set. Its own HTTP client requires TLS 1.3, where Go
// offers the hybrid key exchange X25519MLKEM768 first.
package client

import (
	"crypto/tls"
	"errors"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

// Client talks to one deployment as one principal. It is safe for concurrent use.
type Client struct {
	V1 *V1
	V2 *V2
}

type config struct {
	apiKey  string
	http    *http.Client
	retries int
	plain   bool
}

// Option changes a setting of [New].
type Option func(*config)

// WithAPIKey sets the API key that calls carry.
func WithAPIKey(key string) Option { return func(c *config) { c.apiKey = key } }

// WithHTTPClient sets the HTTP client, for example one that trusts a private certificate authority.
// New copies it and ignores its cookie jar and redirect policy.
func WithHTTPClient(h *http.Client) Option { return func(c *config) { c.http = h } }

// WithRetries sets how many times a call may be repeated. The default is 4; 0 sends each call once.
func WithRetries(n int) Option { return func(c *config) { c.retries = n } }

// WithPlainHTTP allows plain HTTP to a host that is not loopback. Credentials and secrets then
// cross the network unencrypted, unless a layer below HTTP encrypts them.
func WithPlainHTTP() Option { return func(c *config) { c.plain = true } }

// Defaults of the HTTP client. attemptTimeout bounds one attempt and is slightly longer than the
// server's own limit. defaultRetries is the number of attempts after the first.
const (
	attemptTimeout = 65 * time.Second
	defaultRetries = 4
)

// New returns a client of the deployment at baseURL, such as https://vault.example.org. It returns
// an error for a URL that cannot be used.
func New(baseURL string, options ...Option) (*Client, error) {
	c := config{retries: defaultRetries}
	for _, o := range options {
		o(&c)
	}
	base, err := checkURL(baseURL, c.plain)
	if err != nil {
		return nil, err
	}
	if c.retries < 0 {
		return nil, errors.New("making the client: the number of retries is negative")
	}
	h := sender(c.http)
	first := &V1{&transport{base: base, http: h, retries: c.retries, credential: c.credentialV1}}
	second := &V2{plain: c.plain}
	second.session.exchange = second.exchange
	second.transport = &transport{
		base: base, http: h, retries: c.retries, renew: second.session.renew,
		credential: func() credential { return c.credentialV2(&second.session) },
	}
	return &Client{V1: first, V2: second}, nil
}

// checkURL returns the URL to which paths are appended.
func checkURL(base string, plain bool) (string, error) {
	u, err := url.Parse(base)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return "", errors.New("making the client: the base URL is not one like https://vault.example.org")
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return "", errors.New("making the client: the base URL has a user, a query or a fragment: leave them out")
	}
	if u.Scheme == "http" && !plain && !loopback(u.Hostname()) {
		return "", errors.New("making the client: plain HTTP to another machine shows it every secret: use https, or WithPlainHTTP")
	}
	return strings.TrimRight(base, "/"), nil
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// sender returns the HTTP client to use. It follows no redirect: Go would send X-API-Key to another
// host, and the interface has no redirects.
func sender(given *http.Client) *http.Client {
	h := &http.Client{Timeout: attemptTimeout}
	if given != nil {
		*h = *given
	} else {
		t := &http.Transport{Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true}
		if usual, ok := http.DefaultTransport.(*http.Transport); ok {
			t = usual.Clone()
		}
		t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS13}
		h.Transport = t
	}
	h.Jar = nil
	h.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return h
}

// credentialV1 returns the API key in the header that version 1 reads.
func (c *config) credentialV1() credential {
	if c.apiKey == "" {
		return credential{}
	}
	return credential{header: "Authorization", value: "Bearer " + c.apiKey}
}

// credentialV2 returns the access token or the API key, never both: the server treats a request
// with both as one without a credential.
func (c *config) credentialV2(s *session) credential {
	access, _ := s.tokens()
	switch {
	case access != credential{}:
		return access
	case c.apiKey != "":
		return credential{header: "X-API-Key", value: c.apiKey}
	}
	return credential{}
}
