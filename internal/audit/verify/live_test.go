package verify_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

func TestTheRunningLogIsVerifiedStepByStep(t *testing.T) {
	f := audittest.NewFixture(t)
	if p := f.Log.Proof(); p.Status != verify.ProofVerifying || p.VerifiedTo != 0 {
		t.Fatal(p)
	}
	for _, n := range []int{20, 0, verify.LiveStep + 10} {
		f.Fill(n)
		p, err := f.Log.Verify(t.Context())
		head, err2 := f.Log.Chain.StoredHead(t.Context())
		if err != nil || err2 != nil || p.Status != verify.ProofVerified || p.VerifiedTo != head.Sequence || p.Hash != head.PreviousHash() || !p.At.Equal(f.Now()) {
			t.Fatal(p, err, err2)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	f.Fill(1)
	before := f.Log.Proof().VerifiedTo
	if p, err := f.Log.Verify(ended); err != nil || p.Status != verify.ProofVerifying || p.VerifiedTo != before {
		t.Fatal(p, err)
	}
	if p, err := f.Log.Verify(t.Context()); err != nil || p.Status != verify.ProofVerified || p.VerifiedTo != before+1 {
		t.Fatal(p, err)
	}
}

// A broken log stays broken until a full pass finds no fault.
func TestABrokenLogStaysBrokenUntilAFullPass(t *testing.T) {
	for name, damage := range map[string]func(tx store.Tx) error{
		"changed": func(tx store.Tx) error {
			row := audittest.Get(tx, audit.EntryKey(7))
			row[100] ^= 1
			return tx.Put(audit.EntryKey(7), row)
		},
		"missing": func(tx store.Tx) error { return tx.Delete(audit.EntryKey(7)) },
	} {
		t.Run(name, func(t *testing.T) {
			f := audittest.NewFixture(t)
			f.Fill(20)
			whole := audittest.CopyStore(t, f.Store)
			if err := f.Store.Update(t.Context(), damage); err != nil {
				t.Fatal(err)
			}
			broken := func(p verify.Proof, err error) {
				t.Helper()
				if err != nil || p.Status != verify.ProofBroken || p.Broken == nil || p.Broken.Sequence != 7 || p.VerifiedTo >= 7 {
					t.Fatal(p, err)
				}
			}
			broken(f.Log.Verify(t.Context()))
			err := f.Store.Update(t.Context(), func(tx store.Tx) error {
				return tx.Put(audit.EntryKey(7), audittest.Get(whole.Tx(), audit.EntryKey(7)))
			})
			if err != nil {
				t.Fatal(err)
			}
			broken(f.Log.Verify(t.Context()))
			broken(f.Log.Proof(), nil)
			f.Log.VerifyAll(t.Context())
			if p := f.Log.Proof(); p.Status != verify.ProofVerified || p.Broken != nil || p.VerifiedTo != 21 {
				t.Fatal(p)
			}
		})
	}
}

// A concurrent step does not overrule the fault that a full pass has found.
func TestAPassThatFindsDamageIsNotOverruled(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20)
	var rows switched
	rows.Store(audittest.CopyStore(t, f.Store))
	synctest.Test(t, func(t *testing.T) {
		log := audittest.NewParts(time.Now)
		_ = log.Use(t.Context(), &rows, f.Log.Signer, f.Log.Chain.ChainID)
		if p, err := log.Verify(t.Context()); err != nil || p.Status != verify.ProofVerified {
			t.Fatal(p, err)
		}
		rows.Store(rows.Load().With(func(tx store.Tx) error { return tx.Delete(audit.EntryKey(7)) }))
		log.Lock() // a step is under way and has passed the entry
		done := make(chan struct{})
		go func() {
			defer close(done)
			log.VerifyAll(t.Context())
		}()
		synctest.Wait() // the pass has found it
		log.NoteProgress(log.Current())
		log.Unlock()
		<-done
		if p := log.Proof(); p.Status != verify.ProofBroken || p.Broken == nil || p.Broken.Sequence != 7 {
			t.Errorf("%+v", p)
		}
	})
}

// switched is a store that a test replaces while it is read.
type switched struct {
	atomic.Pointer[audittest.Memory]
}

func (s *switched) View(ctx context.Context, fn func(store.Reader) error) error {
	return s.Load().View(ctx, fn)
}

func (s *switched) Update(context.Context, func(store.Tx) error) error { return errors.ErrUnsupported }

func (s *switched) Ready(context.Context) error { return nil }

func (s *switched) Close() error { return nil }

// A full pass finds a change to entries that were already verified. The interval zero disables the
// verification.
func TestAllIsVerifiedNowAndThen(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20)
	var rows switched
	rows.Store(audittest.CopyStore(t, f.Store))
	synctest.Test(t, func(t *testing.T) {
		log := audittest.NewParts(time.Now)
		_ = log.Use(t.Context(), &rows, f.Log.Signer, f.Log.Chain.ChainID)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			log.KeepVerified(ctx, time.Hour, slog.New(slog.DiscardHandler))
		}()
		time.Sleep(10 * time.Minute) // synctest clock
		if p := log.Proof(); p.Status != verify.ProofVerified || p.VerifiedTo != 21 {
			t.Error(p)
		}
		rows.Store(rows.Load().With(func(tx store.Tx) error { return tx.Delete(audit.EntryKey(7)) }))
		time.Sleep(10 * time.Minute) // synctest clock
		if p := log.Proof(); p.Status != verify.ProofVerified {
			t.Error("found before its time: ", p)
		}
		time.Sleep(time.Hour) // synctest clock
		if p := log.Proof(); p.Status != verify.ProofBroken || p.Broken.Sequence != 7 {
			t.Error(p)
		}
		cancel()
		<-done
		log.KeepVerified(t.Context(), 0, slog.New(slog.DiscardHandler))
		if p, err := log.Verify(t.Context()); err != nil || p.Status != verify.ProofDisabled {
			t.Error(p, err)
		}
	})
}
