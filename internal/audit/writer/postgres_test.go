package writer_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha3"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/test/audittest"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// process is one of several processes that write a log in one PostgreSQL database.
type process struct {
	log   *audittest.Parts
	store *postgres.Store
	said  bytes.Buffer
	hold  atomic.Pointer[func()] // called in the hook
	end   func()
}

// newProcesses starts n processes. Each of them also follows and verifies the log.
func newProcesses(t *testing.T, url string, n int) (all []*process) {
	t.Helper()
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	signer, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		p := &process{}
		p.log = audittest.NewParts(func() time.Time {
			if hold := p.hold.Swap(nil); hold != nil {
				(*hold)()
			}
			return time.Now()
		})
		if p.store, err = postgres.Open(t.Context(), url, postgres.Options{Hook: p.log.Commit}); err != nil {
			t.Fatal(err)
		}
		if err := p.log.Use(t.Context(), p.store, signer, "chain_test"); err != nil {
			t.Fatal(err)
		}
		if i%2 == 1 {
			p.log.SetSigning(writer.SignBatches)
		}
		if i == 0 {
			if err := p.log.Record(t.Context(), audit.Event{Type: audit.ChainStarted, Outcome: audit.Success, Principal: audittest.Principal(authz.SystemTenant), Resource: audit.Resource{Type: audit.ChainResource}}); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(context.Background())
		logger := slog.New(slog.NewTextHandler(&audittest.LockedWriter{W: &p.said}, &slog.HandlerOptions{Level: slog.LevelWarn}))
		var wg sync.WaitGroup
		wg.Go(func() { p.log.KeepFollowing(ctx, logger) })
		wg.Go(func() { p.log.KeepVerified(ctx, time.Hour, logger) })
		p.end = sync.OnceFunc(func() { cancel(); wg.Wait() })
		t.Cleanup(func() { p.end(); p.store.Close() })
		all = append(all, p)
	}
	return all
}

// append writes an entry and returns its place.
func (p *process) append(ctx context.Context, tenant authz.TenantID) (receipt audit.Receipt, err error) {
	var r *audit.Receipt
	err = p.store.Update(ctx, func(tx store.Tx) (err error) {
		r = nil
		r, err = p.log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(tenant), Resource: audit.Resource{Type: audit.LogResource}})
		return err
	})
	if err == nil {
		receipt = *r
	}
	return receipt, err
}

