package server

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/diagnosis"
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
	ask := func(l net.Listener, path string, want int) string {
		r, err := http.Get("http://" + l.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != want {
			t.Error(path, r.Status, err)
		}
		return string(text)
	}
	get := func(l net.Listener) string { return ask(l, "/readyz?verbose", http.StatusServiceUnavailable) }
	diagnose := func(ctx context.Context) diagnosis.Report {
		return diagnosis.Run(ctx, "v1", time.Second, diagnosis.Check{Part: diagnosis.PostgreSQL, Look: func(context.Context) []diagnosis.Line {
			return []diagnosis.Line{diagnosis.Fail("look at it", reason())}
		}})
	}
	public, operations := listen(), listen()
	s := NewStarting(public, nil, nil, reason, diagnose)
	if text := get(public); strings.Contains(text, place) || !strings.Contains(text, "PostgreSQL does not answer") {
		t.Errorf("without a listener for operations:\n%s", text)
	}
	ask(public, "/diagnosis", http.StatusServiceUnavailable) // no key can be looked up
	if err := s.End(); err != nil {
		t.Fatal(err)
	}
	s = NewStarting(public, nil, operations, reason, diagnose)
	if text := get(operations); !strings.Contains(text, place) {
		t.Errorf("on the listener for operations:\n%s", text)
	}
	if text := ask(operations, "/diagnosis", http.StatusOK); !strings.Contains(text, `"status":"failed"`) || !strings.Contains(text, place) {
		t.Errorf("the diagnosis on the listener for operations:\n%s", text)
	}
	ask(public, "/diagnosis", http.StatusServiceUnavailable)
	if text := get(public); strings.Contains(text, "PostgreSQL") {
		t.Errorf("beside a listener for operations:\n%s", text)
	}
	if err := s.End(); err != nil {
		t.Fatal(err)
	}
}
