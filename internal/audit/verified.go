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

// The verification of a running log would begin anew with each process, and until
// it came to the end nothing could be said of the newest entries. So what it knows
// after an entry is kept, and the next process goes on behind that at once, while
// it verifies all of it beside. As bytes:
//
//	1 ‖ ML-DSA-65 signature (3309 bytes) ‖ u64 Unix microseconds ‖ JSON
//
// where the time is when the pass over all entries began that this rests on, and
// the JSON that of a base without what is not about the chain alone.
//
// The row is as good as what the former process remembered: an entry before it that
// is changed later is found by the next pass over all entries. One that is not
// signed with the log's key, is older than two such passes are apart, or is of an
// entry that the log does not have (any more), is as none.
const (
	verifiedVersion = 1
	verifiedContext = "latticekeep/audit-verified/v1"

	// What is verified is kept after so many entries, and after such a time.
	keepEntries = 1 << 16
	keepAfter   = time.Hour
)

// verified is what a verification knows, and when its pass over all entries began.
type verified struct {
	*Base
	since time.Time
}

// sign returns the bytes of what this log has verified.
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

// parseVerified reads what a process that had this log's key has verified.
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

// decodeVerified reads what is signed.
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

// resume has the verification go on behind what an earlier process has verified,
// and reports whether it does: not if the pass over all entries that this rests on
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
			return nil // the log is not the one that was verified, or begins later by now
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

// keptAs tells apart what was kept.
type keptAs struct {
	sequence uint64
	since    time.Time
}

// keepProgress keeps what is verified, if it is of least so many entries more than what was
// kept last, or rests on a later pass. Of a broken log nothing is kept, so that the
// next process does not take it for a good one before it has seen all of it.
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

// keepRow writes what is verified, unless another process has kept what is as good,
// or has found the log broken since this one kept something: then the row is missing,
// and is until a pass over all entries that began later.
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
			return err // another has kept something right now
		}
		return tx.Put(verifiedKey, row)
	})
}

// forgetVerified has the next process begin anew.
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

// progressKeeper keeps what is verified now and then.
type progressKeeper struct {
	verifier *LiveVerifier
	logger   *slog.Logger
	last     time.Time
	failed   bool
}

// keepNow keeps it when enough is new, or when it is called for.
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
