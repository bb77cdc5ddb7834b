package mail

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/emersion/go-sasl"
	"github.com/emersion/go-smtp"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/outbox"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// fixture is an outbox on a database file, with the test's clock.
type fixture struct {
	t      *testing.T
	dir    string
	key    string
	store  *storetest.Rehearsed
	keys   *keyring.Ring
	outbox *Outbox
	log    *machine.Log

	mu    sync.Mutex
	clock time.Time
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{
		t: t, dir: t.TempDir(), key: filepath.Join(t.TempDir(), "kms.key"), log: new(machine.Log),
		clock: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC),
	}
	must(t, kms.CreateLocal(f.key))
	f.open()
	return f
}

// open opens the outbox, also again after it was closed.
func (f *fixture) open() {
	f.t.Helper()
	k, err := kms.OpenLocal(f.key)
	must(f.t, err)
	s, err := bolt.Open(filepath.Join(f.dir, "store.db"), bolt.Options{})
	must(f.t, err)
	f.store = storetest.Rehearsing(s)
	f.t.Cleanup(func() { _ = f.store.Close() })
	c := keyring.Config{CacheTTL: time.Hour, Now: f.now}
	f.keys, err = keyring.Open(f.t.Context(), f.store, k, c)
	if errors.Is(err, fault.NotFound) {
		var first *keyring.First
		f.keys, first, err = keyring.Create(f.t.Context(), f.store, k, c)
		must(f.t, err)
		must(f.t, f.store.Update(f.t.Context(), first.Put))
	}
	must(f.t, err)
	f.outbox = NewOutbox(f.store, f.keys, f.now)
}

func (f *fixture) now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.clock
}

func (f *fixture) advance(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock = f.clock.Add(d)
}

// Of package outbox.
const (
	passSize     = 32
	pollInterval = time.Minute
)

const (
	recipient = "canary-recipient@example.org"
	token     = "canary-token-0123456789=0123456789=0123456789=0123456789=0123456789=0123456789" // at least as long as real ones
)

// post stores a mail and returns its id.
func (f *fixture) post(m Message) string {
	f.t.Helper()
	p, err := f.outbox.Prepare(f.t.Context(), m)
	must(f.t, err)
	must(f.t, f.store.Update(f.t.Context(), p.Put))
	f.outbox.Notify()
	return strings.TrimPrefix(string(p.key), rowPrefix)
}

// stored returns how many mails wait.
func (f *fixture) stored() (n int) {
	f.t.Helper()
	must(f.t, f.store.View(f.t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte(rowPrefix)), func(_, _ []byte) bool {
			n++
			return true
		})
	}))
	return n
}

func (f *fixture) options() Options {
	return Options{PublicURL: "https://vault.example.com", From: "Latticekeep <noreply@example.com>", Logger: slog.New(slog.NewTextHandler(f.log, nil))}
}

// courier returns the state of a Run, for a test that calls its passes itself.
func (f *fixture) courier(t Transport) *outbox.Courier {
	return f.outbox.Courier(f.options().Logger, f.outbox.deliver(t, f.options()))
}

func (f *fixture) pass(c *outbox.Courier) time.Duration {
	f.t.Helper()
	wait, err := c.Pass(f.t.Context())
	must(f.t, err)
	return wait
}

// files returns the bytes of the database.
func (f *fixture) files() []byte {
	f.t.Helper()
	b, err := os.ReadFile(filepath.Join(f.dir, "store.db"))
	must(f.t, err)
	return b
}

// sendFunc is a transport that a test defines.
type sendFunc func(ctx context.Context, e Envelope) error

func (f sendFunc) Send(ctx context.Context, e Envelope) error { return f(ctx, e) }

// mailServer is a real SMTP server on loopback. Hooks that are set decide about recipients and
// texts. received holds the mails that it accepted.
type mailServer struct {
	address string
	roots   *x509.CertPool
	rcpt    func() error
	data    func(*smtp.Conn) error

	mu       sync.Mutex
	received []string
	sessions int
}

const username, password = "postmaster", "canary-password"

// startMailServer starts a server that offers what the security demands.
func startMailServer(t *testing.T, security Security, authenticated bool) *mailServer {
	t.Helper()
	certs := httptest.NewTLSServer(nil) // provides a certificate for 127.0.0.1
	certs.Close()
	m := &mailServer{roots: x509.NewCertPool()}
	m.roots.AddCert(certs.Certificate())
	config := &tls.Config{Certificates: certs.TLS.Certificates}
	s := smtp.NewServer(smtp.BackendFunc(func(c *smtp.Conn) (smtp.Session, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.sessions++
		return &session{server: m, conn: c, anonymous: authenticated}, nil
	}))
	s.Domain, s.ErrorLog = "localhost", slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	s.AllowInsecureAuth = security == Plain
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	m.address = l.Addr().String()
	switch security {
	case STARTTLS:
		s.TLSConfig = config
	case TLS:
		l = tls.NewListener(l, config)
	}
	go func() { _ = s.Serve(l) }() // ends with Close
	t.Cleanup(func() { _ = s.Close() })
	return m
}

func (m *mailServer) mails() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.received...)
}

// transport returns a transport to the server.
func (m *mailServer) transport(t *testing.T, security Security, username, password string) *SMTP {
	t.Helper()
	s, err := NewSMTP(SMTPConfig{Address: m.address, Security: security, Username: username, Password: []byte(password), RootCAs: m.roots})
	must(t, err)
	return s
}

// session is one connection to a mailServer.
type session struct {
	server    *mailServer
	conn      *smtp.Conn
	anonymous bool // not authenticated although the server requires it
}

func (s *session) AuthMechanisms() []string { return []string{sasl.Plain} }

func (s *session) Auth(string) (sasl.Server, error) {
	return sasl.NewPlainServer(func(_, user, pass string) error {
		if user != username || pass != password {
			return &smtp.SMTPError{Code: 535, EnhancedCode: smtp.EnhancedCode{5, 7, 8}, Message: "wrong: " + user + " " + pass}
		}
		s.anonymous = false
		return nil
	}), nil
}

func (s *session) Reset()        {}
func (s *session) Logout() error { return nil }

func (s *session) Mail(string, *smtp.MailOptions) error {
	if s.anonymous {
		return smtp.ErrAuthRequired
	}
	return nil
}

func (s *session) Rcpt(string, *smtp.RcptOptions) error {
	if s.server.rcpt != nil {
		return s.server.rcpt()
	}
	return nil
}

func (s *session) Data(r io.Reader) error {
	if s.server.data != nil {
		if err := s.server.data(s.conn); err != nil {
			return err
		}
	}
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.server.received = append(s.server.received, string(b))
	return nil
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
