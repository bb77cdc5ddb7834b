// Package servertest runs the whole service for tests of its interface: real parts, a store on disk,
// a listener on loopback, and a client that checks every exchange against the contract. The tests of
// server/v1, server/v2 and server/gate stand beside what they test and share it; it imports the
// product, and nothing but tests imports it.
package servertest

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/compliance/report"
	"github.com/latticekeep/latticekeep/internal/custody"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/server/gate"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// Service is a whole service of real parts: a store on disk, real keys, and a listener on loopback.
type Service struct {
	T              testing.TB
	Server         *server.Server
	Config         server.Config
	Store          store.Store
	Audit          *audit.Log
	Guard          *audit.Guard
	Reader         *audit.Reader
	Verifier       *audit.LiveVerifier
	Vault          *vault.Vault
	Transit        *transit.Transit
	Sealing        *sealingkey.Service
	Custody        *custody.Service
	PreviousKMSKey string // id of a KMS key that wraps nothing any more
	Identity       *identity.Service
	Keys           *keyring.Ring
	Clock          *Clock
	Logged         *Buffer
	URL            string
	State          *atomic.Pointer[compliance.State] // what the deployment reports about itself
	ReportFolder   string
	Client         *http.Client // checks every exchange against the contract

	Tenant  authz.TenantID
	Key     string // API key of Tenant, with all scopes
	Mailbox *Mailbox
}

// Assemble makes a service that listens nowhere yet.
func Assemble(t testing.TB, change ...func(*server.Config)) *Service {
	t.Helper()
	return assembleAt(t, "http://127.0.0.1", change...)
}

// assembleAt makes a service that will be reached at a URL.
func assembleAt(t testing.TB, url string, change ...func(*server.Config)) *Service {
	t.Helper()
	ctx := context.Background()
	s := &Service{
		URL:     url,
		T:       t,
		Clock:   &Clock{now: time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)},
		Logged:  &Buffer{},
		Mailbox: &Mailbox{arrived: make(chan struct{}, 1)},
		Client:  &http.Client{Transport: NewContract(t)},
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	chain := audit.New(s.Clock.Now)
	embedded, err := bolt.Open(filepath.Join(dir, "store.db"), bolt.Options{Hook: chain.Commit})
	check(err)
	db := storetest.Rehearsing(embedded)
	s.Store, s.Audit, s.Guard = db, chain, audit.NewGuard(chain)
	s.Reader, s.Verifier = audit.NewReader(chain, s.Guard), audit.NewLiveVerifier(chain)
	t.Cleanup(func() { _ = db.Close() })

	var keys [2]*kms.Key
	for i, name := range []string{"kms.key", "former.key"} {
		check(kms.CreateLocal(filepath.Join(dir, name)))
		keys[i], err = kms.OpenLocal(filepath.Join(dir, name))
		check(err)
	}
	s.PreviousKMSKey = keys[1].ID()
	s.Identity, s.Keys, err = identity.Open(ctx, db, chain, keys[0], keyring.Config{CacheTTL: keyring.DefaultCacheTTL, Former: []keyring.KMS{keys[1]}, Now: s.Clock.Now})
	check(err)
	check(db.Update(ctx, func(tx store.Tx) error { return tx.Put([]byte("kms/moved-from/"+s.PreviousKMSKey), nil) })) // or nobody may destroy it
	s.Vault = vault.New(db, s.Guard, s.Keys, s.Clock.Now)
	s.Tenant, s.Key, err = s.Identity.Dev(ctx)
	check(err)
	s.Transit = transit.New(db, s.Guard, s.Keys, s.Clock.Now)
	s.Sealing = sealingkey.New(db, s.Guard, s.Reader, s.Keys, sealingkey.Options{InUse: s.Vault.SealingKeyUse, Now: s.Clock.Now})
	s.Custody = custody.New(db, s.Guard, s.Keys, custody.Options{Now: s.Clock.Now, Destroy: func(context.Context, string) (kms.Destruction, error) {
		return kms.Destruction{When: s.Clock.Now().Add(7 * 24 * time.Hour), Undo: "ask for it"}, nil
	}})
	s.ReportFolder = filepath.Join(dir, "reports")
	reports, err := objects.Open(ctx, "file://"+s.ReportFolder, objects.SigningOptions{
		BaseURL: url + "/api/v2/compliance/download", Secret: s.Keys.ReportURLKey(), Now: s.Clock.Now,
	})
	check(err)
	t.Cleanup(func() { _ = reports.Close() })
	config := server.Config{
		Vault: s.Vault, Transit: s.Transit, Identity: s.Identity, Audit: chain, Guard: s.Guard, Reader: s.Reader, Keys: s.Keys, Sealing: s.Sealing, Custody: s.Custody, Store: db,
		Reports:   reports,
		PublicURL: "http://127.0.0.1", Rates: gate.Rates{V1: Plenty, V2: Plenty, Address: Plenty, Registrations: Plenty},
		Logger: slog.New(slog.NewJSONHandler(s.Logged, nil)), Now: s.Clock.Now, Version: "test",
	}
	s.State = HealthyState()
	config.Compliance = NewCompliance(t, &config, s.Verifier, s.State, reports)
	for _, c := range change {
		c(&config)
	}
	s.Config = config
	s.Server, err = server.New(config)
	check(err)
	return s
}

