// Package overlay has transactions whose writes nobody else sees. A change that is only tried is made in
// one, over a snapshot: it holds no lock, and nothing of it is ever stored.
package overlay

import (
	"bytes"
	"strings"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Tx is a [store.Tx] over a Reader. Events and what is to be done on a commit are dropped. It must not be
// used by several goroutines, nor after the View of its Reader.
type Tx struct {
	below   store.Reader
	written map[string][]byte // nil: deleted
}

// New returns a transaction over r.
func New(r store.Reader) *Tx { return &Tx{r, make(map[string][]byte)} }

// Get implements [store.Reader].
func (t *Tx) Get(key []byte) ([]byte, error) {
	if value, ok := t.written[string(key)]; ok {
		return value, nil
	}
	return t.below.Get(key)
}

// Scan implements [store.Reader]. It looks at all written keys for each row below, so it is for changes of
// few rows.
func (t *Tx) Scan(r store.Range, visit func(key, value []byte) bool) error {
	var last []byte // the key that the scan has reached
	going := true
	step := func(key, value []byte) {
		if last = bytes.Clone(key); value != nil {
			going = visit(key, value)
		}
	}
	writtenBefore := func(end []byte) {
		for going {
			key, ok := t.next(r, last, end)
			if !ok {
				return
			}
			step([]byte(key), t.written[key])
		}
	}
	err := t.below.Scan(r, func(key, value []byte) bool {
		if writtenBefore(key); !going {
			return false
		}
		if own, ok := t.written[string(key)]; ok {
			value = own
		}
		step(key, value)
		return going
	})
	if err == nil {
		writtenBefore(nil)
	}
	return err
}

// next returns the first written key of a range after last and before end, in the direction of the range.
// Nil is its beginning, or its end.
func (t *Tx) next(r store.Range, last, end []byte) (first string, ok bool) {
	order := func(a, b string) int {
		if r.Reverse {
			a, b = b, a
		}
		return strings.Compare(a, b)
	}
	for key := range t.written {
		if key < string(r.From) || r.To != nil && key >= string(r.To) ||
			last != nil && order(key, string(last)) <= 0 || end != nil && order(key, string(end)) >= 0 {
			continue
		}
		if !ok || order(key, first) < 0 {
			first, ok = key, true
		}
	}
	return first, ok
}

// Put implements [store.Tx].
func (t *Tx) Put(key, value []byte) error {
	t.written[string(key)] = append([]byte{}, value...) // empty, but not nil
	return nil
}

// Delete implements [store.Tx].
func (t *Tx) Delete(key []byte) error {
	t.written[string(key)] = nil
	return nil
}

// Wrote implements [store.Tx].
func (t *Tx) Wrote(key []byte) bool {
	_, ok := t.written[string(key)]
	return ok
}

// Written implements [store.Tx].
func (t *Tx) Written(prefix []byte, visit func(key []byte, absent bool)) error {
	for key, value := range t.written {
		if strings.HasPrefix(key, string(prefix)) {
			visit([]byte(key), value == nil)
		}
	}
	return nil
}

// Enqueue implements [store.Tx].
func (t *Tx) Enqueue(any) {}

// OnCommit implements [store.Tx].
func (t *Tx) OnCommit(func()) {}
