package writer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Detector finds out whether the log has lost entries, and halts the log until the loss is
// accepted. Its sources know entries that the log must have: the newest checkpoint in the database,
// the memory of this process, and the anchors. One lock covers comparing a source with the log and
// publishing the result. An acceptance, made by any process, is visible in the same snapshot as the
// loss that it accepts.
type Detector struct {
	chain *chain.Chain

	seen      atomic.Pointer[audit.Head] // the newest entry that the store is known to have had
	suspected atomic.Bool                // a commit did not find that entry
	halted    atomic.Pointer[haltReason] // nil while the log takes entries

	mu                   sync.Mutex // guards the fields below
	inDatabase, inMemory LossSource
	anchors              []*LossSource
	published            *audit.RollbackError      // the loss that the log was halted for last
	checkAnchors         func(ctx context.Context) // nil: there are no anchors
}

// SetAnchors replaces the sources that anchors are, and the function that compares all of them with
// the log.
func (d *Detector) SetAnchors(anchors []*LossSource, check func(ctx context.Context)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.anchors, d.checkAnchors = anchors, check
}

// askAnchors compares the anchors with the log.
func (d *Detector) askAnchors(ctx context.Context) {
	d.mu.Lock()
	check := d.checkAnchors
	d.mu.Unlock()
	if check != nil {
		check(ctx) // it locks d.mu itself
	}
}

// HasLoss reports whether a source knows of a loss that was not accepted.
func (d *Detector) HasLoss(source *LossSource) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return source.lost != nil
}

// HaltingLoss returns the loss that the log is halted for, and nil if it is not halted for a loss.
func (d *Detector) HaltingLoss() *audit.RollbackError {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.published == nil || !errors.Is(d.HaltedBy(), d.published) {
		return nil
	}
	return d.published
}

// noteHead stores k as the newest known entry of the store, unless a newer one is known.
func (d *Detector) noteHead(k audit.Head) {
	for {
		before := d.seen.Load()
		if before != nil && !k.Newer(*before) || d.seen.CompareAndSwap(before, &k) {
			return
		}
	}
}

func newDetector(ch *chain.Chain) *Detector {
	return &Detector{chain: ch, inDatabase: LossSource{Name: audit.DatabaseSource}, inMemory: LossSource{Name: audit.MemorySource}}
}

// LossSource is a source of the Detector, and the loss that it knows. The Detector's lock guards
// its fields.
type LossSource struct {
	Name     string               // name of the source in messages
	lost     *audit.RollbackError // nil: nothing is lost, or the loss was accepted
	epoch    uint64               // epoch of the log when the loss was found
	accepted *audit.RollbackError // the previous loss, which an anchor may still show
}

// Decide reads the log's state in a snapshot, in which find compares a source with the log. The
// function take that find returns stores the finding in the source. Decide then halts the log for
// the worst loss that any source knows, or ends the halt. Error: that of find. The function find
// may run more than once.
func (d *Detector) Decide(ctx context.Context, find func(r store.Reader, s chain.LogState) (take func(), err error)) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		var now audit.Epoch
		var take func()
		seen := *d.seen.Load()
		err := d.chain.Store.View(ctx, func(r store.Reader) error {
			s, err := d.chain.ReadState(r)
			if err == nil {
				now, s.Seen = s.Epoch(), seen
				take, err = find(r, s)
			}
			return err
		})
		if err != nil {
			return err
		}
		for _, source := range d.sources() {
			if source.lost != nil && now.Number > source.epoch && now.First > source.lost.LostTo {
				source.lost, source.accepted = nil, source.lost
			}
		}
		take()
		if !d.publishLoss() {
			return nil
		}
		// An acceptance may have been committed since the database was read.
		var again audit.Epoch
		err = d.chain.Store.View(ctx, func(r store.Reader) error {
			s, err := d.chain.ReadState(r)
			if err == nil {
				again = s.Epoch()
			}
			return err
		})
		if err != nil || again == now {
			return err
		}
	}
}

func (d *Detector) sources() []*LossSource {
	return append([]*LossSource{&d.inDatabase, &d.inMemory}, d.anchors...)
}

// publishLoss halts the log for the worst known loss. It ends its own halt when no unaccepted loss
// is left. It reports whether it halted the log anew.
func (d *Detector) publishLoss() bool {
	var worst *audit.RollbackError
	var number uint64
	for _, source := range d.sources() {
		if source.lost == nil {
			continue
		}
		if worst == nil || source.lost.LostTo > worst.LostTo {
			worst = source.lost
		}
		number = max(number, source.lost.Epoch)
	}
	if worst == nil {
		if d.published != nil && errors.Is(d.HaltedBy(), d.published) {
			d.Halt(nil)
		}
		return false
	}
	lost := *worst
	lost.Epoch = number
	if d.published != nil && *d.published == lost && d.HaltedBy() != nil {
		return false // already halted for this loss
	}
	d.published = &lost
	d.Halt(d.published)
	return true
}

