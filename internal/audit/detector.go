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

// A witness knows entries that the log must have. There are three kinds: the newest checkpoint in
// the database, a place outside of the database that keeps a checkpoint, and this process, which
// has seen entries. One lock covers comparing witnesses with the log and publishing the result. An
// acceptance, made by any process, is visible in the same snapshot as the loss that it accepts.

// Detector finds out whether the log has lost entries, and halts the log until the loss is
// accepted.
type Detector struct {
	chain *Chain

	seen      atomic.Pointer[Head]       // the newest entry that the store is known to have had
	suspected atomic.Bool                // a commit did not find that entry
	halted    atomic.Pointer[haltReason] // nil while the log takes entries

	// mu guards the known losses and the last published one.
	mu                   sync.Mutex
	inDatabase, inMemory lossSource
	places               []*lossSource
	published            *RollbackError
	askPlaces            func(ctx context.Context) // checks all places; nil: there are none
}

// noteHead stores k as the newest known entry of the store, unless a newer one is known.
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

// lossSource is a witness and the loss that it knows.
type lossSource struct {
	place    string         // name of the witness in messages
	lost     *RollbackError // nil: nothing is lost, or the loss was accepted
	epoch    uint64         // epoch of the log when the loss was found
	accepted *RollbackError // the previous loss, which a place may still show
}

// decide reads the log's state in a snapshot, asks find what a witness knows, and stores the
// finding with the function take that find returns. It then halts the log for the worst loss that
// any witness knows, or ends the halt. Error: that of find. The function find may run more than
// once.
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

// publishLoss halts the log for the worst known loss. It ends its own halt when no unaccepted loss
// is left. It reports whether it halted the log anew.
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

// checkForRollback compares the log with its own newest checkpoint and with the entries that this
// process has seen. It halts the log if they do not match, and ends the halt once the loss is
// accepted. It reports whether entries are lost. Other damage is not treated as a loss.
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

// lostEntries reports whether a known loss concerns entries that were in this database, or entries
// in whose place the database now has others. In that case no checkpoint is signed.
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

// note stores a finding. The epoch of the log tells the acceptance of this loss from an earlier
// acceptance.
func (w *lossSource) note(lost *RollbackError, s logState) {
	if w.lost = lost; lost != nil {
		lost.Place, lost.Epoch = w.place, max(lost.Epoch, s.epoch().number)
		w.epoch = s.epoch().number
	}
}

// lostOfSeen returns which of the entries that this process has seen the log lacks.
func (d *Detector) lostOfSeen(r store.Reader, s logState) (*RollbackError, error) {
	lost, err := d.chain.lacks(r, Head{s.head, s.epoch().number}, s.seen)
	if lost == nil || err != nil {
		return nil, err
	}
	// If there are entries after the head, or the head's entry is not signed, the database is
	// damaged, and not an older copy.
	_, _, err = d.chain.foreignHead(r, s.head)
	return lost, err
}

// haltReason is the reason why the log takes no entries.
type haltReason struct{ reason error }

// Halt makes [Log.Ready], [Log.Append] and every commit fail with fault.Unavailable. The halt ends
// when Halt is called with nil or, if the reason is a [RollbackError], when the loss is accepted.
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

// checkNotHalted returns the error for callers while the log is halted, and nil otherwise.
func (d *Detector) checkNotHalted() error {
	if reason := d.HaltedBy(); reason != nil {
		return fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), reason)
	}
	return nil
}

// acceptance belongs to the event that begins an epoch. The commit hook sets epoch and made,
// because only the hook knows the head.
type acceptance struct {
	lost  RollbackError
	epoch epoch
	made  Rollback
}

// goesOn fails when the log lacks an entry that it is known to have had, unless a accepts that
// loss. Error: fault.Unavailable, with a [RollbackError] if a is nil.
func (d *Detector) goesOn(r store.Reader, head, since Head, a *acceptance) error {
	lost, err := d.chain.lacks(r, head, since)
	switch {
	case err != nil:
		return err
	case lost == nil, a != nil && a.lost.LostTo >= lost.LostTo:
		return nil
	case a != nil:
		return errOneByOne // the caller accepts a smaller loss than this one
	}
	d.suspected.Store(true)
	return fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), lost)
}
