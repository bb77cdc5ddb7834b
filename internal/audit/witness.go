package audit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/store"
)

// A witness knows of entries that the log must have: the newest checkpoint in the
// database, a place outside of it that keeps one, or this process, which has seen
// them. What they know is compared and told under one lock, and an acceptance,
// whichever process it was made by, shows in the same snapshot as what it accepts.

// Detector finds out whether the log has lost entries, and halts it until that is accepted.
type Detector struct {
	chain *Chain

	seen    atomic.Pointer[known]   // the newest entry that the store is known to have had
	suspect atomic.Bool             // a commit did not find that entry
	refusal atomic.Pointer[refusal] // nil while the log takes entries

	// What is known to be lost, and the refusal that came of it last.
	deciding    sync.Mutex
	own, memory witness
	places      []*witness
	told        *RollbackError
	look        func(ctx context.Context) // asks the places; nil: there are none
}

func newDetector(ch *Chain) *Detector {
	return &Detector{chain: ch, own: witness{place: databasePlace}, memory: witness{place: memoryPlace}}
}

// witness is what one of them knows to be lost.
type witness struct {
	place    string         // in messages
	lost     *RollbackError // nil: nothing, or it was accepted
	epoch    uint64         // of the log, when it was found
	accepted *RollbackError // the one before, which a place may still show
}

// standing is where the log stands in a snapshot.
type standing struct {
	head   link
	epochs []epoch
	losses []acceptedLoss
	seen   known // by this process before
}

func (s standing) epoch() epoch { return s.epochs[len(s.epochs)-1] }

func (ch *Chain) standing(r store.Reader) (s standing, err error) {
	if s.head, err = readHead(r); err == nil {
		s.epochs, s.losses, err = ch.accepted(r, s.head)
	}
	return s, err
}

// judge has what witnesses know found out in a snapshot and taken up, and the log
// refused or not for the worst that any of them knows. Error: that of find, which
// may run more than once.
func (d *Detector) judge(ctx context.Context, find func(r store.Reader, s standing) (take func(), err error)) error {
	d.deciding.Lock()
	defer d.deciding.Unlock()
	for {
		var now epoch
		var take func()
		seen := *d.seen.Load()
		err := d.chain.store.View(ctx, func(r store.Reader) error {
			s, err := d.chain.standing(r)
			if err == nil {
				now, s.seen = s.epoch(), seen
				take, err = find(r, s)
			}
			return err
		})
		if err != nil {
			return err
		}
		for _, w := range d.witnesses() {
			if w.lost != nil && now.number > w.epoch && now.first > w.lost.LostTo {
				w.lost, w.accepted = nil, w.lost
			}
		}
		take()
		if !d.tell() {
			return nil
		}
		// An acceptance may have been committed since the database was read.
		var again epoch
		err = d.chain.store.View(ctx, func(r store.Reader) error {
			s, err := d.chain.standing(r)
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

func (d *Detector) witnesses() []*witness { return append([]*witness{&d.own, &d.memory}, d.places...) }

// tell has the log refused for the worst that is known, or no longer when nothing is
// lost that was not accepted. It reports whether it did the former.
func (d *Detector) tell() bool {
	var worst *RollbackError
	var number uint64
	for _, w := range d.witnesses() {
		if w.lost == nil {
			continue
		}
		if worst == nil || w.lost.LostTo > worst.LostTo {
			worst = w.lost
		}
		number = max(number, w.lost.Epoch)
	}
	if worst == nil {
		if d.told != nil && d.Refusal() == error(d.told) {
			d.Refuse(nil)
		}
		return false
	}
	lost := *worst
	lost.Epoch = number
	if d.told != nil && *d.told == lost && d.Refusal() != nil {
		return false // which the log knows
	}
	d.told = &lost
	d.Refuse(d.told)
	return true
}

// hold has the log refused when it does not go on from its own newest checkpoint, or
// from what this process has seen, and no longer when that was accepted. It reports
// whether entries are lost. What is damaged otherwise says nothing.
func (d *Detector) hold(ctx context.Context) (lost bool, err error) {
	suspected := d.suspect.Swap(false)
	err = d.judge(ctx, func(r store.Reader, s standing) (func(), error) {
		own, err1 := d.chain.lostOfOwn(r, s)
		seen, err2 := d.lostOfSeen(r, s)
		return func() {
			if err1 == nil {
				d.own.take(own, s)
			}
			if err2 == nil {
				d.memory.take(seen, s)
			}
		}, errors.Join(sound(err1), sound(err2))
	})
	if err = sound(err); err != nil {
		if suspected {
			d.suspect.Store(true)
		}
		err = fmt.Errorf("comparing what is known of the log with its entries: %w", err)
	}
	return d.lostEntries(), err
}

// lostEntries reports whether the log is known, and told, to lack entries that were
// in this database, or to have others than it had: then no checkpoint is signed.
func (d *Detector) lostEntries() bool {
	d.deciding.Lock()
	defer d.deciding.Unlock()
	for _, w := range d.witnesses() {
		if w.lost != nil && (w == &d.own || w == &d.memory || w.lost.LostFrom == 0) {
			return true
		}
	}
	return false
}

// take takes up what was found. An acceptance is told from one of something else by
// its epoch.
func (w *witness) take(lost *RollbackError, s standing) {
	if w.lost = lost; lost != nil {
		lost.Place, lost.Epoch = w.place, max(lost.Epoch, s.epoch().number)
		w.epoch = s.epoch().number
	}
}

// lostOfSeen returns what the log lacks of what this process has seen.
func (d *Detector) lostOfSeen(r store.Reader, s standing) (*RollbackError, error) {
	lost, err := d.chain.lacks(r, known{s.head, s.epoch().number}, s.seen)
	if lost == nil || err != nil {
		return nil, err
	}
	// Entries behind the head, or one there that is not signed, are no older copy.
	_, _, err = d.chain.theirs(r, s.head)
	return lost, err
}

// sound returns an error that is not of damage.
func sound(err error) error {
	if damaged(err) {
		return nil
	}
	return err
}
