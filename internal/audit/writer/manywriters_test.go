package writer_test

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A commit that starts with an acceptance covers only what that acceptance names.
func TestAnAcceptanceIsNotOfMoreThanItKnows(t *testing.T) {
	r := audittest.NewReplicas(t, 1)[0]
	older := r.Read()
	for range 9 {
		r.Append(audit.AuditRead, audittest.TenantA)
	}
	r.Put(older)
	accept := func(to uint64) error {
		return r.Update(t.Context(), func(tx store.Tx) error {
			_, err := r.Log.AppendAcceptance(tx, audit.Event{Type: audit.RollbackAccepted, Outcome: audit.Success, Principal: audittest.Admin()}, &audit.RollbackError{LostFrom: 2, LostTo: to, Epoch: 1})
			return err
		})
	}
	if err := accept(5); !errors.Is(err, writer.ErrOneByOne) {
		t.Error(err)
	}
	if err := accept(10); err != nil {
		t.Error(err)
	}
}

// Anyone with write access to the database can write the head row.
func TestAForeignHeadIsVerified(t *testing.T) {
	for name, forge := range map[string]func(tx store.Tx, r *audittest.Replica) error{
		"of an entry that is not there": func(tx store.Tx, _ *audittest.Replica) error {
			return tx.Put(audit.HeadKey, audit.Position{Sequence: 99, Micros: 1}.Encode())
		},
		"of another hash": func(tx store.Tx, r *audittest.Replica) error {
			head, err := audit.ReadHead(tx)
			head.Hash[0] ^= 1
			return errors.Join(err, tx.Put(audit.HeadKey, head.Encode()))
		},
		"of an entry that is not signed": func(tx store.Tx, r *audittest.Replica) error {
			e, err := audit.ReadEntry(tx, 4)
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
			e, err := audit.ReadEntry(tx, 2)
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

// A step writes nothing if an older copy of the database and newer entries replaced the entries
// that it read, even if the checkpoint is unchanged.
func TestAStepOfAnotherHistoryIsNotWritten(t *testing.T) {
	r := audittest.NewReplicas(t, 1)[0]
	if _, err := r.Log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	older := r.Read()
	for range 5 {
		r.Append(audit.AuditRead, audittest.TenantA)
	}
	slow, err := r.Log.Begin(t.Context())
	if err == nil {
		err = slow.Read(t.Context(), r)
	}
	if err != nil {
		t.Fatal(err)
	}
	r.Put(older)
	other := r.Replica(t, r.Log.Signer)
	for range 9 {
		other.Append(audit.AuditRead, audittest.TenantA)
	}
	if c, err := r.Log.Step(t.Context()); err == nil {
		t.Errorf("a checkpoint is signed of what this process has seen otherwise: %+v", c)
	}
	c, err := slow.Checkpoint(r.Log.Chain)
	if err != nil {
		t.Fatal(err)
	}
	signed := audittest.SignedNote(t, &audittest.Fixture{Log: r.Log}, c)
	if err := r.Update(t.Context(), func(tx store.Tx) error { return slow.Write(tx, signed) }); !errors.Is(err, writer.ErrOutrun) {
		t.Error(err)
	}
	r.Verified(t)
}
