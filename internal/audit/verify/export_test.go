package verify

import (
	"context"
	"log/slog"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

const (
	LiveStep    = liveStep
	StretchSize = stretchSize
)

var ClosingPrefix = closingPrefix

// The options that only tests set.
func (o Options) WithLinksOnly(on bool) Options { o.linksOnly = on; return o }
func (o Options) WithEntriesOnly() Options      { o.entriesOnly = true; return o }

// WithCheck lets a test cache the results of signatures.
func (o Options) WithCheck(check func(audit.StoredEntry, func() bool) bool) Options {
	o.check = check
	return o
}

func (v *Verifier) Verified() uint64 { return v.entries }

func (lv *LiveVerifier) Current() *Verifier         { return lv.v }
func (lv *LiveVerifier) Since() time.Time           { return lv.since }
func (lv *LiveVerifier) SetSince(t time.Time)       { lv.since = t }
func (lv *LiveVerifier) Lock()                      { lv.turn <- struct{}{} }
func (lv *LiveVerifier) Unlock()                    { <-lv.turn }
func (lv *LiveVerifier) NoteBroken(b *audit.Broken) { lv.noteBroken(b) }
func (lv *LiveVerifier) NoteProgress(v *Verifier)   { lv.noteProgress(v, true) }

func (lv *LiveVerifier) VerifyAll(ctx context.Context) {
	lv.verifyAll(ctx, &progressKeeper{verifier: lv, logger: slog.New(slog.DiscardHandler)})
}

func (lv *LiveVerifier) KeepProgress(ctx context.Context, least uint64) error {
	return lv.keepProgress(ctx, least)
}

func (lv *LiveVerifier) Resume(ctx context.Context, most time.Duration) (bool, error) {
	return lv.resume(ctx, most)
}

type Progress = verified

func NewProgress(b *audit.Base, since time.Time) Progress { return verified{Base: b, since: since} }

func (w *verified) SetSince(t time.Time) { w.since = t }
func (w verified) Since() time.Time      { return w.since }
func (w verified) Sign(key *dualsig.PrivateKey) ([]byte, error) {
	return w.sign(func(b []byte) ([]byte, error) { return key.Sign(audit.VerifiedContext, b) })
}

func ParseVerified(row []byte, chainID string, key *dualsig.PublicKey) (Progress, error) {
	return parseVerified(row, chainID, key)
}

func DecodeVerified(since, text []byte, chainID string, key *dualsig.PublicKey) (Progress, error) {
	return decodeVerified(since, text, chainID, key)
}

// Tenant checks one tenant's part of the chain. The entries are as a tenant reads them from
// the API, oldest first.
func Tenant(entries []audit.Entry, o Options) (Report, error) {
	o.Tenant = true
	v := NewVerifier(o)
	for i := range entries {
		if err := v.Add(&entries[i]); err != nil {
			break
		}
	}
	report, err := v.Finish()
	if err == nil {
		err = v.named()
	}
	if err != nil {
		return Report{}, err
	}
	return report, nil
}
