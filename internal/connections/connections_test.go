package connections

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/machine"
)

// served is an HTTP server with bounded connections.
type served struct {
	*Listener
	t       *testing.T
	began   chan struct{} // a request for /wait is served
	release chan struct{} // ends those requests
}

// serve serves until the end of the test. A request for /key shows a valid credential of the tenant in
// its query.
func serve(t *testing.T, o Options) *served {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &served{Listen(inner, o), t, make(chan struct{}), make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("/key", func(_ http.ResponseWriter, r *http.Request) { Keep(r.Context(), authz.TenantID(r.URL.RawQuery)) })
	mux.HandleFunc("/wait", func(_ http.ResponseWriter, r *http.Request) {
		Keep(r.Context(), authz.TenantID(r.URL.RawQuery))
		s.began <- struct{}{}
		<-s.release
	})
	server := &http.Server{Handler: mux, ConnState: Follow, ConnContext: InContext, ReadHeaderTimeout: time.Hour}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(s) }()
	t.Cleanup(func() {
		close(s.release)
		_ = server.Close()
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return s
}

// client is the other end of a connection.
type client struct {
	net.Conn
	t *testing.T
}

// dial connects, and waits until the server has accepted.
func (s *served) dial(source string) client {
	s.t.Helper()
	before := s.handled()
	c := client{machine.DialFrom(s.t, source, s.Addr().String()), s.t}
	for deadline := time.Now().Add(time.Minute); s.handled() == before; time.Sleep(time.Millisecond) { // asks again
		if time.Now().After(deadline) {
			s.t.Fatal("the connection is not accepted")
		}
	}
	return c
}

// handled returns how many connections were accepted so far, if none has ended by itself.
func (s *served) handled() int {
	n := s.Counts()
	return n.Kept + n.Idle + n.Busy + n.Closed[Crowded] + n.Closed[Full] + n.Closed[Largest]
}

func (c client) send(path string) {
	c.t.Helper()
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: h\r\n\r\n", path); err != nil {
		c.t.Fatal(err)
	}
}

// ask sends a request and reads the answer.
func (c client) ask(path string) {
	c.t.Helper()
	c.send(path)
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		c.t.Fatal("no answer: ", err)
	}
	_ = answer.Body.Close()
}

// wantEnded fails unless the server has closed the connection.
func (c client) wantEnded() {
	c.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute)) // cannot fail: the connection is open
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Error("the connection goes on")
	}
}

func (s *served) wantCounts(kept, strangers, crowded, full int) {
	s.t.Helper()
	if n := s.Counts(); n.Kept != kept || n.Idle+n.Busy != strangers || n.Closed[Crowded] != crowded || n.Closed[Full] != full {
		s.t.Errorf("%+v, not %d kept and %d strangers, with %d and %d closed", n, kept, strangers, crowded, full)
	}
}

func TestNobodyIsBoundedWithoutPressure(t *testing.T) {
	s := serve(t, Options{Most: 8, PerAddress: 1})
	for range 6 {
		defer s.dial("127.0.0.2").ask("/")
	}
	s.wantCounts(0, 6, 0, 0)
}

func TestUnderPressureAnAddressLosesTheConnectionThatWaitsLongest(t *testing.T) {
	s := serve(t, Options{Most: 8, PerAddress: 2})
	for range 4 {
		defer s.dial("127.0.0.3").ask("/")
	}
	first, second := s.dial("127.0.0.2"), s.dial("127.0.0.2")
	third := s.dial("127.0.0.2")
	first.wantEnded()
	s.wantCounts(0, 6, 1, 0)
	s.dial("127.0.0.4").ask("/")
	second.ask("/")
	third.ask("/")
}

// The webhook always bounds the connections of an address.
func TestWithoutABoundForAllThereAlwaysIsPressure(t *testing.T) {
	s := serve(t, Options{PerAddress: 2})
	first, second, other := s.dial("127.0.0.2"), s.dial("127.0.0.2"), s.dial("127.0.0.3")
	third := s.dial("127.0.0.2")
	first.wantEnded()
	for _, c := range []client{second, third, other} {
		c.ask("/")
	}
	s.wantCounts(0, 3, 1, 0)
}

func TestARequestThatIsServedIsNotEndedForAnotherOfItsAddress(t *testing.T) {
	s := serve(t, Options{PerAddress: 2})
	for range 2 {
		s.dial("127.0.0.2").send("/wait")
		<-s.began
	}
	s.dial("127.0.0.2").wantEnded()
	s.wantCounts(0, 2, 1, 0)
}

func TestAFullListenerEndsTheStrangerThatWaitsLongest(t *testing.T) {
	s := serve(t, Options{Most: 4, PerAddress: 4})
	served := s.dial("127.0.0.2")
	served.send("/wait")
	<-s.began
	first := s.dial("127.0.0.3")
	for i := range 2 {
		s.dial(fmt.Sprintf("127.0.0.%d", 4+i))
	}
	s.dial("127.0.0.9")
	first.wantEnded()
	s.wantCounts(0, 4, 0, 1)
	for i := range 3 {
		s.dial(fmt.Sprintf("127.0.0.%d", 10+i)).send("/wait")
		<-s.began
	}
	s.dial("127.0.0.20").ask("/") // all others are served: the longest of them is ended
	served.wantEnded()
}

