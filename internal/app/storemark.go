package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// markRow says of a store that it is not to be served. It is of the store and not
// of the deployment: no backup is restored with it, and no migration copies it.
var markRow = []byte("maintenance")

// mark is its content.
type mark struct {
	State string `json:"state"`
	ID    string `json:"id"`              // of the restore or migration: random
	Other string `json:"other"`           // where it comes from or goes to, without what is secret
	Chain string `json:"chain,omitempty"` // fingerprint
	Since string `json:"since"`           // RFC 3339
	Rows  uint64 `json:"rows,omitempty"`  // copied so far,
	Next  []byte `json:"next,omitempty"`  // and the key behind the last of them
}

// States of a store that has the row.
const (
	markRestoring = "restoring" // a backup is being loaded
	markReceiving = "receiving" // a migration is being copied to it
	markLeaving   = "leaving"   // it is being copied elsewhere
	markMoved     = "moved"     // it was: the deployment is there now
)

// readMark returns the mark of a store, or nil.
func readMark(r store.Reader) (*mark, error) {
	b, err := r.Get(markRow)
	if err != nil || b == nil {
		return nil, err
	}
	m := new(mark)
	if err := json.Unmarshal(b, m); err != nil {
		return nil, fault.Wrap(fault.Internal, "the row that says why the database is not served is damaged: restore a backup", err)
	}
	return m, nil
}

// markOf reads the mark of a store, or nil.
func markOf(ctx context.Context, s store.Store) (m *mark, err error) {
	err = s.View(ctx, func(r store.Reader) (err error) {
		m, err = readMark(r)
		return err
	})
	return m, err
}

// unfinished says whether the store lacks part of what it is to hold.
func (m *mark) unfinished() bool { return m.State == markRestoring || m.State == markReceiving }

func (m *mark) put(tx store.Tx) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return tx.Put(markRow, b)
}

// refusal says why the store is not served, and what helps.
func (m *mark) refusal() error {
	var text string
	switch m.State {
	case markRestoring:
		text = fmt.Sprintf("a restore into this database, begun %s, has not come to its end: run latticekeep restore again", m.Since)
	case markReceiving:
		text = fmt.Sprintf("a migration from %s into this database, begun %s, has not come to its end: run latticekeep migrate again", m.Other, m.Since)
	case markLeaving:
		text = fmt.Sprintf("this database is being moved to %s since %s: run latticekeep migrate again, or give that up with latticekeep migrate --abandon", m.Other, m.Since)
	case markMoved:
		text = fmt.Sprintf("this deployment was moved to %s, begun %s, and goes on there: name that in store.url, or its folder in dataDir. "+
			"Were it served here too, there would be two of it whose logs part", m.Other, m.Since)
	default:
		text = "this database is being worked on by a newer release: use that"
	}
	return fault.New(fault.Unavailable, text)
}

// refuseMarked fails for a store that is not to be served.
func refuseMarked(ctx context.Context, s store.Store) error {
	m, err := markOf(ctx, s)
	if err != nil || m == nil {
		return err
	}
	return m.refusal()
}

// unmarked is the hook of a store that is served: with it a store that gets a mark
// takes no more commits of any process, at once.
func unmarked(hook store.Hook) store.Hook {
	return func(tx store.Tx, events []any) error {
		m, err := readMark(tx)
		if err != nil {
			return err
		}
		if m != nil {
			return m.refusal()
		}
		return hook(tx, events)
	}
}

// heldBy fails when the mark of a store is not that of the restore or migration
// with this id. An empty id stands for a store that has no need of a mark.
func heldBy(r store.Reader, id string) error {
	if id == "" {
		return nil
	}
	m, err := readMark(r)
	if err == nil && (m == nil || m.ID != id) {
		err = fault.New(fault.Conflict, "another restore or migration has taken over the database: look which one is to be, and run that again")
	}
	return err
}

// unmark takes the mark away, and is sure of it.
func unmark(ctx context.Context, s store.Store, id string) error {
	err := s.Update(ctx, func(tx store.Tx) error {
		return errors.Join(heldBy(tx, id), tx.Delete(markRow))
	})
	if err != nil { // it may have been committed all the same
		if m, read := markOf(ctx, s); read == nil && m == nil {
			return nil
		}
		return fmt.Errorf("making the database one that is served: %w", err)
	}
	return nil
}

// begin gives an empty database its mark. What is left of an earlier attempt, as
// stale says of its mark, is removed; anything else is refused.
func begin(ctx context.Context, s store.Store, m *mark, stale func(*mark) bool) error {
	own := func(found *mark) bool { return found.ID == m.ID || stale(found) }
	for {
		var wrong error
		left := false
		err := s.Update(ctx, func(tx store.Tx) error {
			wrong, left = nil, false
			found, err := readMark(tx)
			if err != nil {
				return err
			}
			if found != nil && !own(found) {
				wrong = found.refusal()
				return wrong
			}
			var keys [][]byte
			err = tx.Scan(store.Range{}, func(key, _ []byte) bool {
				if !bytes.Equal(key, markRow) {
					keys = append(keys, bytes.Clone(key))
				}
				return len(keys) < restoreRows
			})
			if err != nil {
				return err
			}
			if found == nil && len(keys) > 0 {
				wrong = errNotEmpty
				return wrong
			}
			left = len(keys) == restoreRows
			for _, key := range keys {
				if err := tx.Delete(key); err != nil {
					return err
				}
			}
			return m.put(tx)
		})
		switch {
		case wrong == errNotEmpty:
			return notEmpty(ctx, s)
		case wrong != nil:
			return wrong
		case err != nil:
			return fmt.Errorf("preparing the database: %w", err)
		case !left:
			return nil
		}
	}
}

var errNotEmpty = fault.New(fault.Conflict, "the database is not empty")

// notEmpty says what is in the way.
func notEmpty(ctx context.Context, s store.Store) error {
	if chain := chainOf(ctx, s); chain != "" {
		return fmt.Errorf("the database holds a deployment already, of the chain %s, and nothing is ever overwritten: name an empty one", chain)
	}
	return errors.New("the database holds something already, and nothing is ever overwritten: name an empty one")
}
