package server_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/server"
)

// exchange writes bytes to a connection at once and returns the statuses of the next answers.
func exchange(t *testing.T, c net.Conn, r *bufio.Reader, sent string, answers int) (statuses []int) {
	t.Helper()
	if _, err := io.WriteString(c, sent); err != nil {
		t.Fatal(err)
	}
	for range answers {
		answer, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatalf("after %v: %v", statuses, err)
		}
		if _, err := io.Copy(io.Discard, answer.Body); err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
		statuses = append(statuses, answer.StatusCode)
	}
	return statuses
}

// A proxy that prefers Content-Length takes what follows the chunks for the next request, maybe of
// somebody else.
func TestNothingIsReadAfterARequestThatMayEndInTwoPlaces(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.OperationsApart = true })
	ctx, stop := context.WithCancel(t.Context())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Server.ServeOperations(ctx, l) }()
	public, operations := strings.TrimPrefix(s.URL, "http://"), l.Addr().String()

	const chunks = "\r\n2\r\n{}\r\n0\r\n\r\n"
	sign := "POST /api/v2/encryption/sign HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nX-API-Key: " + s.Key + "\r\n"
	list := "GET /api/v2/vault/list HTTP/1.1\r\nHost: h\r\nX-API-Key: " + s.Key + "\r\n\r\n"
	health := "GET /healthz HTTP/1.1\r\nHost: h\r\n"
	for _, c := range []struct {
		name, address, sent string
		statuses            []int
		closed              bool
	}{
		{"both", public, sign + "Content-Length: 12\r\nTransfer-Encoding: chunked\r\n" + chunks + list, []int{422}, true},
		{"both, the other way round", public, sign + "Transfer-Encoding: chunked\r\nContent-Length: 12\r\n" + chunks + list, []int{422}, true},
		{"both, and the caller wants to go on", public, sign + "Connection: keep-alive\r\nTransfer-Encoding: chunked\r\nContent-Length: 12\r\n" + chunks + list, []int{422}, true},
		{"both, without a route", public, "POST /none HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 12\r\n" + chunks + list, []int{404}, true},
		{"both, without a credential", public, "POST /v1/encrypt HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 12\r\n" + chunks + list, []int{401}, true},
		{"both, of no path", public, "OPTIONS * HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 12\r\n" + chunks + list, []int{404}, true},
		{"both, operations, of no path", operations, "OPTIONS * HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 12\r\n" + chunks + list, []int{404}, true},
		{"both, operations", operations, health + "Transfer-Encoding: chunked\r\nContent-Length: 12\r\n" + chunks + health + "\r\n", []int{200}, true},
		{"HTTP/1.0, where chunks are ignored", public, strings.Replace(sign, "1.1", "1.0", 1) + "Connection: keep-alive\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}" + list, []int{422}, true},
		{"only chunks", public, sign + "Transfer-Encoding: chunked\r\n" + chunks + list, []int{422}, true},
		{"only a length", public, sign + "Content-Length: 2\r\n\r\n{}" + list, []int{422, 200}, false},
		{"no body", public, list + list, []int{200, 200}, false},
		{"operations", operations, health + "\r\n" + health + "\r\n", []int{200, 200}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", c.address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			r := bufio.NewReader(conn)
			if got := exchange(t, conn, r, c.sent, len(c.statuses)); !slices.Equal(got, c.statuses) {
				t.Fatalf("answers %v, want %v", got, c.statuses)
			}
			if !c.closed {
				exchange(t, conn, r, health+"\r\n", 1) // the connection goes on
				return
			}
			if more, err := io.ReadAll(r); len(more) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the connection goes on: %.200q, %v", more, err)
			}
		})
	}
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
}
