// Package servertest runs the whole service for tests of its API: real parts, a real database, a
// listener on loopback, and a client that checks every exchange against the contract. The tests of
// server/v1, server/v2 and server/gate share it. Only tests import it.
package servertest

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/compliance/report"
	"github.com/latticekeep/latticekeep/internal/custody"
	"github.com/latticekeep/latticekeep/internal/dryrun"
	"github.com/latticekeep/latticekeep/internal/health"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/names"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/nodelog/receiver"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/webhooks"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/server/gate"
	"github.com/latticekeep/latticekeep/test/pgtest"
	"github.com/latticekeep/latticekeep/test/statetest"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// Service is a whole service of real parts: a real database, real keys, and a listener on loopback.
type Service struct {
	server.Config // configuration of the server, with all services
	Server        *server.Server
	Verifier      *verify.LiveVerifier
	T             testing.TB
	Clock         *Clock
	Logged        *Buffer
	URL           string
	Client        *http.Client // checks every exchange against the contract
	Mailbox       *Mailbox
	State         *atomic.Pointer[compliance.State] // what the deployment reports about itself
	Rows          *Rows                             // the store as somebody reaches it who writes the database
	ReportFolder  string
	KMS           []keyring.KMS // the current key, and one that no longer wraps anything

	Tenant authz.TenantID
	Key    string // API key of Tenant, with all scopes
}

// Assemble creates a service without a listener.
func Assemble(t testing.TB, change ...func(*server.Config)) *Service {
	t.Helper()
	return assembleAt(t, "http://127.0.0.1", Bolt, change...)
}

// assembleAt creates a service that a URL will reach.
func assembleAt(t testing.TB, url string, open Open, change ...func(*server.Config)) *Service {
	t.Helper()
	s := &Service{
		T: t, URL: url, State: HealthyState(),
		Clock:   &Clock{now: time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)},
		Logged:  &Buffer{},
		Mailbox: &Mailbox{arrived: make(chan struct{}, 1)},
		Client:  &http.Client{Transport: NewContract(t)},
	}
	s.openStore(open)
	s.openReports()
	now := s.Clock.Now
	s.Vault = vault.New(s.Store, s.Guard, s.Keys, now)
	s.Webhooks = webhooks.New(s.Store, s.Guard, s.Keys, now)
	s.Transit = transit.New(s.Store, s.Guard, s.Keys, now)
	s.Sealing = sealingkey.New(s.Store, s.Guard, s.Reader, s.Keys, sealingkey.Options{InUse: s.Vault.SealingKeyUse, Now: now})
	s.Custody = custody.New(s.Store, s.Guard, s.Keys, custody.Options{Now: now, Destroy: func(context.Context, string) (kms.Destruction, error) {
		return kms.Destruction{When: now().Add(7 * 24 * time.Hour), Undo: "ask for it"}, nil
	}})
	s.NodeLogs = receiver.New(s.Store, s.Guard, mac.New(s.Keys))
	s.Names = names.New(s.Store, s.Guard, s.Identity, s.Transit, past.New(s.Keys, now))
	s.DryRun = dryrun.New(s.Store, s.Guard, s.Reader, s.Identity.Access, past.New(s.Keys, now), now)
	s.PublicURL = "http://127.0.0.1"
	s.Limits = gate.Limits{V1: Plenty, V2: Plenty, Address: Plenty, Registrations: Plenty, Patience: Patience}
	s.Logger = slog.New(slog.NewJSONHandler(s.Logged, nil))
	s.Now, s.Version = now, "test"
	s.Compliance = NewCompliance(t, &s.Config, s.Verifier, s.State, s.Reports.(compliance.Reports))
	s.Health = health.New(
		health.Check{Name: "store", Scope: health.Replica, Stops: health.Classes(), Ask: s.Store.Ready},
		health.Check{Name: "log", Scope: health.Shared, Stops: health.Classes(), Ask: s.Audit.CheckHistory},
		health.Check{Name: "rows", Scope: health.Shared, Stops: health.Classes(), Ask: func(context.Context) error { return s.Rows.state.Halted() }},
	)
	for _, c := range change {
		c(&s.Config)
	}
	var err error
	if s.Server, err = server.New(s.Config); err != nil {
		t.Fatal(err)
	}
	return s
}

// Open opens an empty database with a commit hook, and closes it at the end of the test.
type Open func(t testing.TB, hook store.Hook) store.Database

// Bolt opens a database file.
func Bolt(t testing.TB, hook store.Hook) store.Database {
	t.Helper()
	db, err := bolt.Open(filepath.Join(t.TempDir(), "store.db"), bolt.Options{Hook: hook})
	return opened(t, db, err)
}

