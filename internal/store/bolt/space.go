package bolt

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store/bolt/pages"
	"github.com/latticekeep/latticekeep/internal/volume"
)

// Space
//
// bbolt grows the file without allocating its blocks, so a full disk would show in the middle of a
// commit, and long after the growth. The writer therefore grows the file itself, before a commit
// that might not fit, and allocates what it adds. A commit that has no room then fails before it has
// written anything, and the file need not be opened again.
//
// The reserve is a part of the file, too: the writer keeps that many bytes allocated after the pages
// in use. So nobody else can take them, a process that is killed leaves them where they are, and
// bbolt uses them without being told. Once the disk is so full that the reserve cannot be kept
// whole, only the closures go on that [Options.Spared] lets: they use it up. When what is left no
// longer holds a commit, all are refused, and no commit is tried that would fail. Once a second the
// writer looks for room. It fills the reserve first, and then lets all closures go on again.
//
// Where blocks cannot be kept for a file, because the file system writes everything to a new place
// or cannot allocate, the reserve is a threshold of what is free on the volume. Others may use that.

const (
	// The file grows by an eighth, within these bounds.
	leastGrowth = 1 << 20
	mostGrowth  = 16 << 20

	leftForOthers = 64 << 10    // never allocated: the file system needs some of it
	shareOfVolume = 16          // the reserve is at most this part of the volume
	lastRoom      = 512 << 10   // with less room, a group might not fit
	lookAgain     = time.Second // pause between attempts to grow on a full disk
	filled        = 5.0 / 4     // the room at which the reserve counts as whole again, in reserves
	noRoomMessage = "the disk of the database is full: free space or make the volume larger"
)

var (
	errReserved = fault.Outage(fault.ReasonSpace, noRoomMessage+". Until then only reads and removals are served", syscall.ENOSPC)
	errNoRoom   = fault.Outage(fault.ReasonSpace, noRoomMessage, syscall.ENOSPC)
)

// reserve is what the writer keeps for the closures that go on while the disk is full. The writer
// goroutine owns it, except for what others may load.
type reserve struct {
	size   int64                // 0: no reserve
	spared func(event any) bool // Options.Spared

	again <-chan time.Time // until it fires, the writer does not try to grow the file

	left atomic.Int64 // bytes of the reserve that are left
	low  atomic.Bool  // only closures that are spared go on
	gone atomic.Bool  // nothing goes on
}

// newReserve returns a reserve for the database in f.
func newReserve(f *file, o Options) *reserve {
	r := &reserve{size: o.Reserve, spared: o.Spared}
	if total, _, _, err := volume.Of(f.File); err == nil {
		r.size = min(r.size, total/shareOfVolume)
	}
	r.left.Store(r.size)
	return r
}

// lookForRoom finds out how many bytes the next commits can write, and whether that is enough. Until
// the reserve is whole, the writer looks again and again.
func (w *writer) lookForRoom(used, needed int64) (room int64) {
	r := w.reserve
	kept := r.size + lastRoom // a small change must still fit above the reserve
	switch {
	case r.size == 0:
		kept = 0
	case r.low.Load():
		kept = int64(float64(r.size)*filled) + lastRoom
	}
	if room = w.last.room(used, kept+needed); room < kept+needed && r.again == nil {
		end := w.disk.busy()
		if err := w.disk.durably("grow", func() error { return w.last.grow(used, kept+needed) }); err != nil {
			w.opts.Logger.Warn("the database file could not grow", "error", err)
		}
		end()
		if room = w.last.room(used, kept+needed); room < kept+needed {
			r.again = time.After(lookAgain)
		}
	}
	low := room < kept
	if r.size > 0 && r.low.Swap(low) != low {
		if low {
			w.opts.Logger.Error("the disk is full: only reads and removals are served, from the reserve", "reserve_bytes", max(room, 0))
		} else {
			w.opts.Logger.Info("the disk has room again: changes are served, and the reserve is whole")
		}
	}
	r.left.Store(min(max(room, 0), r.size))
	r.gone.Store(r.size > 0 && room < min(lastRoom, r.size/2))
	return room
}

// refill looks for room when no group does.
func (w *writer) refill() {
	if w.reserve.size == 0 || w.reserve.again != nil || !w.views.usable() {
		return
	}
	if open := w.ahead.open; open != nil {
		w.lookForRoom(open.bolt.Size(), open.growth)
		return
	}
	tx, _, err := w.beginWrite()
	if err != nil {
		return
	}
	w.lookForRoom(tx.Size(), 0)
	_ = w.rollback(tx)
}

