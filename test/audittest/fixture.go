// Package audittest gives tests a log on a real store, with everything that a process runs beside
// it, and with the means to damage, restore and fork it.
package audittest

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/rand"
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

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// Copied returns a copy of the database file as it is now, like a snapshot of its disk.
func (f *Fixture) Copied() string {
	f.T.Helper()
	return CopyOf(f.T, f.Path)
}

// CopyOf copies a file into a new temporary folder.
func CopyOf(t testing.TB, path string) string {
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

// Opened opens the log of a copy.
func (f *Fixture) Opened(path string) *Fixture {
	f.T.Helper()
	g := &Fixture{T: f.T, Path: path, Clock: f.Now()}
	g.Log = NewParts(g.Now)
	s, err := bolt.Open(path, bolt.Options{Hook: g.Log.Commit})
	if err != nil {
		f.T.Fatal(err)
	}
	f.T.Cleanup(func() { s.Close() })
	g.Store = Rehearsing(f.T, s)
	if err := g.Log.Use(f.T.Context(), g.Store, f.Log.Signer, "chain_test"); err != nil {
		f.T.Fatal(err)
	}
	return g
}

// SignedNote signs a checkpoint with the key of the fixture's log.
func SignedNote(t *testing.T, f *Fixture, c audit.Checkpoint) []byte {
	t.Helper()
	signed, err := audit.SignCheckpoint(c, f.Log.Signer)
	if err != nil {
		t.Fatal(err)
	}
	return signed
}

// Keep is how long the fixture's entries stay in the database.
const Keep = 90 * 24 * time.Hour

// Lines returns the lines of the entries of a segment, and its closing line.
func Lines(t *testing.T, a audit.Archive, s audit.Segment) (entries [][]byte, closing []byte) {
	t.Helper()
	data, err := a.Get(t.Context(), s.Name)
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	if err := audit.Unzip(data, func(r io.Reader) error { text, err = io.ReadAll(r); return err }); err != nil {
		t.Fatal(err)
	}
	all := bytes.SplitAfter(text, []byte("\n"))
	return all[:len(all)-2], all[len(all)-2]
}

// Zipped compresses the text again.
func Zipped(text ...[]byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = w.Write(slices.Concat(text...))
	_ = w.Close()
	return out.Bytes()
}

// EncodeRow returns the row of an entry with a signature of its own.
func EncodeRow(core, signature []byte) []byte {
	return slices.Concat([]byte{audit.PlainRow}, signature, core)
}

// DecodeRow decodes a stored entry with its signature. The batch is the row of its group, if there
// is one.
func DecodeRow(row, batch []byte) (*audit.Entry, error) {
	s, err := audit.DecodeStoredEntry(row, batch)
	if err != nil {
		return nil, err
	}
	return s.SignedEntry(), nil
}

const (
	TenantA = authz.TenantID("ten_aaaaaaaaaaaaaaaaaaaaaaaaaa")
	TenantB = authz.TenantID("ten_eeeeeeeeeeeeeeeeeeeeeeeeee")
)

// Fixture is a log on a real store, with a clock that the test moves.
type Fixture struct {
	T     testing.TB
	Path  string // database file of an embedded store
	URL   string // address of any other database
	Log   *Parts
	Store store.Store
	mu    sync.Mutex
	Clock time.Time
}

// Now returns the time of the fixture's clock.
func (f *Fixture) Now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.Clock
}

// Advance moves the clock forward.
func (f *Fixture) Advance(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Clock = f.Clock.Add(d)
}

// NewFixture returns a log with its first entry, in a database file.
func NewFixture(t testing.TB) *Fixture {
	t.Helper()
	return (&Fixture{T: t, Path: filepath.Join(t.TempDir(), "audit.db")}).begin()
}

// NewPostgresFixture is [NewFixture] with PostgreSQL.
func NewPostgresFixture(t testing.TB) *Fixture {
	t.Helper()
	return (&Fixture{T: t, URL: pgtest.Shared(t).URL()}).begin()
}

// OnBothStores runs a test on each kind of store.
func OnBothStores(t *testing.T, test func(t *testing.T, newFixture func(testing.TB) *Fixture)) {
	t.Run("bolt", func(t *testing.T) { test(t, NewFixture) })
	t.Run("postgres", func(t *testing.T) { test(t, NewPostgresFixture) })
}

