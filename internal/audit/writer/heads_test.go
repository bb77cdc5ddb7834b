package writer_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Nothing reads the log between the last acknowledged commit and the next one.
func TestALostLastCommitIsFoundByTheNext(t *testing.T) {
	audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
		f := newFixture(t)
		f.Sealed(audittest.TenantA, "cred_a", "1", "00")
		unsealed := audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: "cred_a", Type: audit.CredentialResource}}
		before := audittest.CopyStore(t, f.Store)
		f.Record(unsealed)
		newest := audittest.CopyStore(t, f.Store)
		putBack(f, before)
		lostToOne := func() {
			t.Helper()
			var lost *audit.RollbackError
			if err := f.Log.Record(t.Context(), unsealed); !errors.Is(err, fault.Unavailable) || !errors.As(err, &lost) || lost.LostFrom != 3 || lost.LostTo != 3 {
				t.Fatal("it is signed again:", err)
			}
			if err := f.Log.Ready(t.Context()); !errors.Is(err, fault.Unavailable) {
				t.Error("it is ready:", err)
			}
		}
		lostToOne()
		putBack(f, newest)
		if _, err := f.Log.Detector.CheckForRollback(t.Context()); err != nil || f.Log.Ready(t.Context()) != nil {
			t.Error("the entry is there again, and it is refused:", err, f.Log.HaltedBy())
		}
		putBack(f, before)
		lostToOne()
		if r, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), "a test"); err != nil || r.LostFrom != 3 || r.LostTo != 3 {
			t.Fatal(r, err)
		}
		f.Record(unsealed)
		if report, err := f.Verify(); err != nil || report.Sequence != 5 || len(report.Rollbacks) != 1 {
			t.Error(report.Sequence, err)
		}
	})
}

// With several replicas, each remembers its own last commit. The store still decides whether a
// commit without acknowledgement succeeded.
func TestALostLastCommitOfAReplicaIsFoundByIt(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	a, b := replicas[0], replicas[1]
	b.Append(audit.AuditRead, audittest.TenantB)
	a.Append(audit.AuditRead, audittest.TenantA)
	before := a.Read()
	a.Append(audit.AuditRead, audittest.TenantA)
	a.Put(before)
	if err := a.Tries(audit.AuditRead, audittest.TenantA); !errors.Is(err, fault.Unavailable) {
		t.Error("it is signed again:", err)
	}
	_ = a.Refused()                              // checks the halt
	b.Append(audit.AuditRead, audittest.TenantB) // b has not seen the commit
	a.Outcome, b.Outcome = audittest.Done, audittest.Persisted
	before = b.Read()
	_ = b.Tries(audit.AuditRead, audittest.TenantB)
	b.Put(before) // no client got an acknowledgement of the commit
	b.Outcome = audittest.Done
	b.Append(audit.AuditRead, audittest.TenantB)
}

