package server

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"
)

// A caller who does not finish its upload must not make the server end with a failure.
func TestAStalledUploadDoesNotFailTheEnd(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	begun := make(chan struct{})
	h := &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { //nolint:gosec // loopback
		close(begun)
		_, _ = io.ReadAll(r.Body)
	})}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- serve(ctx, h, l, time.Millisecond, slog.New(slog.DiscardHandler)) }()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nhalf"); err != nil {
		t.Fatal(err)
	}
	<-begun
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