// CheckForRollback compares the log with its own newest checkpoint and with the entries that this
// process has seen. It halts the log if they do not match, and ends the halt once the loss is
// accepted. It reports whether entries are lost. Other damage is not treated as a loss.
func (d *Detector) CheckForRollback(ctx context.Context) (lost bool, err error) {
	suspected := d.suspected.Swap(false)
	err = d.Decide(ctx, func(r store.Reader, s chain.LogState) (func(), error) {
		own, err1 := d.chain.FindOwnLoss(r, s)
		seen, err2 := d.findLossOfSeen(r, s)
		return func() {
			if err1 == nil {
				d.inDatabase.noteLoss(own, s)
			}
			if err2 == nil {
				d.inMemory.noteLoss(seen, s)
			}
		}, errors.Join(audit.IgnoreDamage(err1), audit.IgnoreDamage(err2))
	})
	if err = audit.IgnoreDamage(err); err != nil {
		if suspected {
			d.suspected.Store(true)
		}
		err = fmt.Errorf("comparing what is known of the log with its entries: %w", err)
	}
	return d.lostEntries(), err
}

// lostEntries reports whether a known loss concerns entries that were in this database, or entries
// in whose place the database now has others. In that case no checkpoint is signed.
func (d *Detector) lostEntries() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, source := range d.sources() {
		if source.lost != nil && (source == &d.inDatabase || source == &d.inMemory || source.lost.LostFrom == 0) {
			return true
		}
	}
	return false
}

// noteLoss stores a finding, nil for none. The epoch of the log tells the acceptance of this loss
// from an earlier acceptance.
func (source *LossSource) noteLoss(lost *audit.RollbackError, s chain.LogState) {
	if source.lost = lost; lost != nil {
		lost.Source, lost.Epoch = source.Name, max(lost.Epoch, s.Epoch().Number)
		source.epoch = s.Epoch().Number
	}
}

// NoteWorseLoss stores a finding unless the source knows a loss of as many entries, or the finding
// was accepted before. It reports whether it stored the finding. Only [Detector.Decide] may call
// it.
func (source *LossSource) NoteWorseLoss(found *audit.RollbackError, s chain.LogState) bool {
	switch before := source.accepted; {
	case found == nil,
		source.lost != nil && found.LostTo <= source.lost.LostTo,
		before != nil && found.LostTo == before.LostTo && found.Hash == before.Hash:
		return false
	}
	source.noteLoss(found, s)
	return true
}

// ClearLoss forgets the loss, because its entries were restored or it was accepted. Only
// [Detector.Decide] may call it.
func (source *LossSource) ClearLoss() { source.lost = nil }

// findLossOfSeen returns which of the entries that this process has seen the log lacks.
func (d *Detector) findLossOfSeen(r store.Reader, s chain.LogState) (*audit.RollbackError, error) {
	lost, err := d.chain.FindLossSince(r, audit.Head{Position: s.Head, Epoch: s.Epoch().Number}, s.Seen)
	if lost == nil || err != nil {
		return nil, err
	}
	// A database with entries after its head, or with a head that is not signed, is damaged. It is
	// not an older copy, so the error comes with the loss and nothing is stored.
	_, _, err = d.chain.VerifyForeignHead(r, s.Head)
	return lost, err
}

// haltReason is the reason why the log takes no entries.
type haltReason struct{ reason error }

// Halt makes [Log.Ready], [Log.Append] and every commit fail with fault.Unavailable. The halt ends
// when Halt is called with nil or, if the reason is an [audit.RollbackError], when the loss is
// accepted.
func (d *Detector) Halt(reason error) {
	if reason == nil {
		d.halted.Store(nil)
		return
	}
	d.halted.Store(&haltReason{reason})
}

// HaltedBy returns why the log takes no entries. It returns nil while the log takes entries.
func (d *Detector) HaltedBy() error {
	if r := d.halted.Load(); r != nil {
		return r.reason
	}
	return nil
}

// CheckNotHalted returns the error for callers while the log is halted, and nil otherwise.
func (d *Detector) CheckNotHalted() error {
	if reason := d.HaltedBy(); reason != nil {
		return fault.Outage(fault.ReasonLog, fault.Unavailable.Error(), reason)
	}
	return nil
}

// acceptance belongs to the event that begins an epoch. The commit hook sets epoch and rollback,
// because only the hook knows the head.
type acceptance struct {
	lost     audit.RollbackError
	skipped  uint64        // sequences left out above the last lost entry that is known
	state    *state.Loaded // state without the lost entries; nil: no state is bound
	epoch    audit.Epoch
	rollback audit.Rollback
}

// checkNothingLost fails when the log lacks an entry that it is known to have had, unless a accepts
// that loss. Error: fault.Unavailable, with an [audit.RollbackError] if a is nil.
func (d *Detector) checkNothingLost(r store.Reader, head, since audit.Head, a *acceptance) error {
	lost, err := d.chain.FindLossSince(r, head, since)
	switch {
	case err != nil:
		return err
	case lost == nil, a != nil && a.lost.LostTo >= lost.LostTo:
		return nil
	case a != nil:
		return errOneByOne // the caller accepts a smaller loss than this one
	}
	d.suspected.Store(true)
	return fault.Outage(fault.ReasonLog, fault.Unavailable.Error(), lost)
}

var (
	errNoPermission = fault.New(fault.Forbidden, "access denied")

	errReason = fault.New(fault.Invalid, "the reason has 1 to 200 printable ASCII characters: say why the entries were lost")

	// errOneByOne is returned when another acceptance is in progress, when more is lost than the
	// caller accepts, or while the last entries before the halt are still being committed.
	errOneByOne = fault.New(fault.Unavailable, fault.Unavailable.Error())

	errNothingLost = fault.New(fault.Conflict, "no rollback is to be accepted: the log is not behind a checkpoint that is kept elsewhere")
)
