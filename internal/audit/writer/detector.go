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
	"github.com/latticekeep/latticekeep/internal/store"
)

// A witness knows entries that the log must have. There are three kinds: the newest checkpoint in
// the database, a place outside of the database that keeps a checkpoint, and this process, which
// has seen entries. One lock covers comparing witnesses with the log and publishing the result. An
// acceptance, made by any process, is visible in the same snapshot as the loss that it accepts.

// Detector finds out whether the log has lost entries, and halts the log until the loss is
// accepted.
type Detector struct {
	chain *chain.Chain

	seen      atomic.Pointer[audit.Head] // the newest entry that the store is known to have had
	suspected atomic.Bool                // a commit did not find that entry
	halted    atomic.Pointer[haltReason] // nil while the log takes entries

	// Mu guards the known losses and the last published one.
	Mu                   sync.Mutex
	inDatabase, inMemory LossSource
	Places               []*LossSource
	Published            *audit.RollbackError
	AskPlaces            func(ctx context.Context) // checks all places; nil: there are none
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
	return &Detector{chain: ch, inDatabase: LossSource{Place: audit.DatabasePlace}, inMemory: LossSource{Place: audit.MemoryPlace}}
}

// LossSource is a witness and the loss that it knows.
type LossSource struct {
	Place    string               // name of the witness in messages
	Lost     *audit.RollbackError // nil: nothing is lost, or the loss was accepted
	epoch    uint64               // epoch of the log when the loss was found
	Accepted *audit.RollbackError // the previous loss, which a place may still show
}

// Decide reads the log's state in a snapshot, asks find what a witness knows, and stores the
// finding with the function take that find returns. It then halts the log for the worst loss that
// any witness knows, or ends the halt. Error: that of find. The function find may run more than
// once.
func (d *Detector) Decide(ctx context.Context, find func(r store.Reader, s chain.LogState) (take func(), err error)) error {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	for {
		var now audit.Epoch
		var take func()
		seen := *d.seen.Load()
		err := d.chain.Store.View(ctx, func(r store.Reader) error {
			s, err := d.chain.LogState(r)
			if err == nil {
				now, s.Seen = s.Epoch(), seen
				take, err = find(r, s)
			}
			return err
		})
		if err != nil {
			return err
		}
		for _, w := range d.sources() {
			if w.Lost != nil && now.Number > w.epoch && now.First > w.Lost.LostTo {
				w.Lost, w.Accepted = nil, w.Lost
			}
		}
		take()
		if !d.publishLoss() {
			return nil
		}
		// An acceptance may have been committed since the database was read.
		var again audit.Epoch
		err = d.chain.Store.View(ctx, func(r store.Reader) error {
			s, err := d.chain.LogState(r)
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
	return append([]*LossSource{&d.inDatabase, &d.inMemory}, d.Places...)
}

// publishLoss halts the log for the worst known loss. It ends its own halt when no unaccepted loss
// is left. It reports whether it halted the log anew.
func (d *Detector) publishLoss() bool {
	var worst *audit.RollbackError
	var number uint64
	for _, w := range d.sources() {
		if w.Lost == nil {
			continue
		}
		if worst == nil || w.Lost.LostTo > worst.LostTo {
			worst = w.Lost
		}
		number = max(number, w.Lost.Epoch)
	}
	if worst == nil {
		if d.Published != nil && errors.Is(d.HaltedBy(), d.Published) {
			d.Halt(nil)
		}
		return false
	}
	lost := *worst
	lost.Epoch = number
	if d.Published != nil && *d.Published == lost && d.HaltedBy() != nil {
		return false // already halted for this loss
	}
	d.Published = &lost
	d.Halt(d.Published)
	return true
}

// CheckForRollback compares the log with its own newest checkpoint and with the entries that this
// process has seen. It halts the log if they do not match, and ends the halt once the loss is
// accepted. It reports whether entries are lost. Other damage is not treated as a loss.
func (d *Detector) CheckForRollback(ctx context.Context) (lost bool, err error) {
	suspected := d.suspected.Swap(false)
	err = d.Decide(ctx, func(r store.Reader, s chain.LogState) (func(), error) {
		own, err1 := d.chain.LostOfOwn(r, s)
		seen, err2 := d.lostOfSeen(r, s)
		return func() {
			if err1 == nil {
				d.inDatabase.Note(own, s)
			}
			if err2 == nil {
				d.inMemory.Note(seen, s)
			}
		}, errors.Join(audit.UnlessDamage(err1), audit.UnlessDamage(err2))
	})
	if err = audit.UnlessDamage(err); err != nil {
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
	d.Mu.Lock()
	defer d.Mu.Unlock()
	for _, w := range d.sources() {
		if w.Lost != nil && (w == &d.inDatabase || w == &d.inMemory || w.Lost.LostFrom == 0) {
			return true
		}
	}
	return false
}

// Note stores a finding. The epoch of the log tells the acceptance of this loss from an earlier
// acceptance.
func (w *LossSource) Note(lost *audit.RollbackError, s chain.LogState) {
	if w.Lost = lost; lost != nil {
		lost.Place, lost.Epoch = w.Place, max(lost.Epoch, s.Epoch().Number)
		w.epoch = s.Epoch().Number
	}
}

// lostOfSeen returns which of the entries that this process has seen the log lacks.
func (d *Detector) lostOfSeen(r store.Reader, s chain.LogState) (*audit.RollbackError, error) {
	lost, err := d.chain.Lacks(r, audit.Head{Link: s.Head, Epoch: s.Epoch().Number}, s.Seen)
	if lost == nil || err != nil {
		return nil, err
	}
	// If there are entries after the head, or the head's entry is not signed, the database is
	// damaged, and not an older copy.
	_, _, err = d.chain.ForeignHead(r, s.Head)
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
		return fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), reason)
	}
	return nil
}

// acceptance belongs to the event that begins an epoch. The commit hook sets epoch and made,
// because only the hook knows the head.
type acceptance struct {
	lost  audit.RollbackError
	epoch audit.Epoch
	made  audit.Rollback
}

// goesOn fails when the log lacks an entry that it is known to have had, unless a accepts that
// loss. Error: fault.Unavailable, with an [audit.RollbackError] if a is nil.
func (d *Detector) goesOn(r store.Reader, head, since audit.Head, a *acceptance) error {
	lost, err := d.chain.Lacks(r, head, since)
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

var (
	errNoPermission = fault.New(fault.Forbidden, "access denied")

	errReason = fault.New(fault.Invalid, "the reason has 1 to 200 printable ASCII characters: say why the entries were lost")

	// errOneByOne is returned when another acceptance is in progress, when more is lost than the
	// caller accepts, or while the last entries before the halt are still being committed.
	errOneByOne = fault.New(fault.Unavailable, fault.Unavailable.Error())

	errNothingLost = fault.New(fault.Conflict, "no rollback is to be accepted: the log is not behind a checkpoint that is kept elsewhere")
)
