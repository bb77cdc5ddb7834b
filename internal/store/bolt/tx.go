package bolt

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// reader reads one bbolt transaction. It copies what it returns out of the memory map, under guard:
// a slice into the map would fault inside the closure when the disk fails, and would kill the
// process if it outlived the map.
type reader struct {
	data    *bbolt.Bucket
	recent  *rows        // rows of commits that the file does not have yet; nil: none, as in a tx
	check   func() error // returns nil while the closure may read on
	changes int          // number of writes, which invalidate cursors
}

// Get implements [store.Reader].
func (r *reader) Get(key []byte) (value []byte, err error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if err := checkKey(key); err != nil {
		return nil, err
	}
	if r.recent != nil {
		if found, ok := r.recent.Get(item{key: key}); ok {
			return bytes.Clone(found.value), nil
		}
	}
	err = guard(func() error {
		value = bytes.Clone(r.data.Get(key))
		return nil
	})
	return value, err
}

// Scan implements [store.Reader].
func (r *reader) Scan(rg store.Range, visit func(key, value []byte) bool) error {
	var c cursor
	if err := guard(func() error { c = cursor{r: r, rg: rg, bolt: r.data.Cursor()}; return nil }); err != nil {
		return err
	}
	for {
		if err := r.check(); err != nil {
			return err
		}
		var key, value []byte
		err := guard(func() error {
			k, v := c.step()
			key, value = bytes.Clone(k), bytes.Clone(v)
			return nil
		})
		if err != nil {
			return err
		}
		if key == nil {
			return nil
		}
		if !visit(key, value) {
			return nil
		}
	}
}

// cursor walks a range. It seeks again after writes, because bbolt's cursor keeps references to
// nodes that writes replace.
type cursor struct {
	r       *reader
	rg      store.Range
	bolt    *bbolt.Cursor
	last    []byte // a copy of the file's key that was passed last; nil at the beginning
	changes int    // value of reader.changes when bolt was positioned

	// For a reader with recent rows: the next pair of the file and the next recent one.
	begun      bool
	key, value []byte
	recent     item
	more       bool // there is a next recent row
}

// step returns the next pair of the file and of the recent rows, or nil.
func (c *cursor) step() (key, value []byte) {
	if c.r.recent == nil {
		return c.next()
	}
	if !c.begun {
		c.begun = true
		c.key, c.value = c.next()
		c.recent, c.more = nextRecent(c.r.recent, c.rg, nil)
	}
	for {
		order := c.compare()
		if order > 0 {
			if key, value = c.key, c.value; key == nil {
				return nil, nil // bbolt's cursor must not go on from its end
			}
		} else {
			key, value = c.recent.key, c.recent.value
			c.recent, c.more = nextRecent(c.r.recent, c.rg, key)
		}
		if order >= 0 {
			c.key, c.value = c.next()
		}
		if value != nil {
			return key, value
		}
	}
}

// compare tells which of the next pairs comes first: below 0 the recent one, above 0 that of the file, and
// 0 when the recent one is in the place of the other.
func (c *cursor) compare() int {
	switch order := bytes.Compare(c.recent.key, c.key); {
	case !c.more:
		return 1
	case c.key == nil: // the end of the file
		return -1
	case c.rg.Reverse:
		return -order
	default:
		return order
	}
}

// next returns the next pair of the range in the file, or nil.
func (c *cursor) next() (key, value []byte) {
	moved := c.changes != c.r.changes
	c.changes = c.r.changes
	if c.rg.Reverse {
		key, value = c.prev(moved)
	} else {
		key, value = c.following(moved)
	}
	if key != nil {
		c.last = append(c.last[:0], key...)
	}
	return key, value
}

func (c *cursor) following(moved bool) (key, value []byte) {
	switch {
	case c.last == nil:
		key, value = c.bolt.Seek(c.rg.From)
	case moved:
		if key, value = c.bolt.Seek(c.last); bytes.Equal(key, c.last) {
			key, value = c.bolt.Next()
		}
	default:
		key, value = c.bolt.Next()
	}
	if c.rg.To != nil && bytes.Compare(key, c.rg.To) >= 0 {
		return nil, nil
	}
	return key, value
}

func (c *cursor) prev(moved bool) (key, value []byte) {
	below := c.last
	if below == nil {
		if below = c.rg.To; below == nil {
			below = bytes.Repeat([]byte{0xff}, store.MaxKeySize+1)
		}
		moved = true
	}
	if moved {
		c.bolt.Seek(below) // the first key that is not below, or past the end
	}
	key, value = c.bolt.Prev()
	// bbolt's Prev also returns nil on a leaf that deletions in this transaction have emptied, and
	// continues from there when called again. It is the end only when no key is left below.
	for key == nil {
		if first, _ := c.r.data.Cursor().First(); first == nil || bytes.Compare(first, below) >= 0 {
			return nil, nil
		}
		key, value = c.bolt.Prev()
	}
	if bytes.Compare(key, c.rg.From) < 0 {
		return nil, nil
	}
	return key, value
}

