package bolt

import (
	"bytes"
	"encoding/binary"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/store/commit"
)

// The list of changed keys is bounded, and a copy that falls too far behind fails: the writer never
// waits for it.
const (
	noteBytes = 16 << 20 // bound for the noted keys, each counted as its length plus noteSize
	noteSize  = 64
)

// changedKeys is the list of keys that commits have changed since a copy began or last took the
// list.
type changedKeys struct {
	mu   sync.Mutex
	keys map[string]struct{}
	size int
	gone bool // some of the keys were deleted
	lost bool // the keys exceeded noteBytes and were dropped
}

func newChangedKeys() *changedKeys { return &changedKeys{keys: make(map[string]struct{})} }

// note adds the keys of log.
func (c *changedKeys) note(log []change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lost {
		return
	}
	for _, change := range log {
		if _, known := c.keys[string(change.key)]; !known {
			c.keys[string(change.key)] = struct{}{}
			c.size += len(change.key) + noteSize
		}
		c.gone = c.gone || change.deleted
	}
	if c.size > noteBytes {
		c.keys, c.size, c.lost = nil, 0, true
	}
}

// bytes returns the size of the list.
func (c *changedKeys) bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.size
}

// deleted reports whether some of the keys were deleted.
func (c *changedKeys) deleted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gone
}

// list returns the keys in order. lost reports that there are others, which were dropped.
func (c *changedKeys) list() (keys []string, lost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.keys)), c.lost
}

// take returns the list and empties it.
func (c *changedKeys) take() (keys []string, lost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	keys, lost = slices.Sorted(maps.Keys(c.keys)), c.lost
	c.keys, c.size, c.gone = make(map[string]struct{}), 0, false
	return keys, lost
}

// The log of commits
//
// Somebody may ship what each commit changes to another place. Two things make that possible, and
// neither delays a commit:
//
//   - The file lists which keys each commit has changed, since the last one that was shipped. The
//     list is written with the commit itself. It has no values: what is deleted must not stay in
//     the file.
//   - The journal has the same commits in memory, with their values, within a bound.
//
// A record is made from the journal while that has the commit, and from the list when shipping took
// too long. The list gives one record of several commits, with present values. What an earlier process
// did not ship is taken from the list into the journal when the file is opened, with the values of
// then. Rows of the list that were shipped go with a later commit.
//
// The list belongs to the file, so it is kept by every process that writes to the file, whether it
// ships or not. The log ends when the list grows beyond its bound, or when a release that knows
// nothing of it has written to the file: then there are changes that nobody can name any more.
//
// A restored database or a migrated one has no log, since a copy takes the data alone.

const (
	bucketList = "latticekeep/unshipped/v1" // u64(number of a commit) → commitRow
	keyLog     = "log"                      // in bucketCommit: logState

	listBytes = 16 << 20 // bound for the list
	trimRows  = 1024     // most shipped rows that one commit removes from the list
)

// LogID names a log of commits. It is random.
type LogID [16]byte

// logState is the row that says how far the log is. Each commit writes it.
type logState struct {
	id       LogID
	noted    [16]byte // id of the newest commit; the file has another one after a program has written that keeps no list
	number   uint64   // number of the newest commit that changed a row
	shipped  uint64   // the list may lack commits up to this one
	bytes    uint64   // length of the list
	position []byte   // as the caller of Shipped has it
}

const logVersion = 1

func (l logState) encode() []byte {
	b := append(append([]byte{logVersion}, l.id[:]...), l.noted[:]...)
	for _, n := range []uint64{l.number, l.shipped, l.bytes} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	return append(b, l.position...)
}

// decodeLog reads the state of the log. ok is false when there is no log that this program knows.
func decodeLog(b []byte) (l logState, ok bool) {
	const fixed = 1 + 16 + 16 + 3*8
	if len(b) < fixed || b[0] != logVersion {
		return l, false
	}
	copy(l.id[:], b[1:])
	copy(l.noted[:], b[17:])
	l.number, l.shipped, l.bytes = binary.BigEndian.Uint64(b[33:]), binary.BigEndian.Uint64(b[41:]), binary.BigEndian.Uint64(b[49:])
	l.position = bytes.Clone(b[fixed:])
	return l, true
}

