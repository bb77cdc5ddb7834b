package audit

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

func TestTheRunningLogIsVerifiedStepByStep(t *testing.T) {
	f := newFixture(t)
	if p := f.log.Proof(); p.Status != ProofVerifying || p.VerifiedTo != 0 {
		t.Fatal(p)
	}
	for _, n := range []int{20, 0, liveStep + 10} {
		f.fill(n)
		p, err := f.log.Verify(t.Context())
		head, err2 := f.log.chain.storedHead(t.Context())
		if err != nil || err2 != nil || p.Status != ProofVerified || p.VerifiedTo != head.sequence || p.Hash != head.previous() || !p.At.Equal(f.now()) {
			t.Fatal(p, err, err2)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	f.fill(1)
	before := f.log.Proof().VerifiedTo
	if p, err := f.log.Verify(ended); err != nil || p.Status != ProofVerifying || p.VerifiedTo != before {
		t.Fatal(p, err)
	}
	if p, err := f.log.Verify(t.Context()); err != nil || p.Status != ProofVerified || p.VerifiedTo != before+1 {
		t.Fatal(p, err)
	}
}

// A broken log stays broken until a full pass finds no fault.
func TestABrokenLogStaysBrokenUntilAFullPass(t *testing.T) {
	for name, damage := range map[string]func(tx store.Tx) error{
		"changed": func(tx store.Tx) error {
			row := get(tx, entryKey(7))
			row[100] ^= 1
			return tx.Put(entryKey(7), row)
		},
		"missing": func(tx store.Tx) error { return tx.Delete(entryKey(7)) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.fill(20)
			whole := copyStore(t, f.store)
			if err := f.store.Update(t.Context(), damage); err != nil {
				t.Fatal(err)
			}
			broken := func(p Proof, err error) {
				t.Helper()
				if err != nil || p.Status != ProofBroken || p.Broken == nil || p.Broken.Sequence != 7 || p.VerifiedTo >= 7 {
					t.Fatal(p, err)
				}
			}
			broken(f.log.Verify(t.Context()))
			err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Put(entryKey(7), get(memoryTx{whole}, entryKey(7))) })
			if err != nil {
				t.Fatal(err)
			}
			broken(f.log.Verify(t.Context()))
			broken(f.log.Proof(), nil)
			f.log.verifyAll(t.Context(), &progressKeeper{verifier: f.log.LiveVerifier, logger: slog.New(slog.DiscardHandler)})
			if p := f.log.Proof(); p.Status != ProofVerified || p.Broken != nil || p.VerifiedTo != 21 {
				t.Fatal(p)
			}
		})
	}
}

// A concurrent step does not overrule the fault that a full pass has found.
func TestAPassThatFindsDamageIsNotOverruled(t *testing.T) {
	f := newFixture(t)
	f.fill(20)
	var rows switched
	rows.Store(copyStore(t, f.store))
	synctest.Test(t, func(t *testing.T) {
		log := newParts(time.Now)
		_ = log.Use(t.Context(), &rows, f.log.signer, f.log.chain.chainID)
		if p, err := log.Verify(t.Context()); err != nil || p.Status != ProofVerified {
			t.Fatal(p, err)
		}
		rows.Store(rows.Load().with(func(tx store.Tx) error { return tx.Delete(entryKey(7)) }))
		log.LiveVerifier.turn <- struct{}{} // a step is under way and has passed the entry
		done := make(chan struct{})
		go func() {
			defer close(done)
			log.verifyAll(t.Context(), &progressKeeper{verifier: log.LiveVerifier, logger: slog.New(slog.DiscardHandler)})
		}()
		synctest.Wait() // the pass has found it
		log.noteProgress(log.LiveVerifier.v, true)
		<-log.LiveVerifier.turn
		<-done
		if p := log.Proof(); p.Status != ProofBroken || p.Broken == nil || p.Broken.Sequence != 7 {
			t.Errorf("%+v", p)
		}
	})
}

// switched is a store that a test replaces while it is read.
type switched struct{ atomic.Pointer[memory] }

func (s *switched) View(ctx context.Context, fn func(store.Reader) error) error {
	return s.Load().View(ctx, fn)
}

func (s *switched) Update(context.Context, func(store.Tx) error) error { return errors.ErrUnsupported }

func (s *switched) Ready(context.Context) error { return nil }

func (s *switched) Close() error { return nil }

// A full pass finds a change to entries that were already verified. The interval zero disables the
// verification.
func TestAllIsVerifiedNowAndThen(t *testing.T) {
	f := newFixture(t)
	f.fill(20)
	var rows switched
	rows.Store(copyStore(t, f.store))
	synctest.Test(t, func(t *testing.T) {
		log := newParts(time.Now)
		_ = log.Use(t.Context(), &rows, f.log.signer, f.log.chain.chainID)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			log.KeepVerified(ctx, time.Hour, slog.New(slog.DiscardHandler))
		}()
		time.Sleep(10 * time.Minute) // synctest clock
		if p := log.Proof(); p.Status != ProofVerified || p.VerifiedTo != 21 {
			t.Error(p)
		}
		rows.Store(rows.Load().with(func(tx store.Tx) error { return tx.Delete(entryKey(7)) }))
		time.Sleep(10 * time.Minute) // synctest clock
		if p := log.Proof(); p.Status != ProofVerified {
			t.Error("found before its time: ", p)
		}
		time.Sleep(time.Hour) // synctest clock
		if p := log.Proof(); p.Status != ProofBroken || p.Broken.Sequence != 7 {
			t.Error(p)
		}
		cancel()
		<-done
		log.KeepVerified(t.Context(), 0, slog.New(slog.DiscardHandler))
		if p, err := log.Verify(t.Context()); err != nil || p.Status != ProofDisabled {
			t.Error(p, err)
		}
	})
}
