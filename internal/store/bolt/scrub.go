package bolt

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/store/bolt/pages"
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

// scrubber knows whether freed pages have to be wiped, and wipes them.
type scrubber struct {
	pace   pace
	disk   *disk
	logger *slog.Logger

	mu    sync.Mutex
	clean chan struct{} // closed by the scrub that wipes deleted rows; nil when there is nothing to wipe

	// The writer goroutine owns these.
	resting  <-chan time.Time    // no scrub until it fires
	patience <-chan time.Time    // until it fires, Views may hold back the scrub, and groups go first
	overdue  bool                // patience has run out
	tail     bool                // wipe the bytes after the last page too
	unsynced map[uint64]struct{} // pages zeroed since the last successful sync
}

// request makes a scrub due.
func (s *scrubber) request() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clean == nil {
		s.clean = make(chan struct{})
	}
}

// suspect makes a scrub due that also wipes the tail: a commit with an unknown outcome may have
// deleted rows or left pages there.
func (s *scrubber) suspect() {
	s.tail = true
	s.request()
}

// follow makes the scrubber wipe another file than before.
func (s *scrubber) follow() {
	s.unsynced = nil
	s.suspect()
}

// isDue reports whether there is something to wipe and the pause since the last scrub is over.
func (s *scrubber) isDue() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.clean != nil && s.resting == nil
}

// awaitViews waits until no View blocks a due scrub, and reports whether that is so.
func (s *scrubber) awaitViews(v *views, blocked func() bool) bool {
	giveUp := time.After(0)
	if s.overdue {
		giveUp = time.After(s.pace.hold)
	}
	if !v.await(blocked, giveUp) {
		if s.overdue {
			s.logger.Error("freed pages could not be wiped in time: a View does not end")
			s.overdue = false
		}
		if s.patience == nil {
			s.patience = time.After(s.pace.patience)
		}
		return false
	}
	s.patience, s.overdue = nil, false
	return true
}

// wait waits until everything is wiped that completed Updates deleted.
func (s *scrubber) wait(ctx context.Context) error {
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

// finish ends a scrub that has wiped everything.
func (s *scrubber) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clean != nil {
		close(s.clean)
		s.clean = nil
	}
}

// wipe zeroes the free pages while transaction txid is open.
func (s *scrubber) wipe(f *file, txid int) error {
	m, err := pages.NewestMeta(f.File)
	if err != nil {
		return err
	}
	if int(m.TxID)+1 != txid {
		return fmt.Errorf("scrubbing: the file is at transaction %d, bbolt at %d", m.TxID, txid)
	}
	free, err := m.FreePages(f.File)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("reading file size: %w", err)
	}
	if s.tail {
		tail, err := m.WrittenTail(f.File)
		if err != nil {
			return err
		}
		free = append(free, tail...)
	}
	if s.unsynced == nil {
		s.unsynced = make(map[uint64]struct{})
	}
	zeroes, buffer := make([]byte, m.PageSize), make([]byte, m.PageSize)
	for _, id := range free {
		at := int64(id) * m.PageSize
		size := min(m.PageSize, info.Size()-at) // a failed write may have left part of a page at the end
		zero, page := zeroes[:size], buffer[:size]
		if _, err := f.ReadAt(page, at); err != nil {
			return fmt.Errorf("reading a freed page: %w", err)
		}
		if _, again := s.unsynced[id]; !again && bytes.Equal(page, zero) {
			continue
		}
		s.unsynced[id] = struct{}{}
		if err := s.disk.durably("wipe", func() error { _, err := f.WriteAt(zero, at); return err }); err != nil {
			return fmt.Errorf("wiping a freed page: %w", err)
		}
	}
	if len(s.unsynced) > 0 {
		defer s.disk.busy()()
		if err := s.disk.durably("scrub", f.Sync); err != nil {
			return fmt.Errorf("syncing wiped pages: %w", err)
		}
	}
	s.unsynced, s.tail = nil, false
	return nil
}
