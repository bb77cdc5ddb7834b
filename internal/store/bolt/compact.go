package bolt

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt/pages"
	"github.com/latticekeep/latticekeep/internal/volume"
)

// Compaction
//
// bbolt gives no page back to the file system: what deleted rows took stays in the file for later
// ones. A compaction writes the rows to a new file beside the old one, and puts it in its place:
//
//  1. The rows go to the new file as a copy reads them: in short Views, while the writer notes the
//     keys that commits change (see Copying). Deletions are followed and wiped there too.
//  2. Each row of the new file is compared with the old one, except those of noted keys.
//  3. When few keys are left, the writer applies them between two commits, syncs the new file,
//     renames it over the old one and syncs the folder.
//  4. Views that are open keep the old file until they end. Then it is overwritten with zeroes,
//     because later deletions do not reach it.
//
// Until the rename the new file is a copy without use, which the next Open removes. Until the folder
// is synced no commit begins, so both files have the same rows, and a crash may leave either name.
// From the rename on the old file has no name. If the process is killed before it is overwritten, its
// blocks keep their bytes until the file system uses them again.

const (
	compactSuffix = ".compact"

	deleteDelay = time.Second     // how long the new file may keep a deleted row
	eraseLimit  = 5 * time.Second // how long Close waits for a file to be overwritten
)

// upkeep says when a Store compacts by itself. A zero field means the default.
type upkeep struct {
	every time.Duration // it looks this often; default: a minute
	pause time.Duration // it rests after a compaction; default: an hour
	least int64         // free bytes that are worth it, if they are half of the file; default: 256 MiB
}

// compactor runs one compaction at a time.
type compactor struct {
	s       *Store
	upkeep  upkeep
	running sync.Mutex

	closing context.Context // ends when Close begins
	close   context.CancelFunc
	work    sync.WaitGroup // what Close waits for

	returned  atomic.Int64 // bytes given back since Open
	compacted atomic.Int64 // Unix nanoseconds of the last compaction since Open; 0: none
}

func newCompactor(s *Store, u upkeep) *compactor {
	c := &compactor{s: s, upkeep: upkeep{
		every: cmp.Or(u.every, time.Minute),
		pause: cmp.Or(u.pause, time.Hour),
		least: cmp.Or(u.least, 256<<20),
	}}
	c.closing, c.close = context.WithCancel(context.Background())
	return c
}

// start removes what a killed process left, and begins to watch the file.
func (c *compactor) start() {
	left, err := takeLeftover(c.s.writer.path + compactSuffix)
	c.work.Go(func() {
		if left != nil {
			err = errors.Join(err, c.erase(c.closing, left), left.Close())
		}
		if err != nil {
			c.s.opts.Logger.Warn("removing the file of a compaction that was killed failed", "error", err)
		}
		c.watch()
	})
}

// takeLeftover removes a file and returns it, or nil if there is none.
func takeLeftover(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return f, os.Remove(path)
}

// stop ends what runs, and lets nothing begin any more.
func (c *compactor) stop() {
	c.close()
	c.work.Wait()
}

// last returns when the last compaction since Open ended.
func (c *compactor) last() time.Time {
	if at := c.compacted.Load(); at != 0 {
		return time.Unix(0, at)
	}
	return time.Time{}
}

// watch compacts the file whenever half of it is free.
func (c *compactor) watch() {
	look := time.NewTicker(c.upkeep.every)
	defer look.Stop()
	var resting <-chan time.Time
	lacked := false
	for {
		select {
		case <-c.closing.Done():
			return
		case <-resting:
			resting = nil
			continue
		case <-look.C:
		}
		if resting != nil || !c.isWorthIt() {
			continue
		}
		// It takes half of a core, and of the disk, at most.
		before, after, err := c.run(c.closing, func(took time.Duration) { c.sleep(took) })
		if c.closing.Err() != nil {
			return
		}
		if after > 0 {
			c.s.opts.Logger.Info("free pages of the database were given back to the file system", "bytes_before", before, "bytes_after", after)
		}
		lacks := errors.Is(err, errLacksRoom)
		if err != nil && !(lacks && lacked) { // a full volume is told of once
			c.s.opts.Logger.Warn("compacting the database failed", "error", err)
		}
		lacked = lacks
		resting = time.After(c.upkeep.pause)
	}
}

func (c *compactor) isWorthIt() bool {
	l, err := c.layout()
	return err == nil && l.Free >= max(l.Live, c.upkeep.least)
}

func (c *compactor) layout() (l pages.Layout, err error) {
	err = c.withFile(func(f *file) error { l, err = pages.LayoutOf(f.File); return err })
	return l, err
}

// withFile keeps the writer from closing the file while do uses it.
func (c *compactor) withFile(do func(*file) error) error {
	f, epoch, err := c.s.views.enter()
	if err != nil {
		return err
	}
	defer c.s.views.leave(f, epoch)
	return do(f)
}

func (c *compactor) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.closing.Done():
	}
}

