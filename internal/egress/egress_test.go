package egress

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"context"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/latticekeep/latticekeep/internal/fault"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestOnlyPublicAddressesAreCalled(t *testing.T) {
	for _, address := range []string{
		"0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "100.127.255.255", "127.0.0.1", "127.9.9.9",
		"168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1",
		"198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
		"::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1",
		"64:ff9b::127.0.0.1", "64:ff9b::8.8.8.8", "64:ff9b:1::1", "64:ff9b:1::a00:1", "100::1", "2001::1", "2001:0:7f00:1::", "2001:10::1", "2001:20::1", "2001:db8::1",
		"2002:7f00:1::", "2002:a00:1::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1", "4000::1",
	} {
		if a := netip.MustParseAddr(address); isPublic(a) || check(netip.AddrPortFrom(a, 443).String(), nil) == nil {
			t.Errorf("%s is called", address)
		}
	}
	for _, address := range []string{
		"1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "128.0.0.1", "168.63.129.17", "172.15.255.255", "172.32.0.0", "192.0.1.1",
		"198.17.255.255", "198.20.0.0", "223.255.255.255", "::ffff:8.8.8.8", "2001:200::1", "2001:4860:4860::8888", "2003::1", "2600::1", "2a00::1", "3ffe::1",
	} {
		if a := netip.MustParseAddr(address); check(netip.AddrPortFrom(a, 443).String(), nil) != nil {
			t.Errorf("%s is not called", address)
		}
	}
	if isPublic(netip.MustParseAddr("2600::1%eth0")) || check("example.org:443", nil) == nil {
		t.Error("a zone, or a name, is called")
	}
}

func TestTheOperatorAllowsNetworks(t *testing.T) {
	allow := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00:1::/32")}
	for address, allowed := range map[string]bool{
		"10.1.2.3:443": true, "[::ffff:10.1.2.3]:443": true, "10.2.0.1:443": false, "127.0.0.1:443": false, "[fd00:1::1]:443": true, "[fd00:2::1]:443": false,
	} {
		if err := check(address, allow); (err == nil) != allowed {
			t.Errorf("%s: %v", address, err)
		}
	}
}

func TestURLs(t *testing.T) {
	for _, text := range []string{
		"https://hooks.example.com/a?b=c", "https://hooks.example.com", "https://hooks.example.com:443/", "https://1.1.1.1:8443/x", "https://[2600::1]/", "https://10.0.0.1/",
	} {
		if u, err := ParseURL(text); err != nil || u.String() != text {
			t.Errorf("%s: %v", text, err)
		}
	}
	for _, text := range []string{
		"", "canary", "http://canary.example/", "HTTP://canary.example", "ftp://canary.example", "//canary.example", "https:canary.example", "https:///canary", "https://:443/canary",
		"https://canary@example.org/", "https://user:canary@example.org/", "https://@canary.example/", "https://canary.example/#canary", "https://canary.example/#",
		"https://canary.example:80/", "https://canary.example:22", "https://canary.example:0", "https://canary.example:65536", "https://canary.example:", "https://canary.example:x/",
		"https://[fe80::1%25canary]/", "https://canary.example/\n", "https://can ary.example/", "https://canary.example/%zz", "https://canary.example/" + strings.Repeat("x", maxURL),
	} {
		if _, err := ParseURL(text); !errors.Is(err, fault.Invalid) || strings.Contains(err.Error(), "canary") || strings.Contains(fault.Message(err), "canary") {
			t.Errorf("%q: %v", text, err)
		}
		if _, err := New(Options{}).Post(t.Context(), text, nil, nil); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q was called: %v", text, err)
		}
	}
}

// receiver is an https server on loopback. It counts its connections.
type receiver struct {
	*httptest.Server
	connections atomic.Int64
}

func newReceiver(t *testing.T, handler http.HandlerFunc) *receiver {
	t.Helper()
	r := &receiver{Server: httptest.NewUnstartedServer(handler)}
	r.Config.ErrorLog = log.New(io.Discard, "", 0)
	r.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			r.connections.Add(1)
		}
	}
	r.StartTLS()
	t.Cleanup(r.Close)
	return r
}

var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}

func (r *receiver) options() Options {
	roots := x509.NewCertPool()
	roots.AddCert(r.Certificate())
	return Options{Allow: loopback, Roots: roots}
}