// Opens opens the store of the fixture.
func (f *Fixture) Opens(hook store.Hook) store.Database {
	f.T.Helper()
	var s store.Database
	var err error
	if f.URL != "" {
		s, err = postgres.Open(context.Background(), f.URL, postgres.Options{Hook: hook})
	} else {
		s, err = bolt.Open(f.Path, bolt.Options{Hook: hook})
	}
	if err != nil {
		f.T.Fatal(err)
	}
	f.T.Cleanup(func() { s.Close() })
	return s
}

func (f *Fixture) begin() *Fixture {
	t := f.T
	t.Helper()
	f.Clock = time.Date(2026, 11, 21, 12, 0, 0, 123456789, time.UTC)
	f.Log = NewParts(f.Now)
	f.Store = Rehearsing(t, f.Opens(f.Log.Commit))
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	signer, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Log.Use(context.Background(), f.Store, signer, "chain_test"); err != nil {
		t.Fatal(err)
	}
	f.Record(audit.Event{Type: audit.ChainStarted, Outcome: audit.Success, Principal: Principal(authz.SystemTenant), Resource: audit.Resource{Type: audit.ChainResource, ID: "chain_test"}})
	return f
}

// Principal returns an API key of a tenant with all scopes of tenants.
func Principal(tenant authz.TenantID) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.APIKey, ID: "key_of_" + string(tenant), Scopes: authz.TenantScopes(), RequestID: "req", SourceIP: "127.0.0.1"}
}

// Record writes one entry.
func (f *Fixture) Record(e audit.Event) {
	f.T.Helper()
	if err := f.Log.Record(context.Background(), e); err != nil {
		f.T.Fatal(err)
	}
}

// Sealed writes the entry of a new version of a credential.
func (f *Fixture) Sealed(tenant authz.TenantID, id, version, digest string) {
	f.T.Helper()
	f.Record(audit.Event{
		Type: audit.CredentialSealed, Outcome: audit.Success, Principal: Principal(tenant), Resource: audit.Resource{ID: id, Type: audit.CredentialResource},
		Attributes: map[string]string{audit.AttributeVersion: version, audit.AttributeDigest: digest},
	})
}

// Verify verifies the whole store.
func (f *Fixture) Verify() (verify.Report, error) {
	return verify.Store(context.Background(), f.Store, verify.Options{})
}

// Export returns an export of the whole log.
func (f *Fixture) Export() []byte {
	f.T.Helper()
	var out bytes.Buffer
	if err := f.Log.Export(context.Background(), &out, 0); err != nil {
		f.T.Fatal(err)
	}
	return out.Bytes()
}

// Fill writes a log of two tenants with concurrent writers.
func (f *Fixture) Fill(n int) {
	f.T.Helper()
	var wg sync.WaitGroup
	errs := make(chan error, n)
	for i := range n {
		wg.Go(func() {
			tenant := TenantA
			if i%3 == 0 {
				tenant = TenantB
			}
			errs <- f.Log.Record(context.Background(), audit.Event{
				Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: Principal(tenant),
				Resource:   audit.Resource{ID: fmt.Sprintf("cred_%d", i), Type: audit.CredentialResource},
				Attributes: map[string]string{"note": "<&>\"\\\u2028é"},
			})
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			f.T.Fatal(err)
		}
	}
}

// SignFormerBase returns the row of a base as releases before lists in rows wrote it.
func (f *Fixture) SignFormerBase(b *audit.Base) []byte {
	f.T.Helper()
	const context = "latticekeep/audit-base/v1"
	text, err := b.JSON()
	if err != nil {
		f.T.Fatal(err)
	}
	signature, err := f.Log.Signer.Sign(context, frame.Join(context, text))
	if err != nil {
		f.T.Fatal(err)
	}
	return slices.Concat([]byte{1}, signature, text)
}

// BaseAt returns the base after an entry, and its row as earlier releases wrote it.
func (f *Fixture) BaseAt(to uint64) (*audit.Base, []byte) {
	f.T.Helper()
	v := verify.NewVerifier(verify.Options{PublicKey: f.Log.Signer.Public()})
	if err := v.AddRange(f.T.Context(), f.Store, store.Range{From: audit.EntryRange.From, To: audit.EntryKey(to + 1)}); err != nil {
		f.T.Fatal(err)
	}
	b, err := v.Base()
	if err != nil {
		f.T.Fatal(err)
	}
	return b, f.SignFormerBase(b)
}

// ErrorOf drops the result of a call.
func ErrorOf[T any](_ T, err error) error { return err }

// Group writes n entries in one commit and returns the sequence of the first.
func (f *Fixture) Group(n int) uint64 {
	f.T.Helper()
	var first *audit.Receipt
	err := f.Store.Update(f.T.Context(), func(tx store.Tx) error {
		for i := range n {
			r, err := f.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: Principal(TenantA)})
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
		f.T.Fatal(err)
	}
	return first.Sequence
}

// Read returns an entry that must exist.
func (f *Fixture) Read(sequence uint64) *audit.Entry {
	f.T.Helper()
	var e *audit.Entry
	err := f.Store.View(f.T.Context(), func(r store.Reader) (err error) {
		e, err = entries.Read(r, sequence)
		return err
	})
	if err != nil {
		f.T.Fatalf("reading %d: %v", sequence, err)
	}
	return e
}

// Admin returns a principal who may accept a rollback.
func Admin() authz.Principal {
	return authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "admin", Scopes: []authz.Scope{authz.SystemAdmin}, RequestID: "req"}
}

