package app

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// newHandshakeCounter counts what clients agree on, so that it shows whether
// the classical groups can be switched off.
func newHandshakeCounter() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "latticekeep_tls_handshakes_total",
		Help: "TLS handshakes, by the key-exchange group that was negotiated.",
	}, []string{"group"})
}

// tlsConfig returns the listener's configuration: TLS 1.3, whose cipher suites
// are all fit, and the hybrid of X25519 and ML-KEM-768 before or instead of
// the classical groups.
func tlsConfig(s TLSSettings, handshakes *prometheus.CounterVec, logger *slog.Logger) (*tls.Config, error) {
	c := &certificate{certFile: s.CertFile, keyFile: s.KeyFile, logger: logger}
	if err := c.load(); err != nil {
		return nil, err
	}
	groups := []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256, tls.CurveP384}
	if s.KeyExchange == keyExchangeRequired {
		groups = groups[:1]
	}
	return &tls.Config{
		MinVersion:       tls.VersionTLS13,
		CurvePreferences: groups,
		NextProtos:       []string{"h2", "http/1.1"},
		GetCertificate:   c.get,
		VerifyConnection: func(state tls.ConnectionState) error {
			handshakes.WithLabelValues(state.CurveID.String()).Inc()
			return nil
		},
	}, nil
}

// certificate is a pair of files that somebody renews from time to time.
type certificate struct {
	certFile, keyFile string
	logger            *slog.Logger

	mu      sync.Mutex
	seen    stamp // of the files at the last try
	current *tls.Certificate
}

// stamp tells one state of the files from another.
type stamp struct {
	certTime, keyTime time.Time
	certSize, keySize int64
}

// get returns the certificate of the files as they are now, and the last good
// one while they do not belong together: they are not replaced in one step.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now, err := c.stat(); err == nil && now == c.seen {
		return c.current, nil
	}
	before := c.seen
	if err := c.loadLocked(); err != nil && c.seen != before { // once for each state, not for each handshake
		c.logger.Error("the new TLS certificate cannot be used, the former one is", "err", err)
	}
	return c.current, nil
}

func (c *certificate) load() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.loadLocked()
}

func (c *certificate) loadLocked() error {
	now, err := c.stat()
	c.seen = now // before the files are read, so that a change meanwhile shows
	if err != nil {
		return fmt.Errorf("finding the TLS certificate: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("reading the TLS certificate: %w", err)
	}
	c.current = &pair
	return nil
}

// stat returns the zero stamp when a file is missing.
func (c *certificate) stat() (stamp, error) {
	cert, err := os.Stat(c.certFile)
	if err != nil {
		return stamp{}, err
	}
	key, err := os.Stat(c.keyFile)
	if err != nil {
		return stamp{}, err
	}
	return stamp{cert.ModTime(), key.ModTime(), cert.Size(), key.Size()}, nil
}