// HealthyState returns the state of a deployment in good order, which takes a backup and makes a
// sealing key every day.
func HealthyState() *atomic.Pointer[compliance.State] {
	state := new(atomic.Pointer[compliance.State])
	state.Store(&compliance.State{
		Custody: compliance.CustodyLocal, RetentionDays: 400, Archive: compliance.ArchiveReadable, Transport: compliance.TransportTLS13Quantum, Signing: string(audit.SignEntries), VerifyEvery: 24 * time.Hour,
		Anchored: true, SealingKeyLifetime: 30 * 24 * time.Hour, ClockSynchronised: true, Suites: []string{"ML-DSA-65", "ML-KEM-768"},
	})
	return state
}

// NewCompliance returns the compliance service over the parts of a server.
func NewCompliance(t testing.TB, c *server.Config, verifier *audit.LiveVerifier, state *atomic.Pointer[compliance.State], reports compliance.Reports) *assessor.Service {
	t.Helper()
	made, err := assessor.New(assessor.Config{
		Store: c.Store, Guard: c.Guard, Reader: c.Reader, Verifier: verifier, Reports: reports, Seal: c.Keys.SealRow, Open: c.Keys.OpenRow, Sign: c.Keys.SignReport, Verify: c.Keys.VerifyReport, Program: "latticekeep test", Now: c.Now, Logger: c.Logger,
		State: func(context.Context) (compliance.State, error) {
			now := *state.Load()
			now.LastBackup = c.Now().UTC().Truncate(24 * time.Hour)
			now.SealingKeyCreated = now.LastBackup
			return now, nil
		},
		Renderers: map[compliance.Format]compliance.Renderer{
			compliance.PDF: report.PDF, compliance.OSCAL: report.OSCAL, compliance.KSI: report.KSI,
		},
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

// FollowLog extends the tree and the newest checkpoint to the head of the log.
func (s *Service) FollowLog() audit.Checkpoint {
	s.T.Helper()
	c, err := audit.NewFollower(s.Audit).Follow(context.Background())
	if err != nil {
		s.T.Fatal(err)
	}
	return c
}

// Plenty is a rate that no test reaches by accident.
const Plenty = 1_000_000

// GrantKey returns a new API key of the tenant with those scopes.
func (s *Service) GrantKey(scopes ...authz.Scope) string {
	s.T.Helper()
	return s.GrantKeyIn(s.Tenant, scopes...)
}

// GrantKeyIn returns a new API key of any tenant with those scopes.
func (s *Service) GrantKeyIn(tenant authz.TenantID, scopes ...authz.Scope) string {
	s.T.Helper()
	p := authz.Principal{Tenant: tenant, Kind: authz.System, ID: "test", Scopes: append(authz.TenantScopes(), authz.SystemAdmin)}
	_, key, err := s.Identity.CreateAPIKey(context.Background(), p, identity.APIKeyRequest{Name: "test", Scopes: scopes})
	if err != nil {
		s.T.Fatal(err)
	}
	return key
}

// SystemKey returns a key of the deployment itself.
func (s *Service) SystemKey() string {
	s.T.Helper()
	return s.GrantKeyIn(authz.SystemTenant, authz.SystemAdmin, authz.AccountAdmin, authz.AuditRead)
}

// Start starts a service and stops it with the test.
func Start(t testing.TB, change ...func(*server.Config)) *Service {
	t.Helper()
	l := listen(t)
	s := assembleAt(t, "http://"+l.Addr().String(), change...)
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

// Serve answers at a listener of its own until the test ends, and sets the URL.
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

// Clock is a clock that only tests move.
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

// LoseEntries halts the log, as it halts when an anchor knows ten entries after its head.
func (s *Service) LoseEntries() {
	s.T.Helper()
	next := s.NextSequence()
	s.Audit.Halt(&audit.RollbackError{LostFrom: next, LostTo: next + 9, Epoch: 1, Place: "a test"})
}

// Operator returns the principal that the reconciler would be for the tenant.
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
