package bolt

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"time"

	bbolt "go.etcd.io/bbolt"
	"k8s.io/utils/third_party/forked/golang/btree"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt/wal"
	"github.com/latticekeep/latticekeep/internal/store/commit"
)

// Writing ahead
//
// A commit of bbolt writes whole paths of its tree and syncs twice. So after [Store.WriteAhead] most
// groups are committed to the write-ahead log instead (package wal): their rows are written in
// sequence and synced once. The transaction of bbolt stays open meanwhile, and the next group
// continues in it. A flush commits it, and the log begins anew:
//
//   - after a second, or when the transaction or the log has become large, see mostPending;
//   - before a scrub, a compaction and Close, which is how a deleted row leaves both files;
//   - with a group that cannot be written ahead: one that probes the disk, begins a log of commits, or
//     is too large.
//
// Views read the newest flush and the rows of the commits after it, which are in memory.
//
// The database names its log and the last commit of it that it has. A start applies those that follow,
// before anything else writes to the database. So does the writer when it opens the file again. While
// that fails, Views read the file and what the log has beside it, and nothing is committed. Either way
// the log is then discarded, and another one begins once commits succeed: what failed to be written to
// the log cannot come back.

const (
	walSuffix = ".wal"
	keyAhead  = "ahead" // in bucketCommit: id of the log ‖ u64(number of the newest commit of the log that the file has)

	// Bytes that a flush may make the file longer, as estimated, when one caller waits for it and when many do.
	mostAhead  = 16 << 20
	leastAhead = 3 << 20

	applyAgain = 5 * time.Second // pause between attempts to apply the log, during which Views are not disturbed
)

// item is a row of a commit that was written ahead. A nil value means that the row was deleted.
type item struct{ key, value []byte }

func lessItem(a, b item) bool { return bytes.Compare(a.key, b.key) < 0 }

type rows = btree.BTree[item]

// recent are the rows of the commits after transaction base, which is the newest that the file has. It
// has them all once it is at a later one.
type recent struct {
	base int
	rows *rows // never changed; nil: none
}

// ahead is the part of the writer that writes ahead. The writer goroutine owns it.
type ahead struct {
	wanted bool      // begin a log once commits succeed
	log    *wal.Log  // nil: groups are committed to bbolt
	state  wal.State // what the file has, with what was written ahead
	behind error     // why the file in use lacks what the log has, so that nothing can be committed; nil: it does not

	open *batch           // nil: nothing was written ahead since the last flush
	due  <-chan time.Time // a flush is due when it fires

	flushAfter time.Duration
}

// batch is a transaction of bbolt with commits that only the log has.
type batch struct {
	bolt   *bbolt.Tx
	data   *bbolt.Bucket
	txid   int   // bolt.ID()
	growth int64 // as of tx.growth
	rows   *rows // what View readers get a copy of
}

// WriteAhead makes the store write commits ahead from now on. Raise the format of the store first: a
// program that does not know the log must not open the database.
func (s *Store) WriteAhead(ctx context.Context) error {
	var err error
	turned := s.queue.turn(ctx, func() {
		s.writer.ahead.wanted = true
		err = s.writer.beginLog()
	})
	return cmp.Or(turned, err)
}

// beginLog makes the log, and then the row that makes it part of the database, if a log is wanted and
// commits succeed. After an error none is wanted any more.
func (w *writer) beginLog() (err error) {
	a := &w.ahead
	if !a.wanted || a.log != nil || a.behind != nil || !w.views.usable() || w.views.failed.Load() {
		return nil
	}
	defer func() { a.wanted = err == nil }()
	path := w.path + walSuffix
	if err := wal.Discard(path); err != nil { // a start did not manage to
		return unavailable(err)
	}
	log, err := wal.Create(path)
	if err != nil {
		return unavailable(fmt.Errorf("making the write-ahead log: %w", err))
	}
	state := wal.State{}
	rand.Read(state.Log[:]) // never fails
	err = likewise(path, w.path)
	if err == nil {
		err = w.changeLogRow(func(b *bbolt.Bucket) error {
			copy(state.Newest[:], b.Get([]byte(keyCommit)))
			return putState(b, state)
		})
	}
	if err != nil {
		return errors.Join(unavailable(err), log.Close()) // the row may be there, so the file stays
	}
	a.log, a.state, a.flushAfter = log, state, cmp.Or(a.flushAfter, time.Second)
	return nil
}

