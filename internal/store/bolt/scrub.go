package bolt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"
)

// Wiping
//
// bbolt never overwrites a page in place: a changed page is written elsewhere,
// and the old one, with all the values on it, stays in the file as a free page
// until it is used again. So after a Delete the writer wipes: with the write
// transaction in hand it zeroes every free page and syncs. It does the same each
// time it has opened the file, because a process that died may not have wiped,
// and a Delete that was answered with fault.Unavailable may have persisted.
//
// Which pages are free is read from the file, not from bbolt's memory: the
// newest meta page names the freelist page, and that lists every page which the
// meta page does not reach. Whoever could still need one of them is
//
//   - a View that began before the last commit: the scrub waits until it is gone;
//   - recovery from a crash, which falls back to the meta page before the newest
//     only if the newest is broken. But the newest was synced before its commit
//     was answered, or settled when the file was opened, and is not written to
//     again until the one after it is durable. bbolt relies on the same when it
//     uses the pages again in the next commit; zeroes are no worse than new data.
//
// A crash in the middle leaves some free pages zeroed; the next Open wipes the
// rest. Live pages hold nothing stale: bbolt builds each page in a zeroed buffer
// (its pool zeroes what it takes back, and takes nothing back from a commit that
// failed), and separator keys in branch pages are rewritten with their leaf.
// Behind the last page in use lies what failed commits may have left, which is
// wiped when the file has been opened, for the first time or after a failure.
//
// Out of reach are copies that the file system or the drive keeps (journals of
// data, snapshots, worn flash), and swap.

// pace is how scrubs and groups share the writer. A Delete is wiped within the
// sum of the three, which is less than five seconds, and the time of one scrub,
// from its commit on; when that failed, from when the file is open again.
type pace struct {
	pause    time.Duration // between two scrubs, so that they cost a steady load little
	patience time.Duration // how long a scrub that old Views hold back lets groups go first
	hold     time.Duration // how long it then holds back groups: old Views end, and none grow old
}

// wiper is the writer's state of scrubbing.
type wiper struct {
	resting  <-chan time.Time    // until then no scrub
	patience <-chan time.Time    // until then Views may hold the scrub back and groups go first
	overdue  bool                // patience is over
	tail     bool                // what lies behind the last page is to be wiped too
	unsynced map[uint64]struct{} // zeroed, but a sync has not succeeded since
}

// wipeFreed scrubs if there is reason to and nothing is in the way.
func (s *Store) wipeFreed() {
	s.mu.Lock()
	due := s.clean != nil && s.open != nil
	s.mu.Unlock()
	if !due || s.wipe.resting != nil {
		return
	}
	giveUp := time.After(0)
	if s.wipe.overdue {
		giveUp = time.After(s.opts.pace.hold)
	}
	if !s.awaitViews(s.views.stale, giveUp) {
		if s.wipe.overdue {
			s.opts.Logger.Error("freed pages could not be wiped in time: a View does not end")
			s.wipe.overdue = false
		}
		if s.wipe.patience == nil {
			s.wipe.patience = time.After(s.opts.pace.patience)
		}
		return
	}
	s.wipe.patience, s.wipe.overdue = nil, false
	s.wipe.resting = time.After(s.opts.pace.pause)
	if err := s.scrub(); err != nil {
		s.opts.Logger.Error("wiping freed pages failed, will be tried again", "error", err)
	}
}

// Scrubbed returns when the bytes of everything deleted by Updates that have
// returned, whatever their answer, are wiped from the file, or with an error when
// ctx ends first.
func (s *Store) Scrubbed(ctx context.Context) error {
	s.mu.Lock()
	clean := s.clean
	s.mu.Unlock()
	if clean == nil {
		return nil
	}
	select {
	case <-clean:
		return nil
	case <-ctx.Done():
		return ended(ctx.Err())
	}
}

// scrub wipes all free pages. The caller has seen to it that no View is older
// than the last commit.
func (s *Store) scrub() error {
	tx, _, err := s.beginWrite()
	if err != nil {
		return fmt.Errorf("beginning to scrub: %w", err)
	}
	err = s.wipePages(s.last, tx.ID())
	if err := errors.Join(err, s.rollback(tx)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clean != nil {
		close(s.clean)
		s.clean = nil
	}
	return nil
}

// wipePages zeroes what is free while transaction txid is open.
func (s *Store) wipePages(f *file, txid int) error {
	m, err := newestMeta(f.File)
	if err != nil {
		return err
	}
	if int(m.txid)+1 != txid {
		return fmt.Errorf("scrubbing: the file is at transaction %d, bbolt at %d", m.txid, txid)
	}
	free, err := m.freePages(f.File)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("reading file size: %w", err)
	}
	if s.wipe.tail {
		for id := m.high; int64(id)*m.pageSize < info.Size(); id++ {
			free = append(free, id)
		}
	}
	if s.wipe.unsynced == nil {
		s.wipe.unsynced = make(map[uint64]struct{})
	}
	zeroes, buffer := make([]byte, m.pageSize), make([]byte, m.pageSize)
	for _, id := range free {
		at := int64(id) * m.pageSize
		size := min(m.pageSize, info.Size()-at) // a write that failed may have left a part of a page at the end
		zero, page := zeroes[:size], buffer[:size]
		if _, err := f.ReadAt(page, at); err != nil {
			return fmt.Errorf("reading a freed page: %w", err)
		}
		if _, again := s.wipe.unsynced[id]; !again && bytes.Equal(page, zero) {
			continue
		}
		s.wipe.unsynced[id] = struct{}{}
		if err := s.opts.durably("wipe", func() error { _, err := f.WriteAt(zero, at); return err }); err != nil {
			return fmt.Errorf("wiping a freed page: %w", err)
		}
	}
	if len(s.wipe.unsynced) > 0 {
		defer s.busy()()
		if err := s.opts.durably("scrub", f.Sync); err != nil {
			return fmt.Errorf("syncing wiped pages: %w", err)
		}
	}
	s.wipe.unsynced, s.wipe.tail = nil, false
	return nil
}
