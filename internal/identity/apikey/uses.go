package apikey

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// LastUses keeps the uses of API keys that are not written yet, because a commit for each request
// costs more than most requests do. The zero value is ready.
type LastUses struct {
	mu sync.Mutex
	at map[Name]time.Time
}

// Note records a use.
func (u *LastUses) Note(n Name, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.at == nil {
		u.at = make(map[Name]time.Time)
	}
	if now.After(u.at[n]) {
		u.at[n] = now.UTC()
	}
}

// All returns the uses that are not written yet.
func (u *LastUses) All() map[Name]time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	return maps.Clone(u.at)
}

// written removes the uses up to the given times.
func (u *LastUses) written(at map[Name]time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.at, func(n Name, t time.Time) bool { return !t.After(at[n]) })
}

// Flush writes the uses. It loses none when it fails.
func (u *LastUses) Flush(ctx context.Context, to store.Store, s *Store) error {
	uses := u.All()
	if len(uses) == 0 {
		return nil
	}
	err := to.Update(ctx, func(tx store.Tx) error {
		for n, at := range uses {
			b, err := tx.Get(NameKey(n))
			if err != nil {
				return err
			}
			if b == nil {
				continue // revoked since
			}
			var previous time.Time // a damaged row is overwritten
			if _, err := s.rows.Get(tx, usedKey(n.ID), &previous); err == nil && !at.After(previous) {
				continue // another replica's is newer
			}
			if err := s.rows.Put(tx, usedKey(n.ID), at); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		u.written(uses)
	}
	return err
}
