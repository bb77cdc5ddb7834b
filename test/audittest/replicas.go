package audittest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Rewrite changes rows like an attacker who can write to the database but lacks the key.
func (b *Table) Rewrite(change func(tx store.Tx) error) {
	b.Put(b.Read().With(change))
}

// Table is an in-memory database of several replicas. Each commit is a separate list of rows.
type Table struct {
	writing sync.Mutex // held during a commit
	mu      sync.Mutex // guards now and past
	Now     *Memory
	past    []*Memory // all earlier commits
}

// Read returns the rows as they are now. They must not be changed.
func (b *Table) Read() *Memory {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Now
}

// Put sets the state of the database, like a restored backup.
func (b *Table) Put(m *Memory) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.Now, b.past = m, append(b.past, m)
}

// Outcome is the result of a commit after its hook has run.
type Outcome string

const (
	Done      Outcome = "done"
	Failed    Outcome = "failed"
	Persisted Outcome = "persisted, and said to have failed"
	Again     Outcome = "failed, and done again"
	Late      Outcome = "lost the lock while it was frozen, and done again"
)

// Replica is the store of one process.
type Replica struct {
	*Table
	t       testing.TB
	Log     *Parts
	Outcome Outcome
	Frozen  func() // called while a hook that has lost the lock is frozen
	Clock   func() time.Time
}

// ErrNotDone is what a replica answers when it cannot tell that its commit succeeded.
var ErrNotDone = fault.New(fault.Unavailable, "the connection is lost")

func (r *Replica) View(ctx context.Context, fn func(store.Reader) error) error {
	if err := ctx.Err(); err != nil {
		return fault.Wrap(fault.Unavailable, "ended", err)
	}
	return fn(MemoryTx{r.Read()})
}

func (r *Replica) Update(ctx context.Context, fn func(store.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return fault.Wrap(fault.Unavailable, "ended", err)
	}
	if r.Outcome == Late {
		was := r.Read()
		tx := &replicaTx{MemoryTx: MemoryTx{&Memory{slices.Clone(was.Rows)}}}
		if err := fn(tx); err != nil {
			return err
		}
		r.Frozen()
		_ = r.Log.Commit(tx, tx.events) // the result does not count, because it has lost the lock
	}
	r.writing.Lock()
	defer r.writing.Unlock()
	runs := 1
	if r.Outcome == Again {
		runs = 2
	}
	var m *Memory
	var tx *replicaTx
	for range runs {
		m = &Memory{slices.Clone(r.Read().Rows)}
		tx = &replicaTx{MemoryTx: MemoryTx{m}}
		if err := fn(tx); err != nil {
			return err
		}
		if err := r.Log.Commit(tx, tx.events); err != nil {
			return err
		}
	}
	if r.Outcome == Failed {
		return ErrNotDone
	}
	r.Put(m)
	if r.Outcome == Persisted {
		return ErrNotDone
	}
	for _, do := range tx.after {
		do()
	}
	return nil
}

func (r *Replica) Ready(context.Context) error { return nil }

func (r *Replica) Close() error { return nil }

type replicaTx struct {
	MemoryTx
	events []any
	after  []func()
}

func (tx *replicaTx) Enqueue(e any) { tx.events = append(tx.events, e) }

func (tx *replicaTx) OnCommit(do func()) { tx.after = append(tx.after, do) }

// NewReplicas returns processes that write one log, which has its first entry.
func NewReplicas(t testing.TB, n int) []*Replica {
	t.Helper()
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	signer, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	b := &Table{Now: new(Memory)}
	var all []*Replica
	for range n {
		all = append(all, b.Replica(t, signer))
	}
	all[0].Append(audit.ChainStarted, authz.SystemTenant)
	return all
}

// Replica starts another process.
func (b *Table) Replica(t testing.TB, signer *dualsig.PrivateKey) *Replica {
	t.Helper()
	r := &Replica{Table: b, t: t, Outcome: Done, Clock: time.Now}
	r.Log = NewParts(func() time.Time { return r.Clock() })
	if err := r.Log.Use(context.Background(), r, signer, "chain_test"); err != nil {
		t.Fatal(err)
	}
	return r
}

// Append writes an entry, which must succeed.
func (r *Replica) Append(what audit.EventType, tenant authz.TenantID) {
	r.t.Helper()
	if err := r.Tries(what, tenant); err != nil {
		r.t.Fatal(err)
	}
}

// Tries writes an entry and returns the error.
func (r *Replica) Tries(what audit.EventType, tenant authz.TenantID) error {
	return r.Log.Record(context.Background(), audit.Event{
		Type: what, Outcome: audit.Success, Principal: Principal(tenant), Resource: audit.Resource{Type: audit.ChainResource, ID: "chain_test"},
	})
}

// Verified verifies the whole log and returns the report.
func (b *Table) Verified(t testing.TB) verify.Report {
	t.Helper()
	report, err := verify.Store(context.Background(), b.Read(), verify.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// LockedWriter lets several goroutines write to one buffer.
type LockedWriter struct {
	mu sync.Mutex
	W  *bytes.Buffer
}

func (w *LockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.W.Write(p)
}

// Checkpoints returns the successive checkpoints. It fails the test if two of one size contradict
// each other.
func (b *Table) Checkpoints(t *testing.T, key *dualsig.PublicKey) (all []audit.Checkpoint) {
	t.Helper()
	var last []byte
	of := make(map[int64]audit.Checkpoint)
	for _, m := range b.past {
		row, _ := MemoryTx{m}.Get(audit.CheckpointKey)
		if row == nil || bytes.Equal(row, last) {
			continue
		}
		last = row
		c, err := audit.ParseCheckpoint(row, key)
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := of[c.Size]; ok && !other.EqualIgnoringTime(c) {
			t.Errorf("%+v and %+v are both signed", other, c)
		}
		of[c.Size] = c
		all = append(all, c)
	}
	return all
}

// Refused returns the loss that Ready reports. It fails the test if the log is not halted.
func (r *Replica) Refused() (lost *audit.RollbackError) {
	r.t.Helper()
	err := r.Log.Ready(context.Background())
	if !errors.Is(err, fault.Unavailable) || !errors.As(err, &lost) {
		r.t.Errorf("it is not refused: %v", err)
	}
	return lost
}
