package audit

import (
	"context"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/store"
)

// A witness knows of entries that the log must have: the newest checkpoint in the
// database, a place outside of it that keeps one, or this process, which has seen
// them. What they know is compared and told under one lock, and an acceptance,
// whichever process it was made by, shows in the same snapshot as what it accepts.

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

func (l *Log) standing(r store.Reader) (s standing, err error) {
	if s.head, err = readHead(r); err == nil {
		s.epochs, s.losses, err = l.accepted(r, s.head)
	}
	return s, err
}

// judge has what witnesses know found out in a snapshot and taken up, and the log
// refused or not for the worst that any of them knows. Error: that of find, which
// may run more than once.
func (l *Log) judge(ctx context.Context, find func(r store.Reader, s standing) (take func(), err error)) error {
	l.deciding.Lock()
	defer l.deciding.Unlock()
	for {
		var now epoch
		var take func()
		seen := *l.seen.Load()
		err := l.store.View(ctx, func(r store.Reader) error {
			s, err := l.standing(r)
			if err == nil {
				now, s.seen = s.epoch(), seen
				take, err = find(r, s)
			}
			return err
		})
		if err != nil {
			return err
		}
		for _, w := range l.witnesses() {
			if w.lost != nil && now.number > w.epoch && now.first > w.lost.LostTo {
				w.lost, w.accepted = nil, w.lost
			}
		}
		take()
		if !l.tell() {
			return nil
		}
		// An acceptance may have been committed since the database was read.
		var again epoch
		err = l.store.View(ctx, func(r store.Reader) error {
			s, err := l.standing(r)
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

func (l *Log) witnesses() []*witness { return append([]*witness{&l.own, &l.memory}, l.places...) }

// tell has the log refused for the worst that is known, or no longer when nothing is
// lost that was not accepted. It reports whether it did the former.
func (l *Log) tell() bool {
	var worst *RollbackError
	var number uint64
	for _, w := range l.witnesses() {
		if w.lost == nil {
			continue
		}
		if worst == nil || w.lost.LostTo > worst.LostTo {
			worst = w.lost
		}
		number = max(number, w.lost.Epoch)
	}
	if worst == nil {
		if l.told != nil && l.Refusal() == error(l.told) {
			l.Refuse(nil)
		}
		return false
	}
	lost := *worst
	lost.Epoch = number
	if l.told != nil && *l.told == lost && l.Refusal() != nil {
		return false // which the log knows
	}
	l.told = &lost
	l.Refuse(l.told)
	return true
}

// hold has the log refused when it does not go on from its own newest checkpoint, or
// from what this process has seen, and no longer when that was accepted. It reports
// whether entries are lost. What is damaged otherwise says nothing.
func (l *Log) hold(ctx context.Context) (lost bool, err error) {
	suspected := l.suspect.Swap(false)
	err = l.judge(ctx, func(r store.Reader, s standing) (func(), error) {
		own, err1 := l.lostOfOwn(r, s)
		seen, err2 := l.lostOfSeen(r, s)
		return func() {
			if err1 == nil {
				l.own.take(own, s)
			}
			if err2 == nil {
				l.memory.take(seen, s)
			}
		}, errors.Join(sound(err1), sound(err2))
	})
	if err = sound(err); err != nil {
		if suspected {
			l.suspect.Store(true)
		}
		err = fmt.Errorf("comparing what is known of the log with its entries: %w", err)
	}
	return l.lostEntries(), err
}

// lostEntries reports whether the log is known, and told, to lack entries that were
// in this database, or to have others than it had: then no checkpoint is signed.
func (l *Log) lostEntries() bool {
	l.deciding.Lock()
	defer l.deciding.Unlock()
	for _, w := range l.witnesses() {
		if w.lost != nil && (w == &l.own || w == &l.memory || w.lost.LostFrom == 0) {
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
func (l *Log) lostOfSeen(r store.Reader, s standing) (*RollbackError, error) {
	lost, err := l.lacks(r, known{s.head, s.epoch().number}, s.seen)
	if lost == nil || err != nil {
		return nil, err
	}
	// Entries behind the head, or one there that is not signed, are no older copy.
	_, _, err = l.theirs(r, s.head)
	return lost, err
}

// sound returns an error that is not of damage.
func sound(err error) error {
	if damaged(err) {
		return nil
	}
	return err
}
