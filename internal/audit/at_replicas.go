package audit

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// rewrite changes rows like an attacker who can write to the database but lacks the key.
func (b *table) rewrite(change func(tx store.Tx) error) {
	b.put(b.read().with(change))
}

// table is an in-memory database of several replicas. Each commit is a separate list of rows.
type table struct {
	writing sync.Mutex // held during a commit
	mu      sync.Mutex // guards now and past
	now     *memory
	past    []*memory // all earlier commits
}

func (b *table) read() *memory {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now
}

// put sets the state of the database, like a restored backup.
func (b *table) put(m *memory) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now, b.past = m, append(b.past, m)
}

// outcome is the result of a commit after its hook has run.
type outcome string

const (
	done      outcome = "done"
	failed    outcome = "failed"
	persisted outcome = "persisted, and said to have failed"
	again     outcome = "failed, and done again"
	late      outcome = "lost the lock while it was frozen, and done again"
)

// replica is the store of one process.
type replica struct {
	*table
	t       testing.TB
	log     *parts
	outcome outcome
	frozen  func() // called while a hook that has lost the lock is frozen
	clock   func() time.Time
}

var errNotDone = fault.New(fault.Unavailable, "the connection is lost")

func (r *replica) View(ctx context.Context, fn func(store.Reader) error) error {
	if err := ctx.Err(); err != nil {
		return fault.Wrap(fault.Unavailable, "ended", err)
	}
	return fn(memoryTx{r.read()})
}

func (r *replica) Update(ctx context.Context, fn func(store.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return fault.Wrap(fault.Unavailable, "ended", err)
	}
	if r.outcome == late {
		was := r.read()
		tx := &replicaTx{memoryTx: memoryTx{&memory{slices.Clone(was.rows)}}}
		if err := fn(tx); err != nil {
			return err
		}
		r.frozen()
		_ = r.log.Commit(tx, tx.events) // the result does not count, because it has lost the lock
	}
	r.writing.Lock()
	defer r.writing.Unlock()
	runs := 1
	if r.outcome == again {
		runs = 2
	}
	var m *memory
	var tx *replicaTx
	for range runs {
		m = &memory{slices.Clone(r.read().rows)}
		tx = &replicaTx{memoryTx: memoryTx{m}}
		if err := fn(tx); err != nil {
			return err
		}
		if err := r.log.Commit(tx, tx.events); err != nil {
			return err
		}
	}
	if r.outcome == failed {
		return errNotDone
	}
	r.put(m)
	if r.outcome == persisted {
		return errNotDone
	}
	for _, do := range tx.after {
		do()
	}
	return nil
}

func (r *replica) Ready(context.Context) error { return nil }

func (r *replica) Close() error { return nil }

type replicaTx struct {
	memoryTx
	events []any
	after  []func()
}

func (tx *replicaTx) Enqueue(e any) { tx.events = append(tx.events, e) }

func (tx *replicaTx) OnCommit(do func()) { tx.after = append(tx.after, do) }

// newReplicas returns processes that write one log, which has its first entry.
func newReplicas(t testing.TB, n int) []*replica {
	t.Helper()
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	signer, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	b := &table{now: new(memory)}
	var all []*replica
	for range n {
		all = append(all, b.replica(t, signer))
	}
	all[0].append(ChainStarted, authz.SystemTenant)
	return all
}

// replica starts another process.
func (b *table) replica(t testing.TB, signer *dualsig.PrivateKey) *replica {
	t.Helper()
	r := &replica{table: b, t: t, outcome: done, clock: time.Now}
	r.log = newParts(func() time.Time { return r.clock() })
	if err := r.log.Use(context.Background(), r, signer, "chain_test"); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *replica) append(what EventType, tenant authz.TenantID) {
	r.t.Helper()
	if err := r.tries(what, tenant); err != nil {
		r.t.Fatal(err)
	}
}

func (r *replica) tries(what EventType, tenant authz.TenantID) error {
	return r.log.Record(context.Background(), Event{
		Type: what, Outcome: Success, Principal: principal(tenant), Resource: Resource{Type: ChainResource, ID: "chain_test"},
	})
}

// verified verifies the whole log and returns the report.
func (b *table) verified(t testing.TB) Report {
	t.Helper()
	report, err := VerifyStore(context.Background(), b.read(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	return report
}

type lockedWriter struct {
	mu sync.Mutex
	w  *bytes.Buffer
}

func (w *lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.w.Write(p)
}

// checkpoints returns the successive checkpoints. It fails the test if two of one size contradict
// each other.
func (b *table) checkpoints(t *testing.T, key *dualsig.PublicKey) (all []Checkpoint) {
	t.Helper()
	var last []byte
	of := make(map[int64]Checkpoint)
	for _, m := range b.past {
		row, _ := memoryTx{m}.Get(checkpointKey)
		if row == nil || bytes.Equal(row, last) {
			continue
		}
		last = row
		c, err := ParseCheckpoint(row, key)
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := of[c.Size]; ok && !other.same(c) {
			t.Errorf("%+v and %+v are both signed", other, c)
		}
		of[c.Size] = c
		all = append(all, c)
	}
	return all
}

// refused returns the loss that Ready reports. It fails the test if the log is not halted.
func (r *replica) refused() (lost *RollbackError) {
	r.t.Helper()
	err := r.log.Ready(context.Background())
	if !errors.Is(err, fault.Unavailable) || !errors.As(err, &lost) {
		r.t.Errorf("it is not refused: %v", err)
	}
	return lost
}
