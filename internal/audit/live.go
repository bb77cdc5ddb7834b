package audit

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// States of a [Proof].
const (
	ProofVerified  = "verified"
	ProofVerifying = "verifying" // there are entries after VerifiedTo
	ProofBroken    = "broken"
	ProofDisabled  = "disabled"
)

// Proof states how far a running log is verified.
type Proof struct {
	Status     string
	VerifiedTo uint64    // all entries up to this sequence are sound
	Hash       string    // hash of the entry at VerifiedTo
	At         time.Time // time of that verification
	Broken     *Broken   // nil unless the status is broken
}

// LiveVerifier verifies a log that is in use. It checks only the entries. The rows derived from
// them are verified with the store at rest ([VerifyStore]).
type LiveVerifier struct {
	log *Log

	turn  chan struct{} // held while the verifier moves on
	v     *Verifier     // nil before the first step
	since time.Time     // start of the pass over all entries that v belongs to
	kept  keptAs        // the progress of v that is in the store

	mu    sync.Mutex
	proof Proof
}

// NewLiveVerifier returns the verifier of a log. It has verified nothing yet. A log has at most
// one.
func NewLiveVerifier(l *Log) *LiveVerifier {
	lv := &LiveVerifier{log: l, turn: make(chan struct{}, 1), proof: Proof{Status: ProofVerifying}}
	l.onAcceptance = lv.verifyAnew
	return lv
}

// liveStep is the number of entries that one step verifies before it lets others proceed.
const liveStep = 1024

// betweenSteps is the interval between verifications of new entries.
const betweenSteps = time.Minute

// Proof returns how far the log is verified. It reads nothing from the store.
func (lv *LiveVerifier) Proof() Proof {
	lv.mu.Lock()
	defer lv.mu.Unlock()
	return lv.proof
}

func (lv *LiveVerifier) setProof(change func(*Proof)) Proof {
	lv.mu.Lock()
	defer lv.mu.Unlock()
	change(&lv.proof)
	return lv.proof
}

// Verify continues the verification of the running log up to the current head. If ctx ends first,
// it returns the progress with the status verifying and no error. A broken log stays broken until a
// pass from the beginning finds no fault. Error: fault.Unavailable.
func (lv *LiveVerifier) Verify(ctx context.Context) (Proof, error) {
	for {
		p, done, err := lv.verifyStep(ctx)
		if done || err != nil || ctx.Err() != nil {
			return p, err
		}
	}
}

// verifyStep verifies some entries and reports whether none are left.
func (lv *LiveVerifier) verifyStep(ctx context.Context) (Proof, bool, error) {
	if p := lv.Proof(); p.Status == ProofDisabled || p.Status == ProofBroken {
		return p, true, nil
	}
	select {
	case lv.turn <- struct{}{}:
		defer func() { <-lv.turn }()
	case <-ctx.Done():
		return lv.setProof(func(p *Proof) { p.fallBehind() }), true, nil
	}
	if p := lv.Proof(); p.Status == ProofDisabled || p.Status == ProofBroken {
		return p, true, nil
	}
	if lv.v == nil {
		lv.since = lv.log.now()
	}
	v, done, err := lv.advance(ctx, lv.v)
	lv.v = v
	if err == nil {
		return lv.noteProgress(v, done), done, nil
	}
	if broken, ok := IsBroken(err); ok {
		return lv.noteBroken(broken), true, nil
	}
	p := lv.noteProgress(v, false)
	if ctx.Err() != nil {
		return p, true, nil
	}
	return p, true, fmt.Errorf("verifying the log: %w", err)
}

func (p *Proof) fallBehind() {
	if p.Status == ProofVerified {
		p.Status = ProofVerifying
	}
}

// noteProgress records how far a verifier has come.
func (lv *LiveVerifier) noteProgress(v *Verifier, done bool) Proof {
	return lv.setProof(func(p *Proof) {
		p.Status = ProofVerifying
		if done {
			p.Status = ProofVerified
		}
		if v != nil && v.head.sequence > 0 {
			p.VerifiedTo, p.Hash, p.At = v.head.sequence, v.hash, lv.log.now().UTC()
		}
		p.Broken = nil
	})
}

func (lv *LiveVerifier) noteBroken(b *Broken) Proof {
	return lv.setProof(func(p *Proof) {
		p.Status, p.Broken = ProofBroken, b
		if p.VerifiedTo >= b.Sequence {
			p.VerifiedTo, p.Hash = 0, ""
		}
	})
}