func within(t *testing.T, limit time.Duration, what string, is func() bool) {
	t.Helper()
	for began := time.Now(); !is(); time.Sleep(5 * time.Millisecond) { // polls with a deadline
		if time.Since(began) > limit {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

// Three processes write more than ten thousand entries at the same time. Each sequence is used
// exactly once, and the log verifies.
func TestThreeProcessesWriteOneLogOnPostgreSQL(t *testing.T) {
	n := 10_200
	if testing.Short() {
		n = 900
	}
	all := newProcesses(t, pgtest.Shared(t).URL(), 3)
	var next atomic.Int64
	var mu sync.Mutex
	places := make(map[uint64]string)
	var wg sync.WaitGroup
	began := time.Now()
	for i := range 48 {
		p := all[i%3]
		wg.Go(func() {
			for next.Add(1) <= int64(n) {
				r, err := p.append(context.Background(), authz.TenantID(fmt.Sprintf("ten_%026d", i/6)))
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if _, taken := places[r.Sequence]; taken {
					t.Errorf("two events were told that they are at %d", r.Sequence)
				}
				places[r.Sequence] = r.Hash
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	t.Logf("%.0f entries a second in %d, %d and %d commits", float64(n)/time.Since(began).Seconds(), all[0].store.Commits(), all[1].store.Commits(), all[2].store.Commits())
	within(t, 5*time.Second, "all has a checkpoint", func() bool {
		_, c, err := all[0].log.Chain.NewestCheckpoint(t.Context())
		return err == nil && c.Size == int64(n)+1
	})
	counted := uint64(0)
	for _, p := range all {
		if proof, err := p.log.Verify(t.Context()); err != nil || proof.Status != verify.ProofVerified || proof.VerifiedTo != uint64(n)+1 {
			t.Errorf("%+v, %v", proof, err)
		}
		_, written, err := p.log.Progress(t.Context())
		if err != nil {
			t.Error(err)
		}
		counted += written[writer.Kind{Type: audit.AuditRead, Outcome: audit.Success}]
		p.end()
		if p.said.Len() > 0 {
			t.Error(p.said.String())
		}
	}
	report, err := verify.Store(t.Context(), all[1].store, verify.Options{Fingerprint: all[0].log.Fingerprint()})
	if err != nil || report.Sequence != uint64(n)+1 || report.Entries != uint64(n)+1 || counted != uint64(n) {
		t.Errorf("%d entries up to %d, of which %d were counted: %v", report.Entries, report.Sequence, counted, err)
	}
	err = audit.ScanAll(t.Context(), all[2].store, audit.EntryRange, func(key, row []byte) error {
		core, _, err := audit.SplitRow(row)
		if sequence := audit.SequenceOf(key[len(audit.EntryRange.From):]); err != nil || sequence > 1 && places[sequence] != fmt.Sprintf("%x", sha3.Sum256(core)) {
			t.Errorf("%d is not what its writer was told: %v", sequence, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// A process whose hook stops for longer than it may hold the lock loses the lock. It then continues
// as one writer among the others.
func TestAProcessThatIsFrozenInItsHookLosesTheLock(t *testing.T) {
	all := newProcesses(t, pgtest.Shared(t).URL(), 2)
	frozen, other := all[0], all[1]
	for range 3 {
		if _, err := frozen.append(t.Context(), audittest.TenantA); err != nil {
			t.Fatal(err)
		}
	}
	stands, goesOn := make(chan struct{}), make(chan struct{})
	hold := func() { close(stands); <-goesOn }
	frozen.hold.Store(&hold)
	answered := make(chan error, 1)
	go func() {
		_, err := frozen.append(context.Background(), audittest.TenantA)
		answered <- err
	}()
	<-stands
	meanwhile := 0
	for began := time.Now(); meanwhile < 20; {
		_, err := other.append(t.Context(), audittest.TenantB)
		if err == nil {
			meanwhile++
		} else if time.Since(began) > 20*time.Second {
			t.Fatal(err)
		}
	}
	within(t, 5*time.Second, "the others' entries have a checkpoint", func() bool { return other.log.Lag() == 0 })
	close(goesOn)
	err := <-answered
	if err != nil && !errors.Is(err, fault.Unavailable) {
		t.Error(err)
	}
	written := uint64(1 + 3 + 20)
	if err == nil {
		written++
	}
	within(t, 10*time.Second, "it goes on", func() bool {
		_, err := frozen.append(t.Context(), audittest.TenantA)
		return err == nil
	})
	for _, p := range all {
		if err := p.log.HaltedBy(); err != nil {
			t.Error(err)
		}
		p.end()
	}
	if report, err := verify.Store(t.Context(), other.store, verify.Options{}); err != nil || report.Sequence != written+1 {
		t.Errorf("%d entries, %v; want %d", report.Sequence, err, written+1)
	}
}

// An older copy replaces the database while processes run. Each process finds out, immediately if
// it commits, and one acceptance lets all of them continue.
func TestAnOlderDatabaseUnderRunningProcesses(t *testing.T) {
	url := pgtest.Shared(t).URL()
	all := newProcesses(t, url, 3)
	write := func(n int) {
		t.Helper()
		for i := range n {
			if _, err := all[i%3].append(t.Context(), audittest.TenantA); err != nil {
				t.Fatal(err)
			}
		}
		within(t, 5*time.Second, "all have seen it", func() bool {
			head, err := all[0].log.Chain.StoredHead(t.Context())
			for _, p := range all {
				if err != nil || p.log.Seen().Position != head || p.log.Lag() > 0 {
					return false
				}
			}
			return true
		})
	}
	write(30)
	tables := []string{"latticekeep_kv", "latticekeep_head", "latticekeep_commit"}
	for _, table := range tables {
		execute(t, url, "CREATE TABLE older_"+table+" AS SELECT * FROM "+table)
	}
	write(30)
	restore := "BEGIN; SELECT * FROM latticekeep_head FOR UPDATE;"
	for _, table := range tables {
		restore += "DELETE FROM " + table + "; INSERT INTO " + table + " SELECT * FROM older_" + table + ";"
	}
	execute(t, url, restore+"COMMIT")

	for i, p := range all[:2] { // the third one only looks
		_, err := p.append(t.Context(), audittest.TenantA)
		var lost *audit.RollbackError
		if !errors.Is(err, fault.Unavailable) || !errors.As(err, &lost) || lost.LostFrom != 32 || lost.LostTo != 61 {
			t.Errorf("process %d: %v", i, err)
		}
		if err := p.log.Ready(t.Context()); !errors.Is(err, fault.Unavailable) {
			t.Errorf("process %d is ready: %v", i, err)
		}
	}
	within(t, 2*time.Second, "the third one finds out", func() bool { return all[2].log.HaltedBy() != nil })
	r, err := all[1].log.AcceptRollback(t.Context(), audittest.Admin(), "a test")
	if err != nil || r.LostFrom != 32 || r.LostTo != 61 || r.Epoch != 2 {
		t.Fatal(r, err)
	}
	within(t, 3*time.Second, "it is accepted everywhere", func() bool {
		for _, p := range all {
			if p.log.Ready(t.Context()) != nil {
				return false
			}
		}
		return true
	})
	write(30)
	report, err := verify.Store(t.Context(), all[0].store, verify.Options{})
	if err != nil || report.Sequence != 92 || report.Entries != 62 || len(report.Rollbacks) != 1 {
		text, _ := json.Marshal(report.Rollbacks)
		t.Errorf("%d entries up to %d, %s: %v", report.Entries, report.Sequence, text, err)
	}
}

func execute(t *testing.T, url, statements string) {
	t.Helper()
	c, err := pgconn.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	if _, err := c.Exec(t.Context(), statements).ReadAll(); err != nil {
		t.Fatal(err)
	}
}
