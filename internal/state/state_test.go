package state_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	mrand "math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// fixture is a store under a state that is bound to a log.
type fixture struct {
	t       testing.TB
	path    string
	signer  *dualsig.PrivateKey
	key     []byte
	raw     *bolt.Store
	log     *writer.Log
	state   *state.State
	store   *state.Store
	refused []*state.RowError
	rows    map[string]string // what the store must hold
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	f := &fixture{t: t, path: filepath.Join(t.TempDir(), "s.db"), key: make([]byte, 64), rows: make(map[string]string)}
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	_, _ = rand.Read(f.key)
	var err error
	if f.signer, err = dualsig.NewPrivateKey(seed); err != nil {
		t.Fatal(err)
	}
	f.must(f.open())
	t.Cleanup(func() { _ = f.raw.Close() })
	f.must(f.update(audit.ChainStarted, nil))
	return f
}

func (f *fixture) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) open() error {
	f.state = state.New(func(e *state.RowError) { f.refused = append(f.refused, e) })
	f.log = writer.New(time.Now, f.state)
	var err error
	if f.raw, err = bolt.Open(f.path, bolt.Options{Hook: f.log.Commit}); err != nil {
		return err
	}
	f.store = f.state.Guard(f.raw)
	if err := f.log.Use(context.Background(), f.raw, f.signer, "chain_test"); err != nil {
		return err
	}
	return f.state.Use(context.Background(), f.raw, f.key)
}

func (f *fixture) reopen() error {
	f.t.Helper()
	f.must(f.raw.Close())
	return f.open()
}

// update commits writes with an entry. A nil value deletes.
func (f *fixture) update(what audit.EventType, rows map[string][]byte) error {
	err := f.store.Update(context.Background(), func(tx store.Tx) error {
		for key, value := range rows {
			if err := put(tx, key, value); err != nil {
				return err
			}
		}
		_, err := f.log.Append(tx, event(what))
		return err
	})
	if err == nil {
		for key, value := range rows {
			if f.rows[key] = string(value); value == nil {
				delete(f.rows, key)
			}
		}
	}
	return err
}

func put(tx store.Tx, key string, value []byte) error {
	if value == nil {
		return tx.Delete([]byte(key))
	}
	return tx.Put([]byte(key), value)
}

func event(what audit.EventType) audit.Event {
	return audit.Event{Type: what, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant), Resource: audit.Resource{Type: audit.ChainResource, ID: "chain_test"}}
}

// tamper writes rows as somebody does who has no key.
func (f *fixture) tamper(rows map[string][]byte) {
	f.t.Helper()
	f.must(f.raw.Update(context.Background(), func(tx store.Tx) error {
		for key, value := range rows {
			if err := put(tx, key, value); err != nil {
				return err
			}
		}
		return nil
	}))
}

func (f *fixture) get(key string) (value []byte, err error) {
	err = f.store.View(context.Background(), func(r store.Reader) (err error) {
		value, err = r.Get([]byte(key))
		return err
	})
	return value, err
}

func (f *fixture) scan(prefix string) (found int, err error) {
	err = f.store.View(context.Background(), func(r store.Reader) error {
		found = 0
		return r.Scan(store.Prefix([]byte(prefix)), func(_, _ []byte) bool { found++; return true })
	})
	return found, err
}

// check reads every row that must be there.
func (f *fixture) check() {
	f.t.Helper()
	for key, value := range f.rows {
		if got, err := f.get(key); err != nil || string(got) != value {
			f.t.Fatalf("%s: %q, %v", key, got, err)
		}
	}
}

// Rows are written, changed and deleted at random, in a store that is opened again and again. Every
// read must agree, and every row that somebody else changes must be refused.
func TestEveryRowIsHeldAgainstTheState(t *testing.T) {
	f := newFixture(t)
	random := mrand.New(mrand.NewPCG(1, 2))
	key := func() string {
		return fmt.Sprintf("session/row/user_%d/sess_%d", random.IntN(40), random.IntN(60))
	}
	for round := range 300 {
		rows := make(map[string][]byte)
		for range 1 + random.IntN(60) {
			value := fmt.Appendf(nil, "%d", random.Int())
			if random.IntN(3) == 0 {
				value = nil
			}
			rows[key()] = value
		}
		f.must(f.update(audit.APIKeyCreated, rows))
		if round%50 == 49 {
			f.check()
			f.must(f.reopen())
			f.check()
		}
	}
	perUser := make(map[string]int)
	for key := range f.rows {
		perUser[key[:len(key)-len("sess_00")]]++
	}
	for user := range 40 {
		prefix := fmt.Sprintf("session/row/user_%d/", user)
		if _, err := f.scan(prefix); err != nil {
			t.Error(prefix, err)
		}
	}
	if len(f.refused) != 0 {
		t.Error("false alarms:", f.refused)
	}
}

