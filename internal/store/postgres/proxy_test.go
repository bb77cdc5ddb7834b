package postgres

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync/atomic"
	"testing"
)

// proxy connects a store with PostgreSQL. It can cut the connection at a COMMIT, either before the
// server gets it or after the server has answered.
type proxy struct {
	address string
	mode    atomic.Int32
	cuts    atomic.Int32
}

const (
	pass int32 = iota
	swallowCommit
	swallowAnswer
)

func newProxy(t *testing.T, server string) *proxy {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{address: l.Addr().String()}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go p.serve(client, u.Host)
		}
	}()
	return p
}

// cut makes the proxy cut the next COMMIT.
func (p *proxy) cut(delivered bool) {
	if delivered {
		p.mode.Store(swallowAnswer)
	} else {
		p.mode.Store(swallowCommit)
	}
}

func (p *proxy) serve(client net.Conn, host string) {
	defer client.Close()
	server, err := net.Dial("tcp", host)
	if err != nil {
		return
	}
	defer server.Close()
	var swallow atomic.Bool
	go func() {
		defer client.Close()
		b := make([]byte, 64<<10)
		for {
			n, err := server.Read(b)
			if err != nil || swallow.Load() {
				server.Close()
				return
			}
			if _, err := client.Write(b[:n]); err != nil {
				return
			}
		}
	}()
	mark := fmt.Appendf(nil, "latticekeep_%d\x00", commit)
	b := make([]byte, 64<<10)
	prepared := false
	for {
		n, err := client.Read(b)
		if err != nil {
			return
		}
		// The statement is first named when it is prepared.
		if bytes.Contains(b[:n], mark) {
			if prepared {
				switch p.mode.Swap(pass) {
				case swallowCommit:
					p.cuts.Add(1)
					return
				case swallowAnswer:
					p.cuts.Add(1)
					swallow.Store(true)
				}
			}
			prepared = true
		}
		if _, err := server.Write(b[:n]); err != nil && err != io.EOF {
			return
		}
	}
}