// logOf reads the state of the log in a transaction.
func logOf(tx *bbolt.Tx) (l logState, ok bool) {
	b := tx.Bucket([]byte(bucketCommit))
	l, ok = decodeLog(b.Get([]byte(keyLog)))
	return l, ok && bytes.Equal(l.noted[:], b.Get([]byte(keyCommit))) && tx.Bucket([]byte(bucketList)) != nil
}

// commitRow is a row of the list: id of the commit ‖ u64(Unix microseconds) ‖ u16(length) ‖ key ‖ ….
type commitRow []byte

const rowFixed = 16 + 8

func newCommitRow(id []byte, at time.Time, keys []string) commitRow {
	b := binary.BigEndian.AppendUint64(bytes.Clone(id), uint64(at.UnixMicro()))
	for _, key := range keys {
		b = append(binary.BigEndian.AppendUint16(b, uint16(len(key))), key...)
	}
	return b
}

func (r commitRow) id() (id [16]byte) { copy(id[:], r); return id }

func (r commitRow) time() time.Time {
	return time.UnixMicro(int64(binary.BigEndian.Uint64(r[16:]))).UTC()
}

// keys calls visit for each key, until visit fails.
func (r commitRow) keys(visit func(key []byte) error) error {
	for b := r[rowFixed:]; len(b) > 0; {
		n := 2 + int(binary.BigEndian.Uint16(b))
		if err := visit(b[2:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func numberKey(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// followers learn what each commit changes.
type followers struct {
	opts    *Options
	journal *journal

	// Keys that a running copy or compaction has yet to read; nil when none is running.
	copying, compacting atomic.Pointer[changedKeys]

	taken   bool                    // takeUp has run; the writer goroutine owns this
	shipped atomic.Pointer[shipped] // up to where the log of commits was shipped; nil until [Store.Shipped]
}

// noteKeys tells what copies the keys that a commit changes. It runs before the commit.
func (f *followers) noteKeys(log []change) {
	for _, by := range []*atomic.Pointer[changedKeys]{&f.copying, &f.compacting} {
		if c := by.Load(); c != nil {
			c.note(log)
		}
	}
}

// note lists the keys that t changes, and makes a record when the journal wants one. It runs before
// the commit with the id and the time, in its transaction.
func (f *followers) note(t *tx, id []byte, at time.Time) (made *Commit, err error) {
	state := t.bolt.Bucket([]byte(bucketCommit))
	l, ok := logOf(t.bolt)
	switch {
	case t.begins != nil:
		if err := f.endLog(t.bolt); err != nil {
			return nil, err
		}
		if _, err := t.bolt.CreateBucket([]byte(bucketList)); err != nil {
			return nil, err
		}
		l = *t.begins
	case !ok:
		if state.Get([]byte(keyLog)) != nil {
			f.opts.Logger.Error("the log of commits has ended: another release has written to the database")
		}
		return nil, f.endLog(t.bolt)
	}
	copy(l.noted[:], id)
	if err := f.trim(t.bolt, &l); err != nil {
		return nil, err
	}
	if keys := slices.Sorted(maps.Keys(t.wrote)); len(keys) > 0 {
		l.number++
		row := newCommitRow(id, at, keys)
		if l.bytes += uint64(len(row)); l.bytes > listBytes {
			f.opts.Logger.Error("the log of commits has ended: too much was changed since it was last shipped", "shipped", l.shipped, "commits", l.number-l.shipped)
			return nil, f.endLog(t.bolt)
		}
		if err := t.bolt.Bucket([]byte(bucketList)).Put(numberKey(l.number), row); err != nil {
			return nil, err
		}
		made = f.journal.record(t.data, l.number, row.time(), keys)
		if made != nil {
			made.Log, made.ID = l.id, row.id()
		}
	}
	return made, state.Put([]byte(keyLog), l.encode())
}

// endLog removes the log from the file, if there is one.
func (f *followers) endLog(tx *bbolt.Tx) error {
	if tx.Bucket([]byte(bucketList)) != nil {
		if err := tx.DeleteBucket([]byte(bucketList)); err != nil {
			return err
		}
	}
	return tx.Bucket([]byte(bucketCommit)).Delete([]byte(keyLog))
}

// trim removes rows from the list that were shipped.
func (f *followers) trim(tx *bbolt.Tx, l *logState) error {
	if s := f.shipped.Load(); s != nil && s.log == l.id && s.number > l.shipped {
		l.shipped, l.position = s.number, s.position
	}
	c := tx.Bucket([]byte(bucketList)).Cursor()
	for range trimRows {
		key, row := c.First()
		if key == nil || binary.BigEndian.Uint64(key) > l.shipped {
			return nil
		}
		l.bytes -= uint64(len(row))
		if err := c.Delete(); err != nil {
			return err
		}
	}
	return nil
}

// Commit is a record with what tells its last commit from that of another database.
type Commit struct {
	commit.Record
	Log LogID
	ID  [16]byte // random id of the commit At
}

// shipped is up to where the log was shipped.
type shipped struct {
	log      LogID
	number   uint64
	position []byte
}

// journal keeps the records of the newest commits in memory until they were shipped. When they
// exceed its bound it drops them all: the list in the file has their keys.
type journal struct {
	bound int           // bytes; 0: there is no journal
	full  chan struct{} // signalled at half of the bound

	mu      sync.Mutex
	commits []Commit // one after the other
	size    int
}

// record makes the record of a commit, or nil when the journal does not take it.
func (j *journal) record(data *bbolt.Bucket, number uint64, at time.Time, keys []string) *Commit {
	if j.bound == 0 {
		return nil
	}
	c := &Commit{Record: commit.Record{First: number, Last: number, At: number, Time: at, Rows: make([]commit.Row, len(keys))}}
	size := 0
	for i, key := range keys {
		value := data.Get([]byte(key))
		if size += len(key) + len(value); size > j.bound {
			return nil
		}
		c.Rows[i] = commit.Row{Key: []byte(key), Value: bytes.Clone(value)}
	}
	return c
}

// add takes a commit that is durable.
func (j *journal) add(c *Commit) {
	if c == nil {
		return
	}
	size := c.Size()
	j.mu.Lock()
	defer j.mu.Unlock()
	if n := len(j.commits); j.size+size > j.bound || n > 0 && (j.commits[n-1].Log != c.Log || j.commits[n-1].Last+1 != c.First) {
		j.commits, j.size = nil, 0
	}
	if size > j.bound {
		return
	}
	j.commits = append(j.commits, *c)
	if j.size += size; j.size > j.bound/2 && j.size-size <= j.bound/2 {
		poke(j.full)
	}
}

// after returns the commits that follow number, of about most bytes, if the journal has the first of
// them.
func (j *journal) after(log LogID, number uint64, most int) []Commit {
	j.mu.Lock()
	defer j.mu.Unlock()
	i := slices.IndexFunc(j.commits, func(c Commit) bool { return c.Log == log && c.First == number+1 })
	if i < 0 {
		return nil
	}
	size, end := 0, i
	for ; end < len(j.commits) && size < most; end++ {
		size += j.commits[end].Size()
	}
	return slices.Clone(j.commits[i:end])
}

// forget drops the commits up to number.
func (j *journal) forget(log LogID, number uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for ; n < len(j.commits) && j.commits[n].Log == log && j.commits[n].Last <= number; n++ {
		j.size -= j.commits[n].Size()
	}
	j.commits = slices.Delete(j.commits, 0, n) // zeroes the rest, so that the values can be freed
}