// advance verifies some entries after those that v has seen (nil: none), and reports whether it has
// reached the head. The caller continues with the returned verifier. It is nil if the verification
// must start again, for example because v's next entry is archived by now.
func (lv *LiveVerifier) advance(ctx context.Context, v *Verifier) (*Verifier, bool, error) {
	if v == nil {
		o := Options{PublicKey: lv.log.chain.key, entriesOnly: true, gentle: true}
		base, err := lv.log.chain.readBase(ctx)
		if err != nil {
			return nil, false, err
		}
		o.Base = base
		v = NewVerifier(o)
	}
	var head link
	var last uint64 // last sequence of this step
	var known Checkpoint
	gone, moved := false, false
	err := lv.log.chain.store.View(ctx, func(r store.Reader) (err error) {
		if head, err = readHead(r); err != nil {
			return err
		}
		if gone, moved, err = lv.lacksVerified(r, head, v); gone || err != nil {
			return err
		}
		// The follower reports a damaged checkpoint.
		if _, known, err = lv.log.chain.checkpointIn(r); err != nil && !damaged(err) {
			return err
		}
		last, err = stepTo(r, v.next(), head.sequence)
		return err
	})
	switch {
	case err != nil:
		return v, false, err
	case moved:
		return nil, false, nil // start again from the beginning
	case gone:
		from := min(v.head.sequence, head.sequence+1)
		return v, false, &Broken{from, fmt.Sprintf("the log was cut, or rewritten: it no longer has the entry at %d that was verified", v.head.sequence)}
	}
	if known.Sequence <= head.sequence && known.Size > v.tree.size && len(v.due) == 0 {
		v.expect(known, "the newest checkpoint")
	}
	if err := v.addRange(ctx, lv.log.chain.store, store.Range{From: entryKey(v.next()), To: entryKey(last + 1)}); err != nil && v.failed() == nil {
		_ = v.Wait()
		v.heal()
		return v, false, err // a failure to read: the entries read before it count
	}
	err = v.Wait()
	if _, broken := IsBroken(err); err != nil && !broken {
		v.heal()
		return v, false, err
	}
	if err == nil && v.head.sequence < last {
		err = &Broken{v.next(), fmt.Sprintf("the log was cut: its head is at %d", head.sequence)}
	}
	if err == nil && v.head.sequence == head.sequence && v.head != head {
		err = &Broken{v.head.sequence, "the head of the chain is not the last entry"}
	}
	if err == nil && v.head.sequence == head.sequence && known.Sequence > head.sequence {
		err = &Broken{v.next(), fmt.Sprintf("the log was cut: its newest checkpoint knows entries up to %d", known.Sequence)}
	}
	if broken, ok := IsBroken(err); ok {
		base, failed := lv.log.chain.readBase(ctx)
		if failed != nil {
			return v, false, failed
		}
		if base != nil && base.Sequence() >= broken.Sequence && base.Sequence() >= v.next() {
			return nil, false, nil // the entry was archived meanwhile
		}
	}
	return v, err == nil && v.head.sequence >= head.sequence, err
}

// lacksVerified reports whether the log no longer has the last verified entry, and whether a loss
// of entries was accepted since.
func (lv *LiveVerifier) lacksVerified(r store.Reader, head link, v *Verifier) (gone, accepted bool, err error) {
	if v.head.sequence == 0 || v.head == head {
		return false, false, nil
	}
	if v.head.sequence < head.sequence {
		has, err := lv.log.chain.has(r, v.head)
		if has || err != nil {
			return false, false, unlessDamaged(err)
		}
	}
	number, err := lv.log.chain.epochNow(r, head)
	return true, number > v.epochs[len(v.epochs)-1].number, err
}

// stepTo returns the last sequence of a step: that of the first entry at least liveStep further on,
// or the head if that comes first.
func stepTo(r store.Reader, from, head uint64) (uint64, error) {
	last := head
	err := r.Scan(store.Range{From: entryKey(from + liveStep), To: entryKey(head + 1)}, func(key, _ []byte) bool {
		last = sequenceOf(key[len(entryRange.From):])
		return false
	})
	return last, err
}

