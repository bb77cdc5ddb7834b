package server

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// While the server starts, the listener of the interface tells strangers nothing about the database.
func TestWhoMayReadWhatIsWaitedFor(t *testing.T) {
	const place = "user=vault host=db.internal"
	reason := func() error { return fault.Wrap(fault.Unavailable, "PostgreSQL does not answer", errors.New(place)) }
	listen := func() *net.TCPListener {
		l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	get := func(l net.Listener) string {
		r, err := http.Get("http://" + l.Addr().String() + "/readyz?verbose")
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != http.StatusServiceUnavailable {
			t.Error(r.Status, err)
		}
		return string(text)
	}
	public, operations := listen(), listen()
	s := NewStarting(public, nil, nil, reason)
	if text := get(public); strings.Contains(text, place) || !strings.Contains(text, "PostgreSQL does not answer") {
		t.Errorf("without a listener for operations:\n%s", text)
	}
	if err := s.End(); err != nil {
		t.Fatal(err)
	}
	s = NewStarting(public, nil, operations, reason)
	if text := get(operations); !strings.Contains(text, place) {
		t.Errorf("on the listener for operations:\n%s", text)
	}
	if text := get(public); strings.Contains(text, "PostgreSQL") {
		t.Errorf("beside a listener for operations:\n%s", text)
	}
	if err := s.End(); err != nil {
		t.Fatal(err)
	}
}