// Compact puts a new file without free pages in the place of the old one, while Views and Updates go
// on. It returns the size of both once the old file is gone. After an error without sizes the old
// file is in use as before. Errors: fault.Conflict while another compaction runs; fault.Unavailable
// when the volume has no room for both files, when the compaction falls behind the writes, or when
// the disk fails.
func (s *Store) Compact(ctx context.Context) (before, after int64, err error) {
	if s.opts.ReadOnly {
		return 0, 0, fault.New(fault.Invalid, "a database that is open for reading only cannot be compacted")
	}
	s.compactor.work.Add(1)
	defer s.compactor.work.Done()
	return s.compactor.run(ctx, func(time.Duration) {})
}

// run compacts the file. It calls rest after each page with the time that the page took.
func (c *compactor) run(ctx context.Context, rest func(time.Duration)) (before, after int64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.closing, cancel)() //nolint:contextcheck // closing the store ends it as well
	if !c.running.TryLock() {
		return 0, 0, fault.New(fault.Conflict, "the database is being compacted: wait until that is done")
	}
	defer c.running.Unlock()

	var was pages.Layout
	w := c.s.writer
	err = c.withFile(func(f *file) (err error) {
		if was, err = pages.LayoutOf(f.File); err != nil {
			return err
		}
		return f.lacksRoom(was.Live + was.Live/16 + w.reserve.size + 3*mostGrowth)
	})
	if err != nil {
		return 0, 0, unavailable(err)
	}
	// The new file has a disk of its own: that of the writer knows how long commits wait.
	to, err := createBeside(w.path, &disk{now: c.s.disk.now, fault: c.s.disk.fault})
	if err != nil {
		return 0, 0, unavailable(fmt.Errorf("creating the new file: %w", err))
	}
	old, err := (&compaction{s: c.s, notes: newChangedKeys(), to: to, rest: rest}).do(ctx)
	if old == nil {
		return 0, 0, errors.Join(unavailable(err), c.discard(ctx, to))
	}
	c.compacted.Store(c.s.opts.Now().UnixNano())
	before, after = was.Size(), was.Size()
	if l, err := c.layout(); err == nil {
		after = l.Size()
		c.returned.Add(max(before-after, 0))
	}
	old.readers.Wait() // two seconds at most
	if err == nil {    // otherwise a crash might bring the old file back
		err = c.erase(ctx, old.File)
	}
	return before, after, errors.Join(err, old.close())
}

// errLacksRoom is in the error of a compaction for which the volume is too full.
var errLacksRoom = errors.New("the volume is too full")

// lacksRoom returns an error when the volume has less room than that.
func (f *file) lacksRoom(needed int64) error {
	_, free, _, err := volume.Of(f.File)
	if errors.Is(err, errors.ErrUnsupported) || err == nil && free >= needed {
		return nil
	}
	return fault.Outage(fault.ReasonSpace, fmt.Sprintf(
		"the volume of the database has no room for a second file: %d MB are needed and %d MB are free. Make the volume larger, or free space on it",
		(needed+1e6-1)/1e6, free/1e6), cmp.Or(err, errLacksRoom))
}

// discard removes the new file when it is not used.
func (c *compactor) discard(ctx context.Context, n *newFile) error {
	n.abort()
	return errors.Join(os.Remove(n.path), c.erase(ctx, n.File), n.close())
}

// erase overwrites all data of a file without a name. After the end of ctx it takes at most five
// more seconds.
func (c *compactor) erase(ctx context.Context, f *os.File) error {
	limited, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(eraseLimit, cancel) })()
	if err := c.s.disk.durably("erase", func() error { return volume.Erase(limited, f) }); err != nil {
		return fmt.Errorf("overwriting a file that is not used any more: %w", err)
	}
	return nil
}

// compaction is one that runs.
type compaction struct {
	s        *Store
	notes    *changedKeys
	to       *newFile
	rest     func(time.Duration)
	followed time.Time // when the noted keys were last read
}

// do fills the new file and puts it in the place of the old one, which it returns. It returns nil
// when the new file is not used. With both a file and an error, the folder was not synced.
func (c *compaction) do(ctx context.Context) (old *file, err error) {
	s := c.s
	if err := s.follow(ctx, &s.followers.compacting, c.notes); err != nil {
		return nil, err
	}
	defer s.followers.compacting.CompareAndSwap(c.notes, nil)
	c.followed = s.opts.Now()
	if err := c.pages(ctx, func(p page, _ store.Range) error { return p.emit(ctx, c.to.put) }); err != nil {
		return nil, fmt.Errorf("copying rows: %w", err)
	}
	if err := c.reserve(); err != nil {
		return nil, err
	}
	if err := c.pages(ctx, c.compare); err != nil {
		return nil, err
	}
	for range maxRounds {
		if err := c.followUp(ctx); err != nil {
			return nil, err
		}
		if err := c.to.sync(); err != nil {
			return nil, err
		}
		if terr := s.queue.turn(ctx, func() { old, err = s.writer.replace(c.to, c.notes) }); terr != nil {
			return nil, terr
		}
		if old != nil || err != nil {
			return old, err
		}
	}
	return nil, errBehind
}

