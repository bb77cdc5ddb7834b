package keyring

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// slowKMS is a local key with a counter, a switch and a gate.
type slowKMS struct {
	*kms.Key
	path  string
	calls atomic.Int64
	open  atomic.Int64 // calls of Unwrap in progress
	most  atomic.Int64 // that were in progress at the same time
	down  atomic.Bool
	gate  chan struct{} // if not nil, Wrap and Unwrap wait for it
}

func (k *slowKMS) Unwrap(ctx context.Context, keyContext string, wrapped []byte) ([]byte, error) {
	k.calls.Add(1)
	open := k.open.Add(1)
	defer k.open.Add(-1)
	most := k.most.Load()
	for open > most && !k.most.CompareAndSwap(most, open) {
		most = k.most.Load()
	}
	if k.gate != nil {
		select {
		case <-k.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if k.down.Load() {
		return nil, errors.New("connection refused")
	}
	return k.Key.Unwrap(ctx, keyContext, wrapped)
}

func (k *slowKMS) Wrap(ctx context.Context, keyContext string, key []byte) ([]byte, error) {
	if k.gate != nil {
		select {
		case <-k.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return k.Key.Wrap(ctx, keyContext, key)
}

func newKMS(t *testing.T) *slowKMS {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kms.key")
	if err := kms.CreateLocal(path); err != nil {
		t.Fatal(err)
	}
	local, err := kms.OpenLocal(path)
	if err != nil {
		t.Fatal(err)
	}
	return &slowKMS{Key: local, path: path}
}

type fixture struct {
	path  string // path of the database
	store store.Store
	kms   *slowKMS
	ring  *Ring
	clock atomic.Int64
}

func (f *fixture) now() time.Time { return time.Unix(f.clock.Load(), 0) }

const tenant = authz.TenantID("ten_aaaaaaaaaaaaaaaaaaaaaaaaaa")

func newFixture(t *testing.T, ttl time.Duration) *fixture {
	t.Helper()
	return newFixtureUnder(t, ttl, newKMS(t))
}

func newFixtureUnder(t *testing.T, ttl time.Duration, k *slowKMS) *fixture {
	t.Helper()
	f := &fixture{kms: k, path: filepath.Join(t.TempDir(), "k.db")}
	f.clock.Store(1_800_000_000)
	s, err := bolt.Open(f.path, bolt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	f.store = s
	if _, err := Open(t.Context(), s, f.kms, Config{}); !errors.Is(err, fault.NotFound) {
		t.Fatal("an empty store:", err)
	}
	ring, first, err := Create(t.Context(), s, f.kms, Config{CacheTTL: ttl, Now: f.now})
	if err != nil {
		t.Fatal(err)
	}
	f.ring = ring
	f.put(t, first.Put)
	set, err := ring.NewSet(t.Context(), tenant, 1)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, set.Put)
	return f
}

func (f *fixture) put(t *testing.T, put func(store.Tx) error) {
	t.Helper()
	if err := f.store.Update(t.Context(), put); err != nil {
		t.Fatal(err)
	}
}

func TestADeploymentOpensAgainWithItsKeyOnly(t *testing.T) {
	f := newFixture(t, time.Minute)
	again, err := Open(t.Context(), f.store, f.kms, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if again.ChainID() != f.ring.ChainID() || again.Audit().Public().ID() != f.ring.Audit().Public().ID() ||
		again.Identity().ID() != f.ring.Identity().ID() || string(again.APIKeyHash()) != string(f.ring.APIKeyHash()) {
		t.Fatal("other keys")
	}
	if again.Identity().ID() == again.Audit().Public().ID() {
		t.Fatal("one key for two uses")
	}
	_, err = Open(t.Context(), f.store, newKMS(t), Config{})
	if !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "name the key it was made with") {
		t.Fatal(err)
	}
	_, first, err := Create(t.Context(), f.store, f.kms, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.store.Update(t.Context(), first.Put); !errors.Is(err, fault.Conflict) {
		t.Fatal("a second deployment in one store:", err)
	}
}

func TestKeysAreCachedForTheirTimeAndNoLonger(t *testing.T) {
	f := newFixture(t, 5*time.Minute)
	use := func() error { _, err := f.ring.Current(t.Context(), tenant); return err }
	calls := func() int64 { return f.kms.calls.Swap(0) }
	calls()
	for range 10 {
		if err := use(); err != nil {
			t.Fatal(err)
		}
	}
	if n := calls(); n != 1 {
		t.Fatalf("%d calls", n)
	}
	asked := f.now()
	f.kms.down.Store(true)
	f.clock.Add(299)
	if n, oldest := f.ring.Cached(); n != 1 || !oldest.Equal(asked) {
		t.Errorf("%d sets are cached, the oldest since %v and not %v", n, oldest, asked)
	}
	if err := use(); err != nil {
		t.Fatal("within the time:", err)
	}
	f.clock.Add(1)
	if err := use(); !errors.Is(err, fault.Unavailable) {
		t.Fatal("after the time:", err)
	}
	f.kms.down.Store(false)
	if err := use(); err != nil {
		t.Fatal("no recovery:", err)
	}
}

func TestWithoutACacheEveryOperationAsks(t *testing.T) {
	f := newFixture(t, 0)
	f.kms.calls.Store(0)
	for range 3 {
		if _, err := f.ring.Current(t.Context(), tenant); err != nil {
			t.Fatal(err)
		}
	}
	if n := f.kms.calls.Load(); n != 3 {
		t.Fatalf("%d calls for 3 operations", n)
	}
}

func TestOneCallIsInFlightPerSet(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.kms.calls.Store(0)
	f.kms.gate = make(chan struct{})
	var wg sync.WaitGroup
	gaveUp, cancel := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	for i := range 20 {
		ctx := t.Context()
		if i == 0 {
			ctx = gaveUp
		}
		asked.Add(1)
		wg.Go(func() {
			asked.Done()
			_, err := f.ring.Current(ctx, tenant)
			if i > 0 && err != nil {
				t.Error(err)
			}
		})
	}
	asked.Wait()
	cancel() // a caller that gives up does not cancel the others
	close(f.kms.gate)
	wg.Wait()
	// A caller that asks after a call has returned, and before its result is cached, begins another.
	if n := f.kms.most.Load(); n != 1 {
		t.Fatalf("%d calls at the same time for 20 callers", n)
	}
}

func TestAHangingKMSIsAnErrorWithinASecond(t *testing.T) {
	f := newFixture(t, time.Minute)
	synctest.Test(t, func(t *testing.T) {
		f.kms.gate = make(chan struct{}) // never opened
		began := time.Now()
		_, err := f.ring.Current(context.Background(), tenant)
		if !errors.Is(err, fault.Unavailable) || time.Since(began) > time.Second {
			t.Fatal(err, time.Since(began))
		}
	})
}

func TestAKMSThatHangsAtANewSetIsAnErrorWithinASecond(t *testing.T) {
	f := newFixture(t, time.Minute)
	synctest.Test(t, func(t *testing.T) {
		f.kms.gate = make(chan struct{}) // never opened
		began := time.Now()
		_, _, err := f.ring.NextSet(context.Background(), tenant, 2)
		if !errors.Is(err, fault.Unavailable) || time.Since(began) > time.Second {
			t.Fatal(err, time.Since(began))
		}
	})
}

// A current version that was rolled back is reported as damage and costs no keys.
func TestANewSetOverwritesNoKeys(t *testing.T) {
	f := newFixture(t, 0)
	second := f.nextSet(t, 2)
	f.put(t, func(tx store.Tx) error { return tx.Put(currentRow(tenant), []byte{0, 0, 0, 1}) })
	set, err := f.ring.NewSet(t.Context(), tenant, 2)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.store.Update(t.Context(), set.Put); !errors.Is(err, fault.Internal) {
		t.Error(err)
	}
	keys, err := f.ring.Version(t.Context(), tenant, 2)
	if err != nil || keys.Signing.Public().ID() != second.Signing.Public().ID() {
		t.Error("other keys under the same version", err)
	}
}

// A set that nobody asks for again does not stay in memory.
func TestAnUnusedSetIsLetGo(t *testing.T) {
	f := newFixture(t, time.Minute)
	synctest.Test(t, func(t *testing.T) {
		r := newRing(f.store, f.kms, Config{CacheTTL: time.Minute, Now: f.now}, f.ring.deployment)
		if _, err := r.load(context.Background(), cacheKey{tenant, 1}); err != nil {
			t.Fatal(err)
		}
		cached := func() int {
			r.sets.mu.Lock()
			defer r.sets.mu.Unlock()
			return len(r.cache)
		}
		if cached() != 1 {
			t.Fatal("not cached")
		}
		time.Sleep(time.Minute + time.Second) // the bubble's clock: no real time passes
		synctest.Wait()
		if cached() != 0 {
			t.Fatal("still in memory")
		}
	})
}

func TestSealingKeysStayBehindTheirDocument(t *testing.T) {
	f := newFixture(t, time.Minute)
	if _, err := f.ring.SealingDocument(t.Context()); !errors.Is(err, fault.NotFound) {
		t.Fatal(err)
	}
	var ids []string
	for _, suite := range []envelope.Suite{envelope.SuiteMLKEM768X25519, envelope.SuiteMLKEM768} {
		key, err := f.ring.NewSealingKey(t.Context(), suite)
		if err != nil {
			t.Fatal(err)
		}
		f.put(t, key.Put)
		document, err := f.ring.SealingDocument(t.Context())
		if err != nil || document.Key().ID() != key.ID || document.CheckIdentity(f.ring.Identity().ID()) != nil {
			t.Fatal(document, err)
		}
		ids = append(ids, key.ID)
	}
	header := envelope.Header{Suite: envelope.SuiteMLKEM768X25519, KeyID: ids[0], Scope: envelope.ScopeStrict, Namespace: "n", Name: "o", CredentialType: "t"}
	for _, id := range ids { // the older one opens, too
		key, err := f.ring.SealingKey(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		header.Suite, header.KeyID = key.Public().Suite(), id
		blob, err := key.Public().SealValue(header, "k", f.now(), []byte("v"))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := key.OpenValue(header, "k", f.now(), blob); err != nil || string(got) != "v" {
			t.Fatal(err)
		}
	}
	if _, err := f.ring.SealingKey(t.Context(), strings.Repeat("0", 64)); !errors.Is(err, fault.NotFound) {
		t.Fatal(err)
	}
	f.kms.down.Store(true)
	f.clock.Add(61)
	if _, err := f.ring.SealingKey(t.Context(), ids[0]); !errors.Is(err, fault.Unavailable) {
		t.Fatal("a sealing key outlived the wrapping key it came out of:", err)
	}
}

// A stored key opens only for its own owner and version.
func TestKeysCannotBeMovedBetweenOwnersAndVersions(t *testing.T) {
	f := newFixture(t, 0)
	other := authz.TenantID("ten_eeeeeeeeeeeeeeeeeeeeeeeeee")
	set, err := f.ring.NewSet(t.Context(), other, 1)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, set.Put)
	for p := range tenantSet {
		f.put(t, func(tx store.Tx) error {
			b, err := tx.Get(keyRow(tenant, 1, p))
			if err != nil {
				return err
			}
			return tx.Put(keyRow(other, 1, p), b)
		})
		if _, err := f.ring.Current(t.Context(), other); !errors.Is(err, fault.Internal) {
			t.Fatalf("%s of another tenant: %v", p, err)
		}
	}
	f.put(t, func(tx store.Tx) error {
		b, err := tx.Get(keyRow(tenant, 1, wrapping))
		if err != nil {
			return err
		}
		return tx.Put(keyRow(other, 1, wrapping), b)
	})
	if _, err := f.ring.Current(t.Context(), other); err == nil {
		t.Fatal("a wrapping key of another tenant")
	}
	if _, err := f.ring.Current(t.Context(), "ten_none"); !errors.Is(err, fault.NotFound) {
		t.Fatal(err)
	}
}

// An attacker who can write the store cannot publish a sealing key of their own.
func TestAForeignSealingDocumentIsNotPublished(t *testing.T) {
	f, foreign := newFixture(t, time.Minute), newFixture(t, time.Minute)
	key, err := f.ring.NewSealingKey(t.Context(), envelope.SuiteMLKEM768X25519)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, key.Put)
	theirs, err := foreign.ring.NewSealingKey(t.Context(), envelope.SuiteMLKEM768X25519)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, func(tx store.Tx) error { return tx.Put(sealingKeyRow(key.ID), theirs.row) })
	if _, err := f.ring.SealingDocument(t.Context()); !errors.Is(err, fault.Internal) {
		t.Error("in the place of ours:", err)
	}
	// This is our key in a document that another identity signed.
	row := contentOf(t, f.ring, key)
	document, err := sealing.ParseDocument(row.Document)
	if err != nil {
		t.Fatal(err)
	}
	signedByThem, err := sealing.Sign(foreign.ring.identity, document.Key(), f.now())
	if err != nil {
		t.Fatal(err)
	}
	if row.Document, err = signedByThem.MarshalJSON(); err != nil {
		t.Fatal(err)
	}
	sealed, err := f.ring.sealSealingRow(key.ID, row)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, func(tx store.Tx) error { return tx.Put(sealingKeyRow(key.ID), sealed) })
	if _, err := f.ring.SealingDocument(t.Context()); !errors.Is(err, fault.Internal) {
		t.Error("signed by another identity:", err)
	}
	f.put(t, theirs.Put)
	if _, err := f.ring.SealingDocument(t.Context()); !errors.Is(err, fault.Internal) {
		t.Error("beside ours:", err)
	}
}

// The first row of a store says 1 to releases that do not know the row of the format, and 2 once
// that row was raised.
func TestTheDeploymentAgreesWithTheFormatOfTheStore(t *testing.T) {
	f := newFixture(t, time.Minute)
	first := func() string {
		var row string
		if err := f.store.View(t.Context(), func(r store.Reader) error {
			b, err := r.Get(deploymentRow)
			row = string(b)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return row
	}()
	row := func(reader, writer int) string {
		return fmt.Sprintf(`{"reader":%d,"writer":%d,"written_by":"v9.8.7"}`, reader, writer)
	}
	for _, c := range []struct {
		member int
		row    string // empty: no row
		want   error
	}{
		{1, "", nil}, {1, row(1, 1), nil}, {2, row(1, 2), nil},
		{2, "", fault.Internal}, {2, row(1, 1), fault.Internal}, {2, row(format.Reads+1, format.Reads+1), fault.Unavailable},
		{0, row(1, 1), fault.Invalid}, {3, row(1, 2), fault.Invalid},
	} {
		f.put(t, func(tx store.Tx) error {
			err := tx.Delete(format.Row)
			if c.row != "" {
				err = tx.Put(format.Row, []byte(c.row))
			}
			return errors.Join(err, tx.Put(deploymentRow, []byte(strings.Replace(first, `"format":1`, fmt.Sprintf(`"format":%d`, c.member), 1))))
		})
		if _, err := Open(t.Context(), f.store, f.kms, Config{}); !errors.Is(err, c.want) {
			t.Errorf("format %d and the row %s: %v", c.member, c.row, err)
		}
	}
}
