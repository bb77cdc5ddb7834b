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
// bbolt never overwrites a page in place. It writes a changed page elsewhere, and the old one, with
// all its values, stays in the file as a free page until it is used again. So after a Delete the
// writer wipes: inside a write transaction it zeroes every free page and syncs. It also wipes each
// time it has opened the file, because a process that died may not have wiped, and a Delete that
// was answered with fault.Unavailable may have persisted.
//
// The list of free pages comes from the file, not from bbolt's memory: the newest meta page names
// the freelist page, and that page lists every page which the meta page does not reach. Only two
// readers could still need one of them:
//
//   - A View that began before the last commit. The scrub waits until it has ended.
//   - Recovery from a crash, which falls back to the previous meta page only if the newest is
//     broken. But the newest was synced before its commit was answered, or settled when the file
//     was opened, and is not written again until the next one is durable. bbolt relies on the
//     same when it reuses the pages in the next commit; zeroes are no worse than new data.
//
// A crash in the middle leaves some free pages zeroed; the next Open wipes the rest. Live pages
// hold no stale bytes: bbolt builds each page in a zeroed buffer (its pool zeroes the buffers that
// it takes back, and takes none back from a failed commit), and rewrites separator keys in branch
// pages with their leaf. Failed commits may have left bytes after the last page in use. The writer
// wipes them after each opening of the file.
//
// The scrub cannot reach copies that the file system or the drive keeps (data journals, snapshots,
// worn flash), nor swap.

// pace controls how scrubs and groups share the writer. A Delete is wiped within the sum of the
// three durations, which is less than five seconds, plus the time of one scrub. The time counts
// from its commit or, if that failed, from the moment the file is open again.
type pace struct {
	pause    time.Duration // between two scrubs, so that they cost little under a steady load
	patience time.Duration // how long groups go first while old Views hold back a scrub
	hold     time.Duration // how long the scrub then holds back groups, so that old Views end and none become old
}

// wiper is the writer's state for scrubbing.
type wiper struct {
	resting  <-chan time.Time    // no scrub until it fires
	patience <-chan time.Time    // until it fires, Views may hold back the scrub, and groups go first
	overdue  bool                // patience has run out
	tail     bool                // wipe the bytes after the last page too
	unsynced map[uint64]struct{} // pages zeroed since the last successful sync
}

// wipeFreed scrubs if a scrub is due and nothing blocks it.
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

// Scrubbed waits until the bytes of everything that completed Updates deleted, whatever their
// answer, are wiped from the file. It returns an error when ctx ends first.
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

// scrub wipes all free pages. The caller must make sure that no View is older than the last commit.
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

// wipePages zeroes the free pages while transaction txid is open.
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
		size := min(m.pageSize, info.Size()-at) // a failed write may have left part of a page at the end
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