// resume begins a log again after a failure.
func (w *writer) resume() {
	if err := w.beginLog(); err != nil {
		w.opts.Logger.Warn(noLog, "error", err)
	}
}

const noLog = "there is no write-ahead log: commits are slower until the next start"

// endLog makes the database do without the log.
func (w *writer) endLog() error {
	if w.ahead.log == nil {
		return nil
	}
	err := w.changeLogRow(func(b *bbolt.Bucket) error { return b.Delete([]byte(keyAhead)) })
	err = errors.Join(err, w.ahead.log.Close())
	w.ahead.log = nil
	return err
}

// wipeLog wipes the log. One that is not in use has nothing that the database lacks, and is removed.
func (w *writer) wipeLog() error {
	defer w.disk.busy()()
	return w.disk.durably("wipe log", func() error {
		if w.ahead.log != nil {
			return w.ahead.log.Wipe()
		}
		return wal.Discard(w.path + walSuffix)
	})
}

// changeLogRow changes the row about the log in a commit of its own.
func (w *writer) changeLogRow(change func(*bbolt.Bucket) error) error {
	b, _, err := w.beginWrite()
	if err != nil {
		return err
	}
	defer w.disk.busy()()
	err = w.disk.durably("note log", func() error {
		return guard(func() error {
			if err := change(b.Bucket([]byte(bucketCommit))); err != nil {
				return err
			}
			return b.Commit()
		})
	})
	if err != nil {
		_ = w.rollback(b)
		w.views.drop(w.last)
		return err
	}
	w.views.age()
	return nil
}

func putState(b *bbolt.Bucket, s wal.State) error {
	return b.Put([]byte(keyAhead), binary.BigEndian.AppendUint64(s.Log[:], s.Applied))
}

// stateOf reads the state of the log in a transaction. has is false when the database has no log.
func stateOf(tx *bbolt.Tx) (s wal.State, has bool, err error) {
	b := tx.Bucket([]byte(bucketCommit))
	copy(s.Newest[:], b.Get([]byte(keyCommit)))
	row := b.Get([]byte(keyAhead))
	switch len(row) {
	case 0:
		return s, false, nil
	case len(s.Log) + 8:
		copy(s.Log[:], row)
		s.Applied = binary.BigEndian.Uint64(row[len(s.Log):])
		return s, true, nil
	}
	return s, true, fault.New(fault.Unavailable, newerLog)
}

const newerLog = "the write-ahead log of the database is of a newer release: install that one"

// mostPending returns how many bytes the commits that wait for a flush may make the file longer, as
// estimated, when a group with that many callers follows them. With more, the group is committed with the
// flush, and all of its callers wait for that: many get short flushes, and few get rare ones.
func mostPending(callers int) int64 { return max(mostAhead*8/(7+int64(callers)), leastAhead) }

// encodeAhead encodes what a group has changed, and returns its rows. There is no record when the group
// cannot be written ahead, or a flush is due.
func (w *writer) encodeAhead(g *group, id wal.ID, at time.Time) (record []byte, items []item) {
	a, t := &w.ahead, g.tx
	if a.log == nil || g.probe || t.begins != nil || t.direct || w.views.failed.Load() || w.reserve.low.Load() ||
		t.earlier > mostPending(len(g.requests)) || t.growth() > mostAhead {
		return nil, nil
	}
	made := wal.Record{Log: a.state.Log, Previous: a.state.Newest, ID: id, Record: commit.Record{
		First: a.state.Applied + 1, Last: a.state.Applied + 1, At: a.state.Applied + 1, Time: at,
	}}
	size := 0
	err := guard(func() error {
		for key := range t.wrote {
			row := commit.Row{Key: []byte(key), Value: t.data.Get([]byte(key))}
			if size += len(row.Key) + len(row.Value); size > wal.MaxSize/2 {
				return errTooLarge
			}
			made.Rows = append(made.Rows, row)
		}
		record = made.Encode()
		return nil
	})
	if err != nil || !a.log.Reserve(len(record)) {
		return nil, nil // bbolt says what is wrong, if anything
	}
	// What Views read must not be in the memory map, which a file that is opened again loses.
	parsed, _ := wal.Parse(record)
	for _, row := range parsed.Rows {
		items = append(items, item{row.Key, row.Value})
	}
	return record, items
}

var errTooLarge = errors.New("the group is too large to be written ahead")