// KeepVerified verifies the entries of the running log until ctx ends. It verifies all of them,
// from the base of the archived entries, at the start and then once per `every`. It verifies new
// entries each minute. It takes at most half of one core. At the start, it first continues from the
// progress of an earlier process, if that belongs to a pass over all entries that began at most
// twice `every` ago. If `every` is zero, it verifies nothing and the status is disabled.
func (lv *LiveVerifier) KeepVerified(ctx context.Context, every time.Duration, logger *slog.Logger) {
	if every <= 0 {
		lv.setProof(func(p *Proof) { *p = Proof{Status: ProofDisabled} })
		return
	}
	k := &progressKeeper{verifier: lv, logger: logger, last: time.Now()}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastStep)
		defer cancel()
		k.keepNow(ctx, 1)
	}()
	began := time.Now()
	resumed, err := lv.resume(ctx, 2*every)
	if err != nil && ctx.Err() == nil {
		logger.Warn("the verification of the audit log begins again", "error", err)
	}
	lv.keepUp(ctx, k)
	if resumed {
		lv.verifyAll(ctx, k)
	}
	k.keepNow(ctx, 1)
	wait := time.NewTimer(min(every, betweenSteps))
	defer wait.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-wait.C:
		}
		if time.Since(began) >= every {
			began = time.Now()
			lv.verifyAll(ctx, k)
		}
		lv.keepUp(ctx, k)
		wait.Reset(min(max(0, every-time.Since(began)), betweenSteps))
	}
}

// verifyAnew makes the verification of a broken log start from the beginning. The log is a
// different one after a loss is accepted.
func (lv *LiveVerifier) verifyAnew(ctx context.Context) {
	select {
	case lv.turn <- struct{}{}:
		defer func() { <-lv.turn }()
	case <-ctx.Done():
		return
	}
	if lv.Proof().Status == ProofBroken {
		lv.v = nil
		lv.setProof(func(p *Proof) { p.Status, p.Broken = ProofVerifying, nil })
	}
}

// keepUp verifies the entries that were added since the last call.
func (lv *LiveVerifier) keepUp(ctx context.Context, k *progressKeeper) {
	before := lv.Proof().Status
	for ctx.Err() == nil {
		began := time.Now()
		p, done, err := lv.verifyStep(ctx)
		if err != nil && ctx.Err() == nil {
			k.logger.Warn("the audit log could not be verified further", "error", err)
		}
		if p.Status == ProofBroken && before != ProofBroken {
			k.logger.Error("the audit log does not hold: run latticekeep audit verify", "sequence", p.Broken.Sequence, "reason", p.Broken.Reason)
		}
		k.keepNow(ctx, keepEntries)
		if done || err != nil {
			return
		}
		rest(ctx, time.Since(began))
	}
}

// rest waits for d, so that others can use the core as long as the caller did.
func rest(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// verifyAll verifies all entries from the beginning, besides the verification of the newest ones.
// When it reaches the head, it replaces the verifier of the newest entries.
func (lv *LiveVerifier) verifyAll(ctx context.Context, k *progressKeeper) {
	before, kept := lv.Proof().Status, time.Now()
	var v *Verifier
	var since time.Time // start of the pass
	for ctx.Err() == nil {
		if time.Since(kept) >= betweenSteps {
			lv.keepUp(ctx, k) // the newest entries do not wait for the end of the pass
			kept = time.Now()
		}
		if v == nil {
			since = lv.log.now()
		}
		began := time.Now()
		next, done, err := lv.advance(ctx, v)
		v = next
		broken, ok := IsBroken(err)
		switch {
		case ok:
			lv.turn <- struct{}{} // otherwise a concurrent step could record the status verified afterwards
			lv.noteBroken(broken)
			<-lv.turn
			k.keepNow(ctx, 1)
			if before != ProofBroken {
				k.logger.Error("the audit log does not hold: run latticekeep audit verify", "sequence", broken.Sequence, "reason", broken.Reason)
			}
			return
		case err != nil && fault.Of(err) != fault.Unavailable:
			k.logger.Warn("the audit log could not be verified", "error", err)
			return
		case done:
			lv.turn <- struct{}{}
			lv.v, lv.since = v, since
			lv.noteProgress(v, true)
			<-lv.turn
			k.keepNow(ctx, 1)
			if before == ProofBroken {
				k.logger.Info("the audit log holds again")
			}
			return
		}
		rest(ctx, max(time.Since(began), time.Millisecond))
	}
}
