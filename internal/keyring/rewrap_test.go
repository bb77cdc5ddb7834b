package keyring

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// moving is a deployment with a few sets under a previous key, and the ring that moves them to
// another one.
type moving struct {
	*fixture
	former, current *faultyKMS
	ring            *Ring
	public          map[string]string // ids of the public signing keys, by set
}

const secondTenant = authz.TenantID("ten_bbbbbbbbbbbbbbbbbbbbbbbbbb")

func newMoving(t *testing.T, ttl time.Duration) *moving {
	t.Helper()
	f := newFixtureUnder(t, 0, newKMS(t))
	f.nextSet(t, 2)
	f.makeSet(t, f.ring, secondTenant)
	m := &moving{fixture: f, former: &faultyKMS{slowKMS: f.kms}, current: &faultyKMS{slowKMS: newKMS(t)}}
	m.ring = m.open(t, m.current, m.former)
	m.ring.config.CacheTTL = ttl
	m.public = m.publicKeys(t, f.ring)
	return m
}

func (f *fixture) makeSet(t *testing.T, r *Ring, owner authz.TenantID) {
	t.Helper()
	set, err := r.NewSet(t.Context(), owner, 1)
	if err != nil {
		t.Fatal(err)
	}
	f.put(t, set.Put)
}

func (f *fixture) open(t *testing.T, current KMS, former ...KMS) *Ring {
	t.Helper()
	r, err := Open(t.Context(), f.store, current, Config{Previous: former, Now: f.now})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// publicKeys unwraps every set and returns the ids of its public signing keys.
func (m *moving) publicKeys(t *testing.T, r *Ring) map[string]string {
	t.Helper()
	ids := make(map[string]string)
	for _, set := range []cacheKey{{tenant, 1}, {tenant, 2}, {secondTenant, 1}} {
		keys, err := r.Version(t.Context(), set.owner, set.version)
		if err != nil {
			t.Fatal(set, err)
		}
		ids[fmt.Sprint(set)] = keys.Signing.Public().ID()
	}
	ids["identity"] = r.Identity().ID()
	return ids
}

// rewrap moves sets until nothing remains.
func (m *moving) rewrap(t *testing.T, r *Ring, before time.Time) (total map[string]int) {
	t.Helper()
	total = make(map[string]int)
	for range 100 {
		step, err := r.Rewrap(t.Context(), before)
		if err != nil || step.Err != nil {
			t.Fatal(err, step.Err)
		}
		m.put(t, func(tx store.Tx) error {
			moved, err := step.Put(tx)
			for from, n := range moved {
				total[from] += n
			}
			return err
		})
		if keys := m.counts(t, r, before); keys.Remaining == 0 {
			return total
		}
	}
	t.Fatal("it does not end")
	return nil
}

func (m *moving) counts(t *testing.T, r *Ring, before time.Time) KMSKeys {
	t.Helper()
	keys, err := r.KMSKeys(t.Context(), before)
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// wrappedRows returns the rows of wrapping keys.
func (f *fixture) wrappedRows(t *testing.T) map[string][]byte {
	t.Helper()
	rows := make(map[string][]byte)
	err := f.store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("key/")), func(key, value []byte) bool {
			if strings.Contains(string(key), "/wrapping") {
				rows[string(key)] = bytes.Clone(value)
			}
			return true
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func (f *fixture) deploymentRow(t *testing.T) (d deployment) {
	t.Helper()
	err := f.store.View(t.Context(), func(r store.Reader) error {
		b, err := r.Get(deploymentRow)
		if err != nil {
			return err
		}
		return json.Unmarshal(b, &d)
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestADeploymentMovesToAnotherKMSKey(t *testing.T) {
	m := newMoving(t, 0)
	if got := m.counts(t, m.ring, time.Time{}); got.Remaining != 4 || len(got.Keys) != 2 ||
		got.Keys[0] != (KMSKey{ID: m.current.ID(), State: KMSKeyCurrent}) || got.Keys[1] != (KMSKey{ID: m.former.ID(), State: KMSKeyPrevious, Sets: 4}) {
		t.Fatalf("%+v", got)
	}
	m.makeSet(t, m.ring, "ten_cccccccccccccccccccccccccc") // made meanwhile, so under the new key
	if moved := m.rewrap(t, m.ring, time.Time{}); !maps.Equal(moved, map[string]int{m.former.ID(): 4}) {
		t.Fatal(moved)
	}
	for row := range m.wrappedRows(t) {
		if owner, at, _ := strings.Cut(row, "/wrapping"); (at == "") != strings.Contains(owner, "ten_cc") {
			t.Errorf("row %s", row)
		}
	}
	if got := m.counts(t, m.ring, time.Time{}); got.Keys[0].Sets != 5 || got.Keys[1].Sets != 0 || got.Damaged != 0 {
		t.Fatalf("%+v", got)
	}
	if d := m.deploymentRow(t); d.KMSKey != m.current.ID() || d.ChainID != m.ring.ChainID() || d.Format != format.DeploymentFirst {
		t.Errorf("%+v", d)
	}
	m.former.down.Store(true)
	if got := m.publicKeys(t, m.open(t, m.current)); !maps.Equal(got, m.public) {
		t.Errorf("other keys: %v, had %v", got, m.public)
	}
	_, err := Open(t.Context(), m.store, m.former, Config{})
	if !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), m.current.ID()) || !strings.Contains(fault.Message(err), "kms.former") {
		t.Errorf("with the former key: %v", err)
	}
	// The deployment then moves to a third key.
	third := &faultyKMS{slowKMS: newKMS(t)}
	r, rows := m.open(t, third, m.current), m.wrappedRows(t)
	if moved := m.rewrap(t, r, time.Time{}); !maps.Equal(moved, map[string]int{m.current.ID(): 5}) {
		t.Fatal(moved)
	}
	for row := range m.wrappedRows(t) { // previous rows are deleted and not overwritten
		if rows[row] != nil {
			t.Errorf("row %s has another content", row)
		}
	}
	if d := m.deploymentRow(t); d.KMSKey != third.ID() {
		t.Errorf("%+v", d)
	}
	if got := m.publicKeys(t, m.open(t, third)); !maps.Equal(got, m.public) {
		t.Error("other keys")
	}
}

// moveSome moves the sets for which the function which returns true.
func (m *moving) moveSome(t *testing.T, which func(wrappedKey) bool) {
	t.Helper()
	step, err := m.ring.Rewrap(t.Context(), time.Time{})
	if err != nil || step.Err != nil {
		t.Fatal(err, step.Err)
	}
	step.moves = slices.DeleteFunc(step.moves, func(one move) bool { return !which(one.from) })
	m.put(t, func(tx store.Tx) error { _, err := step.Put(tx); return err })
}

func TestAMoveThatWasBrokenOffLeavesBothKeysNeeded(t *testing.T) {
	for _, first := range []authz.TenantID{authz.SystemTenant, tenant} {
		m := newMoving(t, 0)
		m.moveSome(t, func(w wrappedKey) bool { return w.owner == first })
		for _, r := range []*Ring{m.open(t, m.current, m.former), m.open(t, m.former, m.current)} {
			if got := m.publicKeys(t, r); !maps.Equal(got, m.public) {
				t.Errorf("%s: other keys", first)
			}
		}
		for missing, with := range map[KMS]KMS{m.current: m.former, m.former: m.current} {
			_, err := Open(t.Context(), m.store, with, Config{})
			if !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), missing.ID()) || !strings.Contains(fault.Message(err), "kms.former") {
				t.Errorf("%s: opens with one key: %v", first, err)
			}
		}
		again := m.open(t, m.current, m.former) // another process continues
		if moved := m.rewrap(t, again, time.Time{}); moved[m.former.ID()]+2 < 4 {
			t.Error(moved)
		}
		if got := m.publicKeys(t, m.open(t, m.current)); !maps.Equal(got, m.public) {
			t.Errorf("%s: other keys", first)
		}
	}
}

func TestTwoCallersMoveEachSetOnce(t *testing.T) {
	m := newMoving(t, 0)
	steps := make([]*Rewrap, 2)
	var both sync.WaitGroup
	for i := range steps {
		both.Go(func() {
			var err error
			if steps[i], err = m.open(t, m.current, m.former).Rewrap(t.Context(), time.Time{}); err != nil || steps[i].Err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
	total := 0
	for _, step := range steps {
		m.put(t, func(tx store.Tx) error {
			moved, err := step.Put(tx)
			total += moved[m.former.ID()]
			return err
		})
	}
	if late, err := m.ring.rewrap(t.Context(), cacheKey{tenant, 1}, time.Time{}); err != nil || late != nil {
		t.Errorf("a set that was moved meanwhile: %v, %v", late, err)
	}
	if total != 4 || len(m.wrappedRows(t)) != 4 {
		t.Errorf("%d moved, %d rows", total, len(m.wrappedRows(t)))
	}
	if got := m.publicKeys(t, m.open(t, m.current)); !maps.Equal(got, m.public) {
		t.Error("other keys")
	}
}

// When the same key was rotated at its provider, every set is wrapped again, once.
func TestARunWrapsAnewWhatWasWrappedBeforeIt(t *testing.T) {
	m := newMoving(t, 0)
	m.rewrap(t, m.ring, time.Time{})
	for _, clock := range []int64{10, 0, -1000} { // the clock advances, stands still, and goes back
		m.clock.Add(clock)
		before, rows := m.now().Add(time.Second), m.wrappedRows(t)
		if got := m.counts(t, m.ring, before); clock > 0 && got.Remaining != 4 {
			t.Fatalf("%+v", got)
		}
		if clock < 0 {
			before = m.now().Add(2000 * time.Second)
		}
		moved := m.rewrap(t, m.ring, before)
		if clock == 0 { // moved at that time already
			if len(moved) != 0 {
				t.Error(moved)
			}
			continue
		}
		if !maps.Equal(moved, map[string]int{m.current.ID(): 4}) {
			t.Error(moved)
		}
		for row, blob := range m.wrappedRows(t) {
			if rows[row] != nil || slices.ContainsFunc(slices.Collect(maps.Values(rows)), func(b []byte) bool { return bytes.Equal(b, blob) }) {
				t.Errorf("row %s was kept", row)
			}
		}
		if again := m.rewrap(t, m.ring, before); len(again) != 0 {
			t.Errorf("moved twice: %v", again)
		}
	}
	if got := m.publicKeys(t, m.open(t, m.current)); !maps.Equal(got, m.public) {
		t.Error("other keys")
	}
}

func TestWhatWasUnderTheFormerKeyIsInNoFile(t *testing.T) {
	m := newMoving(t, 0)
	s := m.store.(*bolt.Store)
	var old [][]byte
	for _, blob := range m.wrappedRows(t) {
		old = append(old, blob)
	}
	files, err := filepath.Glob(filepath.Join(filepath.Dir(m.path), "*"))
	if err != nil {
		t.Fatal(err)
	}
	holds := func() (n int) {
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, blob := range old {
				if bytes.Contains(b, blob) {
					n++
				}
			}
		}
		return n
	}
	if holds() != 4 {
		t.Fatal("the test cannot find what it looks for")
	}
	m.rewrap(t, m.ring, time.Time{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.Scrubbed(ctx); err != nil {
		t.Fatal(err)
	}
	if n := holds(); n != 0 {
		t.Errorf("%d of them are still in the files", n)
	}
}

func TestNothingIsGivenUpForWhatDoesNotOpen(t *testing.T) {
	for name, spoil := range map[string]func(*moving){
		"the former KMS is down":             func(m *moving) { m.former.down.Store(true) },
		"the current KMS is down":            func(m *moving) { m.current.downWrap = true },
		"it does not open what it wraps":     func(m *moving) { m.current.down.Store(true) },
		"it wraps something else":            func(m *moving) { m.current.wraps = []byte("another key of 32 bytes, not this") },
		"it does not name itself":            func(m *moving) { m.current.nameless = true },
		"it names another key":               func(m *moving) { m.current.name = m.former.ID() },
		"the set does not open with its own": func(m *moving) { m.former.opens = make([]byte, wrappingKeySize) },
	} {
		m := newMoving(t, 0)
		rows := m.wrappedRows(t)
		spoil(m)
		step, err := m.ring.Rewrap(t.Context(), time.Time{})
		if err != nil {
			t.Fatal(name, err)
		}
		if step.Err == nil || len(step.moves) != 0 {
			t.Errorf("%s: %d moves, error %v", name, len(step.moves), step.Err)
		}
		m.put(t, func(tx store.Tx) error { _, err := step.Put(tx); return err })
		if !maps.EqualFunc(rows, m.wrappedRows(t), bytes.Equal) {
			t.Errorf("%s: rows changed", name)
		}
	}
}

// A set that cannot be moved does not stop the others.
func TestADamagedSetStaysAndTheOthersMove(t *testing.T) {
	m := newMoving(t, 0)
	row := string(keyRow(tenant, 1, wrapping))
	for name, damage := range map[string]func(b []byte) []byte{
		"cut":     func(b []byte) []byte { return b[:len(b)-20] },
		"changed": func(b []byte) []byte { b[len(b)-1] ^= 1; return b },
	} {
		m.put(t, func(tx store.Tx) error { return tx.Put([]byte(row), damage(m.wrappedRows(t)[row])) })
		step, err := m.ring.Rewrap(t.Context(), time.Time{})
		if err != nil || step.Err == nil {
			t.Fatal(name, err, step.Err)
		}
		m.put(t, func(tx store.Tx) error { _, err := step.Put(tx); return err })
		if got := m.counts(t, m.ring, time.Time{}); got.Remaining != 1 || got.Keys[1].Sets != 1 {
			t.Errorf("%s: %+v", name, got)
		}
	}
	m.put(t, func(tx store.Tx) error { return tx.Put([]byte(row), []byte("damaged")) })
	if got := m.counts(t, m.ring, time.Time{}); got.Remaining != 0 || got.Damaged != 1 {
		t.Errorf("%+v", got)
	}
	if err := m.store.Update(t.Context(), func(tx store.Tx) error { return m.ring.GiveUp(tx, m.former.ID()) }); !errors.Is(err, fault.Conflict) {
		t.Error("given up although it cannot be told what a set is under:", err)
	}
	if _, err := m.ring.Version(t.Context(), tenant, 1); !errors.Is(err, fault.Unavailable) {
		t.Error(err)
	}
	m.open(t, m.current, m.former) // the deployment still opens
}

// There may be more sets than one View reads.
func TestEverySetIsCountedAndMoved(t *testing.T) {
	m := newMoving(t, 0)
	const more = pageSize/4 + 100 // each has four rows, and its owner has one more
	m.put(t, func(tx store.Tx) error {
		for i := range more {
			set, _, err := newSet(t.Context(), m.former, authz.TenantID(fmt.Sprintf("ten_%026d", i)), 1)
			if err != nil {
				return err
			}
			if err := set.Put(tx); err != nil {
				return err
			}
		}
		return nil
	})
	if got := m.counts(t, m.ring, time.Time{}); got.Remaining != more+4 {
		t.Fatalf("%+v", got)
	}
	if moved := m.rewrap(t, m.ring, time.Time{}); moved[m.former.ID()] != more+4 {
		t.Error(moved)
	}
	m.open(t, m.current)
}

// faultyKMS fails in the ways that a test sets.
type faultyKMS struct {
	*slowKMS
	downWrap, nameless bool
	name               string
	wraps, opens       []byte
}

func (k *faultyKMS) Wrap(ctx context.Context, keyContext string, key []byte) ([]byte, error) {
	switch {
	case k.downWrap:
		return nil, errors.New("connection refused")
	case k.wraps != nil:
		key = k.wraps
	}
	b, err := k.slowKMS.Wrap(ctx, keyContext, key)
	if err == nil && k.nameless {
		b[0] = 0 // a form that names no key
	}
	if err == nil && k.name != "" {
		copy(b[3:], k.name)
	}
	return b, err
}

func (k *faultyKMS) Unwrap(ctx context.Context, keyContext string, wrapped []byte) ([]byte, error) {
	if k.nameless && len(wrapped) > 0 && wrapped[0] == 0 {
		wrapped = append([]byte{2}, wrapped[1:]...)
	}
	if k.opens != nil {
		return k.opens, nil
	}
	if k.name != "" {
		wrapped = bytes.Clone(wrapped)
		copy(wrapped[3:], k.ID())
	}
	return k.slowKMS.Unwrap(ctx, keyContext, wrapped)
}