// The index of a tenant is not signed. Whatever an attacker writes there, replicas sign only
// entries that continue from the tenant's last entry.
func TestNoReplicaForksAHistoryThatSomebodyRewrites(t *testing.T) {
	key := func(n uint64) []byte { return audit.TenantKey(string(audittest.TenantA), n) }
	type rewriting = func(tx store.Tx, r *audittest.Replica) error
	older := func(tx store.Tx, _ *audittest.Replica) error { return tx.Delete(key(3)) }
	gone := func(tx store.Tx, _ *audittest.Replica) error {
		return errors.Join(tx.Delete(key(1)), tx.Delete(key(2)), tx.Delete(key(3)))
	}
	names := func(at uint64, change func(*audit.IndexRow)) rewriting {
		return func(tx store.Tx, _ *audittest.Replica) error {
			row, err := audit.DecodeIndexRow(audittest.Get(tx, key(3)))
			if err != nil {
				return err
			}
			change(&row)
			return tx.Put(key(at), row.Encode())
		}
	}
	forged := func(tx store.Tx, _ *audittest.Replica) error { // an unsigned entry of the tenant
		row, err := audit.DecodeIndexRow(audittest.Get(tx, key(1)))
		if err != nil {
			return err
		}
		e, err := entries.Read(tx, row.Sequence)
		if err != nil {
			return err
		}
		e.TenantSequence = 4
		core, err := e.Canonical(nil, false)
		if err != nil {
			return err
		}
		if row.Hash, err = e.Digest(); err != nil {
			return err
		}
		return errors.Join(tx.Put(audit.EntryKey(row.Sequence), audittest.EncodeRow(core, audit.NoSignature)), tx.Put(key(4), row.Encode()))
	}
	for name, c := range map[string]struct {
		rewrite rewriting
		met     bool // only a replica that knows the tenant finds it
	}{
		"the last row is removed": {older, true},
		"all rows are removed":    {gone, true},
		"another hash":            {names(3, func(r *audit.IndexRow) { r.Hash[0] ^= 1 }), false},
		"a later place":           {names(9, func(*audit.IndexRow) {}), false},
		"another tenant's entry": {func(tx store.Tx, _ *audittest.Replica) error {
			return tx.Put(key(4), audittest.Get(tx, audit.TenantKey(string(audittest.TenantB), 1)))
		}, false},
		"an entry that is not there":       {names(4, func(r *audit.IndexRow) { r.Sequence = 99 }), false},
		"another time":                     {names(3, func(r *audit.IndexRow) { r.Micros++ }), false},
		"an entry that nobody has signed":  {forged, false},
		"a row that is none":               {func(tx store.Tx, _ *audittest.Replica) error { return tx.Put(key(4), []byte("no")) }, false},
		"the last row is of the one below": {func(tx store.Tx, _ *audittest.Replica) error { return tx.Put(key(3), audittest.Get(tx, key(2))) }, false},
	} {
		for _, meets := range []bool{true, false} {
			if !meets && c.met {
				continue
			}
			t.Run(name+map[bool]string{true: ", of a tenant that is known", false: ", of one that is not"}[meets], func(t *testing.T) {
				replicas := audittest.NewReplicas(t, 2)
				r, other := replicas[0], replicas[1]
				other.Append(audit.AuditRead, audittest.TenantA)
				other.Append(audit.AuditRead, audittest.TenantA)
				if meets {
					r.Append(audit.AuditRead, audittest.TenantA)
				} else {
					other.Append(audit.AuditRead, audittest.TenantA)
				}
				other.Append(audit.AuditRead, audittest.TenantB) // makes r read again
				sound := r.Read()
				r.Rewrite(func(tx store.Tx) error { return c.rewrite(tx, r) })
				for range 3 {
					if err := r.Tries(audit.AuditRead, audittest.TenantA); fault.Of(err) != fault.Internal || err == nil {
						t.Error("it is gone on from:", err)
					}
					r.Append(audit.AuditRead, audittest.TenantB) // other tenants are not affected
					other.Append(audit.AuditRead, authz.SystemTenant)
				}
				if err := r.Log.HaltedBy(); err != nil {
					t.Error("it is taken for an older copy:", err)
				}
				// Restore the rows.
				r.Rewrite(func(tx store.Tx) error {
					if err := tx.Delete(key(9)); err != nil {
						return err
					}
					for n := range uint64(4) {
						row, _ := sound.Tx().Get(key(n + 1))
						if row == nil {
							_ = tx.Delete(key(n + 1))
							continue
						}
						at, err := audit.DecodeIndexRow(row)
						if err := errors.Join(err, tx.Put(key(n+1), row), tx.Put(audit.EntryKey(at.Sequence), audittest.Get(sound.Tx(), audit.EntryKey(at.Sequence)))); err != nil {
							return err
						}
					}
					return nil
				})
				r.Append(audit.AuditRead, audittest.TenantA)
				other.Append(audit.AuditRead, audittest.TenantA)
				r.Verified(t)
			})
		}
	}
}

