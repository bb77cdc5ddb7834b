package audit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A witness knows of entries that the log must have: the newest checkpoint in the
// database, a place outside of it that keeps one, or this process, which has seen
// them. What they know is compared and told under one lock, and an acceptance,
// whichever process it was made by, shows in the same snapshot as what it accepts.

// Detector finds out whether the log has lost entries, and halts it until that is accepted.
type Detector struct {
	chain *Chain

	seen      atomic.Pointer[Head]       // the newest entry that the store is known to have had
	suspected atomic.Bool                // a commit did not find that entry
	halted    atomic.Pointer[haltReason] // nil while the log takes entries

	// What is known to be lost, and the refusal that came of it last.
	mu                   sync.Mutex
	inDatabase, inMemory lossSource
	places               []*lossSource
	published            *RollbackError
	askPlaces            func(ctx context.Context) // asks the places; nil: there are none
}

// noteHead keeps the newest entry that the store is known to have had.
func (d *Detector) noteHead(k Head) {
	for {
		before := d.seen.Load()
		if before != nil && !k.newer(*before) || d.seen.CompareAndSwap(before, &k) {
			return
		}
	}
}

func newDetector(ch *Chain) *Detector {
	return &Detector{chain: ch, inDatabase: lossSource{place: databasePlace}, inMemory: lossSource{place: memoryPlace}}
}

// lossSource is what one of them knows to be lost.
type lossSource struct {
	place    string         // in messages
	lost     *RollbackError // nil: nothing, or it was accepted
	epoch    uint64         // of the log, when it was found
	accepted *RollbackError // the one before, which a place may still show
}

// decide has what witnesses know found out in a snapshot and taken up, and the log
// refused or not for the worst that any of them knows. Error: that of find, which
// may run more than once.
func (d *Detector) decide(ctx context.Context, find func(r store.Reader, s logState) (take func(), err error)) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		var now epoch
		var take func()
		seen := *d.seen.Load()
		err := d.chain.store.View(ctx, func(r store.Reader) error {
			s, err := d.chain.logState(r)
			if err == nil {
				now, s.seen = s.epoch(), seen
				take, err = find(r, s)
			}
			return err
		})
		if err != nil {
			return err
		}
		for _, w := range d.sources() {
			if w.lost != nil && now.number > w.epoch && now.first > w.lost.LostTo {
				w.lost, w.accepted = nil, w.lost
			}
		}
		take()
		if !d.publishLoss() {
			return nil
		}
		// An acceptance may have been committed since the database was read.
		var again epoch
		err = d.chain.store.View(ctx, func(r store.Reader) error {
			s, err := d.chain.logState(r)
			if err == nil {
				again = s.epoch()
			}
			return err
		})
		if err != nil || again == now {
			return err
		}
	}
}

func (d *Detector) sources() []*lossSource {
	return append([]*lossSource{&d.inDatabase, &d.inMemory}, d.places...)
}

// publishLoss has the log refused for the worst that is known, or no longer when nothing is
// lost that was not accepted. It reports whether it did the former.
func (d *Detector) publishLoss() bool {
	var worst *RollbackError
	var number uint64
	for _, w := range d.sources() {
		if w.lost == nil {
			continue
		}
		if worst == nil || w.lost.LostTo > worst.LostTo {
			worst = w.lost
		}
		number = max(number, w.lost.Epoch)
	}
	if worst == nil {
		if d.published != nil && d.HaltedBy() == error(d.published) {
			d.Halt(nil)
		}
		return false
	}
	lost := *worst
	lost.Epoch = number
	if d.published != nil && *d.published == lost && d.HaltedBy() != nil {
		return false // which the log knows
	}
	d.published = &lost
	d.Halt(d.published)
	return true
}

// checkForRollback has the log refused when it does not go on from its own newest checkpoint, or
// from what this process has seen, and no longer when that was accepted. It reports
// whether entries are lost. What is damaged otherwise says nothing.
func (d *Detector) checkForRollback(ctx context.Context) (lost bool, err error) {
	suspected := d.suspected.Swap(false)
	err = d.decide(ctx, func(r store.Reader, s logState) (func(), error) {
		own, err1 := d.chain.lostOfOwn(r, s)
		seen, err2 := d.lostOfSeen(r, s)
		return func() {
			if err1 == nil {
				d.inDatabase.note(own, s)
			}
			if err2 == nil {
				d.inMemory.note(seen, s)
			}
		}, errors.Join(unlessDamage(err1), unlessDamage(err2))
	})
	if err = unlessDamage(err); err != nil {
		if suspected {
			d.suspected.Store(true)
		}
		err = fmt.Errorf("comparing what is known of the log with its entries: %w", err)
	}
	return d.lostEntries(), err
}

// lostEntries reports whether the log is known, and told, to lack entries that were
// in this database, or to have others than it had: then no checkpoint is signed.
func (d *Detector) lostEntries() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range d.sources() {
		if w.lost != nil && (w == &d.inDatabase || w == &d.inMemory || w.lost.LostFrom == 0) {
			return true
		}
	}
	return false
}

// note takes up what was found. An acceptance is told from one of something else by
// its epoch.
func (w *lossSource) note(lost *RollbackError, s logState) {
	if w.lost = lost; lost != nil {
		lost.Place, lost.Epoch = w.place, max(lost.Epoch, s.epoch().number)
		w.epoch = s.epoch().number
	}
}

// lostOfSeen returns what the log lacks of what this process has seen.
func (d *Detector) lostOfSeen(r store.Reader, s logState) (*RollbackError, error) {
	lost, err := d.chain.lacks(r, Head{s.head, s.epoch().number}, s.seen)
	if lost == nil || err != nil {
		return nil, err
	}
	// Entries behind the head, or one there that is not signed, are no older copy.
	_, _, err = d.chain.foreignHead(r, s.head)
	return lost, err
}

// haltReason is why the log takes no entries.
type haltReason struct{ reason error }

// Halt makes [Log.Ready], [Log.Append] and every commit fail with
// fault.Unavailable, until it is called with nil or, when the reason is a
// [RollbackError], until that is accepted.
func (d *Detector) Halt(reason error) {
	if reason == nil {
		d.halted.Store(nil)
		return
	}
	d.halted.Store(&haltReason{reason})
}

// HaltedBy returns why the log takes no entries, and nil when it does.
func (d *Detector) HaltedBy() error {
	if r := d.halted.Load(); r != nil {
		return r.reason
	}
	return nil
}

// checkNotHalted returns what a caller is told while the log takes no entries.
func (d *Detector) checkNotHalted() error {
	if reason := d.HaltedBy(); reason != nil {
		return fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), reason)
	}
	return nil
}

// acceptance belongs to the event that begins an epoch. What it comes to is
// decided in the hook, which knows the head.
type acceptance struct {
	lost  RollbackError
	epoch epoch
	made  Rollback
}

// goesOn fails when the log does not go on from what it is known to have had. Error:
// fault.Unavailable, with a [RollbackError].
func (d *Detector) goesOn(r store.Reader, head, since Head, a *acceptance) error {
	lost, err := d.chain.lacks(r, head, since)
	switch {
	case err != nil:
		return err
	case lost == nil, a != nil && a.lost.LostTo >= lost.LostTo:
		return nil
	case a != nil:
		return errOneByOne // more is lost than whoever accepts it knew
	}
	d.suspected.Store(true)
	return fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), lost)
}
