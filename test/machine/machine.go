// Package machine makes what tests find on their machine: files, a certificate, a connection from
// another address, a log that is read while it is written, and the patience that a busy machine
// needs. Nothing in the product imports it.
package machine

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Log is a log that may be read while it is written. The zero value is empty.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Tail returns the last 4,000 bytes.
func (l *Log) Tail() string {
	all := l.String()
	return all[max(0, len(all)-4000):]
}

// WriteFile writes a file that only its owner may read.
func WriteFile(t testing.TB, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

// WriteOldFile writes a file and its folder, and dates the file two days back.
func WriteOldFile(t testing.TB, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	WriteFile(t, path, []byte("old"))
	at := time.Now().Add(-48 * time.Hour)
	if err := os.Chtimes(path, at, at); err != nil {
		t.Fatal(err)
	}
}

// WriteCertificate writes a self-signed certificate for 127.0.0.1 with the serial number to tls.crt
// and tls.key in dir. It is valid for an hour. WriteCertificate returns their paths, and the pool for
// a client.
func WriteCertificate(t testing.TB, dir string, serial int64) (certFile, keyFile string, roots *x509.CertPool) {
	t.Helper()
	return WriteCertificateFor(t, dir, serial, time.Hour)
}

// WriteCertificateFor is [WriteCertificate] with another time of validity.
func WriteCertificateFor(t testing.TB, dir string, serial int64, valid time.Duration) (certFile, keyFile string, roots *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "127.0.0.1"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(valid), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	WriteFile(t, certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	WriteFile(t, keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots = x509.NewCertPool()
	roots.AddCert(cert)
	return certFile, keyFile, roots
}

// DialFrom connects to a listener on this machine from the given loopback address, until the test
// ends.
func DialFrom(t testing.TB, source, to string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
	c, err := d.DialContext(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// Patient is a transport that repeats a request while the server is too busy. On a loaded machine,
// checking a password can take longer than the server allows; the server has then done nothing.
type Patient struct{ http.RoundTripper }

// RoundTrip implements [http.RoundTripper].
func (p Patient) RoundTrip(r *http.Request) (*http.Response, error) {
	for attempt := 0; ; attempt++ {
		response, err := p.RoundTripper.RoundTrip(r)
		if err != nil || response.StatusCode != http.StatusServiceUnavailable || attempt == 60 || r.Body != nil && r.GetBody == nil {
			return response, err
		}
		if err := response.Body.Close(); err != nil {
			return nil, err
		}
		if r.GetBody != nil {
			r = r.Clone(r.Context())
			if r.Body, err = r.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}
