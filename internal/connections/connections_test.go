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

	"github.com/latticekeep/latticekeep/test/machine"
)

// served is an HTTP server with bounded connections.
type served struct {
	*Listener
	t       *testing.T
	began   chan struct{} // a request for /wait is served
	release chan struct{} // ends those requests
}

// serve serves until the end of the test. A request for /key shows a valid credential.
func serve(t *testing.T, o Options) *served {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &served{Listen(inner, o), t, make(chan struct{}), make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("/key", func(_ http.ResponseWriter, r *http.Request) { Keep(r.Context()) })
	mux.HandleFunc("/wait", func(http.ResponseWriter, *http.Request) {
		s.began <- struct{}{}
		<-s.release
	})
	server := &http.Server{Handler: mux, ConnState: Follow, ConnContext: InContext, ReadHeaderTimeout: time.Hour}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(s) }()
	t.Cleanup(func() {
		close(s.release)
		_ = server.Close()
		<-ended
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
	return n.Exempt + n.Idle + n.Busy + n.Closed[Crowded] + n.Closed[Full]
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

func (s *served) wantCounts(exempt, strangers, crowded, full int) {
	s.t.Helper()
	if n := s.Counts(); n.Exempt != exempt || n.Idle+n.Busy != strangers || n.Closed[Crowded] != crowded || n.Closed[Full] != full {
		s.t.Errorf("%+v, not %d exempt and %d strangers, with %d and %d closed", n, exempt, strangers, crowded, full)
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

func TestAConnectionThatShowedACredentialIsNeverEnded(t *testing.T) {
	s := serve(t, Options{Most: 4, PerAddress: 2})
	var known []client
	for range 5 { // more than all strangers together may have
		c := s.dial("127.0.0.2")
		c.ask("/key")
		known = append(known, c)
	}
	for i := range 9 {
		s.dial(fmt.Sprintf("127.0.0.%d", 3+i/3))
	}
	for _, c := range known {
		c.ask("/")
	}
	newcomer := s.dial("127.0.0.2")
	newcomer.ask("/key")
	if n := s.Counts(); n.Exempt != 6 || n.Closed[Full] == 0 {
		t.Errorf("%+v", n)
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
		c.ask([]string{"/", "/key"}[i%3/2])
		_ = c.Close()
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) { // asks again
		n := s.Counts()
		s.mu.Lock()
		addresses := len(s.addresses)
		s.mu.Unlock()
		if n.Exempt+n.Idle+n.Busy+addresses == 0 {
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
	Keep(InContext(t.Context(), a))
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