func TestStrangersEndNoConnectionThatShowedACredential(t *testing.T) {
	s := serve(t, Options{Most: 4, PerAddress: 2})
	var known []client
	for range 3 {
		c := s.dial("127.0.0.2")
		c.ask("/key?a")
		known = append(known, c)
	}
	for i := range 9 {
		s.dial(fmt.Sprintf("127.0.0.%d", 3+i/3))
	}
	for _, c := range known {
		c.ask("/key?b") // counts for a as before
	}
	s.wantCounts(3, 1, 0, 8)
}

func TestATenantKeepsNoOtherOutOfAFullListener(t *testing.T) {
	s := serve(t, Options{Most: 4, PerAddress: 4})
	busy := s.dial("127.0.0.2")
	busy.send("/wait?a")
	<-s.began
	var idle []client
	for range 3 {
		c := s.dial("127.0.0.2")
		c.ask("/key?a")
		idle = append(idle, c)
	}
	var others []client
	for i := range 2 { // until both have as many
		c := s.dial("127.0.0.3")
		idle[i].wantEnded()
		c.ask("/key?b")
		others = append(others, c)
	}
	for _, c := range append(others, idle[2]) {
		c.ask("/")
	}
	if n := s.Counts(); n.Kept != 4 || n.Closed[Largest] != 2 {
		t.Errorf("%+v", n)
	}
}

func TestATenantThatIsServedSlowlyKeepsNoOtherOut(t *testing.T) {
	s := serve(t, Options{Most: 4, PerAddress: 4})
	var stalled []client
	for range 4 {
		c := s.dial("127.0.0.2")
		c.send("/wait?a")
		<-s.began
		stalled = append(stalled, c)
	}
	other := s.dial("127.0.0.3")
	stalled[0].wantEnded()
	other.ask("/key?b")
}

// from is a listener whose connections come from addresses.
type from struct {
	net.Listener
	addresses []string
}

type addressed struct {
	net.Conn
	at net.Addr
}

func (c addressed) RemoteAddr() net.Addr { return c.at }

func (l *from) Accept() (net.Conn, error) {
	c, other := net.Pipe()
	_ = other.Close()
	at := l.addresses[0]
	l.addresses = l.addresses[1:]
	return addressed{c, net.TCPAddrFromAddrPort(netip.MustParseAddrPort(at))}, nil
}

func TestANetworkOfIPv6CountsAsOneAddress(t *testing.T) {
	for name, c := range map[string]struct {
		addresses []string
		ended     int
	}{
		"a /64":       {[]string{"[2001:db8::1]:1", "[2001:db8::2]:1", "[2001:db8::ffff:0:0:3]:1"}, 1},
		"three /64":   {[]string{"[2001:db8::1]:1", "[2001:db8:0:1::1]:1", "[2001:db8:0:2::1]:1"}, 0},
		"IPv4 mapped": {[]string{"192.0.2.1:1", "[::ffff:192.0.2.1]:1", "192.0.2.1:2"}, 1},
		"three IPv4":  {[]string{"[::ffff:192.0.2.1]:1", "192.0.2.2:1", "192.0.2.3:1"}, 0},
	} {
		l := Listen(&from{addresses: c.addresses}, Options{PerAddress: 2})
		for range c.addresses {
			if _, err := l.Accept(); err != nil {
				t.Fatal(err)
			}
		}
		if n := l.Counts(); n.Closed[Crowded] != c.ended {
			t.Errorf("%s: %+v", name, n)
		}
	}
}

func TestTrustedProxiesAreNotBounded(t *testing.T) {
	s := serve(t, Options{Most: 4, PerAddress: 1, Trusted: []netip.Prefix{netip.MustParsePrefix("127.0.1.0/24")}})
	var behind []client
	for range 6 {
		behind = append(behind, s.dial("127.0.1.9"))
	}
	for range 3 {
		s.dial("127.0.0.2")
	}
	for _, c := range behind {
		c.ask("/")
	}
}

func TestEndedConnectionsAreForgotten(t *testing.T) {
	s := serve(t, Options{Most: 100, PerAddress: 2, Trusted: []netip.Prefix{netip.MustParsePrefix("127.0.1.0/24")}})
	for i := range 30 {
		c := client{machine.DialFrom(t, fmt.Sprintf("127.0.%d.%d", i%2, 1+i%5), s.Addr().String()), t}
		c.ask([]string{"/", "/key?a"}[i%3/2])
		_ = c.Close()
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) { // asks again
		n := s.Counts()
		s.mu.Lock()
		addresses := len(s.addresses) + len(s.tenants)
		s.mu.Unlock()
		if n.Kept+n.Idle+n.Busy+addresses == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v, and %d addresses", n, addresses)
		}
	}
}

func TestAnotherListenersConnectionsAreLeftAlone(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	Follow(a, http.StateIdle)
	Keep(InContext(t.Context(), a), "a")
	go func() { _, _ = io.WriteString(a, "x") }()
	if _, err := b.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
}

func TestMostConnectionsFollowFromFilesAndMemory(t *testing.T) {
	if most, files := Most(), maxFiles(); most < least || files > 0 && most > max(least, files/4*3) {
		t.Errorf("%d connections with %d files", most, files)
	}
}
