package server

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
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
	"github.com/latticekeep/latticekeep/server/gate"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// service is a whole service of real parts: a store on disk, real keys, and a
// listener on loopback.
type service struct {
	t        testing.TB
	server   *Server
	store    store.Store
	chain    *audit.Log
	vault    *vault.Vault
	transit  *transit.Transit
	sealing  *sealingkey.Service
	custody  *custody.Service
	former   string // id of a KMS key that nothing is under
	identity *identity.Service
	keys     *keyring.Ring
	clock    *clock
	log      *buffer
	url      string
	state    *atomic.Pointer[compliance.State] // what the deployment says of itself
	folder   string                            // of the reports
	client   *http.Client                      // holds every exchange against the contract

	tenant authz.TenantID
	key    string // with all scopes of tenant
	mails  *mailbox
}

// assemble makes a service that listens nowhere yet.
func assemble(t testing.TB, change ...func(*Config)) *service {
	t.Helper()
	return assembleAt(t, "http://127.0.0.1", change...)
}

// assembleAt makes a service that will be reached at a URL.
func assembleAt(t testing.TB, url string, change ...func(*Config)) *service {
	t.Helper()
	ctx := context.Background()
	s := &service{
		url:    url,
		t:      t,
		clock:  &clock{now: time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)},
		log:    &buffer{},
		mails:  &mailbox{arrived: make(chan struct{}, 1)},
		client: &http.Client{Transport: newContract(t)},
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	chain := audit.New(s.clock.Now)
	embedded, err := bolt.Open(filepath.Join(dir, "store.db"), bolt.Options{Hook: chain.Commit})
	check(err)
	db := storetest.Rehearsing(embedded)
	s.store, s.chain = db, chain
	t.Cleanup(func() { _ = db.Close() })

	var keys [2]*kms.Key
	for i, name := range []string{"kms.key", "former.key"} {
		check(kms.CreateLocal(filepath.Join(dir, name)))
		keys[i], err = kms.OpenLocal(filepath.Join(dir, name))
		check(err)
	}
	s.former = keys[1].ID()
	s.identity, s.keys, err = identity.Open(ctx, db, chain, keys[0], keyring.Config{CacheTTL: keyring.DefaultCacheTTL, Former: []keyring.KMS{keys[1]}, Now: s.clock.Now})
	check(err)
	check(db.Update(ctx, func(tx store.Tx) error { return tx.Put([]byte("kms/moved-from/"+s.former), nil) })) // or nobody may destroy it
	s.vault = vault.New(db, chain.Guard(), s.keys, s.clock.Now)
	s.tenant, s.key, err = s.identity.Dev(ctx)
	check(err)
	s.transit = transit.New(db, chain.Guard(), s.keys, s.clock.Now)
	s.sealing = sealingkey.New(db, chain, s.keys, sealingkey.Options{InUse: s.vault.SealingKeyUse, Now: s.clock.Now})
	s.custody = custody.New(db, chain.Guard(), s.keys, custody.Options{Now: s.clock.Now, Destroy: func(context.Context, string) (kms.Destruction, error) {
		return kms.Destruction{When: s.clock.Now().Add(7 * 24 * time.Hour), Undo: "ask for it"}, nil
	}})
	s.folder = filepath.Join(dir, "reports")
	reports, err := objects.Open(ctx, "file://"+s.folder, objects.SigningOptions{
		BaseURL: url + "/api/v2/compliance/download", Secret: s.keys.ReportURLKey(), Now: s.clock.Now,
	})
	check(err)
	t.Cleanup(func() { _ = reports.Close() })
	config := Config{
		Vault: s.vault, Transit: s.transit, Identity: s.identity, Audit: chain, Keys: s.keys, Sealing: s.sealing, Custody: s.custody, Store: db,
		Reports:   reports,
		PublicURL: "http://127.0.0.1", Rates: gate.Rates{V1: plenty, V2: plenty, Address: plenty, Registrations: plenty},
		Logger: slog.New(slog.NewJSONHandler(s.log, nil)), Now: s.clock.Now, Version: "test",
	}
	s.state = healthy()
	config.Compliance = complianceOf(t, &config, s.state, reports)
	for _, c := range change {
		c(&config)
	}
	s.server, err = New(config)
	check(err)
	return s
}