// admit returns an error when the disk is too full for what a closure has done since m.
func (w *writer) admit(t *tx, m mark) error {
	r := w.reserve
	if r.size == 0 || m.changes == len(t.log) && m.events == len(t.events) {
		return nil
	}
	needed := t.growth()
	if !r.low.Load() && t.room-needed < r.size {
		t.room = w.lookForRoom(t.bolt.Size(), needed)
	}
	if !r.low.Load() && t.room-needed >= r.size {
		return nil
	}
	for _, e := range t.events[m.events:] {
		if !r.spared(e) {
			return errReserved
		}
	}
	if r.gone.Load() || t.room < needed {
		return errNoRoom
	}
	return nil
}

// fits returns an error when t would not fit. Where that cannot be known, the commit finds out.
func (w *writer) fits(t *tx) error {
	needed := t.growth()
	if t.room >= needed || w.last.sparse {
		return nil
	}
	if w.reserve.size == 0 { // admit has not looked
		if err := w.disk.durably("grow", func() error { return w.last.grow(t.bolt.Size(), needed) }); err != nil {
			return err
		}
		if w.last.sparse || w.last.room(t.bolt.Size(), needed) >= needed {
			return nil
		}
	}
	return fmt.Errorf("growing the file: %w", syscall.ENOSPC)
}

// room returns how many bytes can be written after the first used ones. It stops counting at enough,
// so there may be more.
func (f *file) room(used, enough int64) int64 {
	if f.sparse {
		_, free, _, err := volume.Of(f.File)
		if err != nil {
			return 0
		}
		return free
	}
	tail := max(f.allocated-used, 0)
	if tail >= enough {
		return tail
	}
	l, err := pages.LayoutOf(f.File)
	if err != nil {
		return tail
	}
	return tail + l.Free/2 // half, because a row that needs several pages side by side may find none
}

// grow allocates room bytes after the first used ones and some more for later, or what the volume
// has left.
func (f *file) grow(used, room int64) error {
	_, free, keeps, err := volume.Of(f.File)
	if f.sparse = f.sparse || err != nil || !keeps; f.sparse {
		return nil
	}
	if f.allocated == 0 {
		if err := f.findAllocated(used); err != nil || f.sparse {
			return err
		}
	}
	end := used + room
	end += min(max(end/8, leastGrowth), mostGrowth)
	if end = min(end, max(f.allocated, used)+free-leftForOthers); end <= f.allocated {
		return nil
	}
	if err := volume.Allocate(f.File, used, end); err != nil {
		return fmt.Errorf("allocating %d bytes: %w", end-used, err)
	}
	// A commit syncs only the data of the file and what is needed to find them.
	if err := f.Sync(); err != nil {
		return fmt.Errorf("syncing the size of the file: %w", err)
	}
	f.allocated = end
	return nil
}

// findAllocated finds out how much of the file has blocks, and gives it blocks up to its end if
// there are any: an earlier program, or bbolt, may have made it longer without.
func (f *file) findAllocated(used int64) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	size := info.Size()
	if size <= used {
		f.allocated = used
		return nil
	}
	switch err := volume.Allocate(f.File, used, size); {
	case err == nil:
		f.allocated = size
	case errors.Is(err, errors.ErrUnsupported):
		f.sparse = true
	default: // all blocks before the end count, so they are at most as many as this
		f.allocated = max(used, min(size, volume.Blocks(info)))
	}
	return nil
}

// growth returns about the number of bytes by which a commit of t's transaction makes the file longer, if
// no page is free: what was put, the pages around that, and the list of free pages. Entries of events are
// written later, by the hook, so they are estimated. A change that was undone has its pages written all
// the same.
func (t *tx) growth() int64 {
	const entry = 8 << 10
	page := int64(os.Getpagesize())
	return cmp.Or(t.earlier, 64*page) + int64(t.bytes)*5/4 + int64(t.touched)*page + int64(len(t.events))*entry
}

// probeSize is about the size of an entry with what goes with it.
const probeSize = 16 << 10

// putProbe writes a row in place of the last probe's one. Its bytes are random, because a file
// system may store a run of zeroes in no space at all.
func putProbe(t *bbolt.Tx) error {
	b, err := t.CreateBucketIfNotExists([]byte(bucketProbe))
	if err != nil {
		return err
	}
	row := make([]byte, probeSize)
	rand.Read(row) // never fails
	return b.Put([]byte(keyProbe), row)
}
