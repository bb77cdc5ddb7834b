package audit

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Nothing reads the log between the last acknowledged commit and the next one.
func TestALostLastCommitIsFoundByTheNext(t *testing.T) {
	onBothStores(t, func(t *testing.T, newFixture func(testing.TB) *fixture) {
		f := newFixture(t)
		f.sealed(tenantA, "cred_a", "1", "00")
		unsealed := Event{Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: "cred_a", Type: CredentialResource}}
		before := copyStore(t, f.store)
		f.record(unsealed)
		newest := copyStore(t, f.store)
		f.putBack(before)
		lostToOne := func() {
			t.Helper()
			var lost *RollbackError
			if err := f.log.Record(t.Context(), unsealed); !errors.Is(err, fault.Unavailable) || !errors.As(err, &lost) || lost.LostFrom != 3 || lost.LostTo != 3 {
				t.Fatal("it is signed again:", err)
			}
			if err := f.log.Ready(t.Context()); !errors.Is(err, fault.Unavailable) {
				t.Error("it is ready:", err)
			}
		}
		lostToOne()
		f.putBack(newest)
		if _, err := f.log.rollbacks.checkForRollback(t.Context()); err != nil || f.log.Ready(t.Context()) != nil {
			t.Error("the entry is there again, and it is refused:", err, f.log.HaltedBy())
		}
		f.putBack(before)
		lostToOne()
		if r, err := f.log.AcceptRollback(t.Context(), admin(), "a test"); err != nil || r.LostFrom != 3 || r.LostTo != 3 {
			t.Fatal(r, err)
		}
		f.record(unsealed)
		if report, err := f.verify(); err != nil || report.Sequence != 5 || len(report.Rollbacks) != 1 {
			t.Error(report.Sequence, err)
		}
	})
}

// With several replicas, each remembers its own last commit. The store still decides whether a
// commit without acknowledgement succeeded.
func TestALostLastCommitOfAReplicaIsFoundByIt(t *testing.T) {
	replicas := newReplicas(t, 2)
	a, b := replicas[0], replicas[1]
	b.append(AuditRead, tenantB)
	a.append(AuditRead, tenantA)
	before := a.read()
	a.append(AuditRead, tenantA)
	a.put(before)
	if err := a.tries(AuditRead, tenantA); !errors.Is(err, fault.Unavailable) {
		t.Error("it is signed again:", err)
	}
	_ = a.refused()              // checks the halt
	b.append(AuditRead, tenantB) // b has not seen the commit
	a.outcome, b.outcome = done, persisted
	before = b.read()
	_ = b.tries(AuditRead, tenantB)
	b.put(before) // no client got an acknowledgement of the commit
	b.outcome = done
	b.append(AuditRead, tenantB)
}

// The index of a tenant is not signed. Whatever an attacker writes there, replicas sign only
// entries that continue from the tenant's last entry.
func TestNoReplicaForksAHistoryThatSomebodyRewrites(t *testing.T) {
	key := func(n uint64) []byte { return tenantKey(string(tenantA), n) }
	type rewriting = func(tx store.Tx, r *replica) error
	older := func(tx store.Tx, _ *replica) error { return tx.Delete(key(3)) }
	gone := func(tx store.Tx, _ *replica) error {
		return errors.Join(tx.Delete(key(1)), tx.Delete(key(2)), tx.Delete(key(3)))
	}
	names := func(at uint64, change func(*indexRow)) rewriting {
		return func(tx store.Tx, _ *replica) error {
			row, err := decodeIndexRow(get(tx, key(3)))
			if err != nil {
				return err
			}
			change(&row)
			return tx.Put(key(at), row.encode())
		}
	}
	forged := func(tx store.Tx, _ *replica) error { // an unsigned entry of the tenant
		row, err := decodeIndexRow(get(tx, key(1)))
		if err != nil {
			return err
		}
		e, err := readEntry(tx, row.sequence)
		if err != nil {
			return err
		}
		e.TenantSequence = 4
		core, err := e.canonical(nil, false)
		if err != nil {
			return err
		}
		if row.hash, err = e.digest(); err != nil {
			return err
		}
		return errors.Join(tx.Put(entryKey(row.sequence), encodeRow(core, noSignature)), tx.Put(key(4), row.encode()))
	}
	for name, c := range map[string]struct {
		rewrite rewriting
		met     bool // only a replica that knows the tenant finds it
	}{
		"the last row is removed": {older, true},
		"all rows are removed":    {gone, true},
		"another hash":            {names(3, func(r *indexRow) { r.hash[0] ^= 1 }), false},
		"a later place":           {names(9, func(*indexRow) {}), false},
		"another tenant's entry": {func(tx store.Tx, _ *replica) error {
			return tx.Put(key(4), get(tx, tenantKey(string(tenantB), 1)))
		}, false},
		"an entry that is not there":       {names(4, func(r *indexRow) { r.sequence = 99 }), false},
		"another time":                     {names(3, func(r *indexRow) { r.micros++ }), false},
		"an entry that nobody has signed":  {forged, false},
		"a row that is none":               {func(tx store.Tx, _ *replica) error { return tx.Put(key(4), []byte("no")) }, false},
		"the last row is of the one below": {func(tx store.Tx, _ *replica) error { return tx.Put(key(3), get(tx, key(2))) }, false},
	} {
		for _, meets := range []bool{true, false} {
			if !meets && c.met {
				continue
			}
			t.Run(name+map[bool]string{true: ", of a tenant that is known", false: ", of one that is not"}[meets], func(t *testing.T) {
				replicas := newReplicas(t, 2)
				r, other := replicas[0], replicas[1]
				other.append(AuditRead, tenantA)
				other.append(AuditRead, tenantA)
				if meets {
					r.append(AuditRead, tenantA)
				} else {
					other.append(AuditRead, tenantA)
				}
				other.append(AuditRead, tenantB) // makes r read again
				sound := r.read()
				r.rewrite(func(tx store.Tx) error { return c.rewrite(tx, r) })
				for range 3 {
					if err := r.tries(AuditRead, tenantA); fault.Of(err) != fault.Internal || err == nil {
						t.Error("it is gone on from:", err)
					}
					r.append(AuditRead, tenantB) // other tenants are not affected
					other.append(AuditRead, authz.SystemTenant)
				}
				if err := r.log.HaltedBy(); err != nil {
					t.Error("it is taken for an older copy:", err)
				}
				// Restore the rows.
				r.rewrite(func(tx store.Tx) error {
					if err := tx.Delete(key(9)); err != nil {
						return err
					}
					for n := range uint64(4) {
						row, _ := memoryTx{sound}.Get(key(n + 1))
						if row == nil {
							_ = tx.Delete(key(n + 1))
							continue
						}
						at, err := decodeIndexRow(row)
						if err := errors.Join(err, tx.Put(key(n+1), row), tx.Put(entryKey(at.sequence), get(memoryTx{sound}, entryKey(at.sequence)))); err != nil {
							return err
						}
					}
					return nil
				})
				r.append(AuditRead, tenantA)
				other.append(AuditRead, tenantA)
				r.verified(t)
			})
		}
	}
}