// writeAhead makes the group of t durable in the log.
func (w *writer) writeAhead(t *tx, id wal.ID, record []byte, items []item) error {
	a := &w.ahead
	if err := w.disk.durably("commit", func() error { return a.log.Append(record) }); err != nil {
		a.wanted = false
		w.opts.Logger.Error("writing the write-ahead log failed. "+noLog, "error", err)
		return err
	}
	if a.open == nil {
		a.open, a.due = &batch{bolt: t.bolt, data: t.data, txid: t.txid, rows: btree.New(32, lessItem)}, time.After(a.flushAfter)
	}
	a.open.growth = t.growth()
	a.state.Applied++
	a.state.Newest = id
	for _, i := range items {
		a.open.rows.ReplaceOrInsert(i)
	}
	w.last.recent.Store(&recent{base: a.open.txid - 1, rows: a.open.rows.Clone()})
	return nil
}

// flushed says that a transaction has been committed to bbolt.
func (w *writer) flushed(txid int) {
	w.ahead.open, w.ahead.due = nil, nil
	if w.ahead.log != nil {
		w.ahead.log.Rewind()
		w.last.recent.Store(&recent{base: txid})
	}
	w.views.age()
}

// flush commits what was written ahead to bbolt. When that fails, the file is opened again, which
// applies the log.
func (w *writer) flush() error {
	open := w.ahead.open
	if open == nil {
		return nil
	}
	defer w.disk.busy()()
	err := w.disk.durably("flush", func() error { return guard(func() error { return w.commitBolt(open.bolt) }) })
	if err == nil {
		w.flushed(open.txid)
		return nil
	}
	w.opts.Logger.Error("committing failed", "error", fmt.Errorf("applying the write-ahead log: %w", err))
	return w.reopen()
}

// commitBolt commits a transaction of bbolt that has all of the log.
func (w *writer) commitBolt(b *bbolt.Tx) error {
	if w.ahead.log != nil {
		if err := putState(b.Bucket([]byte(bucketCommit)), w.ahead.state); err != nil {
			return err
		}
	}
	return b.Commit()
}

