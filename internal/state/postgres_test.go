package state_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// replica is one of several processes that share a database.
type replica struct {
	key     []byte
	raw     *postgres.Store
	log     *writer.Log
	state   *state.State
	store   *state.Store
	mu      sync.Mutex
	refused []*state.RowError
}

func newReplicas(t *testing.T, n int) []*replica {
	t.Helper()
	url := pgtest.Shared(t).URL()
	key, seed := make([]byte, 64), make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(key)
	_, _ = rand.Read(seed)
	signer, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	var all []*replica
	for range n {
		r := &replica{key: key}
		r.state = state.New(func(e *state.RowError) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.refused = append(r.refused, e)
		})
		r.log = writer.New(time.Now, r.state)
		if r.raw, err = postgres.Open(t.Context(), url, postgres.Options{Hook: r.log.Commit, Head: state.HeadKey}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = r.raw.Close() })
		r.store = r.state.Guard(r.raw)
		if err := errors.Join(r.log.Use(t.Context(), r.raw, signer, "chain_test"), r.log.BindState(t.Context(), key)); err != nil {
			t.Fatal(err)
		}
		if len(all) == 0 {
			if err := r.update(audit.ChainStarted, nil); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, r)
	}
	return all
}

func (r *replica) update(what audit.EventType, rows map[string][]byte) error {
	return r.store.Update(context.Background(), func(tx store.Tx) error {
		for key, value := range rows {
			if err := put(tx, key, value); err != nil {
				return err
			}
		}
		_, err := r.log.Append(tx, event(what))
		return err
	})
}

func (r *replica) get(key string) (value []byte, err error) {
	err = r.store.View(context.Background(), func(rd store.Reader) (err error) {
		value, err = rd.Get([]byte(key))
		return err
	})
	return value, err
}

// What one replica changes, the others know at once, and none takes a row that somebody put back.
func TestReplicasShareTheState(t *testing.T) {
	all := newReplicas(t, 3)
	a, b, c := all[0], all[1], all[2]
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const row = "apikey/hash/1/aa"
	must(a.update(audit.APIKeyCreated, map[string][]byte{row: []byte("old")}))
	for _, r := range all {
		if v, err := r.get(row); err != nil || string(v) != "old" {
			t.Fatal(string(v), err)
		}
	}
	must(b.update(audit.APIKeyRevoked, map[string][]byte{row: nil}))
	must(a.raw.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte(row), []byte("old")) }))
	for i, r := range all {
		if _, err := r.get(row); !isRefused(err, state.Added) || fault.Of(err) != fault.Forbidden {
			t.Errorf("replica %d: %v", i, err)
		}
	}
	must(c.raw.Update(t.Context(), func(tx store.Tx) error { return tx.Delete([]byte(row)) }))
	if _, err := c.get(row); err != nil {
		t.Error(err)
	}
}

// A database is put back beneath its replicas, and the loss is accepted at one of them: the others
// go on with the state of that database. A row of the lost branch is refused then, also when the
// rows of the state and the head of the log are put back with it.
func TestReplicasGoOnAfterAnAcceptedLoss(t *testing.T) {
	all := newReplicas(t, 2)
	a, b := all[0], all[1]
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const row = apiKey
	must(a.update(audit.APIKeyCreated, map[string][]byte{row: []byte("kept")}))
	backup := rows(t, a.raw)
	for n := range 3 {
		must(all[n%2].update(audit.APIKeyCreated, map[string][]byte{row: fmt.Appendf(nil, "lost %d", n)}))
	}
	for _, r := range all {
		if v, err := r.get(row); err != nil || string(v) != "lost 2" {
			t.Fatal(string(v), err)
		}
	}
	lost := rows(t, a.raw)
	follow := func(r *replica) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); writer.NewFollower(r.log).KeepFollowing(ctx, slog.New(slog.DiscardHandler)) }()
		t.Cleanup(func() { cancel(); <-done })
	}
	follow(b)
	restore(t, a.raw, backup)
	if _, err := b.get(row); fault.Of(err) != fault.Unavailable {
		t.Fatal("a row of an older database is read:", err)
	}
	_, err := a.log.AcceptRollback(t.Context(), authz.Principal{Tenant: authz.SystemTenant, ID: "api_key:admin", Scopes: []authz.Scope{authz.SystemAdmin}}, "restored")
	must(err)
	for _, r := range all {
		for {
			v, err := r.get(row)
			if err == nil && string(v) == "kept" {
				break
			}
			if fault.Of(err) != fault.Unavailable || t.Context().Err() != nil {
				t.Fatal(string(v), err)
			}
			runtime.Gosched()
		}
	}
	restore(t, a.raw, lost)
	for i, r := range all {
		if v, err := r.get(row); fault.Of(err) != fault.Unavailable {
			t.Errorf("replica %d reads a lost row: %q, %v", i, v, err)
		}
	}
}

