package postgres

import (
	"bytes"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// base is what a transaction reads beneath its own writes. The slices that it returns may be
// shared, so callers must not modify them.
type base interface {
	get(key []byte) ([]byte, error)
	// page returns up to limit rows from the beginning of rg. Fewer rows mean that the range has no
	// more.
	page(rg store.Range, limit int) ([]row, error)
}

// Pages of a scan grow from firstPage to lastPage rows, because most scans end after a few rows.
const firstPage, lastPage = 16, 512

// tx reads a base. Unless it belongs to a View, it also keeps writes over the base. Its log of
// changes serves to undo closures that fail.
type tx struct {
	base   base
	check  func() error      // returns nil while the closure may go on
	over   map[string][]byte // written values; nil means deleted
	keys   []string          // keys of over, sorted; some may have been undone; nil until the first scan
	log    []change
	events []any
	after  []func() // called after the commit
	broken error    // set when the base failed: the transaction must not be committed
}

// change is one write with the value of over that it replaced.
type change struct {
	key    string
	before []byte
	had    bool
}

// Get implements [store.Reader].
func (t *tx) Get(key []byte) ([]byte, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	if err := checkKey(key); err != nil {
		return nil, err
	}
	value, ok := t.over[string(key)]
	if !ok {
		var err error
		if value, err = t.base.get(key); err != nil {
			return nil, t.fail(err)
		}
	}
	return bytes.Clone(value), nil
}

// fail remembers the first error of the base and returns the error.
func (t *tx) fail(err error) error {
	if t.broken == nil {
		t.broken = err
	}
	return answer(err)
}

// Scan implements [store.Reader].
func (t *tx) Scan(rg store.Range, visit func(key, value []byte) bool) error {
	c := cursor{t: t, rg: rg, rest: rg, more: true, size: firstPage}
	for {
		if err := t.check(); err != nil {
			return err
		}
		key, value, err := c.next()
		if err != nil {
			return t.fail(err)
		}
		if key == nil {
			return nil
		}
		c.last = append(c.last[:0], key...) // a copy of its own: visit gets another
		if !visit(bytes.Clone(key), bytes.Clone(value)) {
			return nil
		}
	}
}

// cursor merges the rows of a range with the writes of the transaction. The writes may change
// between two steps; the rows may not.
type cursor struct {
	t    *tx
	rg   store.Range
	last []byte // key visited last; nil at the beginning

	rows []row       // rows of the base that are yet to come
	rest store.Range // rest of the base range after rows
	more bool        // there may be rows in rest
	size int         // size of the next page
}

// next returns the next pair, or nil. The slices belong to the store.
func (c *cursor) next() (key, value []byte, err error) {
	for {
		if err := c.fill(); err != nil {
			return nil, nil, err
		}
		written, ok := c.written()
		var stored []byte
		if len(c.rows) > 0 {
			stored = c.rows[0].key
		}
		switch {
		case stored == nil && !ok:
			return nil, nil, nil
		case stored == nil || ok && c.before(written, string(stored)):
			key, value = []byte(written), c.t.over[written]
		default:
			key, value = stored, c.rows[0].value
			c.rows = c.rows[1:]
			if v, over := c.t.over[string(key)]; over {
				value = v
			}
		}
		if value != nil {
			return key, value, nil
		}
		c.last = append(c.last[:0], key...) // deleted: go on to the next key
	}
}

// before reports whether a comes before b in the order of the scan.
func (c *cursor) before(a, b string) bool { return a != b && (a < b) != c.rg.Reverse }

// fill reads the next page when no rows are left.
func (c *cursor) fill() error {
	if len(c.rows) > 0 || !c.more {
		return nil
	}
	if c.rest.To != nil && bytes.Compare(c.rest.From, c.rest.To) >= 0 {
		c.more = false
		return nil
	}
	rows, err := c.t.base.page(c.rest, c.size)
	if err != nil {
		return err
	}
	c.more = len(rows) >= c.size
	c.rows, c.size = rows, min(2*c.size, lastPage)
	if len(rows) > 0 {
		c.rest = after(c.rest, rows[len(rows)-1].key)
	}
	return nil
}

// after returns the part of rg that comes after key.
func after(rg store.Range, key []byte) store.Range {
	if rg.Reverse {
		rg.To = key
	} else {
		rg.From = append(clone(key), 0)
	}
	return rg
}

// written returns the next key that the transaction has written.
func (c *cursor) written() (string, bool) {
	t := c.t
	if len(t.over) == 0 {
		return "", false
	}
	if t.keys == nil {
		for key := range t.over {
			t.keys = append(t.keys, key)
		}
		slices.Sort(t.keys)
	}
	from, to := string(c.rg.From), string(c.rg.To)
	i, step := 0, 1
	if c.rg.Reverse {
		step = -1
		i = len(t.keys)
		if c.last != nil {
			to = string(c.last)
		}
		if c.last != nil || c.rg.To != nil {
			i, _ = slices.BinarySearch(t.keys, to)
		}
		i--
	} else {
		var found bool
		if c.last != nil {
			if i, found = slices.BinarySearch(t.keys, string(c.last)); found {
				i++
			}
		} else {
			i, _ = slices.BinarySearch(t.keys, from)
		}
	}
	for ; i >= 0 && i < len(t.keys); i += step {
		key := t.keys[i]
		if c.rg.Reverse && key < from || !c.rg.Reverse && c.rg.To != nil && key >= to {
			return "", false
		}
		if _, ok := t.over[key]; ok {
			return key, true
		}
	}
	return "", false
}

// Put implements [store.Tx].
func (t *tx) Put(key, value []byte) error { return t.write(key, clone(value)) }

// Delete implements [store.Tx].
func (t *tx) Delete(key []byte) error { return t.write(key, nil) }

// Wrote implements [store.Tx].
func (t *tx) Wrote(key []byte) bool { _, ok := t.over[string(key)]; return ok }

// Written implements [store.Tx].
func (t *tx) Written(prefix []byte, visit func(key []byte, absent bool)) error {
	for key, value := range t.over {
		if strings.HasPrefix(key, string(prefix)) {
			visit([]byte(key), value == nil)
		}
	}
	return nil
}

// Enqueue implements [store.Tx].
func (t *tx) Enqueue(event any) { t.events = append(t.events, event) }

// OnCommit implements [store.Tx].
func (t *tx) OnCommit(do func()) { t.after = append(t.after, do) }

func (t *tx) write(key, value []byte) error {
	if err := t.check(); err != nil {
		return err
	}
	if err := checkKey(key); err != nil {
		return err
	}
	before, had := t.over[string(key)]
	if value == nil { // removing an absent key is no change
		stored := before
		if !had {
			var err error
			if stored, err = t.base.get(key); err != nil {
				return t.fail(err)
			}
		}
		if stored == nil {
			return nil
		}
	}
	k := string(key)
	t.log = append(t.log, change{k, before, had})
	t.over[k] = value
	if t.keys != nil && !had {
		if i, found := slices.BinarySearch(t.keys, k); !found {
			t.keys = slices.Insert(t.keys, i, k)
		}
	}
	return nil
}

// mark is a point in the transaction to which undo returns.
type mark struct{ changes, events, after int }

func (t *tx) mark() mark { return mark{len(t.log), len(t.events), len(t.after)} }

func (t *tx) undo(m mark) {
	for _, c := range slices.Backward(t.log[m.changes:]) {
		if c.had {
			t.over[c.key] = c.before
		} else {
			delete(t.over, c.key)
		}
	}
	t.log, t.events, t.after = t.log[:m.changes], t.events[:m.events], t.after[:m.after]
}

// changed reports whether there is anything to commit.
func (t *tx) changed() bool { return len(t.log)+len(t.events) > 0 }

// writes returns the keys and values to store and the keys to remove, in the order of the keys.
func (t *tx) writes() (keys, values, removed [][]byte) {
	sorted := make([]string, 0, len(t.over))
	for key := range t.over {
		sorted = append(sorted, key)
	}
	slices.SortFunc(sorted, strings.Compare)
	for _, key := range sorted {
		if value := t.over[key]; value != nil {
			keys, values = append(keys, []byte(key)), append(values, value)
		} else {
			removed = append(removed, []byte(key))
		}
	}
	return keys, values, removed
}

func checkKey(key []byte) error {
	if len(key) == 0 || len(key) > store.MaxKeySize {
		return fault.New(fault.Invalid, "a key of the store has 1 to 1024 bytes")
	}
	return nil
}
