package offline

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// PutFirstMark sets a mark on a store that has none.
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
	if err != nil { // the commit may have succeeded all the same
		if found, read := MarkOf(ctx, s); read == nil && found != nil && found.ID == m.ID {
			return nil
		}
	}
	return err
}

// Limits for one commit of a restore.
const (
	BatchRows  = 1000
	BatchBytes = 4 << 20
)

// MarkRow is the key of the mark, which says that the store must not be served. The mark belongs to
// the store and not to the deployment: no backup contains it, and no migration copies it.
var MarkRow = []byte("maintenance")

// Mark is the content of MarkRow.
type Mark struct {
	State string `json:"state"`
	ID    string `json:"id"`              // random id of the restore or migration
	Other string `json:"other"`           // location of the other store, without secrets
	Chain string `json:"chain,omitempty"` // fingerprint of the chain
	Since string `json:"since"`           // RFC 3339
	Rows  uint64 `json:"rows,omitempty"`  // rows copied so far
	Next  []byte `json:"next,omitempty"`  // key after the last copied row

	Identity []byte `json:"identity,omitempty"` // public key that signs what a cold copy follows
}

// States of a store with a mark.
const (
	Restoring = "restoring" // a backup is being loaded into it
	Receiving = "receiving" // a migration is being copied into it
	Leaving   = "leaving"   // a migration is being copied from it
	Following = "following" // it is a cold copy of a deployment that is served elsewhere
	Promoting = "promoting" // the cold copy is being made one that is served
	Moved     = "moved"     // the migration is complete; the deployment is in the other store
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

// MarkOf reads the mark in its own transaction. It returns nil without a mark.
func MarkOf(ctx context.Context, s store.Store) (m *Mark, err error) {
	err = s.View(ctx, func(r store.Reader) (err error) {
		m, err = ReadMark(r)
		return err
	})
	return m, err
}

// Unfinished reports whether the store is still incomplete.
func (m *Mark) Unfinished() bool { return m.State == Restoring || m.State == Receiving }

func (m *Mark) Put(tx store.Tx) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return tx.Put(MarkRow, b)
}

// Err returns an error that says why the store is not served, and what to do. Its message is for
// strangers, and does not name the other store.
func (m *Mark) Err() error {
	var text string
	switch m.State {
	case Restoring:
		text = fmt.Sprintf("a restore into this database, begun %s, is unfinished: run latticekeep restore again", m.Since)
	case Receiving:
		text = fmt.Sprintf("a migration from %s into this database, begun %s, is unfinished: run latticekeep migrate again", m.Other, m.Since)
	case Leaving:
		text = fmt.Sprintf("this database is being moved to %s (begun %s): run latticekeep migrate again, or abandon that with latticekeep migrate --abandon", m.Other, m.Since)
	case Following:
		text = fmt.Sprintf("this database is a cold copy of a deployment that is served elsewhere (begun %s): stop that server for good, then run latticekeep restore --promote", m.Since)
	case Promoting:
		text = "the promotion of this cold copy is unfinished: run latticekeep restore --promote again"
	case Moved:
		text = fmt.Sprintf("this deployment was moved to %s (begun %s): name that store in store.url, or its folder in dataDir. "+
			"Serving it here too would fork its audit log", m.Other, m.Since)
	default:
		text = "a newer release is working on this database: use that release"
	}
	return fault.Wrap(fault.Unavailable, "this database is not served", errors.New(text))
}

// CheckUnmarked fails if the store has a mark.
func CheckUnmarked(ctx context.Context, s store.Store) error {
	m, err := MarkOf(ctx, s)
	if err != nil || m == nil {
		return err
	}
	return m.Err()
}

// HookUnlessMarked returns a hook for a store that is served. Once the store gets a mark, the hook
// refuses all further commits of every process.
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

// CheckHolder fails if the store's mark does not belong to the restore or migration with this id.
// An empty id means that the store needs no mark.
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

// Unmark removes the mark. If the commit fails, it checks whether the mark is gone all the same.
func Unmark(ctx context.Context, s store.Store, id string) error {
	err := s.Update(ctx, func(tx store.Tx) error {
		return errors.Join(CheckHolder(tx, id), tx.Delete(MarkRow))
	})
	if err != nil { // the commit may have succeeded all the same
		if m, read := MarkOf(ctx, s); read == nil && m == nil {
			return nil
		}
		return fmt.Errorf("making the database one that is served: %w", err)
	}
	return nil
}

// Claim sets a mark on an empty database. It removes the rows of an earlier attempt if stale
// accepts its mark, and refuses a database with other content.
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
		case errors.Is(wrong, errNotEmpty):
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

// NotEmptyError returns an error that says what the database contains.
func NotEmptyError(ctx context.Context, s store.Store) error {
	if chain := chainOf(ctx, s); chain != "" {
		return fmt.Errorf("the database holds a deployment already, of the chain %s, and nothing is ever overwritten: name an empty one", chain)
	}
	return errors.New("the database holds something already, and nothing is ever overwritten: name an empty one")
}

// chainOf returns the fingerprint of the chain in a store, and "" without a chain.
func chainOf(ctx context.Context, s store.Store) string {
	report, err := verify.Store(ctx, s, verify.Options{To: 1})
	if err != nil {
		return ""
	}
	return report.Fingerprint
}
