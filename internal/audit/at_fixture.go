package audit

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/test/pgtest"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// copied returns a copy of the database file as it is now, like a snapshot of its disk.
func (f *fixture) copied() string {
	f.t.Helper()
	return copyOf(f.t, f.path)
}

func copyOf(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "audit.db")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// opened opens the log of a copy.
func (f *fixture) opened(path string) *fixture {
	f.t.Helper()
	g := &fixture{t: f.t, path: path, clock: f.now()}
	g.log = newParts(g.now)
	s, err := bolt.Open(path, bolt.Options{Hook: g.log.Commit})
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { s.Close() })
	g.store = rehearsing(f.t, s)
	if err := g.log.Use(f.t.Context(), g.store, f.log.signer, "chain_test"); err != nil {
		f.t.Fatal(err)
	}
	return g
}

// begun returns the places that the log records as begun, with the sequences of their first
// checkpoints.
func (f *fixture) begun() (places []string) {
	f.t.Helper()
	for _, e := range f.entries() {
		if e.EventType == AnchorStarted && e.TenantID == string(authz.SystemTenant) && e.Outcome == Success && e.Resource == (Resource{"chain_test", ChainResource}) {
			places = append(places, e.Attributes[attributePlace]+" "+e.Attributes[attributeSequence])
		}
	}
	return places
}

func signedNote(t *testing.T, f *fixture, c Checkpoint) []byte {
	t.Helper()
	signed, err := SignCheckpoint(c, f.log.signer)
	if err != nil {
		t.Fatal(err)
	}
	return signed
}

const keep = 90 * 24 * time.Hour

// lines returns the lines of the entries of a segment, and its closing line.
func lines(t *testing.T, a Archive, s Segment) (entries [][]byte, closing []byte) {
	t.Helper()
	data, err := a.Get(t.Context(), s.Name)
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	if err := unzip(data, func(r io.Reader) error { text, err = io.ReadAll(r); return err }); err != nil {
		t.Fatal(err)
	}
	all := bytes.SplitAfter(text, []byte("\n"))
	return all[:len(all)-2], all[len(all)-2]
}

// zipped compresses the text again.
func zipped(text ...[]byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = w.Write(slices.Concat(text...))
	_ = w.Close()
	return out.Bytes()
}

// encodeRow returns the row of an entry with a signature of its own.
func encodeRow(core, signature []byte) []byte {
	return slices.Concat([]byte{plainRow}, signature, core)
}

// decodeRow decodes a stored entry with its signature. The batch is the row of its group, if there
// is one.
func decodeRow(row, batch []byte) (*Entry, error) {
	s, err := decodeStored(row, batch)
	if err != nil {
		return nil, err
	}
	return s.whole(), nil
}

const (
	tenantA = authz.TenantID("ten_aaaaaaaaaaaaaaaaaaaaaaaaaa")
	tenantB = authz.TenantID("ten_eeeeeeeeeeeeeeeeeeeeeeeeee")
)

// fixture is a log on a real store, with a clock that the test moves.
type fixture struct {
	t     testing.TB
	path  string // database file of an embedded store
	url   string // address of any other database
	log   *parts
	store store.Store
	mu    sync.Mutex
	clock time.Time
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

// rehearsing runs every closure of Update twice, except where time is measured.
func rehearsing(t testing.TB, s store.Database) store.Store {
	if _, benchmark := t.(*testing.B); benchmark {
		return s
	}
	return storetest.Rehearsing(s)
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	return (&fixture{t: t, path: filepath.Join(t.TempDir(), "audit.db")}).begin()
}

// newPostgresFixture is newFixture with PostgreSQL.
func newPostgresFixture(t testing.TB) *fixture {
	t.Helper()
	return (&fixture{t: t, url: pgtest.Shared(t).URL()}).begin()
}

// onBothStores runs a test on each kind of store.
func onBothStores(t *testing.T, test func(t *testing.T, newFixture func(testing.TB) *fixture)) {
	t.Run("bolt", func(t *testing.T) { test(t, newFixture) })
	t.Run("postgres", func(t *testing.T) { test(t, newPostgresFixture) })
}

// opens opens the store of the fixture.
func (f *fixture) opens(hook store.Hook) store.Database {
	f.t.Helper()
	var s store.Database
	var err error
	if f.url != "" {
		s, err = postgres.Open(context.Background(), f.url, postgres.Options{Hook: hook})
	} else {
		s, err = bolt.Open(f.path, bolt.Options{Hook: hook})
	}
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { s.Close() })
	return s
}