// tx is the transaction of one group. Its log of changes serves to undo closures that fail, and
// tells afterwards what the group has done. Groups that are written ahead share a transaction of bbolt.
type tx struct {
	reader
	bolt    *bbolt.Tx
	txid    int   // bolt.ID(), which bolt does not know any more after the commit
	earlier int64 // growth of the groups before this one in bolt
	direct  bool  // the group is not to be written ahead
	log     []change
	wrote   map[string]int // number of the changes in log, by key
	touched int            // number of all changes, those that were undone too
	events  []any
	after   []func()  // called after the commit
	broken  error     // set when bbolt panicked: the transaction must not be committed
	bytes   int       // length of the keys and values that were put
	room    int64     // what fitted on the disk when the group began
	begins  *logState // a log of commits begins with this commit; nil mostly
}

// change is one write with the value that it replaced.
type change struct {
	key, before []byte // before is nil when the key was absent
	deleted     bool
}

// Put implements [store.Tx].
func (t *tx) Put(key, value []byte) error {
	value = append([]byte{}, value...) // never nil, which would read as absent
	return t.change(change{key: bytes.Clone(key)}, func(key []byte) error {
		t.bytes += len(key) + len(value)
		return t.data.Put(key, value)
	})
}

// Delete implements [store.Tx].
func (t *tx) Delete(key []byte) error {
	return t.change(change{key: bytes.Clone(key), deleted: true}, t.data.Delete)
}

// Wrote implements [store.Tx].
func (t *tx) Wrote(key []byte) bool { return t.wrote[string(key)] > 0 }

// Written implements [store.Tx].
func (t *tx) Written(prefix []byte, visit func(key []byte, absent bool)) error {
	for key := range t.wrote {
		if !strings.HasPrefix(key, string(prefix)) {
			continue
		}
		value, err := t.Get([]byte(key))
		if err != nil {
			return err
		}
		visit([]byte(key), value == nil)
	}
	return nil
}

// Enqueue implements [store.Tx].
func (t *tx) Enqueue(event any) { t.events = append(t.events, event) }

// OnCommit implements [store.Tx].
func (t *tx) OnCommit(do func()) { t.after = append(t.after, do) }

func (t *tx) Get(key []byte) ([]byte, error) {
	value, err := t.reader.Get(key)
	return value, t.note(err)
}

func (t *tx) Scan(r store.Range, visit func(key, value []byte) bool) error {
	return t.note(t.reader.Scan(r, visit))
}

func (t *tx) change(c change, do func(key []byte) error) error {
	if err := t.check(); err != nil {
		return err
	}
	if err := checkKey(c.key); err != nil {
		return err
	}
	return t.note(guard(func() error {
		// bbolt keeps this slice valid until the commit, which is after any undo.
		c.before = t.data.Get(c.key)
		if c.before == nil && c.deleted {
			return nil
		}
		if err := do(c.key); err != nil {
			return fmt.Errorf("writing to bbolt: %w", err)
		}
		t.log = append(t.log, c)
		t.touched++
		if t.wrote == nil {
			t.wrote = make(map[string]int)
		}
		t.wrote[string(c.key)]++
		t.changes++
		return nil
	}))
}

// note remembers damage, because the bbolt transaction cannot be trusted after it.
func (t *tx) note(err error) error {
	if t.broken == nil && errors.Is(err, fault.Internal) {
		t.broken = err
	}
	return err
}

// mark is a point in the transaction to which undo returns.
type mark struct{ changes, events, after, bytes int }

func (t *tx) mark() mark { return mark{len(t.log), len(t.events), len(t.after), t.bytes} }

func (t *tx) undo(m mark) {
	for i := len(t.log) - 1; i >= m.changes; i-- {
		c := t.log[i]
		_ = t.note(guard(func() error {
			if c.before == nil {
				return t.data.Delete(c.key)
			}
			return t.data.Put(c.key, c.before)
		}))
		if t.wrote[string(c.key)]--; t.wrote[string(c.key)] == 0 {
			delete(t.wrote, string(c.key))
		}
		t.changes++
	}
	t.log, t.events, t.after, t.bytes = t.log[:m.changes], t.events[:m.events], t.after[:m.after], m.bytes
}

// changed reports whether there is anything to commit.
func (t *tx) changed() bool { return len(t.log)+len(t.events) > 0 || t.begins != nil }

// deletes reports whether the group removed a key.
func (t *tx) deletes() bool {
	for _, c := range t.log {
		if c.deleted {
			return true
		}
	}
	return false
}

func checkKey(key []byte) error {
	if len(key) == 0 || len(key) > store.MaxKeySize {
		return fault.New(fault.Invalid, "a key of the store has 1 to 1024 bytes")
	}
	return nil
}