// Put changes the store without the log's knowledge.
func (f *Fixture) Put(change func(store.Tx) error) {
	f.T.Helper()
	if err := f.Store.Update(f.T.Context(), change); err != nil {
		f.T.Fatal(err)
	}
}

// CopyOf returns a log of the same chain on a copy of its rows.
func (f *Fixture) CopyOf(m *Memory) *Fixture {
	f.T.Helper()
	g := &Fixture{T: f.T, Path: f.Path + strconv.Itoa(len(m.Rows)), Clock: f.Now()}
	g.Log = NewParts(g.Now)
	g.open(m)
	if err := g.Log.Use(context.Background(), g.Store, f.Log.Signer, f.Log.Chain.ChainID); err != nil {
		f.T.Fatal(err)
	}
	return g
}

// open creates a store of the rows, with the log as its hook.
func (f *Fixture) open(m *Memory) {
	f.T.Helper()
	fill := mustOpen(f.T, f.Path, nil)
	err := fill.Update(context.Background(), func(tx store.Tx) error {
		for _, r := range m.Rows {
			if err := tx.Put(r.Key, r.Value); err != nil {
				return err
			}
		}
		return nil
	})
	if err := cmp.Or(err, fill.Close()); err != nil {
		f.T.Fatal(err)
	}
	f.Store = mustOpen(f.T, f.Path, f.Log.Commit)
	f.T.Cleanup(func() { f.Store.Close() })
}

// Parts are a log and everything in a process that reads, follows and verifies it.
type Parts struct {
	*writer.Log
	*reader.Reader
	*writer.Follower
	*verify.LiveVerifier
	Chain  *chain.Chain
	Guard  *guard.Guard
	Signer *dualsig.PrivateKey // nil before Use
}

// NewParts returns a log without store and key, and the parts that work on it.
func NewParts(now func() time.Time) *Parts {
	l := writer.New(now, nil)
	g := guard.New(l)
	return &Parts{l, reader.New(l, g), writer.NewFollower(l), verify.NewLiveVerifier(l), l.Chain, g, nil}
}

// Use is [writer.Log.Use], and remembers the key for tests that forge.
func (p *Parts) Use(ctx context.Context, s store.Store, signer *dualsig.PrivateKey, chainID string) error {
	p.Signer = signer
	return p.Log.Use(ctx, s, signer, chainID)
}

// AcceptRollback goes through the guard, as services do.
func (p *Parts) AcceptRollback(ctx context.Context, by authz.Principal, reason string) (audit.Rollback, error) {
	return p.Guard.AcceptRollback(ctx, by, reason)
}