func (f *fixture) begin() *fixture {
	t := f.t
	t.Helper()
	f.clock = time.Date(2026, 11, 21, 12, 0, 0, 123456789, time.UTC)
	f.log = newParts(f.now)
	f.store = rehearsing(t, f.opens(f.log.Commit))
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	signer, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.log.Use(context.Background(), f.store, signer, "chain_test"); err != nil {
		t.Fatal(err)
	}
	f.record(Event{Type: ChainStarted, Outcome: Success, Principal: principal(authz.SystemTenant), Resource: Resource{Type: ChainResource, ID: "chain_test"}})
	return f
}

func principal(tenant authz.TenantID) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.APIKey, ID: "key_of_" + string(tenant), Scopes: authz.TenantScopes(), RequestID: "req", SourceIP: "127.0.0.1"}
}

func (f *fixture) record(e Event) {
	f.t.Helper()
	if err := f.log.Record(context.Background(), e); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) sealed(tenant authz.TenantID, id, version, digest string) {
	f.t.Helper()
	f.record(Event{
		Type: CredentialSealed, Outcome: Success, Principal: principal(tenant), Resource: Resource{ID: id, Type: CredentialResource},
		Attributes: map[string]string{AttributeVersion: version, AttributeDigest: digest},
	})
}

func (f *fixture) verify() (Report, error) {
	return VerifyStore(context.Background(), f.store, Options{})
}

func (f *fixture) export() []byte {
	f.t.Helper()
	var out bytes.Buffer
	if err := f.log.Export(context.Background(), &out, 0); err != nil {
		f.t.Fatal(err)
	}
	return out.Bytes()
}

// fill writes a log of two tenants with concurrent writers.
func (f *fixture) fill(n int) {
	f.t.Helper()
	var wg sync.WaitGroup
	errs := make(chan error, n)
	for i := range n {
		wg.Go(func() {
			tenant := tenantA
			if i%3 == 0 {
				tenant = tenantB
			}
			errs <- f.log.Record(context.Background(), Event{
				Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenant),
				Resource:   Resource{ID: fmt.Sprintf("cred_%d", i), Type: CredentialResource},
				Attributes: map[string]string{"note": "<&>\"\\\u2028é"},
			})
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			f.t.Fatal(err)
		}
	}
}

// baseAt returns the signed base after an entry, and its row.
func (f *fixture) baseAt(to uint64) (*Base, []byte) {
	f.t.Helper()
	v := NewVerifier(Options{PublicKey: f.log.signer.Public()})
	if err := v.addRange(f.t.Context(), f.store, store.Range{From: entryRange.From, To: entryKey(to + 1)}); err != nil {
		f.t.Fatal(err)
	}
	b, err := v.Base()
	if err != nil {
		f.t.Fatal(err)
	}
	row, err := b.sign(f.log.signer, f.log.ChainID())
	if err != nil {
		f.t.Fatal(err)
	}
	return b, row
}

func errorOf[T any](_ T, err error) error { return err }

// group writes n entries in one commit and returns the sequence of the first.
func (f *fixture) group(n int) uint64 {
	f.t.Helper()
	var first *Receipt
	err := f.store.Update(f.t.Context(), func(tx store.Tx) error {
		for i := range n {
			r, err := f.log.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)})
			if err != nil {
				return err
			}
			if i == 0 {
				first = r
			}
		}
		return nil
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return first.Sequence
}