func reasonOf(err error) Reason {
	if e := new(Error); errors.As(err, &e) {
		return e.Reason
	}
	return ""
}

func TestACallCarriesHeaderAndBody(t *testing.T) {
	t.Setenv("HTTPS_PROXY", "http://127.0.0.1:1")
	t.Setenv("ALL_PROXY", "http://127.0.0.1:1")
	var got string
	r := newReceiver(t, func(w http.ResponseWriter, q *http.Request) {
		b, _ := io.ReadAll(q.Body)
		got = q.Method + " " + q.URL.Path + " " + q.Header.Get("Webhook-Id") + " " + string(b)
		w.WriteHeader(http.StatusAccepted)
	})
	status, err := New(r.options()).Post(t.Context(), r.URL+"/path", http.Header{"Webhook-Id": {"msg_1"}}, []byte("body"))
	if err != nil || status != http.StatusAccepted || got != "POST /path msg_1 body" {
		t.Error(status, err, got)
	}
}

// What is not allowed gets not even a connection.
func TestAnAddressThatIsNotAllowedIsNotDialed(t *testing.T) {
	r := newReceiver(t, func(http.ResponseWriter, *http.Request) {})
	o := r.options()
	o.Allow = nil
	_, port, _ := net.SplitHostPort(r.Listener.Addr().String())
	for _, host := range []string{"127.0.0.1", "[::ffff:127.0.0.1]", "0.0.0.0", "localhost", "[::]", "[64:ff9b::127.0.0.1]"} {
		_, err := New(o).Post(t.Context(), "https://"+host+":"+port+"/canary", nil, nil)
		if !errors.Is(err, ErrAddress) || reasonOf(err) != Unreachable {
			t.Errorf("%s: %v", host, err)
		}
	}
	if n := r.connections.Load(); n != 0 {
		t.Error(n, "connections")
	}
}

// resolver is a DNS server on loopback. It answers each question for an IPv4 address with the next of the
// answers, and then with the last one.
func resolver(t *testing.T, answers ...string) *net.Resolver {
	t.Helper()
	server, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = server.Close() })
	go func() {
		b := make([]byte, 512)
		for {
			n, from, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(b[:n]) != nil || len(m.Questions) == 0 {
				continue
			}
			m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
			if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class},
					Body:   &dnsmessage.AResource{A: netip.MustParseAddr(answers[0]).As4()},
				}}
				if len(answers) > 1 {
					answers = answers[1:]
				}
			}
			packed, err := m.Pack()
			if err == nil {
				_, _ = server.WriteTo(packed, from)
			}
		}
	}()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", server.LocalAddr().String())
	}}
}

// Whoever looks a name up first and calls it then is told a public address first, and called to loopback.
func TestANameThatIsReboundHelpsNobody(t *testing.T) {
	r := newReceiver(t, func(http.ResponseWriter, *http.Request) {})
	_, port, _ := net.SplitHostPort(r.Listener.Addr().String())
	o := r.options()
	o.Allow, o.Resolver = nil, resolver(t, "93.184.216.34", "127.0.0.1")
	seen, err := o.Resolver.LookupNetIP(t.Context(), "ip4", "rebound.example.")
	if err != nil || len(seen) != 1 || !isPublic(seen[0]) {
		t.Fatal(seen, err)
	}
	_, err = New(o).Post(t.Context(), "https://rebound.example.:"+port+"/", nil, nil)
	if !errors.Is(err, ErrAddress) || r.connections.Load() != 0 {
		t.Error(err, r.connections.Load(), "connections")
	}
	// The same name reaches the receiver once loopback is allowed, so the test is about the address.
	o.Allow = loopback
	_, err = New(o).Post(t.Context(), "https://rebound.example.:"+port+"/", nil, nil)
	if reasonOf(err) != NotTrusted || r.connections.Load() != 1 { // the certificate has another name
		t.Error(err, r.connections.Load(), "connections")
	}
}

func TestARedirectIsNotFollowed(t *testing.T) {
	other := newReceiver(t, func(http.ResponseWriter, *http.Request) {})
	for _, code := range []int{301, 302, 303, 307, 308} {
		r := newReceiver(t, func(w http.ResponseWriter, q *http.Request) { http.Redirect(w, q, other.URL, code) })
		status, err := New(r.options()).Post(t.Context(), r.URL, nil, []byte("body"))
		if err != nil || status != code {
			t.Error(status, err)
		}
	}
	if n := other.connections.Load(); n != 0 {
		t.Error(n, "redirects were followed")
	}
}