// Postgres opens a database of the PostgreSQL server that the tests share. It skips the test where
// PostgreSQL is not installed.
func Postgres(t testing.TB, hook store.Hook) store.Database {
	t.Helper()
	db, err := postgres.Open(context.Background(), pgtest.Shared(t).URL(), postgres.Options{Hook: hook, Head: state.HeadKey})
	return opened(t, db, err)
}

func opened(t testing.TB, db store.Database, err error) store.Database {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// openStore opens the database, its log, its keys and its tenant.
func (s *Service) openStore(open Open) {
	ctx := context.Background()
	check := func(err error) {
		s.T.Helper()
		if err != nil {
			s.T.Fatal(err)
		}
	}
	dir := s.T.TempDir()
	watch := statetest.New(s.T)
	bound := watch.State()
	s.Audit = writer.New(s.Clock.Now, bound)
	s.Guard = guard.New(s.Audit)
	s.Reader, s.Verifier = reader.New(s.Audit, s.Guard), verify.NewLiveVerifier(s.Audit)
	db := bound.Guard(storetest.Rehearsing(open(s.T, s.Audit.Commit)))
	s.Store, s.Rows = db, &Rows{s.T, watch, bound, db.Database}

	var keys [2]*kms.Key
	var err error
	for i, name := range []string{"kms.key", "previous.key"} {
		check(kms.CreateLocal(filepath.Join(dir, name)))
		keys[i], err = kms.OpenLocal(filepath.Join(dir, name))
		check(err)
	}
	s.KMS = []keyring.KMS{keys[0], keys[1]}
	s.Identity, s.Keys, err = identity.Open(ctx, db, s.Audit, s.Guard, keys[0], keyring.Config{
		CacheTTL: keyring.DefaultCacheTTL, Previous: []keyring.KMS{keys[1]}, Now: s.Clock.Now,
	})
	check(err)
	// Without this row nobody may destroy the key.
	check(db.Update(ctx, func(tx store.Tx) error {
		_, err := s.Audit.Append(tx, audit.Event{
			Type: audit.KMSRewrapped, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
			Resource: audit.Resource{Type: audit.KMSKeyResource, ID: keys[1].ID()},
		})
		return errors.Join(err, tx.Put([]byte("kms/moved-from/"+keys[1].ID()), nil))
	}))
	s.Tenant, s.Key, err = s.Identity.Dev(ctx)
	check(err)
}

// openReports opens a folder of reports.
func (s *Service) openReports() {
	s.ReportFolder = filepath.Join(s.T.TempDir(), "reports")
	reports, err := objects.Open(context.Background(), "file://"+s.ReportFolder, objects.SigningOptions{
		BaseURL: s.URL + "/api/v2/compliance/download", Secret: s.Keys.ReportURLKey(), Now: s.Clock.Now,
	})
	if err != nil {
		s.T.Fatal(err)
	}
	s.T.Cleanup(func() { _ = reports.Close() })
	s.Reports = reports
}

// HealthyState returns the state of a healthy deployment, which takes a backup and creates a
// sealing key every day.
func HealthyState() *atomic.Pointer[compliance.State] {
	state := new(atomic.Pointer[compliance.State])
	state.Store(&compliance.State{
		Custody: compliance.CustodyLocal, RetentionDays: 400, Archive: compliance.ArchiveReadable, Transport: compliance.TransportTLS13Quantum, Signing: string(writer.SignEntries), VerifyEvery: 24 * time.Hour,
		Anchored: true, SealingKeyLifetime: 30 * 24 * time.Hour, ClockSynchronised: true, Suites: []string{"ML-DSA-65", "ML-KEM-768"},
	})
	return state
}

// NewCompliance returns the compliance service on top of a server's parts.
func NewCompliance(t testing.TB, c *server.Config, verifier *verify.LiveVerifier, state *atomic.Pointer[compliance.State], reports compliance.Reports) *assessor.Service {
	t.Helper()
	made, err := assessor.New(c.Store, c.Guard, assessor.Config{
		Reader: c.Reader, Verifier: verifier, Reports: reports, Seal: c.Keys.SealRow, Open: c.Keys.OpenRow, Sign: c.Keys.SignReport, Verify: c.Keys.VerifyReport, Program: "latticekeep test", Now: c.Now, Logger: c.Logger,
		State: func(context.Context) (compliance.State, error) {
			now := *state.Load()
			now.LastBackup = c.Now().UTC().Truncate(24 * time.Hour)
			now.SealingKeyCreated = now.LastBackup
			return now, nil
		},
		Renderers: map[compliance.Format]compliance.Renderer{
			compliance.PDF: report.PDF, compliance.OSCAL: report.OSCAL, compliance.KSI: report.KSI,
		},
		Organisation: c.Identity.TenantName,
		Inventory: func(_ context.Context, p authz.Principal) ([]byte, error) {
			return report.CBOM(report.Inventory{
				Tenant: p.Tenant, Program: "latticekeep", Version: "test", At: c.Now(),
				Algorithms: []report.Algorithm{report.MLKEM768, report.MLDSA65, report.AES256GCM},
			})
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// Plenty is a rate limit that no test reaches by accident.
const Plenty = 1_000_000

// Patience is a time limit of answers that no busy machine reaches. It is below the limit after
// which the server closes a connection.
const Patience = 45 * time.Second

// GrantKey returns a new API key of the tenant with the given scopes.
func (s *Service) GrantKey(scopes ...authz.Scope) string {
	s.T.Helper()
	return s.GrantKeyIn(s.Tenant, scopes...)
}

// GrantKeyIn returns a new API key of any tenant with the given scopes.
func (s *Service) GrantKeyIn(tenant authz.TenantID, scopes ...authz.Scope) string {
	s.T.Helper()
	p := authz.Principal{Tenant: tenant, Kind: authz.System, ID: "test", Scopes: authz.Scopes()}
	_, key, err := s.Identity.CreateAPIKey(context.Background(), p, identity.APIKeyRequest{Name: "test", Scopes: scopes})
	if err != nil {
		s.T.Fatal(err)
	}
	return key
}

// SystemKey returns an API key of the deployment.
func (s *Service) SystemKey() string {
	s.T.Helper()
	return s.GrantKeyIn(authz.SystemTenant, authz.SystemAdmin, authz.AccountAdmin, authz.AuditRead)
}

// Start starts a service on a database file and stops it at the end of the test.
func Start(t testing.TB, change ...func(*server.Config)) *Service {
	t.Helper()
	return StartOn(t, Bolt, change...)
}

// StartOn is [Start] on any database.
func StartOn(t testing.TB, open Open, change ...func(*server.Config)) *Service {
	t.Helper()
	l := listen(t)
	s := assembleAt(t, "http://"+l.Addr().String(), open, change...)
	ctx, stop := context.WithCancel(context.Background())
	mailed := make(chan error, 1)
	go func() {
		mailed <- s.Identity.Outbox().Run(ctx, s.Mailbox, mail.Options{
			PublicURL: s.URL, From: "vault@example.org", Logger: slog.New(slog.DiscardHandler),
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-mailed; err != nil {
			t.Errorf("sending mail: %v", err)
		}
	})
	s.serve(l)
	return s
}

// Serve serves on a new listener until the test ends, and sets the URL.
func (s *Service) Serve() {
	s.T.Helper()
	l := listen(s.T)
	s.URL = "http://" + l.Addr().String()
	s.serve(l)
}

func (s *Service) serve(l net.Listener) {
	t := s.T
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Server.Serve(ctx, l) }()
	t.Cleanup(func() {
		s.Client.CloseIdleConnections()
		stop()
		if err := <-served; err != nil {
			t.Errorf("serving: %v", err)
		}
	})
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Clock is a clock that only the test moves.
type Clock struct {
	mu  sync.Mutex
	now time.Time
}

// Now returns the time that was set.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Set sets the clock.
func (c *Clock) Set(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = now
}

// Advance moves the clock.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// Buffer is a bytes.Buffer for concurrent writers.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Operator returns the reconciler's principal for the tenant.
func (s *Service) Operator() authz.Principal {
	return authz.Principal{Tenant: s.Tenant, Kind: authz.Operator, ID: "operator", Scopes: authz.TenantScopes()}
}

// Stranger returns a principal of another tenant.
func (s *Service) Stranger() authz.Principal {
	s.T.Helper()
	tenant, err := s.Identity.NamespaceTenant(context.Background(), "cluster", "stranger")
	if err != nil {
		s.T.Fatal(err)
	}
	return authz.Principal{Tenant: tenant, Kind: authz.APIKey, ID: "stranger", Scopes: authz.TenantScopes()}
}

// Mailbox receives the service's e-mails.
type Mailbox struct {
	mu       sync.Mutex
	received []mail.Envelope
	arrived  chan struct{}
}

func (m *Mailbox) Send(_ context.Context, e mail.Envelope) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.received = append(m.received, e)
	select {
	case m.arrived <- struct{}{}:
	default:
	}
	return nil
}

// Received returns all messages so far.
func (m *Mailbox) Received() []mail.Envelope {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.received)
}
