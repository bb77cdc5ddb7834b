package server_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// stalled is a request whose body never arrives completely.
type stalled struct{ net.Conn }

// stall sends a request with a body of size, but for its last byte.
func stall(t *testing.T, s *service, key string, size int) stalled {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(s.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_, err = fmt.Fprintf(c, "POST /api/v2/encryption/encrypt HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nX-API-Key: %s\r\nContent-Length: %d\r\n\r\n%s",
		key, size, strings.Repeat(" ", size-1))
	if err != nil {
		t.Fatal(err)
	}
	return stalled{c}
}

// answered returns the status of the answer.
func (c stalled) answered(t *testing.T) int {
	t.Helper()
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal("no answer: ", err)
	}
	_ = r.Body.Close()
	return r.StatusCode
}

// inMemory starts a service with a memory limit.
func inMemory(t *testing.T, limit int64) *service {
	t.Helper()
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(limit)) // it is read when the service is made
	return newService(t)
}

func TestTenantsThatSendSlowlyLeaveMemoryToAnother(t *testing.T) {
	s := inMemory(t, 40<<20) // 4 MiB for bodies
	third := s.TenantOf(s.RegisterVerified("c@example.org"))
	keys := []string{s.Key, s.GrantKeyIn(s.Stranger().Tenant, authz.CryptoEncrypt)}
	var slow []stalled
	for i := range 12 { // more than there is memory for
		slow = append(slow, stall(t, s, keys[i%2], 1<<20))
	}
	for range 8 {
		s.Call(servertest.Request{
			Method: "POST", Path: "/api/v2/encryption/encrypt", Key: s.GrantKeyIn(third, authz.CryptoEncrypt),
			Body: `{"data":"` + strings.Repeat("QUFB", 150_000) + `"}`,
		}).Want(t, http.StatusOK)
	}
	if status := slow[0].answered(t); status != http.StatusServiceUnavailable {
		t.Error("the longest of them:", status)
	}
}

// The caller is refused later, in the order that the contract states.
func TestNoMemoryIsHeldForACallerWithoutTheScope(t *testing.T) {
	s := inMemory(t, 40<<20)
	without := s.GrantKey(authz.VaultRead)
	var slow []stalled
	for range 12 {
		slow = append(slow, stall(t, s, without, 1<<20))
	}
	s.Call(servertest.Request{
		Method: "POST", Path: "/api/v2/encryption/encrypt", Key: s.Key, Body: `{"data":"` + strings.Repeat("QUFB", 150_000) + `"}`,
	}).Want(t, http.StatusOK)
	for _, c := range slow {
		if _, err := c.Write([]byte(" ")); err != nil {
			t.Fatal("was broken off: ", err)
		}
		if status := c.answered(t); status != http.StatusForbidden {
			t.Error(status)
		}
	}
}