// A replica that is the only writer reads nothing before its hook, so the hook must find the
// damage.
func TestARewrittenHistoryIsFoundByTheHook(t *testing.T) {
	replicas := newReplicas(t, 2)
	r, other := replicas[0], replicas[1]
	for range aloneAfter + 2 {
		r.append(AuditRead, tenantA)
	}
	if r.log.heads.sharedLately.Load() {
		t.Fatal("it does not know that it is alone")
	}
	r.rewrite(func(tx store.Tx) error { return tx.Delete(tenantKey(string(tenantA), aloneAfter+2)) })
	other.append(AuditRead, tenantB)
	for range 2 {
		if err := r.tries(AuditRead, tenantA); !errors.Is(err, errDamagedLog) {
			t.Error("it is gone on from:", err)
		}
	}
	r.append(AuditRead, tenantB)
}

// If one tenant's rows are damaged, a commit of several tenants fails at most once.
func TestARewrittenHistoryFailsItsTenantAlone(t *testing.T) {
	replicas := newReplicas(t, 2)
	r, other := replicas[0], replicas[1]
	for range 2 {
		r.append(AuditRead, tenantA)
		other.append(AuditRead, tenantB)
	}
	r.rewrite(func(tx store.Tx) error { return tx.Delete(tenantKey(string(tenantA), 2)) })
	two := func() (ofA, ofAll error) {
		ofAll = r.Update(t.Context(), func(tx store.Tx) error {
			_, ofA = r.log.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)})
			_, err := r.log.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantB)})
			return err
		})
		return ofA, ofAll
	}
	if _, err := two(); err == nil {
		other.append(AuditRead, tenantB)
	}
	for range 3 {
		if ofA, ofAll := two(); !errors.Is(ofA, errDamagedLog) || ofAll != nil {
			t.Error(ofA, ofAll)
		}
		other.append(AuditRead, tenantB)
	}
}

// A verification finds what a replica cannot know when it signs.
func TestATenantThatWasNotMetMayBeForkedButNotUnnoticed(t *testing.T) {
	replicas := newReplicas(t, 2)
	r, other := replicas[0], replicas[1]
	for range 3 {
		other.append(AuditRead, tenantA) // head at 4
	}
	r.rewrite(func(tx store.Tx) error { return tx.Delete(tenantKey(string(tenantA), 3)) })
	r.append(AuditRead, tenantA)
	for _, any := range replicas {
		if p, err := any.log.Verify(t.Context()); err != nil || p.Status != ProofBroken || p.Broken.Sequence != 5 {
			t.Errorf("%+v, %v", p, err)
		}
	}
	if err := other.tries(AuditRead, tenantA); !errors.Is(err, errDamagedLog) {
		t.Error("who knows the tenant goes on:", err)
	}
}
