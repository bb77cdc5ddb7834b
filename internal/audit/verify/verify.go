// Package verify verifies the log: a store, an export, an archive, a tenant's part of an export,
// and the log of a running service. It trusts the log's key and nothing else that it reads.
package verify

import (
	"bytes"
	"context"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Options configures a verification.
type Options struct {
	// Tenant verifies one tenant's part of the chain by its own links. Entries of other tenants are
	// then a fault.
	Tenant bool
	// PublicKey is the log's key. If nil, the verification takes the key that the first entry or
	// the base names.
	PublicKey *dualsig.PublicKey
	// Fingerprint identifies the chain, as [audit.Fingerprint] computes it. If empty, any log is
	// accepted.
	Fingerprint string
	// Since is an older checkpoint of the log that was kept elsewhere: a signed note or its text
	// alone ([audit.ParseKept]). The log must contain everything that the checkpoint covers.
	Since []byte
	// From and To are the first and the last sequence to verify; zero means no bound. A range that
	// begins after the first entry needs PublicKey.
	From, To uint64
	// Unclosed accepts the export of a tenant without its closing line. The caller then knows from
	// elsewhere where the export is to end.
	Unclosed bool
	// Base is the state that the verification continues from; nil means the beginning of the log.
	// [Store] ignores it and reads the base from the store.
	Base *audit.Base
	// Entry is called for each entry that fits the chain, one after another; nil: not called.
	Entry func()

	linksOnly   bool                                               // skips signatures, so a benchmark can measure their cost
	entriesOnly bool                                               // replays nothing and verifies only the chain
	Gentle      bool                                               // uses one core, for a log that is in use
	check       func(s audit.StoredEntry, verify func() bool) bool // lets a test cache the results of signatures
}

// Report is the result of a verification that found no fault.
type Report struct {
	From        uint64 // first sequence that was checked
	Entries     uint64 // number of entries that were checked
	Tenant      string // tenant of a tenant's part; empty for a whole chain
	Sequence    uint64 // sequence of the last entry
	Hash        string // hash of the last entry
	ChainID     string // empty for a range that does not begin with the first entry
	Fingerprint string // empty in the same case
	Pinned      bool   // a fingerprint or public key was given, and it matches this chain
	PublicKey   *dualsig.PublicKey
	// Size and Root describe the tree. They are zero if the verification began neither at the first
	// entry nor at a base.
	Size  int64
	Root  tlog.Hash
	Epoch uint64
	// Rollbacks are the accepted losses of entries.
	Rollbacks []audit.Rollback
	// Since is the older checkpoint that the log contains; nil if none was given.
	Since *audit.Checkpoint

	// These maps hold everything that a whole chain ever created. After a base, they lack what was
	// deleted or revoked before the base.
	Credentials map[audit.CredentialKey]audit.CredentialState
	APIKeys     map[audit.APIKeyName]audit.APIKeyState
	Namespaces  map[audit.NamespaceName]audit.NamespaceState
}

// Verifier checks entries in order, oldest first. It parses and hashes entries and checks their
// signatures on all cores, but links them in order. It reports the earliest fault.
type Verifier struct {
	options Options
	audit.History
	pipeline

	pinned  bool
	from    uint64 // first sequence that was checked
	entries uint64 // number of entries that were checked
	tenant  string // tenant of a tenant's part; empty for a whole chain

	due    []dueCheckpoint // checkpoints that the chain must match, nearest first
	since  *audit.Checkpoint
	links  func(it *Item)                 // called in order for each entry that fits the chain
	begun  func() error                   // called when chain and key are known
	older  func(c audit.Checkpoint) error // compares a checkpoint with the tree below the base
	opened bool
}

// NewVerifier returns a verifier that starts at the beginning of the log, or at the base in o.
func NewVerifier(o Options) *Verifier {
	v := &Verifier{options: o, History: audit.History{
		Tenants:     make(map[string]*audit.TenantState),
		Credentials: make(map[audit.CredentialKey]audit.CredentialState),
		APIKeys:     make(map[audit.APIKeyName]audit.APIKeyState),
		Namespaces:  make(map[audit.NamespaceName]audit.NamespaceState),
		Epochs:      []audit.Epoch{{Number: 1, First: 1}},
		IsComplete:  !o.Tenant && o.From <= 1,
		Hash:        audit.ZeroHash,
	}}
	v.init(o.Gentle)
	if o.Base != nil {
		v.History = o.Base.Clone()
	}
	switch {
	case o.PublicKey != nil:
		v.key.Store(o.PublicKey)
	case o.Base != nil:
		v.key.Store(v.Public)
	}
	return v
}

// Add adds the next entry. The caller must not change the entry until it is checked. Add returns
// the earliest fault known so far; [Verifier.Finish] returns the earliest fault of all.
func (v *Verifier) Add(e *audit.Entry) error { return v.add(Item{given: e}) }

// AddRange checks the entries in a range of the store's rows. It reads only the keys at which
// stretches begin; the pipeline reads the rows.
func (v *Verifier) AddRange(ctx context.Context, s store.Store, rng store.Range) error {
	view := func(do func(store.Reader) error) error { return s.View(ctx, do) }
	if err := v.submit(); err != nil {
		return err
	}
	var starts [][]byte
	for more := true; more; {
		starts = starts[:0]
		err := view(func(r store.Reader) (err error) {
			starts, more, err = stretchStarts(r, rng, starts)
			return err
		})
		if err != nil {
			return err
		}
		for i, from := range starts {
			to := rng.To
			if i+1 < len(starts) {
				to = starts[i+1]
			} else if more {
				rng.From = from
				break
			}
			b := newStretch()
			b.rows = &store.Range{From: from, To: to}
			v.start(b, view)
			if err := v.failed(); err != nil {
				return err
			}
		}
	}
	return nil
}

// stretchStarts appends the keys of the rows at which the stretches of a range begin. It reports
// whether the range may have more rows after the last stretch.
func stretchStarts(r store.Reader, rng store.Range, starts [][]byte) ([][]byte, bool, error) {
	for len(starts) < 64 {
		var first []byte
		err := entries.Scan(r, rng, func(key, _ []byte) bool {
			first = bytes.Clone(key)
			return false
		})
		if err != nil || first == nil {
			return starts, false, err
		}
		starts = append(starts, first)
		n := len(audit.EntryRange.From)
		if len(first) < n+8 || binary.BigEndian.Uint64(first[n:]) > audit.MaxInteger {
			return starts, false, nil // neither this row nor a later one is an entry
		}
		rng.From = audit.EntryKey(binary.BigEndian.Uint64(first[n:]) + stretchSize)
		if rng.To != nil && bytes.Compare(rng.From, rng.To) >= 0 {
			return starts, false, nil
		}
	}
	return starts, true, nil
}

// addLine checks the next line of an export.
func (v *Verifier) addLine(line []byte) error { return v.add(Item{line: line}) }

func (v *Verifier) add(it Item) error {
	if v.filling == nil {
		v.filling = newStretch()
	}
	v.filling.items = append(v.filling.items, it)
	if len(v.filling.items) == stretchSize {
		return v.submit()
	}
	return nil
}

func (v *Verifier) submit() error {
	if v.filling != nil {
		v.start(v.filling, nil)
		v.filling = nil
	}
	return v.failed()
}

// Wait returns after all added entries are checked. It returns the earliest fault.
func (v *Verifier) Wait() error {
	err := v.submit()
	if v.last != nil {
		<-v.last.done
		err = v.outcome()
	}
	return err
}

// Next returns the expected sequence of the next entry. An entry that accepts a rollback may have a
// higher one. Call it only after Wait, or while linking.
func (v *Verifier) Next() uint64 {
	if v.Head.Sequence == 0 && v.options.From > 1 {
		return v.options.From
	}
	return v.Head.Sequence + 1
}

// Finish checks the remaining entries and returns the report. A chain without entries is broken at
// 1, because every log begins with its first entry.
func (v *Verifier) Finish() (Report, error) {
	if err := v.Wait(); err != nil {
		return Report{}, err
	}
	if v.options.Base != nil {
		if err := v.open(nil); err != nil {
			return Report{}, err
		}
	}
	if v.Head.Sequence == 0 {
		return Report{}, &audit.Broken{Sequence: v.Next(), Reason: "there is no entry"}
	}
	for _, w := range v.due {
		return Report{}, &audit.Broken{Sequence: v.Next(), Reason: fmt.Sprintf("the log was cut: %s knows entries up to %d", w.what, w.Sequence)}
	}
	r := Report{
		From: v.from, Entries: v.entries, Tenant: v.tenant, Sequence: v.Head.Sequence, Hash: v.Hash,
		ChainID: v.ChainID, PublicKey: v.Public, Pinned: v.pinned, Rollbacks: v.Lost, Since: v.since,
	}
	if v.ChainID != "" {
		r.Fingerprint = audit.Fingerprint(v.ChainID, v.Public.Bytes())
	}
	if v.IsComplete {
		r.Size, r.Root, r.Epoch = v.Tree.Size, v.Tree.Root(), v.Epochs[len(v.Epochs)-1].Number
		r.Credentials, r.APIKeys, r.Namespaces = v.Credentials, v.APIKeys, v.Namespaces
	}
	return r, nil
}

// Checkpoint returns the checkpoint of the head. Call it only after Wait or while linking, and only
// for a chain that was verified from its beginning.
func (v *Verifier) Checkpoint() audit.Checkpoint {
	return audit.Checkpoint{
		ChainID: v.ChainID, Epoch: v.Epochs[len(v.Epochs)-1].Number, Size: v.Tree.Size, Root: v.Tree.Root(),
		Sequence: v.Head.Sequence, Hash: v.Head.Hash, Time: time.UnixMicro(v.Head.Micros).UTC(),
	}
}

// linkAll links the entries of a stretch up to the first one that does not fit. It is called for
// one stretch at a time, in order.
func (v *Verifier) linkAll(b *stretch) {
	for i := range b.items {
		if err := v.link(&b.items[i]); err != nil {
			if broken, ok := audit.IsBroken(err); ok {
				b.cut = broken
			} else {
				b.failure = err
			}
			b.items = b.items[:i]
			return
		}
		if v.options.Entry != nil {
			v.options.Entry()
		}
	}
}

// signatureHolds reports whether the signature of an entry verifies.
func (v *Verifier) signatureHolds(it *Item, key *dualsig.PublicKey) bool {
	switch {
	case v.options.linksOnly:
		return true
	case it.unsigned:
		return false
	case v.options.check != nil:
		return v.options.check(it.StoredEntry, func() bool { return it.Verify(key, &v.memo) })
	}
	return it.Verify(key, &v.memo)
}

// link checks everything but the signature, and replays the entry.
func (v *Verifier) link(it *Item) error {
	next := v.Next()
	if it.bad != nil {
		return &audit.Broken{Sequence: v.at(it, next), Reason: it.bad.Error()}
	}
	e := it.Entry
	if it.misplaced {
		return &audit.Broken{Sequence: v.at(it, next), Reason: "the entry is missing, or a row stands where none belongs"}
	}
	if err := v.open(it); err != nil {
		return err
	}
	jump, err := v.jump(e, next)
	switch {
	case err != nil:
		return err
	case !it.timed:
		return &audit.Broken{Sequence: e.Sequence, Reason: "the timestamp is malformed"}
	case !v.options.Tenant && !jump && e.Sequence != next && v.knowsPrevious():
		return &audit.Broken{Sequence: next, Reason: fmt.Sprintf("expected here, found %d: an entry is missing, repeated or moved", e.Sequence)}
	case e.Sequence <= v.Head.Sequence:
		return &audit.Broken{Sequence: next, Reason: fmt.Sprintf("expected a later entry, found %d: an entry is repeated or moved", e.Sequence)}
	case !v.options.Tenant && v.knowsPrevious() && e.PreviousHash != v.Hash:
		return &audit.Broken{Sequence: e.Sequence, Reason: "the previous hash is not that of the entry before"}
	case it.micros < v.Head.Micros:
		return &audit.Broken{Sequence: e.Sequence, Reason: "the timestamp is earlier than that of the entry before"}
	case e.KeyID != v.KeyID:
		return &audit.Broken{Sequence: e.Sequence, Reason: "the entry names another signing key than the chain"}
	}
	if err := v.linkTenant(it); err != nil {
		return err
	}
	if jump {
		if err := v.enter(e); err != nil {
			return err
		}
	}
	v.Head, v.Hash = audit.Position{Sequence: e.Sequence, Micros: it.micros, Hash: it.Hash}, e.Hash
	if v.entries++; v.from == 0 {
		v.from = e.Sequence
	}
	if v.IsComplete {
		if v.Tree.Add(it.Hash); v.links == nil {
			v.Tree.Filled = nil
		}
		if !v.options.entriesOnly {
			v.Replay(e)
		}
	}
	if err := v.passDue(); err != nil {
		return err
	}
	if v.links != nil {
		v.links(it)
	}
	return nil
}

// at returns the sequence to report for an item that is faulty. In a tenant's part, only the entry
// itself can name its sequence.
func (v *Verifier) at(it *Item, next uint64) uint64 {
	if v.options.Tenant && it.Entry != nil {
		return it.Entry.Sequence
	}
	return next
}

// knowsPrevious reports whether the verifier has seen the previous entry, or none exists.
func (v *Verifier) knowsPrevious() bool { return v.IsComplete || v.Head.Sequence > 0 }

func (v *Verifier) linkTenant(it *Item) error {
	e := it.Entry
	last := v.Tenants[e.TenantID]
	if last == nil {
		if v.options.Tenant && len(v.Tenants) > 0 {
			return &audit.Broken{Sequence: e.Sequence, Reason: "the entry belongs to another tenant"}
		}
		last = &audit.TenantState{Hash: audit.ZeroHash}
		if !v.IsComplete && !v.options.Tenant || v.options.Tenant && v.options.From > 1 {
			// The entries of this tenant before the range are unknown.
			last.Sequence, last.Hash = e.TenantSequence-1, e.TenantPreviousHash
		}
		v.Tenants[strings.Clone(e.TenantID)] = last // a clone, so the rest of the entry's text is not retained
	}
	if e.TenantSequence != last.Sequence+1 || e.TenantSequence == 0 {
		return &audit.Broken{Sequence: e.Sequence, Reason: fmt.Sprintf("the tenant's sequence is %d, expected %d: an entry of this tenant is missing, repeated or moved", e.TenantSequence, last.Sequence+1)}
	}
	if e.TenantPreviousHash != last.Hash {
		return &audit.Broken{Sequence: e.Sequence, Reason: "the previous hash is not that of the tenant's entry before"}
	}
	last.Sequence, last.Hash, last.Last = e.TenantSequence, e.Hash, audit.Position{Sequence: e.Sequence, Micros: it.micros, Hash: it.Hash}
	return nil
}

// jump reports whether the entry begins an epoch. Such an entry may skip exactly the sequences that
// it names as lost.
func (v *Verifier) jump(e *audit.Entry, next uint64) (bool, error) {
	if e.EventType != audit.RollbackAccepted || e.Outcome != audit.Success || v.options.Tenant {
		return false, nil
	}
	number, ok1 := audit.Decimal(e.Attributes[audit.AttributeEpoch])
	from, ok2 := audit.Decimal(e.Attributes[audit.AttributeLostFrom])
	to, ok3 := audit.Decimal(e.Attributes[audit.AttributeLostTo])
	switch {
	case !ok1 || !ok2 || !ok3 || to+1 != e.Sequence || from > e.Sequence:
		return false, &audit.Broken{Sequence: v.orAt(e, next), Reason: "the entry accepts a rollback, and does not say of which entries"}
	case !v.knowsPrevious():
		return true, nil
	case from != next:
		return false, &audit.Broken{Sequence: next, Reason: fmt.Sprintf("expected here, found %d: it accepts that entries were lost, but not this one", e.Sequence)}
	case v.IsComplete && number <= v.Epochs[len(v.Epochs)-1].Number, v.IsComplete && e.TenantID != string(authz.SystemTenant):
		return false, &audit.Broken{Sequence: next, Reason: "the entry accepts a rollback into an epoch that was before"}
	}
	return true, nil
}

func (v *Verifier) orAt(e *audit.Entry, next uint64) uint64 {
	if v.knowsPrevious() {
		return next
	}
	return e.Sequence
}

// enter begins the epoch of an accepted rollback. A due checkpoint of an earlier epoch covers
// entries that the rollback lost, so enter returns that as a fault.
func (v *Verifier) enter(e *audit.Entry) error {
	number, _ := audit.Decimal(e.Attributes[audit.AttributeEpoch])
	from, _ := audit.Decimal(e.Attributes[audit.AttributeLostFrom])
	for _, w := range v.due {
		if w.Epoch < number {
			return w.lostTo(from, e.Sequence)
		}
	}
	v.Epochs = append(v.Epochs, audit.Epoch{Number: number, First: e.Sequence, Size: v.Tree.Size})
	v.Lost = append(v.Lost, audit.Rollback{Epoch: number, LostFrom: from, LostTo: e.Sequence - 1, Receipt: audit.Receipt{Sequence: e.Sequence, Hash: e.Hash}})
	return nil
}

// open identifies the chain, from the base or from the first entry.
func (v *Verifier) open(it *Item) error {
	if v.opened {
		return nil
	}
	v.opened = true
	if v.options.Base == nil {
		if err := v.begin(it); err != nil {
			return err
		}
		v.key.Store(v.Public)
	} else if err := v.checkPins(1); err != nil {
		return err
	}
	if err := v.beginSince(); err != nil || v.begun == nil {
		return err
	}
	return v.begun()
}

// begin takes chain ID and key from the first entry and compares them with the pinned ones.
func (v *Verifier) begin(it *Item) error {
	e := it.Entry
	if v.options.Tenant {
		v.tenant = strings.Clone(e.TenantID)
	}
	if v.options.From > 1 {
		if !v.options.Tenant && e.Sequence != v.options.From {
			from, _ := audit.Decimal(e.Attributes[audit.AttributeLostFrom])
			if jump, err := v.jump(e, v.options.From); !jump || err != nil || from > v.options.From || e.Sequence < v.options.From {
				return &audit.Broken{Sequence: v.options.From, Reason: fmt.Sprintf("expected here, found %d: an entry is missing, repeated or moved", e.Sequence)}
			}
		}
		if v.options.PublicKey == nil {
			return errNoKey
		}
		v.Public, v.KeyID, v.pinned = v.options.PublicKey, v.options.PublicKey.ID(), true
		return nil
	}
	raw, ok := audit.DecodeBase64(e.Attributes[audit.AttributePublicKey])
	key, err := dualsig.ParsePublicKey(raw)
	// A whole log begins with CHAIN_STARTED. A log that was wiped and then written to begins with
	// another entry.
	begins := v.options.Tenant || (e.EventType == audit.ChainStarted && e.TenantID == string(authz.SystemTenant))
	if !ok || err != nil || !begins || e.Attributes[audit.AttributeChainID] == "" {
		first := e.Sequence
		if !v.options.Tenant {
			first = 1
		}
		return &audit.Broken{Sequence: first, Reason: "the first entry does not name a chain id and a public key: the beginning of the log is missing"}
	}
	v.ChainID, v.Public, v.KeyID = strings.Clone(e.Attributes[audit.AttributeChainID]), key, key.ID()
	return v.checkPins(e.Sequence)
}

var errNoKey = fault.New(fault.Invalid, "a range that does not begin with the first entry names no key: give the log's public key")

// checkPins compares chain and key with the pinned ones.
func (v *Verifier) checkPins(sequence uint64) error {
	if pin := v.options.Fingerprint; pin != "" {
		if subtle.ConstantTimeCompare([]byte(pin), []byte(audit.Fingerprint(v.ChainID, v.Public.Bytes()))) != 1 {
			return &audit.Broken{Sequence: sequence, Reason: "the chain's fingerprint is not the pinned one: this is another log"}
		}
		v.pinned = true
	}
	if pin := v.options.PublicKey; pin != nil {
		if pin.ID() != v.KeyID {
			return &audit.Broken{Sequence: sequence, Reason: "the chain's public key is not the given one: this is another log"}
		}
		v.pinned = true
	}
	return nil
}

// Base returns the state after the last entry. The chain must have been verified from its beginning
// or from a base.
func (v *Verifier) Base() (*audit.Base, error) {
	if err := v.Wait(); err != nil {
		return nil, err
	}
	if !v.IsComplete || v.Head.Sequence == 0 {
		return nil, errors.New("making a base: the beginning of the log was not verified")
	}
	s := v.History.Clone()
	// A row of something unknown counts as the same fault as a row of something deleted. So the
	// base omits deleted and revoked items, and does not grow with everything that ever existed.
	maps.DeleteFunc(s.Credentials, func(_ audit.CredentialKey, c audit.CredentialState) bool { return c.Deleted })
	maps.DeleteFunc(s.APIKeys, func(_ audit.APIKeyName, k audit.APIKeyState) bool { return k.Revoked })
	return &audit.Base{History: s}, nil
}

// dueCheckpoint is a checkpoint that the chain must match.
type dueCheckpoint struct {
	audit.Checkpoint
	what string // name of the checkpoint in messages
}

// expect adds a verified checkpoint that the chain must match.
func (v *Verifier) expect(c audit.Checkpoint, what string) {
	w := dueCheckpoint{c, what}
	i := 0
	for i < len(v.due) && v.due[i].Size <= c.Size {
		i++
	}
	v.due = append(v.due[:i:i], append([]dueCheckpoint{w}, v.due[i:]...)...)
}

// passDue compares the head with the checkpoints that are due at it.
func (v *Verifier) passDue() error {
	for len(v.due) > 0 && v.Tree.Size >= v.due[0].Size {
		w := v.due[0]
		v.due = v.due[1:]
		if !w.EqualIgnoringTime(v.Checkpoint()) {
			return w.forked()
		}
	}
	return nil
}

func (w dueCheckpoint) forked() *audit.Broken {
	return &audit.Broken{Sequence: w.Sequence, Reason: "the log is not the one that " + w.what + " is of: it was rewritten at this entry or before"}
}

func (w dueCheckpoint) lostTo(from, accepted uint64) *audit.Broken {
	return &audit.Broken{Sequence: from, Reason: fmt.Sprintf("%s is of epoch %d and knows entries up to %d: entries %d to %d are not in this log, they were lost by the rollback that entry %d accepted",
		w.what, w.Epoch, w.Sequence, from, w.Sequence, accepted)}
}

var (
	errSinceMalformed  = fault.New(fault.Invalid, "the older checkpoint is not a checkpoint of a latticekeep log: give the signed note as it was kept")
	errSinceUnverified = fault.New(fault.Invalid, "the older checkpoint is not signed with this log's key: it is of another log, or was altered")
	errSinceChain      = fault.New(fault.Invalid, "the older checkpoint is of another log")
	errSincePart       = fault.New(fault.Invalid, "a part of the log does not show what an older checkpoint knows: verify the whole log")
)

// beginSince parses the older checkpoint, verifies it with the log's key, and makes the chain match
// it.
func (v *Verifier) beginSince() error {
	if v.options.Since == nil {
		return nil
	}
	if !v.IsComplete {
		return errSincePart
	}
	c, _, err := audit.ParseKept(v.options.Since, v.Public)
	switch {
	case errors.Is(err, audit.ErrCheckpointMalformed):
		return errSinceMalformed
	case err != nil:
		return errSinceUnverified
	case c.ChainID != v.ChainID:
		return errSinceChain
	}
	v.since = &c
	switch {
	case c.Size > v.Tree.Size:
		v.expect(c, "the older checkpoint")
	case c.Size == v.Tree.Size:
		v.due = append(v.due, dueCheckpoint{c, "the older checkpoint"})
		return v.passDue()
	case v.older == nil:
		return errSincePart
	default:
		return v.older(c)
	}
	return nil
}
