package verify

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
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
	VerifiedTo uint64        // all entries up to this sequence are sound
	Hash       string        // hash of the entry at VerifiedTo
	At         time.Time     // time of that verification
	Broken     *audit.Broken // nil unless the status is broken
}

// LiveVerifier verifies a log that is in use. It checks only the entries. The rows derived from
// them are verified with the store at rest ([Store]).
type LiveVerifier struct {
	log *writer.Log

	turn  chan struct{} // held while the verifier moves on
	v     *Verifier     // nil before the first step
	since time.Time     // start of the pass over all entries that v belongs to
	kept  keptAs        // the progress of v that is in the store

	mu    sync.Mutex
	proof Proof
}

// NewLiveVerifier returns the verifier of a log. It has verified nothing yet. A log has at most
// one.
func NewLiveVerifier(l *writer.Log) *LiveVerifier {
	lv := &LiveVerifier{log: l, turn: make(chan struct{}, 1), proof: Proof{Status: ProofVerifying}}
	l.OnAcceptance = lv.verifyAnew
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
		lv.since = lv.log.Now()
	}
	v, done, err := lv.advance(ctx, lv.v)
	lv.v = v
	if err == nil {
		return lv.noteProgress(v, done), done, nil
	}
	if broken, ok := audit.IsBroken(err); ok {
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
		if v != nil && v.Head.Sequence > 0 {
			p.VerifiedTo, p.Hash, p.At = v.Head.Sequence, v.Hash, lv.log.Now().UTC()
		}
		p.Broken = nil
	})
}

func (lv *LiveVerifier) noteBroken(b *audit.Broken) Proof {
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
		o := Options{PublicKey: lv.log.Chain.Key, entriesOnly: true, Gentle: true}
		base, err := lv.log.Chain.LoadBase(ctx, audit.TenantsList)
		if err != nil {
			return nil, false, err
		}
		o.Base = base
		v = NewVerifier(o)
	}
	var head audit.Position
	var last uint64 // last sequence of this step
	var known audit.Checkpoint
	gone, moved := false, false
	err := lv.log.Chain.Store.View(ctx, func(r store.Reader) (err error) {
		if head, err = audit.ReadHead(r); err != nil {
			return err
		}
		if gone, moved, err = lv.lacksVerified(r, head, v); gone || err != nil {
			return err
		}
		// The follower reports a damaged checkpoint.
		if _, known, err = lv.log.Chain.ReadCheckpoint(r); err != nil && !audit.IsDamage(err) {
			return err
		}
		last, err = stepTo(r, v.Next(), head.Sequence)
		return err
	})
	switch {
	case err != nil:
		return v, false, err
	case moved:
		return nil, false, nil // start again from the beginning
	case gone:
		from := min(v.Head.Sequence, head.Sequence+1)
		return v, false, &audit.Broken{Sequence: from, Reason: fmt.Sprintf("the log was cut, or rewritten: it no longer has the entry at %d that was verified", v.Head.Sequence)}
	}
	if known.Sequence <= head.Sequence && known.Size > v.Tree.Size && len(v.due) == 0 {
		v.expect(known, "the newest checkpoint")
	}
	if err := v.AddRange(ctx, lv.log.Chain.Store, store.Range{From: audit.EntryKey(v.Next()), To: audit.EntryKey(last + 1)}); err != nil && v.failed() == nil {
		_ = v.Wait()
		v.heal()
		return v, false, err // a failure to read: the entries read before it count
	}
	err = v.Wait()
	if _, broken := audit.IsBroken(err); err != nil && !broken {
		v.heal()
		return v, false, err
	}
	if err == nil && v.Head.Sequence < last {
		err = &audit.Broken{Sequence: v.Next(), Reason: fmt.Sprintf("the log was cut: its head is at %d", head.Sequence)}
	}
	if err == nil && v.Head.Sequence == head.Sequence && v.Head != head {
		err = &audit.Broken{Sequence: v.Head.Sequence, Reason: "the head of the chain is not the last entry"}
	}
	if err == nil && v.Head.Sequence == head.Sequence && known.Sequence > head.Sequence {
		err = &audit.Broken{Sequence: v.Next(), Reason: fmt.Sprintf("the log was cut: its newest checkpoint knows entries up to %d", known.Sequence)}
	}
	if broken, ok := audit.IsBroken(err); ok {
		base, failed := lv.log.Chain.ReadBase(ctx)
		if failed != nil {
			return v, false, failed
		}
		if base != nil && base.Sequence() >= broken.Sequence && base.Sequence() >= v.Next() {
			return nil, false, nil // the entry was archived meanwhile
		}
	}
	return v, err == nil && v.Head.Sequence >= head.Sequence, err
}