// The body of an answer is not read to its end, and in no error.
func TestABodyWithoutEndIsCutOff(t *testing.T) {
	var written atomic.Int64
	ended := make(chan struct{})
	r := newReceiver(t, func(w http.ResponseWriter, _ *http.Request) {
		defer close(ended)
		w.WriteHeader(http.StatusInternalServerError)
		for {
			n, err := w.Write([]byte(strings.Repeat("canary", 1000)))
			written.Add(int64(n))
			if err != nil {
				return
			}
		}
	})
	status, err := New(r.options()).Post(t.Context(), r.URL, nil, nil)
	if err != nil || status != 500 {
		t.Error(status, err)
	}
	<-ended                              // the connection was closed on it
	if n := written.Load(); n > 64<<20 { // what the sockets buffer is less
		t.Error(n, "bytes were taken")
	}
}

func TestASlowAnswerEndsWithTheContext(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	for name, handler := range map[string]http.HandlerFunc{
		"no header": func(http.ResponseWriter, *http.Request) { asked <- struct{}{}; <-release },
		"no end of the body": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(200)
			_ = http.NewResponseController(w).Flush()
			asked <- struct{}{}
			<-release
		},
	} {
		r := newReceiver(t, handler)
		t.Cleanup(func() { r.CloseClientConnections() })
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-asked; cancel() }()
		status, err := New(r.options()).Post(ctx, r.URL, nil, nil)
		if name == "no header" && (err == nil || status != 0) {
			t.Errorf("%s: %d, %v", name, status, err)
		}
	}
	close(release)
	if c := New(Options{}); c.http.Timeout != Timeout || Timeout > 10e9 {
		t.Error("a call has no end")
	}
}

// An answer that is not acceptable is an error without its text, the URL and the resolver.
func TestErrorsShowNothing(t *testing.T) {
	bomb := newReceiver(t, func(w http.ResponseWriter, _ *http.Request) {
		for range 100 {
			w.Header().Add("X-Canary", strings.Repeat("canary", 1000))
		}
	})
	raw := func(text string) string {
		l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: bomb.TLS.Certificates})
		must(t, err)
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = c.Read(make([]byte, 1000))
				_, _ = c.Write([]byte(text))
				_ = c.Close()
			}
		}()
		return "https://" + l.Addr().String()
	}
	plain := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(plain.Close)
	closed, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	must(t, closed.Close())
	untrusted := bomb.options()
	untrusted.Roots = x509.NewCertPool()
	old := httptest.NewUnstartedServer(nil)
	old.Config.ErrorLog = log.New(io.Discard, "", 0)
	old.TLS = &tls.Config{MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10} //nolint:gosec // an old server
	old.StartTLS()
	t.Cleanup(old.Close)
	for name, c := range map[string]struct {
		url     string
		options Options
		reason  Reason
	}{
		"a long header": {bomb.URL, bomb.options(), NotHTTP},
		"no HTTP":       {raw("canary canary\r\n\r\n"), bomb.options(), NotHTTP},
		"no answer":     {raw(""), bomb.options(), NotHTTP},
		"no TLS":        {strings.Replace(plain.URL, "http:", "https:", 1), bomb.options(), NotTrusted},
		"untrusted":     {bomb.URL, untrusted, NotTrusted},
		"TLS 1.1":       {old.URL, bomb.options(), NotTrusted},
		"closed":        {"https://" + closed.Addr().String(), bomb.options(), Unreachable},
		"no such name":  {"https://canary.example.:4433", Options{Resolver: resolver(t, "127.0.0.1")}, Unreachable},
	} {
		status, err := New(c.options).Post(t.Context(), c.url+"/canary-token", nil, nil)
		if status != 0 || reasonOf(err) != c.reason || strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "127.0.0.1") {
			t.Errorf("%s: %d, %v", name, status, err)
		}
	}
}

// An answer that hands the connection over ends the call: no timeout of the client would.
func TestAnAnswerThatSwitchesProtocolsEndsTheCall(t *testing.T) {
	release := make(chan struct{})
	r := newReceiver(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		<-release
		_ = conn.Close()
	})
	status, err := New(r.options()).Post(t.Context(), r.URL, nil, nil)
	close(release)
	if status != 0 || reasonOf(err) != NotHTTP {
		t.Errorf("%d, %v", status, err)
	}
}
