package audit

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

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
	verifiedContext = "latticekeep/audit-verified/v1"

	// Progress is kept after this many entries, and after this time.
	keepEntries = 1 << 16
	keepAfter   = time.Hour
)

// verified is the state of a verification, with the start of its pass over all entries.
type verified struct {
	*Base
	since time.Time
}

// sign returns the signed bytes of the verification's progress.
func (w verified) sign(signer *dualsig.PrivateKey) ([]byte, error) {
	s := w.history
	s.credentials, s.apiKeys, s.namespaces, s.kept = nil, nil, nil, nil
	text, err := (&Base{s}).json()
	if err != nil {
		return nil, fmt.Errorf("encoding what is verified: %w", err)
	}
	since := binary.BigEndian.AppendUint64(nil, uint64(w.since.UnixMicro()))
	signature, err := signer.Sign(verifiedContext, frame.Join(verifiedContext, since, text))
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
	if !key.Verify(verifiedContext, frame.Join(verifiedContext, since, text), signature) {
		return verified{}, errNotVerified
	}
	return decodeVerified(since, text, chainID, key)
}

// decodeVerified decodes the signed part.
func decodeVerified(since, text []byte, chainID string, key *dualsig.PublicKey) (verified, error) {
	var j baseJSON
	if err := json.Unmarshal(text, &j, json.RejectUnknownMembers(true)); err != nil {
		return verified{}, errNotVerified
	}
	b, err := j.base()
	if err != nil || b.chainID != chainID || b.keyID != key.ID() {
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
	err := lv.log.chain.store.View(ctx, func(r store.Reader) error {
		row, err := r.Get(verifiedKey)
		if err != nil || row == nil {
			return err
		}
		w, err := parseVerified(row, lv.log.chain.chainID, lv.log.chain.key)
		if err != nil {
			return err
		}
		if age := lv.log.now().Sub(w.since); age < 0 || age > most {
			return nil
		}
		head, err := readHead(r)
		if err != nil || head.sequence < w.Sequence() {
			return err
		}
		e, err := readEntry(r, w.Sequence())
		if damaged(err) || fault.Of(err) == fault.NotFound || err == nil && e.link() != w.head {
			return nil // the log is another one than the verified one, or its oldest entries were archived since
		}
		kept = w
		return err
	})
	if err != nil || kept.Base == nil || lv.v != nil && lv.v.head.sequence >= kept.Sequence() {
		return false, err
	}
	lv.v = NewVerifier(Options{PublicKey: lv.log.chain.key, Base: kept.Base, entriesOnly: true, gentle: true})
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
	if v == nil || v.head.sequence == 0 || lv.log.rollbacks.HaltedBy() != nil {
		return nil
	}
	now := keptAs{v.head.sequence, lv.since}
	if now.since.Equal(lv.kept.since) && now.sequence < lv.kept.sequence+max(least, 1) {
		return nil
	}
	b, err := v.Base()
	if err != nil {
		return fmt.Errorf("keeping what is verified: %w", err)
	}
	row, err := verified{b, now.since}.sign(lv.log.signer)
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
	err := lv.log.chain.store.View(ctx, func(r store.Reader) error {
		b, err := r.Get(verifiedKey)
		before = bytes.Clone(b)
		return err
	})
	if err != nil {
		return err
	}
	if before == nil && lv.kept.sequence > 0 && now.since.Equal(lv.kept.since) {
		return nil
	}
	theirs, err := parseVerified(before, lv.log.chain.chainID, lv.log.chain.key)
	if err == nil && !theirs.since.Before(now.since.Truncate(time.Microsecond)) && theirs.Sequence() >= now.sequence {
		return nil
	}
	return lv.log.chain.store.Update(ctx, func(tx store.Tx) error {
		if b, err := tx.Get(verifiedKey); err != nil || !bytes.Equal(b, before) {
			return err // another process has kept its progress just now
		}
		return tx.Put(verifiedKey, row)
	})
}

// forgetVerified deletes the kept progress, so the next process begins at the start.
func (lv *LiveVerifier) forgetVerified(ctx context.Context) error {
	lv.kept = keptAs{}
	found := false
	err := lv.log.chain.store.View(ctx, func(r store.Reader) error {
		row, err := r.Get(verifiedKey)
		found = row != nil
		return err
	})
	if err == nil && found {
		err = lv.log.chain.store.Update(ctx, func(tx store.Tx) error { return tx.Delete(verifiedKey) })
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