// A replica that is the only writer reads nothing before its hook, so the hook must find the
// damage.
func TestARewrittenHistoryIsFoundByTheHook(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	r, other := replicas[0], replicas[1]
	for range writer.AloneAfter + 2 {
		r.Append(audit.AuditRead, audittest.TenantA)
	}
	if r.Log.SharedLately() {
		t.Fatal("it does not know that it is alone")
	}
	r.Rewrite(func(tx store.Tx) error {
		return tx.Delete(audit.TenantKey(string(audittest.TenantA), writer.AloneAfter+2))
	})
	other.Append(audit.AuditRead, audittest.TenantB)
	for range 2 {
		if err := r.Tries(audit.AuditRead, audittest.TenantA); !errors.Is(err, audit.ErrDamagedLog) {
			t.Error("it is gone on from:", err)
		}
	}
	r.Append(audit.AuditRead, audittest.TenantB)
}

// If one tenant's rows are damaged, a commit of several tenants fails at most once.
func TestARewrittenHistoryFailsItsTenantAlone(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	r, other := replicas[0], replicas[1]
	for range 2 {
		r.Append(audit.AuditRead, audittest.TenantA)
		other.Append(audit.AuditRead, audittest.TenantB)
	}
	r.Rewrite(func(tx store.Tx) error { return tx.Delete(audit.TenantKey(string(audittest.TenantA), 2)) })
	two := func() (ofA, ofAll error) {
		ofAll = r.Update(t.Context(), func(tx store.Tx) error {
			_, ofA = r.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
			_, err := r.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB)})
			return err
		})
		return ofA, ofAll
	}
	if _, err := two(); err == nil {
		other.Append(audit.AuditRead, audittest.TenantB)
	}
	for range 3 {
		if ofA, ofAll := two(); !errors.Is(ofA, audit.ErrDamagedLog) || ofAll != nil {
			t.Error(ofA, ofAll)
		}
		other.Append(audit.AuditRead, audittest.TenantB)
	}
}

// A verification finds what a replica cannot know when it signs.
func TestATenantThatWasNotMetMayBeForkedButNotUnnoticed(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	r, other := replicas[0], replicas[1]
	for range 3 {
		other.Append(audit.AuditRead, audittest.TenantA) // head at 4
	}
	r.Rewrite(func(tx store.Tx) error { return tx.Delete(audit.TenantKey(string(audittest.TenantA), 3)) })
	r.Append(audit.AuditRead, audittest.TenantA)
	for _, any := range replicas {
		if p, err := any.Log.Verify(t.Context()); err != nil || p.Status != verify.ProofBroken || p.Broken.Sequence != 5 {
			t.Errorf("%+v, %v", p, err)
		}
	}
	if err := other.Tries(audit.AuditRead, audittest.TenantA); !errors.Is(err, audit.ErrDamagedLog) {
		t.Error("who knows the tenant goes on:", err)
	}
}