// healthy is what a deployment in good order says of itself. It backs up and makes
// sealing keys every day.
func healthy() *atomic.Pointer[compliance.State] {
	state := new(atomic.Pointer[compliance.State])
	state.Store(&compliance.State{
		Custody: compliance.CustodyLocal, RetentionDays: 400, Archive: compliance.ArchiveReadable, Transport: compliance.TransportTLS13Quantum, Signing: string(audit.SignEntries), VerifyEvery: 24 * time.Hour,
		Anchored: true, SealingKeyLifetime: 30 * 24 * time.Hour, ClockSynchronised: true, Suites: []string{"ML-DSA-65", "ML-KEM-768"},
	})
	return state
}

// complianceOf makes the service that scores of the parts that a server has.
func complianceOf(t testing.TB, c *Config, state *atomic.Pointer[compliance.State], reports compliance.Reports) *compliance.Service {
	t.Helper()
	made, err := compliance.New(compliance.Config{
		Store: c.Store, Log: c.Audit, Reports: reports, Seal: c.Keys.SealRow, Open: c.Keys.OpenRow, Sign: c.Keys.SignReport, Verify: c.Keys.VerifyReport, Program: "latticekeep test", Now: c.Now, Logger: c.Logger,
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

// follow brings the tree and the newest checkpoint to the head of the log.
func (s *service) follow() audit.Checkpoint {
	s.t.Helper()
	c, err := s.chain.Follow(context.Background())
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// plenty is a rate that no test reaches by accident.
const plenty = 1_000_000

// grant returns a new API key of the tenant with those scopes.
func (s *service) grant(scopes ...authz.Scope) string {
	s.t.Helper()
	return s.grantIn(s.tenant, scopes...)
}

func (s *service) grantIn(tenant authz.TenantID, scopes ...authz.Scope) string {
	s.t.Helper()
	p := authz.Principal{Tenant: tenant, Kind: authz.System, ID: "test", Scopes: append(authz.TenantScopes(), authz.SystemAdmin)}
	_, key, err := s.identity.CreateAPIKey(context.Background(), p, identity.APIKeyRequest{Name: "test", Scopes: scopes})
	if err != nil {
		s.t.Fatal(err)
	}
	return key
}

// systemKey returns a key of the deployment itself.
func (s *service) systemKey() string {
	s.t.Helper()
	return s.grantIn(authz.SystemTenant, authz.SystemAdmin, authz.AccountAdmin, authz.AuditRead)
}

// mailbox takes the service's mail.
type mailbox struct {
	mu       sync.Mutex
	received []mail.Envelope
	arrived  chan struct{}
}

func (m *mailbox) Send(_ context.Context, e mail.Envelope) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.received = append(m.received, e)
	select {
	case m.arrived <- struct{}{}:
	default:
	}
	return nil
}

// to waits for the n-th message to an address.
func (s *service) mailTo(address string, n int) mail.Envelope {
	s.t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		s.mails.mu.Lock()
		found := 0
		for _, e := range s.mails.received {
			if e.To == address {
				if found++; found == n {
					s.mails.mu.Unlock()
					return e
				}
			}
		}
		s.mails.mu.Unlock()
		select {
		case <-s.mails.arrived:
		case <-deadline:
			s.t.Fatalf("no mail number %d to the address", n)
		}
	}
}

var mailedToken = regexp.MustCompile(`"token":\s*"([^"]+)"`)

// tokenTo returns the token in the n-th message to an address.
func (s *service) tokenTo(address string, n int) string {
	s.t.Helper()
	m := mailedToken.FindStringSubmatch(s.mailTo(address, n).Text)
	if m == nil {
		s.t.Fatal("the mail has no token")
	}
	return m[1]
}

// newService starts a service and stops it with the test.
func newService(t testing.TB, change ...func(*Config)) *service {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := assembleAt(t, "http://"+l.Addr().String(), change...)
	ctx, stop := context.WithCancel(context.Background())
	served, mailed := make(chan error, 1), make(chan error, 1)
	go func() { served <- s.server.Serve(ctx, l) }()
	go func() {
		mailed <- s.identity.Outbox().Run(ctx, s.mails, mail.Options{PublicURL: s.url, From: "vault@example.org", Logger: slog.New(slog.DiscardHandler)})
	}()
	t.Cleanup(func() {
		s.client.CloseIdleConnections()
		stop()
		if err := <-mailed; err != nil {
			t.Errorf("sending mail: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serving: %v", err)
		}
	})
	return s
}

// clock is a clock that tests move.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// buffer is a bytes.Buffer for concurrent writers.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// request is what a test sends. The zero value of each field sends nothing.
type request struct {
	method, path string
	key          string // X-API-Key
	bearer       string // Authorization
	body         string
	contentType  string // default application/json when there is a body
	chunked      bool   // no Content-Length
	header       http.Header
	lost         bool // while the log lacks entries that an anchor knows
}

// reply is what came back.
type reply struct {
	status int
	header http.Header
	body   []byte
}

// unwaiting has a tail end with the entries that there are.
func unwaiting(path string) string {
	query, ok := strings.CutPrefix(path, "/api/v2/audit/tail")
	switch {
	case !ok || strings.Contains(query, "wait=") || strings.HasPrefix(query, "/"):
		return path
	case query == "":
		return path + "?wait=0"
	}
	return path + "&wait=0"
}

func (s *service) call(r request) reply {
	s.t.Helper()
	if r.lost {
		s.lose()
		defer s.chain.Refuse(nil)
	}
	var body io.Reader
	if r.body != "" {
		body = strings.NewReader(r.body)
		if r.chunked {
			body = io.MultiReader(body) // hides the length
		}
	}
	req, err := http.NewRequest(r.method, s.url+unwaiting(r.path), body)
	if err != nil {
		s.t.Fatal(err)
	}
	for name, values := range r.header {
		req.Header[http.CanonicalHeaderKey(name)] = values
	}
	if r.key != "" {
		req.Header.Set("X-API-Key", r.key)
	}
	if r.bearer != "" {
		req.Header.Set("Authorization", "Bearer "+r.bearer)
	}
	if r.body != "" && r.contentType == "" {
		r.contentType = "application/json"
	}
	if r.contentType != "" {
		req.Header.Set("Content-Type", r.contentType)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		s.t.Fatalf("%s %s: %v", r.method, r.path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatalf("%s %s: %v", r.method, r.path, err)
	}
	return reply{resp.StatusCode, resp.Header, b}
}

// lose has the log refuse to go on, as it does when ten entries after its head are
// known elsewhere.
func (s *service) lose() {
	s.t.Helper()
	next := s.next()
	s.chain.Refuse(&audit.RollbackError{LostFrom: next, LostTo: next + 9, Epoch: 1, Place: "a test"})
}

// get, post and remove call with the key of all scopes.
func (s *service) get(path string) reply {
	s.t.Helper()
	return s.call(request{method: "GET", path: path, key: s.key})
}

func (s *service) post(path, body string) reply {
	s.t.Helper()
	return s.call(request{method: "POST", path: path, key: s.key, body: body})
}

func (s *service) remove(path string) reply {
	s.t.Helper()
	return s.call(request{method: "DELETE", path: path, key: s.key})
}

// want fails the test unless the reply has the status; it decodes the body.
func (r reply) want(t testing.TB, status int) map[string]any {
	t.Helper()
	if r.status != status {
		t.Fatalf("status %d, want %d: %s", r.status, status, r.body)
	}
	var fields map[string]any
	if err := json.Unmarshal(r.body, &fields); err != nil {
		t.Fatalf("body %q: %v", r.body, err)
	}
	return fields
}

// message returns the message of an error reply.
func (r reply) message(t testing.TB, status int) string {
	t.Helper()
	fields := r.want(t, status)
	detail, ok := fields["error"].(map[string]any)
	if !ok || fields["success"] != false || detail["code"] != float64(status) {
		t.Fatalf("no error envelope: %s", r.body)
	}
	return detail["message"].(string)
}

// seal stores a credential with one value and returns its id.
func (s *service) seal(value string) string {
	s.t.Helper()
	body, err := json.Marshal(map[string]any{
		"name": "n", "credential_type": "api_key", "values": map[string]string{"key": value}, "ttl_days": 10,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return s.post("/api/v2/vault/seal", string(body)).want(s.t, http.StatusCreated)["credential_id"].(string)
}

func (s *service) entries(query string) []map[string]any {
	s.t.Helper()
	var entries []map[string]any
	for _, e := range s.get("/api/v2/audit/logs?"+query).want(s.t, http.StatusOK)["entries"].([]any) {
		entries = append(entries, e.(map[string]any))
	}
	return entries
}

// operator returns the principal that the reconciler would be for the tenant.
func (s *service) operator() authz.Principal {
	return authz.Principal{Tenant: s.tenant, Kind: authz.Operator, ID: "operator", Scopes: authz.TenantScopes()}
}

// stranger returns a principal of another tenant.
func (s *service) stranger() authz.Principal {
	s.t.Helper()
	tenant, err := s.identity.NamespaceTenant(context.Background(), "cluster", "stranger")
	if err != nil {
		s.t.Fatal(err)
	}
	return authz.Principal{Tenant: tenant, Kind: authz.APIKey, ID: "stranger", Scopes: authz.TenantScopes()}
}