// Block returns rows of n types and m actors.
func Block(random *mrand.Rand, n, m int) []audit.IndexRow {
	rows := make([]audit.IndexRow, audit.BlockSize)
	for i := range rows {
		rows[i].EventType, rows[i].Actor = audit.EventType(fmt.Sprint("TYPE_", random.IntN(n))), fmt.Sprint("usr_", random.IntN(m))
	}
	return rows
}

// SequencesOf returns the sequences of a tenant's entries in the database.
func (f *Fixture) SequencesOf(tenant authz.TenantID) (all []uint64) {
	for _, e := range f.Entries() {
		if e.TenantID == string(tenant) {
			all = append(all, e.Sequence)
		}
	}
	return all
}

// Drain reads a tail until there is nothing more.
func Drain(t *testing.T, tail *reader.Tail) (all []uint64) {
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

// Progress returns the newest sequence and the counts of committed entries.
func (f *Fixture) Progress() (uint64, map[writer.Kind]uint64) {
	f.T.Helper()
	sequence, written, err := f.Log.Progress(context.Background())
	if err != nil {
		f.T.Fatal(err)
	}
	return sequence, written
}

// Get returns a copy of a row that must exist.
func Get(tx store.Tx, key []byte) []byte {
	b, err := tx.Get(key)
	if err != nil || b == nil {
		panic(fmt.Sprint("no row: ", key, err))
	}
	return bytes.Clone(b)
}

// PositionIn returns the key of the index row that names the sequence.
func PositionIn(tx store.Tx, sequence uint64) (found []byte) {
	err := tx.Scan(audit.TenantRange, func(key, value []byte) bool {
		if audit.SequenceOf(value) == sequence {
			found = bytes.Clone(key)
		}
		return found == nil
	})
	if err != nil || found == nil {
		panic("no index row")
	}
	return found
}

// RollBack lets the log continue above lost entries.
func (f *Fixture) RollBack(head, lostTo uint64) audit.Rollback {
	f.T.Helper()
	f.Log.Halt(&audit.RollbackError{LostFrom: head + 1, LostTo: lostTo, Epoch: 1, Source: "a test"})
	p := Principal(authz.SystemTenant)
	p.Scopes = []authz.Scope{authz.SystemAdmin}
	got, err := f.Log.AcceptRollback(f.T.Context(), p, "a test")
	if err != nil {
		f.T.Fatal(err)
	}
	return got
}

// Followed follows the log and returns its signed checkpoint.
func (f *Fixture) Followed() []byte {
	f.T.Helper()
	if _, err := f.Log.Follow(f.T.Context()); err != nil {
		f.T.Fatal(err)
	}
	note, _, err := f.Log.Chain.NewestCheckpoint(f.T.Context())
	if err != nil {
		f.T.Fatal(err)
	}
	return note
}

// Lines returns the lines of an export, each with its newline, the closing line last.
func (f *Fixture) Lines() []string {
	f.T.Helper()
	lines := strings.SplitAfter(string(f.Export()), "\n")
	return lines[:len(lines)-1]
}

// OnAllCores calls do for each number from 0 to n-1 once, and returns when all calls are done.
func OnAllCores(n int, do func(i int)) {
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

// Entries returns the whole log.
func (f *Fixture) Entries() (all []*audit.Entry) {
	f.T.Helper()
	err := entries.ScanAll(context.Background(), f.Store, audit.EntryRange, func(row entries.Row) error {
		e, err := DecodeRow(row.Row, row.Batch)
		all = append(all, e)
		return err
	})
	if err != nil {
		f.T.Fatal(err)
	}
	return all
}

// RowsOf returns the rows of some ranges by key.
func (f *Fixture) RowsOf(ranges ...store.Range) map[string][]byte {
	f.T.Helper()
	rows := make(map[string][]byte)
	for _, rng := range ranges {
		err := audit.ScanAll(context.Background(), f.Store, rng, func(key, value []byte) error {
			rows[string(key)] = value
			return nil
		})
		if err != nil {
			f.T.Fatal(err)
		}
	}
	return rows
}

// RowOf returns a row of the fixture's store, or nil.
func RowOf(f *Fixture, key []byte) []byte { return f.RowsOf(audit.KeyRange(key))[string(key)] }

// Stride is the step of a loop over every point of interruption: 1, or n under -short.
func Stride(n int) int {
	if testing.Short() {
		return n
	}
	return 1
}