func (f *fixture) read(sequence uint64) *Entry {
	f.t.Helper()
	var e *Entry
	err := f.store.View(f.t.Context(), func(r store.Reader) (err error) {
		e, err = readEntry(r, sequence)
		return err
	})
	if err != nil {
		f.t.Fatalf("reading %d: %v", sequence, err)
	}
	return e
}

func (f *fixture) readError(sequence uint64) error {
	return f.store.View(f.t.Context(), func(r store.Reader) error {
		_, err := readEntry(r, sequence)
		return err
	})
}

func (f *fixture) commits() uint64 { return f.store.(interface{ Commits() uint64 }).Commits() }

func admin() authz.Principal {
	return authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "admin", Scopes: []authz.Scope{authz.SystemAdmin}, RequestID: "req"}
}

// putBack restores the rows of a copy, like a failover to a server that lacks the newest commits.
func (f *fixture) putBack(m *memory) {
	f.t.Helper()
	now := copyStore(f.t, f.store)
	err := f.store.Update(f.t.Context(), func(tx store.Tx) error {
		for _, r := range now.rows {
			if err := tx.Delete(r.key); err != nil {
				return err
			}
		}
		for _, r := range m.rows {
			if err := tx.Put(r.key, r.value); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

// put changes the store without the log's knowledge.
func (f *fixture) put(change func(store.Tx) error) {
	f.t.Helper()
	if err := f.store.Update(f.t.Context(), change); err != nil {
		f.t.Fatal(err)
	}
}

// copyOf returns a log of the same chain on a copy of its rows.
func (f *fixture) copyOf(m *memory) *fixture {
	f.t.Helper()
	g := &fixture{t: f.t, path: f.path + strconv.Itoa(len(m.rows)), clock: f.now()}
	g.log = newParts(g.now)
	g.open(m)
	if err := g.log.Use(context.Background(), g.store, f.log.signer, f.log.chain.chainID); err != nil {
		f.t.Fatal(err)
	}
	return g
}

// open creates a store of the rows, with the log as its hook.
func (f *fixture) open(m *memory) {
	f.t.Helper()
	fill := mustOpen(f.t, f.path, nil)
	err := fill.Update(context.Background(), func(tx store.Tx) error {
		for _, r := range m.rows {
			if err := tx.Put(r.key, r.value); err != nil {
				return err
			}
		}
		return nil
	})
	if err := cmp.Or(err, fill.Close()); err != nil {
		f.t.Fatal(err)
	}
	f.store = mustOpen(f.t, f.path, f.log.Commit)
	f.t.Cleanup(func() { f.store.Close() })
}

// parts are a log and everything in a process that reads, follows and verifies it.
type parts struct {
	*Log
	*Reader
	*Follower
	*LiveVerifier
	chain *Chain
	guard *Guard
}

func newParts(now func() time.Time) *parts {
	l := New(now)
	g := NewGuard(l)
	return &parts{l, NewReader(l, g), NewFollower(l), NewLiveVerifier(l), l.chain, g}
}

func (p *parts) AcceptRollback(ctx context.Context, by authz.Principal, reason string) (Rollback, error) {
	return p.guard.AcceptRollback(ctx, by, reason)
}

type rowKinds struct {
	store.Reader
	*countingStore
}

func kindOfRow(key []byte) string { return strings.Join(strings.SplitN(string(key), "/", 3)[:2], "/") }

func (r rowKinds) Get(key []byte) ([]byte, error) {
	r.gets[kindOfRow(key)]++
	return r.Reader.Get(key)
}

func (r rowKinds) Scan(rng store.Range, visit func(key, value []byte) bool) error {
	return r.Reader.Scan(rng, func(key, value []byte) bool {
		r.scans[kindOfRow(key)]++
		return visit(key, value)
	})
}

func toBase64(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

// block returns rows of n types and m actors.
func block(random *mrand.Rand, n, m int) []indexRow {
	rows := make([]indexRow, blockSize)
	for i := range rows {
		rows[i].eventType, rows[i].actor = EventType(fmt.Sprint("TYPE_", random.IntN(n))), fmt.Sprint("usr_", random.IntN(m))
	}
	return rows
}

// sequencesOf returns the sequences of a tenant's entries in the database.
func (f *fixture) sequencesOf(tenant authz.TenantID) (all []uint64) {
	for _, e := range f.entries() {
		if e.TenantID == string(tenant) {
			all = append(all, e.Sequence)
		}
	}
	return all
}

// drain reads a tail until there is nothing more.
func drain(t *testing.T, tail *Tail) (all []uint64) {
	t.Helper()
	for {
		entries, err := tail.Next(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) == 0 {
			return all
		}
		for _, e := range entries {
			all = append(all, e.Sequence)
		}
	}
}

func (f *fixture) progress() (uint64, map[Kind]uint64) {
	f.t.Helper()
	sequence, written, err := f.log.Progress(context.Background())
	if err != nil {
		f.t.Fatal(err)
	}
	return sequence, written
}

// alter changes the database without the log's knowledge: it opens the same database without the
// hook.
func (f *fixture) alter(change func(tx store.Tx) error) {
	f.t.Helper()
	if err := f.store.Close(); err != nil {
		f.t.Fatal(err)
	}
	f.store = f.opens(nil)
	if err := f.store.Update(context.Background(), change); err != nil {
		f.t.Fatal(err)
	}
}

func get(tx store.Tx, key []byte) []byte {
	b, err := tx.Get(key)
	if err != nil || b == nil {
		panic(fmt.Sprint("no row: ", key, err))
	}
	return bytes.Clone(b)
}

// positionIn returns the key of the index row that names the sequence.
func positionIn(tx store.Tx, sequence uint64) (found []byte) {
	err := tx.Scan(tenantRange, func(key, value []byte) bool {
		if sequenceOf(value) == sequence {
			found = bytes.Clone(key)
		}
		return found == nil
	})
	if err != nil || found == nil {
		panic("no index row")
	}
	return found
}

func (f *fixture) row(key []byte) (row []byte) {
	f.t.Helper()
	err := f.store.View(f.t.Context(), func(r store.Reader) error {
		b, err := r.Get(key)
		row = bytes.Clone(b)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return row
}

// rollBack lets the log continue above lost entries.
func (f *fixture) rollBack(head, lostTo uint64) Rollback {
	f.t.Helper()
	f.log.Halt(&RollbackError{LostFrom: head + 1, LostTo: lostTo, Epoch: 1, Place: "a test"})
	p := principal(authz.SystemTenant)
	p.Scopes = []authz.Scope{authz.SystemAdmin}
	got, err := f.log.AcceptRollback(f.t.Context(), p, "a test")
	if err != nil {
		f.t.Fatal(err)
	}
	return got
}

func (f *fixture) followed() []byte {
	f.t.Helper()
	if _, err := f.log.Follow(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	note, _, err := f.log.chain.NewestCheckpoint(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	return note
}

// lines returns the lines of an export, each with its newline, the closing line last.
func (f *fixture) lines() []string {
	f.t.Helper()
	lines := strings.SplitAfter(string(f.export()), "\n")
	return lines[:len(lines)-1]
}

// visited returns the resources that a visit of tenant A's entries shows, in order.
func (f *fixture) visited(types ...EventType) (ids []string, err error) {
	err = f.log.Visit(f.t.Context(), tenantA, func(e *Entry) { ids = append(ids, e.Resource.ID) }, types...)
	return ids, err
}

// onAllCores calls do for each number from 0 to n-1 once, and returns when all calls are done.
func onAllCores(n int, do func(i int)) {
	var next atomic.Int64
	work := func() {
		for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
			do(i)
		}
	}
	var wg sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}