func TestRowsOfSomebodyElseAreRefused(t *testing.T) {
	const kept, other = "apikey/hash/1/aa", "apikey/hash/1/bb"
	f := newFixture(t)
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{kept: []byte("old"), other: []byte("other")}))
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{kept: []byte("new"), other: nil}))
	for name, c := range map[string]struct {
		row    string
		value  []byte
		reason state.Reason
	}{
		"an earlier value":  {kept, []byte("old"), state.Replaced},
		"another row":       {kept, []byte("other"), state.Replaced},
		"a removed row":     {kept, nil, state.Removed},
		"a deleted row":     {other, []byte("other"), state.Added},
		"a row never there": {"apikey/hash/1/cc", []byte("new"), state.Added},
	} {
		t.Run(name, func(t *testing.T) {
			was := map[string][]byte{kept: []byte("new"), other: nil, "apikey/hash/1/cc": nil}
			f.tamper(map[string][]byte{c.row: c.value})
			for _, start := range []bool{false, true} {
				if start {
					f.must(f.reopen())
				}
				f.refused = nil
				_, err := f.get(c.row)
				var refused *state.RowError
				if !errors.As(err, &refused) || refused.Reason != c.reason || fault.Of(err) != fault.Forbidden || len(f.refused) != 1 {
					t.Errorf("%v, reported %v", err, f.refused)
				}
			}
			f.tamper(was)
			f.check()
		})
	}
}

func TestAScanOfAGroupMissesNoRow(t *testing.T) {
	f := newFixture(t)
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{"session/row/u/1": {1}, "session/row/u/2": {2}, "session/row/u/3": {3}, "session/row/v/1": {1}}))
	if n, err := f.scan("session/row/u/"); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	if n, err := f.scan("session/row/"); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	f.tamper(map[string][]byte{"session/row/u/3": nil})
	if _, err := f.scan("session/row/u/"); !isRefused(err, state.Removed) {
		t.Error(err)
	}
	err := f.store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("session/row/u/")), func(_, _ []byte) bool { return false })
	})
	if !isRefused(err, state.Removed) {
		t.Error("a scan that ended early:", err)
	}
	f.tamper(map[string][]byte{"session/row/u/0": {0}}) // where the scan does not come to
	err = f.store.View(t.Context(), func(r store.Reader) error {
		rng := store.Prefix([]byte("session/row/u/"))
		rng.Reverse = true
		return r.Scan(rng, func(_, _ []byte) bool { return false })
	})
	if !isRefused(err, state.Added) {
		t.Error("a row in the place of another:", err)
	}
	f.tamper(map[string][]byte{"session/row/u/0": nil})
	if _, err := f.scan("session/row/v/"); err != nil {
		t.Error("another group:", err)
	}
	f.tamper(map[string][]byte{"session/row/u/3": {3}, "session/row/u/4": {4}})
	if _, err := f.scan("session/row/u/"); !isRefused(err, state.Added) {
		t.Error(err)
	}
}

// A scan of all key sets tells whether a KMS key may be destroyed.
func TestAScanOfAllKeysMissesNoRow(t *testing.T) {
	f := newFixture(t)
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{"key/a/current": {1}, "key/a/00000001/wrapping": {2}, "key/system/current": {1}, "key/system/00000001/wrapping": {2}}))
	if n, err := f.scan("key/"); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	for _, key := range []string{"key/a/00000001/wrapping", "key/system/00000001/wrapping"} {
		f.tamper(map[string][]byte{key: nil})
		if _, err := f.scan("key/"); !isRefused(err, state.Removed) {
			t.Error(key, err)
		}
		f.tamper(map[string][]byte{key: {2}})
	}
	f.must(f.store.Update(t.Context(), func(tx store.Tx) error {
		f.must(tx.Put([]byte("key/b/current"), []byte{1}))
		f.must(tx.Delete([]byte("key/a/current")))
		n := 0
		if err := tx.Scan(store.Prefix([]byte("key/")), func(_, _ []byte) bool { n++; return n < 2 }); err != nil {
			t.Error(err)
		}
		_, err := f.log.Append(tx, event(audit.APIKeyCreated))
		return err
	}))
}