// putBack restores the rows of a copy, like a failover to a server that lacks the newest commits.
func putBack(f *audittest.Fixture, m *audittest.Memory) {
	f.T.Helper()
	now := audittest.CopyStore(f.T, f.Store)
	err := f.Store.Update(f.T.Context(), func(tx store.Tx) error {
		for _, r := range now.Rows {
			if err := tx.Delete(r.Key); err != nil {
				return err
			}
		}
		for _, r := range m.Rows {
			if err := tx.Put(r.Key, r.Value); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		f.T.Fatal(err)
	}
}

// Anyone with write access to the database can write the head row.
func TestAForeignHeadIsVerified(t *testing.T) {
	for name, forge := range map[string]func(tx store.Tx, r *audittest.Replica) error{
		"of an entry that is not there": func(tx store.Tx, _ *audittest.Replica) error {
			return tx.Put(audit.HeadKey, audit.Position{Sequence: 99, Micros: 1}.Encode())
		},
		"of another hash": func(tx store.Tx, _ *audittest.Replica) error {
			head, err := audit.ReadHead(tx)
			head.Hash[0] ^= 1
			return errors.Join(err, tx.Put(audit.HeadKey, head.Encode()))
		},
		"of an entry that is not signed": func(tx store.Tx, _ *audittest.Replica) error {
			e, err := entries.Read(tx, 4)
			if err != nil {
				return err
			}
			e.Sequence, e.PreviousHash = 5, e.Hash
			core, err := e.Canonical(nil, false)
			if err != nil {
				return err
			}
			sum, err := e.Digest()
			return errors.Join(err, tx.Put(audit.EntryKey(5), audittest.EncodeRow(core, make([]byte, 3309))),
				tx.Put(audit.HeadKey, audit.Position{Sequence: 5, Micros: e.Position().Micros, Hash: sum}.Encode()))
		},
		"of an earlier entry": func(tx store.Tx, _ *audittest.Replica) error {
			e, err := entries.Read(tx, 2)
			if err != nil {
				return err
			}
			return tx.Put(audit.HeadKey, e.Position().Encode())
		},
	} {
		t.Run(name, func(t *testing.T) {
			replicas := audittest.NewReplicas(t, 2)
			a, b := replicas[0], replicas[1]
			b.Append(audit.AuditRead, audittest.TenantA)
			a.Append(audit.AuditRead, audittest.TenantA)
			b.Append(audit.AuditRead, audittest.TenantA) // head at 4
			m := a.Read().With(func(tx store.Tx) error { return forge(tx, a) })
			a.Put(m)
			for _, r := range replicas {
				if err := r.Tries(audit.AuditRead, audittest.TenantA); err == nil {
					t.Error("it is gone on from")
				}
				_, _ = r.Log.Detector.CheckForRollback(t.Context())
				if err := r.Log.HaltedBy(); err != nil {
					t.Error("what is damaged is taken for an older copy:", err)
				}
			}
		})
	}
}

// Damaged rows of a tenant fail at most the commit in which other replicas find the damage while
// another process writes.
func TestADamagedTenantIsItsOwnTroubleAmongReplicas(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	a, b := replicas[0], replicas[1]
	for range writer.AloneAfter + 2 {
		a.Append(audit.AuditRead, audittest.TenantA)
	}
	a.Append(audit.AuditRead, audittest.TenantB)
	a.Put(a.Read().With(func(tx store.Tx) error { return tx.Put(audit.TenantKey(string(audittest.TenantB), 1), []byte("junk")) }))
	b.Append(audit.AuditRead, audittest.TenantA)
	both := func() error {
		return a.Update(t.Context(), func(tx store.Tx) error {
			_, err := a.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
			if err == nil {
				_, err = a.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB)})
			}
			return err
		})
	}
	if err := both(); !errors.Is(err, fault.Internal) {
		t.Fatal(err)
	}
	a.Append(audit.AuditRead, audittest.TenantA)
	if err := a.Update(t.Context(), func(tx store.Tx) error {
		_, err := a.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB)})
		if err == nil {
			t.Error("the tenant's own event is let in")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// Whatever the results of two replicas' commits are, in any order, the log is whole, the next
// commit succeeds, and each replica counts exactly its own committed entries.
func TestReplicasGoOnWhateverBecameOfTheirCommits(t *testing.T) {
	outcomes := []audittest.Outcome{audittest.Done, audittest.Failed, audittest.Persisted, audittest.Again, audittest.Late}
	length := 4
	if testing.Short() {
		length = 3
	}
	words := 1
	for range length {
		words *= 2 * len(outcomes)
	}
	all := audittest.NewReplicas(t, 2)
	begun, signer := all[0].Read(), all[0].Log.Signer
	audittest.OnAllCores(words, func(word int) {
		b := &audittest.Table{Now: begun}
		pair := []*audittest.Replica{b.Replica(t, signer), b.Replica(t, signer)}
		var want [2]uint64
		var said string
		count := func(said string) {
			for i, r := range pair {
				if _, written, err := r.Log.Progress(t.Context()); err != nil || written[writer.Kind{Type: audit.AuditRead, Outcome: audit.Success}] != want[i] {
					t.Errorf("%s: %d were counted of %d, %v", said, written[writer.Kind{Type: audit.AuditRead, Outcome: audit.Success}], want[i], err)
				}
			}
		}
		for rest := word; len(said) < 1 || rest > 0; rest /= 2 * len(outcomes) {
			i, o := rest%2, outcomes[rest/2%len(outcomes)]
			said += fmt.Sprintf("%d %s; ", i, o)
			r, other := pair[i], pair[1-i]
			r.Outcome, r.Frozen = o, func() {
				other.Outcome = audittest.Done
				other.Append(audit.AuditRead, audittest.TenantA)
				want[1-i]++
			}
			err := r.Tries(audit.AuditRead, audittest.TenantA)
			if ok := o != audittest.Failed && o != audittest.Persisted; (err == nil) != ok {
				t.Errorf("%s: %v", said, err)
			}
			if o != audittest.Failed {
				want[i]++
			}
			count(said)
		}
		for i, r := range pair {
			r.Outcome = audittest.Done
			r.Append(audit.AuditRead, audittest.TenantA)
			want[i]++
		}
		count(said)
		report, err := verify.Store(t.Context(), b.Read(), verify.Options{PublicKey: signer.Public()})
		if err != nil || report.Sequence != 1+want[0]+want[1] {
			t.Errorf("%s: %d entries, %v", said, report.Sequence, err)
		}
	})
}

// The newest entry that a process has seen may be archived by now.
func TestAReplicaThatSleptSinceEntriesWereArchivedGoesOn(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	awake, asleep := replicas[0], replicas[1]
	now := time.Now()
	awake.Clock, asleep.Clock = func() time.Time { return now }, func() time.Time { return now }
	asleep.Append(audit.AuditRead, audittest.TenantB)
	for range 300 {
		awake.Append(audit.AuditRead, audittest.TenantA)
	}
	now = now.Add(audittest.Keep + 48*time.Hour)
	awake.Append(audit.AuditRead, audittest.TenantA)
	a, _ := (&audittest.Fixture{T: t}).Folder()
	seen := asleep.Log.Proposed().Position
	if n, err := (&keeper.Cutter{Log: awake.Log.Log, Reader: awake.Log.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context()); err != nil || n < 300 {
		t.Fatal(n, err)
	}
	cut := asleep.Read()
	asleep.Append(audit.AuditRead, audittest.TenantB)
	asleep.Verified(t)
	if _, written, err := asleep.Log.Progress(t.Context()); err != nil || written[writer.Kind{Type: audit.AuditRead, Outcome: audit.Success}] != 2 {
		t.Error(written, err)
	}
	// The tree shows whether it is the archived entry.
	if has, err := awake.Log.Chain.HasEntry(cut.Tx(), seen); !has || err != nil {
		t.Error(has, err)
	}
	other := seen
	other.Hash[0] ^= 1
	if has, err := awake.Log.Chain.HasEntry(cut.Tx(), other); has || err != nil {
		t.Error("another entry is said to be archived:", err)
	}
	liar := cut.With(func(tx store.Tx) error {
		row := audittest.Get(tx, audit.TileKey(0, 0))
		copy(row[32:], tlogLeaf(other))
		return tx.Put(audit.TileKey(0, 0), row)
	})
	if has, err := awake.Log.Chain.HasEntry(liar.Tx(), other); has {
		t.Error("a tree that does not hold is believed:", err)
	}
}

func tlogLeaf(at audit.Position) []byte {
	leaf := audit.LeafHash(at.Hash)
	return leaf[:]
}
