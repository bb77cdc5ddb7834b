package audit

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
	// Fingerprint identifies the chain, as [Fingerprint] computes it. If empty, any log is
	// accepted.
	Fingerprint string
	// Since is an older checkpoint of the log that was kept elsewhere: a signed note or its text
	// alone ([ParseKept]). The log must contain everything that the checkpoint covers.
	Since []byte
	// From and To are the first and the last sequence to verify; zero means no bound. A range that
	// begins after the first entry needs PublicKey.
	From, To uint64
	// Base is the state that the verification continues from; nil means the beginning of the log.
	// [VerifyStore] ignores it and reads the base from the store.
	Base *Base

	linksOnly   bool                                    // skips signatures, so a benchmark can measure their cost
	entriesOnly bool                                    // replays nothing and verifies only the chain
	gentle      bool                                    // uses one core, for a log that is in use
	check       func(s stored, verify func() bool) bool // lets a test cache the results of signatures
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
	Rollbacks []Rollback
	// Since is the older checkpoint that the log contains; nil if none was given.
	Since *Checkpoint

	// These maps hold everything that a whole chain ever created. After a base, they lack what was
	// deleted or revoked before the base.
	Credentials map[CredentialKey]State
	APIKeys     map[APIKeyName]APIKeyState
	Namespaces  map[NamespaceName]NamespaceState
}

// Verifier checks entries in order, oldest first. It parses and hashes entries and checks their
// signatures on all cores, but links them in order. It reports the earliest fault.
type Verifier struct {
	options Options
	history
	pipeline

	pinned  bool
	from    uint64 // first sequence that was checked
	entries uint64 // number of entries that were checked
	tenant  string // tenant of a tenant's part; empty for a whole chain

	due    []dueCheckpoint // checkpoints that the chain must match, nearest first
	since  *Checkpoint
	links  func(it *item)           // called in order for each entry that fits the chain
	begun  func() error             // called when chain and key are known
	older  func(c Checkpoint) error // compares a checkpoint with the tree below the base
	opened bool
}

// NewVerifier returns a verifier that starts at the beginning of the log, or at the base in o.
func NewVerifier(o Options) *Verifier {
	v := &Verifier{options: o, history: history{
		tenants:     make(map[string]*tenantState),
		credentials: make(map[CredentialKey]State),
		apiKeys:     make(map[APIKeyName]APIKeyState),
		namespaces:  make(map[NamespaceName]NamespaceState),
		epochs:      []epoch{{number: 1, first: 1}},
		whole:       !o.Tenant && o.From <= 1,
		hash:        zeroHash,
	}}
	v.init(o.gentle)
	if o.Base != nil {
		v.history = o.Base.clone()
	}
	switch {
	case o.PublicKey != nil:
		v.key.Store(o.PublicKey)
	case o.Base != nil:
		v.key.Store(v.public)
	}
	return v
}

// Add adds the next entry. The caller must not change the entry until it is checked. Add returns
// the earliest fault known so far; [Verifier.Finish] returns the earliest fault of all.
func (v *Verifier) Add(e *Entry) error { return v.add(item{given: e}) }

// addRange checks the entries in a range of the store's rows. It reads only the keys at which
// stretches begin; the pipeline reads the rows.
func (v *Verifier) addRange(ctx context.Context, s store.Store, rng store.Range) error {
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
		err := r.Scan(rng, func(key, _ []byte) bool {
			first = bytes.Clone(key)
			return false
		})
		if err != nil || first == nil {
			return starts, false, err
		}
		starts = append(starts, first)
		n := len(entryRange.From)
		if len(first) < n+8 || binary.BigEndian.Uint64(first[n:]) > maxInteger {
			return starts, false, nil // neither this row nor a later one is an entry
		}
		rng.From = entryKey(binary.BigEndian.Uint64(first[n:]) + stretchSize)
		if rng.To != nil && bytes.Compare(rng.From, rng.To) >= 0 {
			return starts, false, nil
		}
	}
	return starts, true, nil
}