// A set of keys is a group, and all sets together decide whether a KMS key is still needed.
func TestAScanOfOneSetOfKeysMissesNoRow(t *testing.T) {
	f := newFixture(t)
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{"key/ten_a/00000001/mac": {1}, "key/ten_a/00000001/wrapping": {2}, "key/ten_b/00000001/mac": {3}, "key/system/00000001/audit": {4}}))
	for _, prefix := range []string{"key/ten_a/00000001/", "key/"} {
		if _, err := f.scan(prefix); err != nil {
			t.Fatal(prefix, err)
		}
	}
	for reason, tampered := range map[state.Reason]map[string][]byte{
		state.Removed:  {"key/ten_a/00000001/wrapping": nil},
		state.Replaced: {"key/ten_a/00000001/wrapping": {9}},
		state.Added:    {"key/ten_a/00000001/wrapping/1": {2}},
	} {
		f.tamper(tampered)
		for _, prefix := range []string{"key/ten_a/00000001/", "key/"} {
			if _, err := f.scan(prefix); !isRefused(err, reason) {
				t.Errorf("%s, a row %s: %v", prefix, reason, err)
			}
		}
		if _, err := f.scan("key/ten_b/00000001/"); err != nil {
			t.Error("another set:", err)
		}
		f.tamper(map[string][]byte{"key/ten_a/00000001/wrapping": {2}, "key/ten_a/00000001/wrapping/1": nil})
	}
}

func isRefused(err error, reason state.Reason) bool {
	var refused *state.RowError
	return errors.As(err, &refused) && refused.Reason == reason
}

// A transaction sees its own rows, and those of closures before it in the same group.
func TestATransactionSeesItsOwnRows(t *testing.T) {
	f := newFixture(t)
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{"session/row/u/1": {1}, "session/row/u/2": {2}}))
	f.must(f.store.Update(t.Context(), func(tx store.Tx) error {
		f.must(tx.Put([]byte("session/row/u/1"), []byte{9}))
		f.must(tx.Put([]byte("session/row/u/3"), []byte{3}))
		f.must(tx.Put([]byte("session/row/u/4"), []byte{4}))
		f.must(tx.Delete([]byte("session/row/u/4")))
		f.must(tx.Delete([]byte("session/row/u/2")))
		if v, err := tx.Get([]byte("session/row/u/1")); err != nil || v[0] != 9 {
			t.Error(v, err)
		}
		n := 0
		if err := tx.Scan(store.Prefix([]byte("session/row/u/")), func(_, _ []byte) bool { n++; return true }); err != nil || n != 2 {
			t.Error(n, err)
		}
		_, err := f.log.Append(tx, event(audit.APIKeyCreated))
		return err
	}))
	if n, err := f.scan("session/row/u/"); n != 2 || err != nil {
		t.Error(n, err)
	}
}

func TestAChangeNeedsAnEntry(t *testing.T) {
	f := newFixture(t)
	err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("dev"), []byte("x")) })
	if fault.Of(err) != fault.Internal {
		t.Error(err)
	}
	if err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("apikey/used/x"), []byte("x")) }); err != nil {
		t.Error("a row that decides nothing:", err)
	}
}

// The rows of the state itself, put back or removed, are found at the start.
func TestTheStatesOwnRowsAreVerified(t *testing.T) {
	f := newFixture(t)
	for i := range 40 {
		rows := make(map[string][]byte)
		for k := range 40 {
			rows[fmt.Sprintf("user/email/%d-%d", i, k)] = []byte("x")
		}
		f.must(f.update(audit.APIKeyCreated, rows))
	}
	own := f.own()
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{"user/email/0-0": nil}))
	newest := f.own()
	restore := func() {
		changed := make(map[string][]byte)
		for key := range f.own() {
			changed[key] = nil
		}
		for key, value := range newest {
			changed[key] = value
		}
		f.tamper(changed)
	}
	f.tamper(own)
	if err := f.reopen(); fault.Of(err) != fault.Internal {
		t.Error("all put back:", err)
	}
	restore()
	for key, value := range newest {
		for what, bad := range map[string][]byte{"removed": nil, "changed": append([]byte{value[0] ^ 1}, value[1:]...), "of another row": own["state/head"]} {
			if key == "state/head" && what == "removed" {
				continue // the state is made anew
			}
			f.tamper(map[string][]byte{key: bad})
			if err := f.reopen(); err == nil {
				t.Errorf("%q %s: not found", key, what)
			}
			restore()
		}
	}
	f.must(f.reopen())
	f.check()
}

