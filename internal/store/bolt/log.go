package bolt

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/commit"
)

// Log is how far the log of commits is.
type Log struct {
	ID       LogID
	Newest   uint64    // number of the newest commit that changed a row
	Shipped  uint64    // up to which commits were shipped, as far as is known
	Position []byte    // as given to Shipped
	Oldest   time.Time // when the first commit after Shipped was made; zero for none
}

// ErrNoLog means that the database keeps no log of commits, or another one than was asked for.
var ErrNoLog = errors.New("the database keeps no such log of commits")

// BeginLog begins a log of commits in place of any other, after which nothing was shipped. position
// returns what is for the caller, as in Shipped, of the state that the log begins after. Errors: those of
// Update and of position.
func (s *Store) BeginLog(ctx context.Context, id LogID, position func(store.Reader) ([]byte, error)) error {
	return s.submit(ctx, false, func(t store.Tx) error {
		at, err := position(t)
		if err == nil {
			t.(*tx).begins = &logState{id: id, position: at}
		}
		return err
	})
}

// Log returns the state of the log. Error: ErrNoLog, fault.Unavailable.
func (s *Store) Log(ctx context.Context) (found Log, err error) {
	err = s.readFile(ctx, func(tx *bbolt.Tx) error {
		l, ok := logOf(tx)
		if !ok {
			return ErrNoLog
		}
		found = Log{ID: l.id, Newest: l.number, Shipped: l.shipped, Position: l.position}
		if p := s.followers.shipped.Load(); p != nil && p.log == l.id && p.number > l.shipped {
			found.Shipped, found.Position = p.number, p.position
		}
		if _, row := tx.Bucket([]byte(bucketList)).Cursor().Seek(numberKey(found.Shipped + 1)); row != nil {
			found.Oldest = commitRow(row).time()
		}
		return nil
	})
	return found, err
}

// CommitID returns the random id of a commit that the list still has. Error: ErrNoLog,
// fault.NotFound, fault.Unavailable.
func (s *Store) CommitID(ctx context.Context, log LogID, number uint64) (id [16]byte, err error) {
	err = s.readFile(ctx, func(tx *bbolt.Tx) error {
		if l, ok := logOf(tx); !ok || l.id != log {
			return ErrNoLog
		}
		row := tx.Bucket([]byte(bucketList)).Get(numberKey(number))
		if row == nil {
			return fault.New(fault.NotFound, "the list of commits does not have this one")
		}
		id = commitRow(row).id()
		return nil
	})
	return id, err
}

// CommitsAfter returns records of the commits that follow number, oldest first, of about most bytes.
// at is the At of the last record that the caller has. There are none when nothing follows. Error:
// ErrNoLog, fault.Unavailable.
func (s *Store) CommitsAfter(ctx context.Context, log LogID, number, at uint64, most int) ([]Commit, error) {
	if found := s.followers.journal.after(log, number, most); len(found) > 0 && found[0].At >= at {
		return found, nil
	}
	var found []Commit
	err := s.readFile(ctx, func(tx *bbolt.Tx) error {
		found = nil
		l, ok := logOf(tx)
		switch {
		case !ok || l.id != log:
			return ErrNoLog
		case l.number <= number:
			return nil
		}
		made := Commit{Record: commit.Record{First: number + 1, At: l.number}, Log: log}
		known, size := make(map[string]bool), 0
		list, data := tx.Bucket([]byte(bucketList)).Cursor(), tx.Bucket([]byte(bucketData))
		for key, row := list.Seek(numberKey(number + 1)); key != nil && size < most; key, row = list.Next() {
			if n := binary.BigEndian.Uint64(key); n != max(number, made.Last)+1 {
				return fault.Wrap(fault.Internal, damaged, fmt.Errorf("the list of commits has %d after %d", n, max(number, made.Last)))
			}
			err := commitRow(row).keys(func(key []byte) error {
				if err := ctx.Err(); err != nil {
					return ended(err)
				}
				if !known[string(key)] {
					known[string(key)] = true
					made.Rows = append(made.Rows, commit.Row{Key: bytes.Clone(key), Value: bytes.Clone(data.Get(key))})
					size += len(key) + len(made.Rows[len(made.Rows)-1].Value)
				}
				return nil
			})
			if err != nil {
				return err
			}
			made.Last, made.Time = binary.BigEndian.Uint64(key), commitRow(row).time()
		}
		made.ID = commitRow(tx.Bucket([]byte(bucketList)).Get(numberKey(l.number))).id()
		found = []Commit{made}
		return nil
	})
	return found, err
}

// takeUp fills the journal with what an earlier process listed and did not ship. It runs before the first
// commit of this process: otherwise one record of the list would stand for commits of both.
func (f *followers) takeUp(tx *bbolt.Tx) {
	if f.taken {
		return
	}
	f.taken = true
	l, ok := logOf(tx)
	if !ok || f.journal.bound == 0 {
		return
	}
	list, data := tx.Bucket([]byte(bucketList)), tx.Bucket([]byte(bucketData))
	newest := commitRow(list.Get(numberKey(l.number)))
	size := 0
	for n := l.shipped + 1; n <= l.number; n++ {
		var made *Commit
		if row := commitRow(list.Get(numberKey(n))); row != nil {
			var keys []string
			_ = row.keys(func(key []byte) error { keys = append(keys, string(key)); return nil })
			made = f.journal.record(data, n, row.time(), keys)
		}
		if made != nil {
			made.At, made.Log, made.ID = l.number, l.id, newest.id()
			size += made.Size()
		}
		if made == nil || size > f.journal.bound {
			f.journal.forget(l.id, n) // CommitsAfter reads the list, or says what is wrong with it
			return
		}
		f.journal.add(made)
	}
}

// Shipped says that commits up to number were shipped, so that the list need not have them. position
// is for the caller, and comes back from Log. A later commit writes both.
func (s *Store) Shipped(log LogID, number uint64, position []byte) {
	s.followers.shipped.Store(&shipped{log, number, bytes.Clone(position)})
	s.followers.journal.forget(log, number)
}

// Journaled is signalled when the journal has become half full.
func (s *Store) Journaled() <-chan struct{} { return s.followers.journal.full }

// readFile runs read over the last commit in the file, which lacks what was written ahead only when the file
// is behind or opened for reading. read must copy what it keeps.
func (s *Store) readFile(ctx context.Context, read func(*bbolt.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if !s.opts.ReadOnly {
		if err := s.queue.turn(ctx, func() {}); err != nil { // a turn flushes
			return err
		}
	}
	f, epoch, err := s.views.enter()
	if err != nil {
		return err
	}
	defer s.views.leave(f, epoch)
	err = f.view(read)
	if f.wedged.Load() {
		s.views.drop(f)
	}
	if err == nil || errors.Is(err, ErrNoLog) {
		return err
	}
	return unavailable(err)
}
