package offline

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// PutFirstMark marks a store that has no mark.
func PutFirstMark(ctx context.Context, s store.Store, m *Mark) error {
	err := s.Update(ctx, func(tx store.Tx) error {
		found, err := ReadMark(tx)
		if err != nil {
			return err
		}
		if found != nil {
			return found.Err()
		}
		return m.Put(tx)
	})
	if err != nil { // it may have been committed all the same
		if found, read := MarkOf(ctx, s); read == nil && found != nil && found.ID == m.ID {
			return nil
		}
	}
	return err
}

// Bounds of one commit of a restore.
const (
	BatchRows  = 1000
	BatchBytes = 4 << 20
)

// MarkRow says of a store that it is not to be served. It is of the store and not
// of the deployment: no backup is restored with it, and no migration copies it.
var MarkRow = []byte("maintenance")

// Mark is its content.
type Mark struct {
	State string `json:"state"`
	ID    string `json:"id"`              // random id of the restore or migration
	Other string `json:"other"`           // the other side, without secrets
	Chain string `json:"chain,omitempty"` // fingerprint
	Since string `json:"since"`           // RFC 3339
	Rows  uint64 `json:"rows,omitempty"`  // copied so far,
	Next  []byte `json:"next,omitempty"`  // and the key behind the last of them
}

// States of a store that has the row.
const (
	Restoring = "restoring" // a backup is being loaded
	Receiving = "receiving" // a migration is being copied to it
	Leaving   = "leaving"   // it is being copied elsewhere
	Moved     = "moved"     // it was: the deployment is there now
)

// ReadMark returns the mark of a store, or nil.
func ReadMark(r store.Reader) (*Mark, error) {
	b, err := r.Get(MarkRow)
	if err != nil || b == nil {
		return nil, err
	}
	m := new(Mark)
	if err := json.Unmarshal(b, m); err != nil {
		return nil, fault.Wrap(fault.Internal, "the row that says why the database is not served is damaged: restore a backup", err)
	}
	return m, nil
}

// MarkOf reads the mark of a store, or nil.
func MarkOf(ctx context.Context, s store.Store) (m *Mark, err error) {
	err = s.View(ctx, func(r store.Reader) (err error) {
		m, err = ReadMark(r)
		return err
	})
	return m, err
}

// Unfinished says whether the store lacks part of what it is to hold.
func (m *Mark) Unfinished() bool { return m.State == Restoring || m.State == Receiving }

func (m *Mark) Put(tx store.Tx) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return tx.Put(MarkRow, b)
}

// Err says why the store is not served, and what helps.
func (m *Mark) Err() error {
	var text string
	switch m.State {
	case Restoring:
		text = fmt.Sprintf("a restore into this database, begun %s, is unfinished: run latticekeep restore again", m.Since)
	case Receiving:
		text = fmt.Sprintf("a migration from %s into this database, begun %s, is unfinished: run latticekeep migrate again", m.Other, m.Since)
	case Leaving:
		text = fmt.Sprintf("this database is being moved to %s (begun %s): run latticekeep migrate again, or abandon that with latticekeep migrate --abandon", m.Other, m.Since)
	case Moved:
		text = fmt.Sprintf("this deployment was moved to %s (begun %s): name that store in store.url, or its folder in dataDir. "+
			"Serving it here too would fork its audit log", m.Other, m.Since)
	default:
		text = "a newer release is working on this database: use that release"
	}
	return fault.New(fault.Unavailable, text)
}

// CheckUnmarked fails for a store that is not to be served.
func CheckUnmarked(ctx context.Context, s store.Store) error {
	m, err := MarkOf(ctx, s)
	if err != nil || m == nil {
		return err
	}
	return m.Err()
}

// HookUnlessMarked is the hook of a store that is served: with it a store that gets a mark
// takes no more commits of any process, at once.
func HookUnlessMarked(hook store.Hook) store.Hook {
	return func(tx store.Tx, events []any) error {
		m, err := ReadMark(tx)
		if err != nil {
			return err
		}
		if m != nil {
			return m.Err()
		}
		return hook(tx, events)
	}
}

// CheckHolder fails when the mark of a store is not that of the restore or migration
// with this id. An empty id stands for a store that has no need of a mark.
func CheckHolder(r store.Reader, id string) error {
	if id == "" {
		return nil
	}
	m, err := ReadMark(r)
	if err == nil && (m == nil || m.ID != id) {
		err = fault.New(fault.Conflict, "another restore or migration has taken over the database: decide which one is to finish, and run it again")
	}
	return err
}

// Unmark takes the mark away, and is sure of it.
func Unmark(ctx context.Context, s store.Store, id string) error {
	err := s.Update(ctx, func(tx store.Tx) error {
		return errors.Join(CheckHolder(tx, id), tx.Delete(MarkRow))
	})
	if err != nil { // it may have been committed all the same
		if m, read := MarkOf(ctx, s); read == nil && m == nil {
			return nil
		}
		return fmt.Errorf("making the database one that is served: %w", err)
	}
	return nil
}

// Claim gives an empty database its mark. What is left of an earlier attempt, as
// stale says of its mark, is removed; anything else is refused.
func Claim(ctx context.Context, s store.Store, m *Mark, stale func(*Mark) bool) error {
	own := func(found *Mark) bool { return found.ID == m.ID || stale(found) }
	for {
		var wrong error
		left := false
		err := s.Update(ctx, func(tx store.Tx) error {
			wrong, left = nil, false
			found, err := ReadMark(tx)
			if err != nil {
				return err
			}
			if found != nil && !own(found) {
				wrong = found.Err()
				return wrong
			}
			var keys [][]byte
			err = tx.Scan(store.Range{}, func(key, _ []byte) bool {
				if !bytes.Equal(key, MarkRow) {
					keys = append(keys, bytes.Clone(key))
				}
				return len(keys) < BatchRows
			})
			if err != nil {
				return err
			}
			if found == nil && len(keys) > 0 {
				wrong = errNotEmpty
				return wrong
			}
			left = len(keys) == BatchRows
			for _, key := range keys {
				if err := tx.Delete(key); err != nil {
					return err
				}
			}
			return m.Put(tx)
		})
		switch {
		case wrong == errNotEmpty:
			return NotEmptyError(ctx, s)
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

// NotEmptyError says what is in the way.
func NotEmptyError(ctx context.Context, s store.Store) error {
	if chain := chainOf(ctx, s); chain != "" {
		return fmt.Errorf("the database holds a deployment already, of the chain %s, and nothing is ever overwritten: name an empty one", chain)
	}
	return errors.New("the database holds something already, and nothing is ever overwritten: name an empty one")
}

// chainOf returns the fingerprint of the chain in a store, and "" when it has
// none.
func chainOf(ctx context.Context, s store.Store) string {
	report, err := audit.VerifyStore(ctx, s, audit.Options{To: 1})
	if err != nil {
		return ""
	}
	return report.Fingerprint
}