// own returns the rows of the state.
func (f *fixture) own() map[string][]byte {
	rows := make(map[string][]byte)
	f.must(f.raw.View(context.Background(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("state/")), func(key, value []byte) bool { rows[string(key)] = value; return true })
	}))
	return rows
}

// An earlier release's store gets its state while it is used.
func TestAnEarlierStoreIsBuilt(t *testing.T) {
	f := newFixture(t)
	rows := make(map[string][]byte)
	for i := range 1500 {
		rows[fmt.Sprintf("user/email/%d", i)] = []byte("x")
		rows[fmt.Sprintf("session/row/u%d/%d", i/10, i)] = []byte("x")
	}
	f.must(f.update(audit.APIKeyCreated, rows))
	gone := make(map[string][]byte)
	for key := range f.own() {
		gone[key] = nil
	}
	f.tamper(gone) // the store as an earlier release made it
	f.must(f.reopen())
	if f.state.Complete() {
		t.Fatal("complete without rows")
	}
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{"user/email/0": []byte("y")}))
	// A build that is interrupted goes on, and what is recorded meanwhile is no state yet.
	interrupted := errors.New("interrupted")
	if err := f.state.Build(t.Context(), f.raw, binding(func(store.Tx) error { return interrupted })); !errors.Is(err, interrupted) {
		t.Fatal(err)
	}
	f.must(f.update(audit.APIKeyCreated, map[string][]byte{"user/email/0": []byte("w")}))
	f.must(f.reopen())
	if e, err := newestEntry(f); err != nil || e.Attributes[audit.AttributeState] != "" {
		t.Error(e, err)
	}
	var building map[string][]byte
	f.must(f.state.Build(t.Context(), f.raw, binding(func(tx store.Tx) error {
		building = map[string][]byte{}
		f.must(tx.Scan(store.Prefix([]byte("state/")), func(key, value []byte) bool { building[string(key)] = value; return true }))
		_, err := f.log.Append(tx, event(audit.APIKeyCreated))
		return err
	})))
	if !f.state.Complete() {
		t.Fatal("not complete")
	}
	f.check()
	f.must(f.reopen())
	f.check()
	f.tamper(map[string][]byte{"user/email/1": []byte("z")})
	if _, err := f.get("user/email/1"); !isRefused(err, state.Replaced) {
		t.Error(err)
	}
	// A state that is complete never becomes one that is being built.
	f.tamper(building)
	if _, err := f.get("user/email/1"); fault.Of(err) != fault.Unavailable {
		t.Error("the rows of the build were put back:", err)
	}
	if err := f.update(audit.APIKeyCreated, map[string][]byte{"user/email/2": []byte("z")}); fault.Of(err) != fault.Unavailable {
		t.Error("a commit on the rows of the build:", err)
	}
	f.must(f.reopen())
	if f.state.Kept() {
		t.Error("a start takes the rows of the build for a state")
	}
}

// The store of an earlier release is used while its rows are bound to the log.
func TestAnEarlierStoreIsBuiltWhileItIsUsed(t *testing.T) {
	f := newFixture(t)
	rows := make(map[string][]byte)
	for i := range 3000 {
		rows[fmt.Sprintf("user/email/%d", i)] = []byte("x")
	}
	f.must(f.update(audit.APIKeyCreated, rows))
	gone := make(map[string][]byte)
	for key := range f.own() {
		gone[key] = nil
	}
	f.tamper(gone)
	f.must(f.reopen())
	var load sync.WaitGroup
	ended := make(chan struct{})
	load.Go(func() {
		for n := 0; ; n++ {
			row := fmt.Sprintf("user/email/%d", n*37%4000)
			value := fmt.Appendf(nil, "%d", n)
			if n%5 == 0 {
				value = nil
			}
			if err := f.update(audit.APIKeyCreated, map[string][]byte{row: value}); err != nil {
				t.Error("a change:", err)
				return
			}
			select {
			case <-ended:
				if n > 100 {
					return
				}
			default:
			}
		}
	})
	load.Go(func() {
		for n := 0; ; n++ {
			if _, err := f.get(fmt.Sprintf("user/email/%d", n*31%4000)); err != nil {
				t.Error("a read:", err)
				return
			}
			select {
			case <-ended:
				return
			default:
			}
		}
	})
	err := f.state.Build(t.Context(), f.raw, binding(func(tx store.Tx) error {
		_, err := f.log.Append(tx, event(audit.StateCommitted))
		return err
	}))
	close(ended)
	load.Wait()
	f.must(err)
	f.check()
	if found, err := f.state.Scan(t.Context(), f.raw, 1); err != nil || len(found.Refused) > 0 {
		t.Error(found.Refused, err)
	}
	f.must(f.reopen())
	f.check()
}

