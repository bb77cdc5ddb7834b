package kms

import (
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"time"
)

// maxAnswer bounds the body of an answer, in bytes. The longest real answer describes a key with
// all its versions.
const maxAnswer = 4 << 20

// tlsConfig returns the TLS configuration for a service, based on that of its client library.
func tlsConfig(base *tls.Config, o Options) *tls.Config {
	c := &tls.Config{}
	if base != nil {
		c = base.Clone()
	}
	if o.RootCAs != nil {
		c.RootCAs = o.RootCAs
	}
	c.MinVersion = max(c.MinVersion, tls.VersionTLS12)
	if o.PQRequired {
		c.MinVersion = tls.VersionTLS13
		c.CurvePreferences = []tls.CurveID{tls.X25519MLKEM768}
	}
	return c
}

// transport carries the calls of a client library. It takes proxy and TLS settings from the
// library's transport.
type transport struct{ *http.Transport }

func newTransport(base *http.Transport, o Options) transport {
	c := tlsConfig(base.TLSClientConfig, o)
	c.NextProtos = nil
	// HTTP/1.1 closes the connection of a call that timed out, so the next call does not wait for
	// the same dead peer.
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return transport{&http.Transport{
		Proxy: base.Proxy, TLSClientConfig: c, Protocols: protocols, DialContext: (&net.Dialer{Timeout: openTimeout, KeepAlive: 15 * time.Second}).DialContext,
		TLSHandshakeTimeout: openTimeout, MaxIdleConnsPerHost: 16, IdleConnTimeout: 90 * time.Second,
	}}
}

// RoundTrip rejects plain HTTP to another machine, whatever the source of the address, and bounds
// the answer.
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := checkAddress(r.URL); err != nil {
		return nil, err
	}
	resp, err := t.Transport.RoundTrip(r)
	if err == nil {
		resp.Body = http.MaxBytesReader(nil, resp.Body, maxAnswer)
	}
	return resp, err
}

// checkAddress rejects a URL that is neither https nor on this machine.
func checkAddress(u *url.URL) error {
	switch {
	case u.Hostname() == "", u.User != nil, u.Scheme != "https" && u.Scheme != "http":
		return unfit("the address of the key-management service is not one: give https://host")
	case u.Scheme == "http" && !loopback(u.Hostname()):
		return unfit("the address of the key-management service is plain http: give https://host, or an address on this machine")
	}
	return nil
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// parameters returns the known query parameters of a URL. It rejects unknown and repeated ones.
func parameters(u *url.URL, known ...string) (map[string]string, error) {
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return nil, unfit("the parameters in the URL of the KMS key cannot be read")
	}
	values := make(map[string]string, len(query))
	for _, name := range known {
		if v, ok := query[name]; ok && len(v) == 1 && v[0] != "" {
			values[name] = v[0]
			delete(query, name)
		}
	}
	if len(query) > 0 || u.Fragment != "" || u.User != nil {
		return nil, unfit("the URL of the KMS key has a part that is unknown, empty or repeated: %s:// takes %v", u.Scheme, known)
	}
	return values, nil
}
