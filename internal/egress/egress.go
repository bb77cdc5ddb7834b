// Package egress calls addresses that tenants name.
//
// A tenant could name an address that only this server reaches: its own loopback, a service of the
// cluster, the metadata of a cloud. So a call goes only to public addresses, and to the networks
// that the operator's list adds. The address is checked when it is dialed, after the resolution of
// the name, so a name that resolves to something else the second time helps nobody.
//
// # Invariants
//
//   - https only, TLS 1.2 or later, on port 443 or one from 1024 on.
//   - No redirect is followed, and no proxy is used, whatever the environment says.
//   - A call ends after [Timeout], and takes a bounded number of bytes.
//   - The caller gets the status of the answer, and nothing else: no body and no header.
//   - An error contains neither the URL, which may hold a token, nor anything of the answer.
package egress

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// Bounds of a call.
const (
	Timeout     = 10 * time.Second
	maxURL      = 2048     // bytes
	maxHeader   = 16 << 10 // bytes of the answer's header
	maxBody     = 16 << 10 // bytes of the answer's body that are read, and dropped
	minOpenPort = 1024     // ports below this, except 443, are those of other protocols
)

// Reason says why a call got no answer. A tenant may see it: a name that does not exist, an address
// that is not allowed and one where nobody listens have the same, so it tells nothing about names and
// addresses of the operator's network.
type Reason string

// The reasons.
const (
	Unreachable Reason = "unreachable"
	NotTrusted  Reason = "tls"     // no TLS, or a certificate that is not trusted
	TooSlow     Reason = "timeout" // no answer within Timeout
	NotHTTP     Reason = "no_http" // the answer is not HTTP, or its header is too long
)

// Error is the error of a call that got no answer. Its text is for the operator.
type Error struct {
	Reason Reason
	cause  error // without the URL
}

func (e *Error) Error() string { return string(e.Reason) + ": " + e.cause.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.cause }

// Options configure a [Client].
type Options struct {
	Allow    []netip.Prefix // networks that may be called although they are not public
	Roots    *x509.CertPool // nil: those of the system
	Resolver *net.Resolver  // nil: that of the system
}

// Client makes the calls. It is safe for concurrent use.
type Client struct{ http http.Client }

// New returns a client.
func New(o Options) *Client {
	dialer := &net.Dialer{
		Resolver: o.Resolver,
		ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
			return check(address, o.Allow)
		},
	}
	return &Client{http.Client{
		Timeout:       Timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			Proxy:                  nil, // the default transport would ask the environment
			DialContext:            dialer.DialContext,
			TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: o.Roots},
			DisableKeepAlives:      true, // each call checks the address
			DisableCompression:     true,
			MaxResponseHeaderBytes: maxHeader,
		},
	}}
}

// ParseURL returns the URL of an address that a tenant names. Error: fault.Invalid. It contains no
// part of the text.
func ParseURL(text string) (*url.URL, error) {
	invalid := func(rule string) (*url.URL, error) { return nil, fault.New(fault.Invalid, "url "+rule) }
	u, err := url.Parse(text)
	switch {
	case len(text) > maxURL:
		return invalid(fmt.Sprintf("has at most %d bytes", maxURL))
	case err != nil || u.Opaque != "" || u.Hostname() == "":
		return invalid("is not a URL: give one such as https://hooks.example.com/path")
	case u.Scheme != "https":
		return invalid("begins with https://")
	case u.User != nil:
		return invalid("has no user and no password: put a token into the path")
	case strings.Contains(text, "#"):
		return invalid("has no fragment: leave out # and what follows")
	case strings.Contains(u.Host, "%"):
		return invalid("has no zone in its address")
	case u.Port() == "" && strings.HasSuffix(u.Host, ":"):
		return invalid("has a number as its port")
	}
	if u.Port() != "" {
		port, err := strconv.ParseUint(u.Port(), 10, 16)
		if err != nil || port < minOpenPort && port != 443 {
			return invalid("has the port 443 or one from 1024 to 65535")
		}
	}
	return u, nil
}

// Post sends a body and returns the status of the answer, whatever it is. Errors: those of [ParseURL],
// and [*Error] if there was no answer.
func (c *Client) Post(ctx context.Context, address string, header http.Header, body []byte) (status int, err error) {
	u, err := ParseURL(address)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	var came progress
	ctx = httptrace.WithClientTrace(ctx, came.trace())
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), bytes.NewReader(body))
	if err != nil {
		return 0, fault.New(fault.Invalid, "url is not a URL that can be called")
	}
	request.Header = header.Clone()
	answer, err := c.http.Do(request)
	if err != nil {
		return 0, came.failure(err)
	}
	closing := func() { _ = answer.Body.Close() } // the status is known
	defer closing()
	if answer.StatusCode < http.StatusOK { // after 101 the connection is ours, and no timeout of the client ends a read
		return 0, &Error{NotHTTP, errors.New("the answer goes on in another protocol")}
	}
	defer context.AfterFunc(ctx, closing)()
	// A receiver that still writes when the connection ends would see an error.
	_, _ = io.CopyN(io.Discard, answer.Body, maxBody)
	return answer.StatusCode, nil
}

// progress says how far a call came. The transport may note it after the call has ended.
type progress struct{ connected, secured atomic.Bool }

func (p *progress) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		TLSHandshakeStart: func() { p.connected.Store(true) },
		GotConn:           func(httptrace.GotConnInfo) { p.secured.Store(true) },
	}
}

// failure returns the error of a call that came so far. It keeps no text of err, which has the URL, and
// perhaps parts of the answer.
func (p *progress) failure(err error) *Error {
	outer := new(url.Error)
	switch {
	case errors.Is(err, ErrAddress):
		return &Error{Unreachable, ErrAddress}
	case errors.As(err, &outer) && outer.Timeout():
		return &Error{TooSlow, fmt.Errorf("there is no answer within %v", Timeout)}
	case errors.Is(err, context.Canceled):
		return &Error{TooSlow, context.Canceled}
	case !p.connected.Load():
		return &Error{Unreachable, errors.New("the name cannot be resolved, or nothing accepts the connection")}
	case !p.secured.Load():
		return &Error{NotTrusted, errors.New("there is no TLS 1.2, or its certificate is not trusted")}
	}
	return &Error{NotHTTP, errors.New("the answer is not HTTP, or its header is too long")}
}