// lacksVerified reports whether the log no longer has the last verified entry, and whether a loss
// of entries was accepted since.
func (lv *LiveVerifier) lacksVerified(r store.Reader, head audit.Position, v *Verifier) (gone, accepted bool, err error) {
	if v.Head.Sequence == 0 || v.Head == head {
		return false, false, nil
	}
	if v.Head.Sequence < head.Sequence {
		has, err := lv.log.Chain.HasEntry(r, v.Head)
		if has || err != nil {
			return false, false, audit.IgnoreDamagedRows(err)
		}
	}
	number, err := lv.log.Chain.CurrentEpoch(r, head)
	return true, number > v.Epochs[len(v.Epochs)-1].Number, err
}

// stepTo returns the last sequence of a step: that of the first entry at least liveStep further on,
// or the head if that comes first.
func stepTo(r store.Reader, from, head uint64) (uint64, error) {
	last := head
	err := entries.Scan(r, store.Range{From: audit.EntryKey(from + liveStep), To: audit.EntryKey(head + 1)}, func(key, _ []byte) bool {
		last = audit.SequenceOf(key[len(audit.EntryRange.From):])
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
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writer.LastStep)
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
			since = lv.log.Now()
		}
		began := time.Now()
		next, done, err := lv.advance(ctx, v)
		v = next
		broken, ok := audit.IsBroken(err)
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

// Without this row, each process would begin the verification of the running log anew, and could
// state nothing about the newest entries before its end. So a process keeps its progress. The next
// process continues from there at once, and then verifies all entries besides. Encoded:
//
//	1 ‖ ML-DSA-65 signature (3309 bytes) ‖ u64 Unix microseconds ‖ JSON
//
// The time is the start of the pass over all entries that the progress belongs to. The JSON is that
// of a base, without the parts that are not about the chain itself.
//
// The row is as good as the memory of the process that wrote it: if an earlier entry is changed
// later, the next pass over all entries finds that. A process ignores a row that is not signed with
// the log's key, whose pass began more than two intervals ago, or whose last entry the log does not
// have.
const (
	verifiedVersion = 1

	// Progress is kept after this many entries, and after this time.
	keepEntries = 1 << 16
	keepAfter   = time.Hour
)

// verified is the state of a verification, with the start of its pass over all entries.
type verified struct {
	*audit.Base
	since time.Time
}

// sign returns the signed bytes of the verification's progress.
func (w verified) sign(sign func(message []byte) ([]byte, error)) ([]byte, error) {
	s := w.History
	s.Credentials, s.APIKeys, s.Namespaces, s.Kept = nil, nil, nil, nil
	text, err := (&audit.Base{History: s}).JSON()
	if err != nil {
		return nil, fmt.Errorf("encoding what is verified: %w", err)
	}
	since := binary.BigEndian.AppendUint64(nil, uint64(w.since.UnixMicro()))
	signature, err := sign(frame.Join(audit.VerifiedContext, since, text))
	if err != nil {
		return nil, fmt.Errorf("signing what is verified: %w", err)
	}
	return slices.Concat([]byte{verifiedVersion}, signature, since, text), nil
}

var errNotVerified = errors.New("what is kept of the verification is not signed with the log's key, or of another log")

// parseVerified parses the progress of a process that had this log's key.
func parseVerified(row []byte, chainID string, key *dualsig.PublicKey) (verified, error) {
	const head = 1 + dualsig.SignatureSize
	if len(row) < head+8 || row[0] != verifiedVersion {
		return verified{}, errNotVerified
	}
	signature, since, text := row[1:head], row[head:head+8], row[head+8:]
	if !key.Verify(audit.VerifiedContext, frame.Join(audit.VerifiedContext, since, text), signature) {
		return verified{}, errNotVerified
	}
	return decodeVerified(since, text, chainID, key)
}

// decodeVerified decodes the signed part.
func decodeVerified(since, text []byte, chainID string, key *dualsig.PublicKey) (verified, error) {
	var j audit.BaseJSON
	if err := json.Unmarshal(text, &j, json.RejectUnknownMembers(true)); err != nil {
		return verified{}, errNotVerified
	}
	b, err := j.Base()
	if err != nil || b.ChainID != chainID || b.KeyID != key.ID() {
		return verified{}, errNotVerified
	}
	return verified{b, time.UnixMicro(int64(binary.BigEndian.Uint64(since))).UTC()}, nil
}

// resume continues the verification after the last entry that an earlier process has verified. It
// reports whether it does. It does not if the pass over all entries that the progress belongs to
// began longer ago than most.
func (lv *LiveVerifier) resume(ctx context.Context, most time.Duration) (bool, error) {
	select {
	case lv.turn <- struct{}{}:
		defer func() { <-lv.turn }()
	case <-ctx.Done():
		return false, nil
	}
	var kept verified
	err := lv.log.Chain.Store.View(ctx, func(r store.Reader) error {
		row, err := r.Get(audit.VerifiedKey)
		if err != nil || row == nil {
			return err
		}
		w, err := parseVerified(row, lv.log.Chain.ChainID, lv.log.Chain.Key)
		if err != nil {
			return err
		}
		if age := lv.log.Now().Sub(w.since); age < 0 || age > most {
			return nil
		}
		head, err := audit.ReadHead(r)
		if err != nil || head.Sequence < w.Sequence() {
			return err
		}
		e, err := entries.Read(r, w.Sequence())
		if audit.IsDamage(err) || fault.Of(err) == fault.NotFound || err == nil && e.Position() != w.Head {
			return nil // the log is another one than the verified one, or its oldest entries were archived since
		}
		kept = w
		return err
	})
	if err != nil || kept.Base == nil || lv.v != nil && lv.v.Head.Sequence >= kept.Sequence() {
		return false, err
	}
	lv.v = NewVerifier(Options{PublicKey: lv.log.Chain.Key, Base: kept.Base, entriesOnly: true, Gentle: true})
	lv.since, lv.kept = kept.since, keptAs{kept.Sequence(), kept.since}
	return true, nil
}

// keptAs identifies progress that was kept.
type keptAs struct {
	sequence uint64
	since    time.Time
}

// keepProgress keeps the progress if it belongs to a later pass than the kept progress, or covers
// at least `least` more entries. For a broken log, it keeps nothing and deletes the row, so the
// next process checks all entries before it reports the log as sound.
func (lv *LiveVerifier) keepProgress(ctx context.Context, least uint64) error {
	select {
	case lv.turn <- struct{}{}:
		defer func() { <-lv.turn }()
	case <-ctx.Done():
		return nil
	}
	if lv.Proof().Status == ProofBroken {
		return lv.forgetVerified(ctx)
	}
	v := lv.v
	if v == nil || v.Head.Sequence == 0 || lv.log.Detector.HaltedBy() != nil {
		return nil
	}
	now := keptAs{v.Head.Sequence, lv.since}
	if now.since.Equal(lv.kept.since) && now.sequence < lv.kept.sequence+max(least, 1) {
		return nil
	}
	b, err := v.Base()
	if err != nil {
		return fmt.Errorf("keeping what is verified: %w", err)
	}
	row, err := verified{b, now.since}.sign(lv.log.SignVerified)
	if err == nil {
		err = lv.keepRow(ctx, now, row)
	}
	if err != nil {
		return fmt.Errorf("keeping what is verified: %w", err)
	}
	lv.kept = now
	return nil
}

// keepRow writes the progress, unless another process has kept equal or better progress. It writes
// nothing either if the row is missing although this process has kept one: another process then
// found the log broken. The row stays missing until a pass over all entries that began later.
func (lv *LiveVerifier) keepRow(ctx context.Context, now keptAs, row []byte) error {
	var before []byte
	err := lv.log.Chain.Store.View(ctx, func(r store.Reader) error {
		b, err := r.Get(audit.VerifiedKey)
		before = bytes.Clone(b)
		return err
	})
	if err != nil {
		return err
	}
	if before == nil && lv.kept.sequence > 0 && now.since.Equal(lv.kept.since) {
		return nil
	}
	theirs, err := parseVerified(before, lv.log.Chain.ChainID, lv.log.Chain.Key)
	if err == nil && !theirs.since.Before(now.since.Truncate(time.Microsecond)) && theirs.Sequence() >= now.sequence {
		return nil
	}
	return lv.log.Chain.Store.Update(ctx, func(tx store.Tx) error {
		if b, err := tx.Get(audit.VerifiedKey); err != nil || !bytes.Equal(b, before) {
			return err // another process has kept its progress just now
		}
		return tx.Put(audit.VerifiedKey, row)
	})
}

// forgetVerified deletes the kept progress, so the next process begins at the start.
func (lv *LiveVerifier) forgetVerified(ctx context.Context) error {
	lv.kept = keptAs{}
	found := false
	err := lv.log.Chain.Store.View(ctx, func(r store.Reader) error {
		row, err := r.Get(audit.VerifiedKey)
		found = row != nil
		return err
	})
	if err == nil && found {
		err = lv.log.Chain.Store.Update(ctx, func(tx store.Tx) error { return tx.Delete(audit.VerifiedKey) })
	}
	if err != nil {
		return fmt.Errorf("forgetting what was verified before the log was broken: %w", err)
	}
	return nil
}

// progressKeeper keeps the progress of a verification from time to time.
type progressKeeper struct {
	verifier *LiveVerifier
	logger   *slog.Logger
	last     time.Time
	failed   bool
}

// keepNow keeps the progress if at least `least` entries are new, or if keepAfter has passed.
func (k *progressKeeper) keepNow(ctx context.Context, least uint64) {
	if time.Since(k.last) >= keepAfter {
		least = 1
	}
	err := k.verifier.keepProgress(ctx, least)
	if err != nil && !k.failed && ctx.Err() == nil {
		k.logger.Warn("what is verified of the audit log cannot be kept: a start now would begin again", "error", err)
	}
	if k.failed = err != nil; !k.failed && least <= 1 {
		k.last = time.Now()
	}
}