// pages passes all rows to visit, and follows the noted keys in between: when they are many, or
// when something has been deleted.
func (c *compaction) pages(ctx context.Context, visit func(page, store.Range) error) error {
	err := c.s.pages(ctx, func(p page, r store.Range) error {
		began := time.Now()
		if c.s.writer.reserve.low.Load() {
			return errReserved
		}
		if err := c.to.lacksRoom(2 * mostGrowth); err != nil {
			return err
		}
		if err := visit(p, r); err != nil {
			return err
		}
		late := c.s.opts.Now().Sub(c.followed) > deleteDelay
		if c.notes.bytes() > noteBytes/2 || c.notes.deleted() && late {
			if err := c.followUp(ctx); err != nil {
				return err
			}
		}
		c.rest(time.Since(began))
		return nil
	})
	return errors.Join(err, c.to.flush())
}

// followUp brings the noted keys of the new file up to date.
func (c *compaction) followUp(ctx context.Context) error {
	if err := c.s.catchUp(ctx, c.notes, c.to.put); err != nil {
		return err
	}
	c.followed = c.s.opts.Now()
	return errors.Join(c.to.flush(), c.to.wipe())
}

// reserve gives the new file a reserve of its own.
func (c *compaction) reserve() error {
	size := c.s.writer.reserve.size
	if size == 0 {
		return nil
	}
	l, err := pages.LayoutOf(c.to.File)
	if err != nil {
		return err
	}
	if err := c.to.lacksRoom(size + 2*mostGrowth); err != nil {
		return err
	}
	return c.s.disk.durably("grow", func() error { return c.to.grow(l.Live+l.Free, size+lastRoom) })
}

// compare returns an error when a row of the new file is not that of the old one and has not been
// noted. Both are the rows of r; those of the old file are in p.
func (c *compaction) compare(p page, r store.Range) error {
	if err := c.to.flush(); err != nil {
		return err
	}
	var differ []string
	err := c.to.view(func(tx *bbolt.Tx) error {
		rows, at := p.rows, tx.Bucket([]byte(bucketData)).Cursor()
		for key, value := at.Seek(r.From); key != nil && (r.To == nil || bytes.Compare(key, r.To) < 0); key, value = at.Next() {
			for len(rows) > 0 && bytes.Compare(rows[0].key, key) < 0 {
				differ, rows = append(differ, string(rows[0].key)), rows[1:]
			}
			if len(rows) == 0 || !bytes.Equal(rows[0].key, key) {
				differ = append(differ, string(key))
				continue
			}
			if !bytes.Equal(rows[0].value, value) {
				differ = append(differ, string(key))
			}
			rows = rows[1:]
		}
		for _, left := range rows {
			differ = append(differ, string(left.key))
		}
		return nil
	})
	if err != nil || len(differ) == 0 {
		return err
	}
	noted, lost := c.notes.list() // after the View: all that it saw has been noted
	if lost {
		return errBehind
	}
	for _, key := range differ {
		if _, changed := slices.BinarySearch(noted, key); !changed {
			return fault.Wrap(fault.Internal, "the new file is not the same as the database: nothing was replaced", fmt.Errorf("row %q differs", key))
		}
	}
	return nil
}

// replace puts the new file in the place of the old one, which it returns. It returns nil without
// an error while more keys are noted than one page holds. The writer calls it between two commits.
func (w *writer) replace(n *newFile, notes *changedKeys) (old *file, err error) {
	if !w.views.usable() || w.ahead.behind != nil {
		return nil, errRecovering
	}
	defer w.disk.busy()()
	keys, lost := notes.list()
	if lost {
		return nil, errBehind
	}
	p := newPage(w.opts.Now)
	err = w.last.view(func(tx *bbolt.Tx) error {
		r := &reader{data: tx.Bucket([]byte(bucketData)), check: func() error { return nil }}
		if err := p.get(r, keys, p.full); err != nil || len(p.rows) < len(keys) {
			return err
		}
		return n.putOthers(tx)
	})
	if err != nil || len(p.rows) < len(keys) {
		return nil, err
	}
	for _, row := range p.rows {
		if err := n.put(row.key, row.value); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(n.flush(), n.sync()); err != nil {
		return nil, err
	}
	err = w.disk.durably("replace", func() error { return os.Rename(n.path, w.path) })
	if err != nil && !n.isAt(w.path) {
		return nil, fmt.Errorf("naming the new file: %w", err)
	}
	n.db.NoSync, n.db.NoGrowSync = false, false
	old, w.last = w.last, n.file
	w.scrubber.follow()
	if err := syncFolder(w.path, w.disk); err != nil {
		w.views.drop(old) // the writer opens the new file again, which syncs the folder first
		return old, err
	}
	w.views.use(n.file)
	return old, nil
}
