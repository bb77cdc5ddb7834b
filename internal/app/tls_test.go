package app

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/test/machine"
)

// shake makes one handshake between the two configurations.
func shake(t *testing.T, server, client *tls.Config) (tls.ConnectionState, error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return // the client reports the error
		}
		defer conn.Close()
		_ = tls.Server(conn, server).HandshakeContext(t.Context())
	}()
	conn, err := tls.Dial("tcp", l.Addr().String(), client)
	if err != nil {
		return tls.ConnectionState{}, err
	}
	defer conn.Close()
	<-done
	return conn.ConnectionState(), nil
}

func TestTheKeyExchangeIsPostQuantumAndCounted(t *testing.T) {
	classical := []tls.CurveID{tls.X25519}
	for name, c := range map[string]struct {
		pqRequired bool
		client     []tls.CurveID
		max        uint16
		want       string // group; empty for a refusal
	}{
		"preferred, a client of today":       {false, nil, 0, "X25519MLKEM768"},
		"preferred, a classical client":      {false, classical, 0, "X25519"},
		"preferred, one that prefers X25519": {false, []tls.CurveID{tls.X25519, tls.X25519MLKEM768}, 0, "X25519MLKEM768"},
		"preferred, TLS 1.2":                 {false, classical, tls.VersionTLS12, ""},
		"required, a client of today":        {true, nil, 0, "X25519MLKEM768"},
		"required, a classical client":       {true, classical, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s, roots := writeCertificate(t, t.TempDir(), 1)
			s.PQRequired = c.pqRequired
			handshakes := newHandshakeCounter()
			config, err := tlsConfig(s, handshakes, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			state, err := shake(t, config, &tls.Config{RootCAs: roots, CurvePreferences: c.client, MaxVersion: c.max})
			if c.want == "" {
				if n := counted(t, handshakes); err == nil || len(n) != 0 {
					t.Fatalf("%v, %v, counted %v", state.CurveID, err, n)
				}
				return
			}
			if err != nil || state.CurveID.String() != c.want || state.Version != tls.VersionTLS13 {
				t.Fatal(state.CurveID, state.Version, err)
			}
			if n := counted(t, handshakes); len(n) != 1 || n[c.want] != 1 {
				t.Error("counted", n)
			}
		})
	}
}

func TestANewCertificateIsTakenWithoutARestart(t *testing.T) {
	dir := t.TempDir()
	s, roots := writeCertificate(t, dir, 1)
	var log machine.Log
	config, err := tlsConfig(s, newHandshakeCounter(), slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	serial := func(roots *x509.CertPool) int64 {
		t.Helper()
		state, err := shake(t, config, &tls.Config{RootCAs: roots})
		if err != nil {
			t.Fatal(err)
		}
		return state.PeerCertificates[0].SerialNumber.Int64()
	}
	if n := serial(roots); n != 1 {
		t.Fatal(n)
	}
	machine.WriteFile(t, s.KeyFile, []byte("half of a new key")) // renewal takes more than one step
	for range 3 {
		if n := serial(roots); n != 1 {
			t.Fatal("the former certificate is gone:", n)
		}
	}
	if n := strings.Count(log.String(), "cannot be used"); n != 1 {
		t.Errorf("logged %d times: %s", n, log.String())
	}
	if err := os.Remove(s.CertFile); err != nil {
		t.Fatal(err)
	}
	if n := serial(roots); n != 1 {
		t.Fatal("the former certificate is gone:", n)
	}
	_, roots = writeCertificate(t, dir, 2)
	if n := serial(roots); n != 2 {
		t.Fatal("the new certificate is not used:", n)
	}
}

func TestAMissingCertificateIsRefusedAtStart(t *testing.T) {
	dir := t.TempDir()
	s, _ := writeCertificate(t, dir, 1)
	machine.WriteFile(t, s.KeyFile, []byte("junk"))
	for _, files := range []config.TLS{s, {CertFile: filepath.Join(dir, "none"), KeyFile: s.KeyFile}, {CertFile: s.CertFile, KeyFile: filepath.Join(dir, "none")}} {
		if _, err := tlsConfig(files, newHandshakeCounter(), slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("%+v was taken", files)
		}
	}
}
