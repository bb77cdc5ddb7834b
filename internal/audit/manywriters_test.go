package audit

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
)

// A commit that starts with an acceptance covers only what that acceptance names.
func TestAnAcceptanceIsNotOfMoreThanItKnows(t *testing.T) {
	r := newReplicas(t, 1)[0]
	older := r.read()
	for range 9 {
		r.append(AuditRead, tenantA)
	}
	r.put(older)
	accept := func(to uint64) error {
		return r.Update(t.Context(), func(tx store.Tx) error {
			_, err := r.log.append(tx, Event{Type: RollbackAccepted, Outcome: Success, Principal: admin()}, &acceptance{lost: RollbackError{LostFrom: 2, LostTo: to, Epoch: 1}})
			return err
		})
	}
	if err := accept(5); !errors.Is(err, errOneByOne) {
		t.Error(err)
	}
	if err := accept(10); err != nil {
		t.Error(err)
	}
}

// Anyone with write access to the database can write the head row.
func TestAForeignHeadIsVerified(t *testing.T) {
	for name, forge := range map[string]func(tx store.Tx, r *replica) error{
		"of an entry that is not there": func(tx store.Tx, _ *replica) error {
			return tx.Put(headKey, link{sequence: 99, micros: 1}.encode())
		},
		"of another hash": func(tx store.Tx, _ *replica) error {
			head, err := readHead(tx)
			head.hash[0] ^= 1
			return errors.Join(err, tx.Put(headKey, head.encode()))
		},
		"of an entry that is not signed": func(tx store.Tx, _ *replica) error {
			e, err := readEntry(tx, 4)
			if err != nil {
				return err
			}
			e.Sequence, e.PreviousHash = 5, e.Hash
			core, err := e.canonical(nil, false)
			if err != nil {
				return err
			}
			sum, err := e.digest()
			return errors.Join(err, tx.Put(entryKey(5), encodeRow(core, make([]byte, 3309))),
				tx.Put(headKey, link{5, e.link().micros, sum}.encode()))
		},
		"of an earlier entry": func(tx store.Tx, _ *replica) error {
			e, err := readEntry(tx, 2)
			if err != nil {
				return err
			}
			return tx.Put(headKey, e.link().encode())
		},
	} {
		t.Run(name, func(t *testing.T) {
			replicas := newReplicas(t, 2)
			a, b := replicas[0], replicas[1]
			b.append(AuditRead, tenantA)
			a.append(AuditRead, tenantA)
			b.append(AuditRead, tenantA) // head at 4
			m := a.read().with(func(tx store.Tx) error { return forge(tx, a) })
			a.put(m)
			for _, r := range replicas {
				if err := r.tries(AuditRead, tenantA); err == nil {
					t.Error("it is gone on from")
				}
				_, _ = r.log.rollbacks.checkForRollback(t.Context())
				if err := r.log.HaltedBy(); err != nil {
					t.Error("what is damaged is taken for an older copy:", err)
				}
			}
		})
	}
}

// A step writes nothing if an older copy of the database and newer entries replaced the entries
// that it read, even if the checkpoint is unchanged.
func TestAStepOfAnotherHistoryIsNotWritten(t *testing.T) {
	r := newReplicas(t, 1)[0]
	if _, err := r.log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	older := r.read()
	for range 5 {
		r.append(AuditRead, tenantA)
	}
	slow, err := r.log.begin(t.Context())
	if err == nil {
		err = slow.read(t.Context(), r)
	}
	if err != nil {
		t.Fatal(err)
	}
	r.put(older)
	other := r.replica(t, r.log.signer)
	for range 9 {
		other.append(AuditRead, tenantA)
	}
	if c, err := r.log.step(t.Context()); err == nil {
		t.Errorf("a checkpoint is signed of what this process has seen otherwise: %+v", c)
	}
	c, err := slow.checkpoint(r.log.chain)
	if err != nil {
		t.Fatal(err)
	}
	signed := signedNote(t, &fixture{log: r.log}, c)
	if err := r.Update(t.Context(), func(tx store.Tx) error { return slow.write(tx, signed) }); !errors.Is(err, errOutrun) {
		t.Error(err)
	}
	r.verified(t)
}