// openApplied opens the file and applies what the log has and the file has not. The database then does
// without the log. With both a file and an error that failed: Views can read the file, and nothing can
// be committed.
func (w *writer) openApplied() (*file, error) {
	w.ahead.behind = nil
	f, records, err := w.openPending()
	if err != nil {
		return nil, err
	}
	var failed error
	if records != nil {
		if failed = w.apply(f, records); failed != nil {
			// After a commit that failed, bbolt is wrong about the file.
			if err := f.close(); err != nil {
				return nil, err
			}
			if f, records, err = w.openPending(); err != nil {
				return nil, err
			}
		}
	}
	if failed != nil && records != nil {
		if err := w.merge(f, records); err != nil {
			return nil, errors.Join(err, f.close())
		}
		w.ahead.behind = fmt.Errorf("applying the write-ahead log: %w", failed)
		return f, w.ahead.behind
	}
	err = f.view(func(tx *bbolt.Tx) (err error) {
		w.ahead.state, _, err = stateOf(tx)
		w.followers.takeUp(tx)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	if err := w.wipeLog(); err != nil { // the scrub tries again
		w.opts.Logger.Warn("wiping a write-ahead log that is not needed any more failed", "error", err)
	}
	return f, nil
}

// openPending opens the file and reads what its log has beside it. records is nil when the database has
// no log, and empty when it has all of it.
func (w *writer) openPending() (f *file, records []wal.Record, err error) {
	if f, err = openFile(w.path, false, w.disk); err != nil {
		return nil, nil, err
	}
	if records, err = pendingIn(f, w.path+walSuffix); err != nil {
		return nil, nil, errors.Join(err, f.close())
	}
	return f, records, nil
}

// merge lets Views of f see the log, once it is certain that the log has on the disk what was read of it.
func (w *writer) merge(f *file, records []wal.Record) error {
	if err := w.disk.durably("settle log", func() error { return wal.Settle(w.path + walSuffix) }); err != nil {
		return err
	}
	if len(records) > 0 {
		w.ahead.state.Newest = records[len(records)-1].ID
	}
	return f.merge(records)
}

// apply applies records in one transaction, and removes the row about the log.
func (w *writer) apply(f *file, records []wal.Record) error {
	if len(records) > 0 {
		w.opts.Logger.Info("applying the write-ahead log", "commits", len(records))
	}
	b, data, err := f.begin(true)
	if err != nil {
		return err
	}
	err = w.disk.durably("apply", func() error {
		return guard(func() error {
			for _, r := range records {
				if err := w.repeat(b, data, r); err != nil {
					return err
				}
			}
			if err := b.Bucket([]byte(bucketCommit)).Delete([]byte(keyAhead)); err != nil {
				return err
			}
			return b.Commit()
		})
	})
	if err != nil {
		_ = f.rollback(b)
	}
	return err
}

// repeat puts what a commit has changed into a transaction.
func (w *writer) repeat(b *bbolt.Tx, data *bbolt.Bucket, r wal.Record) error {
	t := &tx{bolt: b, reader: reader{data: data}, wrote: make(map[string]int)}
	for _, row := range r.Rows {
		t.wrote[string(row.Key)]++
		var err error
		if row.Value == nil {
			err = data.Delete(row.Key)
		} else {
			err = data.Put(row.Key, row.Value)
		}
		if err != nil {
			return err
		}
	}
	if _, err := w.followers.note(t, r.ID[:], r.Time); err != nil {
		return err
	}
	return b.Bucket([]byte(bucketCommit)).Put([]byte(keyCommit), r.ID[:])
}

// pendingIn returns the commits that the log at path has and the database f has not. It returns nil when
// the database has no log.
func pendingIn(f *file, path string) (records []wal.Record, err error) {
	var state wal.State
	var has bool
	err = f.view(func(tx *bbolt.Tx) (err error) { state, has, err = stateOf(tx); return err })
	if err != nil || !has {
		return nil, err
	}
	records, err = wal.After(path, state)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = fault.Wrap(fault.Internal, fmt.Sprintf(
			"the write-ahead log %s is missing, and may have commits that the database has not: put it back, or make an empty file of that name to go on without them", path), err)
	case errors.Is(err, wal.ErrNewer):
		err = fault.Wrap(fault.Unavailable, newerLog, err)
	case errors.Is(err, wal.ErrGap):
		err = fault.Wrap(fault.Internal, fmt.Sprintf(
			"the write-ahead log %s is damaged or that of another state of the database: restore a backup, put both files back as they were together, or make this one empty to go on without its commits", path), err)
	}
	return records, err
}

// openMerged opens the file for reading only. Views see what the log has beside it.
func openMerged(path string, d *disk) (*file, error) {
	f, err := openFile(path, true, d)
	if err != nil {
		return nil, err
	}
	records, err := pendingIn(f, path+walSuffix)
	if err == nil && records != nil {
		err = f.merge(records)
	}
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

// merge lets Views of a file see rows that it does not have.
func (f *file) merge(records []wal.Record) error {
	found := &recent{rows: btree.New(32, lessItem)}
	for _, r := range records {
		for _, row := range r.Rows {
			found.rows.ReplaceOrInsert(item{row.Key, row.Value})
		}
	}
	err := f.view(func(tx *bbolt.Tx) error { found.base = tx.ID(); return nil })
	f.recent.Store(found)
	return err
}

// beginView starts a View of the newest commit.
func (f *file) beginView() (tx *bbolt.Tx, r *reader, err error) {
	for {
		tx, data, err := f.begin(false)
		if err != nil {
			return nil, nil, err
		}
		r := &reader{data: data}
		found := f.recent.Load() // after the transaction began, so that it is at least as new
		switch {
		case found == nil || found.base < tx.ID(): // all of it is in the file
			return tx, r, nil
		case found.base == tx.ID():
			r.recent = found.rows
			return tx, r, nil
		}
		if err := f.rollback(tx); err != nil { // a flush came between
			return nil, nil, err
		}
	}
}

// nextRecent returns the first row after last in the direction of the range; a nil last is its
// beginning.
func nextRecent(rows *rows, rg store.Range, last []byte) (found item, ok bool) {
	visit := func(i item) bool {
		if last != nil && bytes.Equal(i.key, last) {
			return true
		}
		found, ok = i, true
		return false
	}
	if !rg.Reverse {
		from := rg.From
		if last != nil {
			from = last
		}
		rows.AscendGreaterOrEqual(item{key: from}, visit)
		return found, ok && (rg.To == nil || bytes.Compare(found.key, rg.To) < 0)
	}
	switch {
	case last != nil:
		rows.DescendLessOrEqual(item{key: last}, visit)
	case rg.To != nil:
		last = rg.To // exclusive
		rows.DescendLessOrEqual(item{key: last}, visit)
	default:
		rows.Descend(visit)
	}
	return found, ok && bytes.Compare(found.key, rg.From) >= 0
}