func TestAScanNamesEveryRowThatIsWrong(t *testing.T) {
	f := newFixture(t)
	rows := make(map[string][]byte)
	for i := range 700 {
		rows[fmt.Sprintf("user/email/%d", i)] = []byte("x")
	}
	f.must(f.update(audit.APIKeyCreated, rows))
	scan := func() map[string]int {
		t.Helper()
		result, err := f.state.Scan(t.Context(), f.raw, 1)
		f.must(err)
		found := make(map[string]int)
		for _, e := range result.Refused {
			found[fmt.Sprintf("%s %s %s", e.Family, e.Key, e.Reason)]++
		}
		return found
	}
	if found := scan(); len(found) != 0 {
		t.Fatal("false alarms:", found)
	}
	f.tamper(map[string][]byte{"user/email/5": []byte("y"), "user/email/6": nil, "user/email/new": []byte("x"), "tenant/system": []byte("x")})
	want := map[string]int{"user/email/ user/email/5 replaced": 1, "user/email/  removed": 1, "user/email/ user/email/new added": 1, "tenant/system tenant/system added": 1}
	if found := scan(); !maps.Equal(found, want) {
		t.Error(found)
	}
	f.must(f.reopen())
	if found := scan(); !maps.Equal(found, want) {
		t.Error("after a start:", found)
	}
}

// A View may see a commit before the process has heard that it succeeded, and one that began before
// a commit ends after it.
func TestViewsBesideCommits(t *testing.T) {
	f := newFixture(t)
	ctx, stop := context.WithCancel(t.Context())
	var reading sync.WaitGroup
	for range 2 {
		reading.Go(func() {
			for ctx.Err() == nil {
				err := f.store.View(context.Background(), func(r store.Reader) error {
					for i := range 20 {
						if _, err := r.Get(fmt.Appendf(nil, "user/email/%d", i)); err != nil {
							return err
						}
					}
					return r.Scan(store.Prefix([]byte("session/row/u/")), func(_, _ []byte) bool { return true })
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var writing sync.WaitGroup
	for w := range 4 {
		writing.Go(func() {
			for i := range 80 {
				value := fmt.Appendf(nil, "%d-%d", w, i)
				err := f.store.Update(context.Background(), func(tx store.Tx) error {
					key := fmt.Appendf(nil, "user/email/%d", (i+w)%20)
					if _, err := tx.Get(key); err != nil {
						return err
					}
					if err := tx.Put(key, value); err != nil {
						return err
					}
					session := fmt.Appendf(nil, "session/row/u/%d", i%7)
					err := tx.Scan(store.Prefix([]byte("session/row/u/")), func(_, _ []byte) bool { return true })
					if err == nil && i%2 == 0 {
						err = tx.Put(session, value)
					} else if err == nil {
						err = tx.Delete(session)
					}
					if err != nil {
						return err
					}
					_, err = f.log.Append(tx, event(audit.APIKeyCreated))
					return err
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	writing.Wait()
	stop()
	reading.Wait()
}

// Rows that change during a scan are no reason for an alarm.
func TestAScanBesideChanges(t *testing.T) {
	f := newFixture(t)
	ctx, stop := context.WithCancel(t.Context())
	var writing sync.WaitGroup
	writing.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			rows := make(map[string][]byte)
			for k := range 20 {
				rows[fmt.Sprintf("user/email/%d", (i*7+k*13)%900)] = []byte{byte(i)}
				rows[fmt.Sprintf("user/email/%d", (i*5+k*11)%900)] = nil
			}
			f.must(f.update(audit.APIKeyCreated, rows))
		}
	})
	for range 30 {
		result, err := f.state.Scan(t.Context(), f.raw, 1)
		if err != nil || len(result.Refused) > 0 {
			t.Error(result.Refused, err)
			break
		}
	}
	stop()
	writing.Wait()
}

func newestEntry(f *fixture) (e *audit.Entry, err error) {
	err = f.raw.View(context.Background(), func(r store.Reader) error {
		head, err := audit.ReadHead(r)
		if err == nil {
			e, err = entries.Read(r, head.Sequence)
		}
		return err
	})
	return e, err
}