func TestReplicasWriteAtOnceWithoutAFalseAlarm(t *testing.T) {
	all := newReplicas(t, 3)
	var work sync.WaitGroup
	for n, r := range all {
		for w := range 3 {
			work.Go(func() {
				for i := range 60 {
					value := fmt.Appendf(nil, "%d-%d-%d", n, w, i)
					err := r.store.Update(context.Background(), func(tx store.Tx) error {
						key := fmt.Appendf(nil, "user/email/%d", (i+w)%20)
						if _, err := tx.Get(key); err != nil {
							return err
						}
						count := 0
						if err := tx.Scan(store.Prefix([]byte("session/row/u/")), func(_, _ []byte) bool { count++; return true }); err != nil {
							return err
						}
						session := fmt.Appendf(nil, "session/row/u/%d", i%7)
						var err error
						if i%2 == 0 {
							err = tx.Put(session, value)
						} else {
							err = tx.Delete(session)
						}
						_, err2 := r.log.Append(tx, event(audit.APIKeyCreated))
						return errors.Join(err, err2, tx.Put(key, value))
					})
					if err != nil {
						t.Error("writing:", err)
						return
					}
					err = r.store.View(context.Background(), func(rd store.Reader) error {
						for k := range 20 {
							if _, err := rd.Get(fmt.Appendf(nil, "user/email/%d", k)); err != nil {
								return err
							}
						}
						return rd.Scan(store.Prefix([]byte("session/row/u/")), func(_, _ []byte) bool { return true })
					})
					if err != nil {
						t.Error("reading:", err)
						return
					}
				}
			})
		}
	}
	work.Wait()
	for _, r := range all {
		result, err := r.state.Scan(t.Context(), r.raw, 1)
		if err != nil || len(result.Refused) > 0 || len(r.refused) > 0 {
			t.Error(result.Refused, r.refused, err)
		}
	}
}

// A View may see the next commit of another replica before this process has heard that its own, the
// one before, succeeded.
func TestACommitIsHeardOfLate(t *testing.T) {
	all := newReplicas(t, 2)
	a, b := all[0], all[1]
	const own, other = "user/email/own", "user/email/other"
	err := a.store.Update(t.Context(), func(tx store.Tx) error {
		tx.OnCommit(func() {
			if err := b.update(audit.APIKeyCreated, map[string][]byte{other: []byte("1")}); err != nil {
				t.Error(err)
			}
			if v, err := a.get(other); err != nil || string(v) != "1" {
				t.Error(string(v), err)
			}
		})
		_, err := a.log.Append(tx, event(audit.APIKeyCreated))
		return errors.Join(err, tx.Put([]byte(own), []byte("1")))
	})
	if err != nil {
		t.Fatal(err)
	}
	for n := range 3 {
		for i, r := range all {
			if err := r.update(audit.APIKeyCreated, map[string][]byte{other: fmt.Appendf(nil, "%d-%d", n, i)}); err != nil {
				t.Fatal(err)
			}
			for _, r := range all {
				if v, err := r.get(other); err != nil || string(v) != fmt.Sprintf("%d-%d", n, i) {
					t.Error(string(v), err)
				}
			}
		}
	}
}

// Two replicas of this release find the store of an earlier one. One of them completes the state,
// and the other goes by it.
func TestOneReplicaBuildsForAll(t *testing.T) {
	all := newReplicas(t, 2)
	a, b := all[0], all[1]
	if err := a.update(audit.APIKeyCreated, map[string][]byte{"user/email/x": []byte("1")}); err != nil {
		t.Fatal(err)
	}
	if err := a.raw.Update(t.Context(), func(tx store.Tx) error {
		return tx.Delete(state.HeadKey)
	}); err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		if err := r.log.BindState(t.Context(), r.key); err != nil || r.state.Complete() {
			t.Fatal(err, "complete without rows")
		}
	}
	record := func(r *replica) func(tx store.Tx) error {
		return func(tx store.Tx) error {
			_, err := r.log.Append(tx, event(audit.StateCommitted))
			return err
		}
	}
	for _, r := range []*replica{a, b} {
		if err := r.state.Build(t.Context(), r.raw, binding(record(r))); err != nil || !r.state.Complete() {
			t.Fatal(err, r.state.Complete())
		}
	}
	if err := a.raw.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("user/email/x"), []byte("0")) }); err != nil {
		t.Fatal(err)
	}
	if _, err := b.get("user/email/x"); !isRefused(err, state.Replaced) {
		t.Error(err)
	}
}