// addLine checks the next line of an export.
func (v *Verifier) addLine(line []byte) error { return v.add(item{line: line}) }

func (v *Verifier) add(it item) error {
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

// next returns the expected sequence of the next entry. An entry that accepts a rollback may have a
// higher one. Call it only after Wait, or while linking.
func (v *Verifier) next() uint64 {
	if v.head.sequence == 0 && v.options.From > 1 {
		return v.options.From
	}
	return v.head.sequence + 1
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
	if v.head.sequence == 0 {
		return Report{}, &Broken{v.next(), "there is no entry"}
	}
	for _, w := range v.due {
		return Report{}, &Broken{v.next(), fmt.Sprintf("the log was cut: %s knows entries up to %d", w.what, w.Sequence)}
	}
	r := Report{
		From: v.from, Entries: v.entries, Tenant: v.tenant, Sequence: v.head.sequence, Hash: v.hash,
		ChainID: v.chainID, PublicKey: v.public, Pinned: v.pinned, Rollbacks: v.lost, Since: v.since,
	}
	if v.chainID != "" {
		r.Fingerprint = Fingerprint(v.chainID, v.public.Bytes())
	}
	if v.whole {
		r.Size, r.Root, r.Epoch = v.tree.size, v.tree.root(), v.epochs[len(v.epochs)-1].number
		r.Credentials, r.APIKeys, r.Namespaces = v.credentials, v.apiKeys, v.namespaces
	}
	return r, nil
}

// checkpoint returns the checkpoint of the head. Call it only after Wait or while linking, and only
// for a chain that was verified from its beginning.
func (v *Verifier) checkpoint() Checkpoint {
	return Checkpoint{
		ChainID: v.chainID, Epoch: v.epochs[len(v.epochs)-1].number, Size: v.tree.size, Root: v.tree.root(),
		Sequence: v.head.sequence, Hash: v.head.hash, Time: time.UnixMicro(v.head.micros).UTC(),
	}
}

// linkAll links the entries of a stretch up to the first one that does not fit. It is called for
// one stretch at a time, in order.
func (v *Verifier) linkAll(b *stretch) {
	for i := range b.items {
		if err := v.link(&b.items[i]); err != nil {
			if broken, ok := IsBroken(err); ok {
				b.cut = broken
			} else {
				b.failure = err
			}
			b.items = b.items[:i]
			return
		}
	}
}

// signatureHolds reports whether the signature of an entry verifies.
func (v *Verifier) signatureHolds(it *item, key *dualsig.PublicKey) bool {
	switch {
	case v.options.linksOnly:
		return true
	case it.unsigned:
		return false
	case v.options.check != nil:
		return v.options.check(it.stored, func() bool { return it.verify(key, &v.memo) })
	}
	return it.verify(key, &v.memo)
}

// link checks everything but the signature, and replays the entry.
func (v *Verifier) link(it *item) error {
	next := v.next()
	if it.bad != nil {
		return &Broken{v.at(it, next), it.bad.Error()}
	}
	e := it.entry
	if it.misplaced {
		return &Broken{v.at(it, next), "the entry is missing, or a row stands where none belongs"}
	}
	if err := v.open(it); err != nil {
		return err
	}
	jump, err := v.jump(e, next)
	switch {
	case err != nil:
		return err
	case !it.timed:
		return &Broken{e.Sequence, "the timestamp is malformed"}
	case !v.options.Tenant && !jump && e.Sequence != next && v.knowsPrevious():
		return &Broken{next, fmt.Sprintf("expected here, found %d: an entry is missing, repeated or moved", e.Sequence)}
	case e.Sequence <= v.head.sequence:
		return &Broken{next, fmt.Sprintf("expected a later entry, found %d: an entry is repeated or moved", e.Sequence)}
	case !v.options.Tenant && v.knowsPrevious() && e.PreviousHash != v.hash:
		return &Broken{e.Sequence, "the previous hash is not that of the entry before"}
	case it.micros < v.head.micros:
		return &Broken{e.Sequence, "the timestamp is earlier than that of the entry before"}
	case e.KeyID != v.keyID:
		return &Broken{e.Sequence, "the entry names another signing key than the chain"}
	}
	if err := v.linkTenant(it); err != nil {
		return err
	}
	if jump {
		if err := v.enter(e); err != nil {
			return err
		}
	}
	v.head, v.hash = link{e.Sequence, it.micros, it.hash}, e.Hash
	if v.entries++; v.from == 0 {
		v.from = e.Sequence
	}
	if v.whole {
		if v.tree.add(it.hash); v.links == nil {
			v.tree.filled = nil
		}
		if !v.options.entriesOnly {
			v.replay(e)
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
func (v *Verifier) at(it *item, next uint64) uint64 {
	if v.options.Tenant && it.entry != nil {
		return it.entry.Sequence
	}
	return next
}

// knowsPrevious reports whether the verifier has seen the previous entry, or none exists.
func (v *Verifier) knowsPrevious() bool { return v.whole || v.head.sequence > 0 }

func (v *Verifier) linkTenant(it *item) error {
	e := it.entry
	last := v.tenants[e.TenantID]
	if last == nil {
		if v.options.Tenant && len(v.tenants) > 0 {
			return &Broken{e.Sequence, "the entry belongs to another tenant"}
		}
		last = &tenantState{hash: zeroHash}
		if !v.whole && !v.options.Tenant || v.options.Tenant && v.options.From > 1 {
			// The entries of this tenant before the range are unknown.
			last.sequence, last.hash = e.TenantSequence-1, e.TenantPreviousHash
		}
		v.tenants[strings.Clone(e.TenantID)] = last // a clone, so the rest of the entry's text is not retained
	}
	if e.TenantSequence != last.sequence+1 || e.TenantSequence == 0 {
		return &Broken{e.Sequence, fmt.Sprintf("the tenant's sequence is %d, expected %d: an entry of this tenant is missing, repeated or moved", e.TenantSequence, last.sequence+1)}
	}
	if e.TenantPreviousHash != last.hash {
		return &Broken{e.Sequence, "the previous hash is not that of the tenant's entry before"}
	}
	last.sequence, last.hash, last.last = e.TenantSequence, e.Hash, link{e.Sequence, it.micros, it.hash}
	return nil
}

// jump reports whether the entry begins an epoch. Such an entry may skip exactly the sequences that
// it names as lost.
func (v *Verifier) jump(e *Entry, next uint64) (bool, error) {
	if e.EventType != RollbackAccepted || e.Outcome != Success || v.options.Tenant {
		return false, nil
	}
	number, ok1 := decimal(e.Attributes[attributeEpoch])
	from, ok2 := decimal(e.Attributes[attributeLostFrom])
	to, ok3 := decimal(e.Attributes[attributeLostTo])
	switch {
	case !ok1 || !ok2 || !ok3 || to+1 != e.Sequence || from > e.Sequence:
		return false, &Broken{v.orAt(e, next), "the entry accepts a rollback, and does not say of which entries"}
	case !v.knowsPrevious():
		return true, nil
	case from != next:
		return false, &Broken{next, fmt.Sprintf("expected here, found %d: it accepts that entries were lost, but not this one", e.Sequence)}
	case v.whole && number <= v.epochs[len(v.epochs)-1].number, v.whole && e.TenantID != string(authz.SystemTenant):
		return false, &Broken{next, "the entry accepts a rollback into an epoch that was before"}
	}
	return true, nil
}

func (v *Verifier) orAt(e *Entry, next uint64) uint64 {
	if v.knowsPrevious() {
		return next
	}
	return e.Sequence
}

// enter begins the epoch of an accepted rollback. A due checkpoint of an earlier epoch covers
// entries that the rollback lost, so enter returns that as a fault.
func (v *Verifier) enter(e *Entry) error {
	number, _ := decimal(e.Attributes[attributeEpoch])
	from, _ := decimal(e.Attributes[attributeLostFrom])
	for _, w := range v.due {
		if w.Epoch < number {
			return w.lostTo(from, e.Sequence)
		}
	}
	v.epochs = append(v.epochs, epoch{number: number, first: e.Sequence, size: v.tree.size})
	v.lost = append(v.lost, Rollback{Epoch: number, LostFrom: from, LostTo: e.Sequence - 1, Receipt: Receipt{e.Sequence, e.Hash}})
	return nil
}

// open identifies the chain, from the base or from the first entry.
func (v *Verifier) open(it *item) error {
	if v.opened {
		return nil
	}
	v.opened = true
	if v.options.Base == nil {
		if err := v.begin(it); err != nil {
			return err
		}
		v.key.Store(v.public)
	} else if err := v.checkPins(1); err != nil {
		return err
	}
	if err := v.beginSince(); err != nil || v.begun == nil {
		return err
	}
	return v.begun()
}

// begin takes chain ID and key from the first entry and compares them with the pinned ones.
func (v *Verifier) begin(it *item) error {
	e := it.entry
	if v.options.Tenant {
		v.tenant = strings.Clone(e.TenantID)
	}
	if v.options.From > 1 {
		if !v.options.Tenant && e.Sequence != v.options.From {
			from, _ := decimal(e.Attributes[attributeLostFrom])
			if jump, err := v.jump(e, v.options.From); !jump || err != nil || from > v.options.From || e.Sequence < v.options.From {
				return &Broken{v.options.From, fmt.Sprintf("expected here, found %d: an entry is missing, repeated or moved", e.Sequence)}
			}
		}
		if v.options.PublicKey == nil {
			return errNoKey
		}
		v.public, v.keyID, v.pinned = v.options.PublicKey, v.options.PublicKey.ID(), true
		return nil
	}
	raw, ok := decodeBase64(e.Attributes[attributePublicKey])
	key, err := dualsig.ParsePublicKey(raw)
	// A whole log begins with CHAIN_STARTED. A log that was wiped and then written to begins with
	// another entry.
	begins := v.options.Tenant || (e.EventType == ChainStarted && e.TenantID == string(authz.SystemTenant))
	if !ok || err != nil || !begins || e.Attributes[attributeChainID] == "" {
		first := e.Sequence
		if !v.options.Tenant {
			first = 1
		}
		return &Broken{first, "the first entry does not name a chain id and a public key: the beginning of the log is missing"}
	}
	v.chainID, v.public, v.keyID = strings.Clone(e.Attributes[attributeChainID]), key, key.ID()
	return v.checkPins(e.Sequence)
}

var errNoKey = fault.New(fault.Invalid, "a range that does not begin with the first entry names no key: give the log's public key")

// checkPins compares chain and key with the pinned ones.
func (v *Verifier) checkPins(sequence uint64) error {
	if pin := v.options.Fingerprint; pin != "" {
		if subtle.ConstantTimeCompare([]byte(pin), []byte(Fingerprint(v.chainID, v.public.Bytes()))) != 1 {
			return &Broken{sequence, "the chain's fingerprint is not the pinned one: this is another log"}
		}
		v.pinned = true
	}
	if pin := v.options.PublicKey; pin != nil {
		if pin.ID() != v.keyID {
			return &Broken{sequence, "the chain's public key is not the given one: this is another log"}
		}
		v.pinned = true
	}
	return nil
}

// Base returns the state after the last entry. The chain must have been verified from its beginning
// or from a base.
func (v *Verifier) Base() (*Base, error) {
	if err := v.Wait(); err != nil {
		return nil, err
	}
	if !v.whole || v.head.sequence == 0 {
		return nil, errors.New("making a base: the beginning of the log was not verified")
	}
	s := v.history.clone()
	// A row of something unknown counts as the same fault as a row of something deleted. So the
	// base omits deleted and revoked items, and does not grow with everything that ever existed.
	maps.DeleteFunc(s.credentials, func(_ CredentialKey, c State) bool { return c.Deleted })
	maps.DeleteFunc(s.apiKeys, func(_ APIKeyName, k APIKeyState) bool { return k.Revoked })
	return &Base{s}, nil
}
