// Package client is the Go client of the REST interface. [Client.V2] has a
// method for every operation of version 2 and [Client.V1] for every one of
// version 1; requests and answers are the types that packages
// api/openapi/v2 and api/openapi/v1 generate from the contract.
//
// # Credentials
//
// With an API key ([WithAPIKey]) every call carries it. After [V2.Login] the
// calls of V2 carry the user's access token instead, until [V2.Logout]; when the
// server refuses it as expired, one exchange of the refresh token serves all
// calls in flight, and each is sent once more. Tokens are kept in memory only.
// Operations that need no credential are sent none.
//
// # Errors and repetition
//
// Every answer that is no success is an [*Error]; errors.Is asks for its kind.
// An empty id or name is [ErrInvalid], and nothing is sent. After another Login
// or a Logout, a call that began before and is refused is [ErrUnauthenticated]:
// it is not sent again as somebody else.
// A call that is refused with 429 is sent again after the time that the server
// asks for, since nothing was done. After a 503 or a broken connection nobody
// knows whether it was done, so only those calls are sent again that may be: all
// that read, encrypt, sign or state the whole of what they set, and
// [V2.SealCredential], which carries an idempotency key. The context bounds all
// of it, waits included.
//
// The package follows no redirects, keeps no cookies besides the refresh token,
// and speaks plain HTTP only to loopback unless told otherwise. Its own HTTP
// client insists on TLS 1.3, where Go offers the hybrid key exchange
// X25519MLKEM768 first.
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

// Client talks to one deployment as one principal. It is safe for concurrent
// use.
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

// Option changes what [New] makes.
type Option func(*config)

// WithAPIKey sets the API key that calls carry.
func WithAPIKey(key string) Option { return func(c *config) { c.apiKey = key } }

// WithHTTPClient sets the HTTP client to send with, as one that trusts a
// private certificate authority. It is copied; its cookie jar and redirect
// policy are not used.
func WithHTTPClient(h *http.Client) Option { return func(c *config) { c.http = h } }

// WithRetries sets how many times a call may be sent again; the default is 4,
// and 0 sends each once.
func WithRetries(n int) Option { return func(c *config) { c.retries = n } }

// WithPlainHTTP allows plain HTTP to a host that is not loopback: credentials
// and secrets then cross the network in the clear, unless something below HTTP
// encrypts it.
func WithPlainHTTP() Option { return func(c *config) { c.plain = true } }

// Defaults of the HTTP client: the longest that one attempt takes, a little
// over the server's own limit, and how many attempts may follow the first.
const (
	attemptTimeout = 65 * time.Second
	defaultRetries = 4
)

// New returns a client of the deployment at baseURL, as
// https://vault.example.org. Error: a URL that cannot be used.
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

// checkURL returns the URL that paths are appended to.
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

// sender returns the HTTP client to use. It follows no redirect, since Go
// would send X-API-Key along to another host, and the interface has none.
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

// credentialV1 is the API key where version 1 looks for it.
func (c *config) credentialV1() credential {
	if c.apiKey == "" {
		return credential{}
	}
	return credential{header: "Authorization", value: "Bearer " + c.apiKey}
}

// credentialV2 is one of the two: the server takes both for none.
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
