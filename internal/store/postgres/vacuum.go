package postgres

import (
	"time"
)

// What was deleted stays in the files of PostgreSQL until the table is vacuumed.
// The server does that by itself once enough has gathered, which in a quiet
// deployment may be never. So every replica asks for it within vacuumAfter of
// a commit that deleted, and after it has started; a table that is being vacuumed
// already is left alone. A table that takes long is vacuumed at intervals of
// vacuumShare times as long.
const (
	vacuumAfter = 30 * time.Second
	vacuumShare = 10
)

// The server pauses a millisecond for each 200 units of cost, and does not cut the
// end off the table, for which it would have to lock out everybody.
const vacuuming = "VACUUM (SKIP_LOCKED, TRUNCATE false) latticekeep_kv"

func (s *Store) tend() {
	for {
		select {
		case <-s.deleted:
		case <-s.life.Done():
			return
		}
		wait := s.opts.vacuumAfter
		for {
			select {
			case <-time.After(wait):
			case <-s.life.Done():
				return
			}
			began := time.Now()
			err := s.vacuum()
			if err == nil {
				wait = vacuumShare * time.Since(began)
				break
			}
			s.opts.Logger.Warn("vacuuming failed, will be tried again", "error", err)
			wait = s.opts.vacuumAfter
		}
		select { // a table that takes long is not vacuumed all the time
		case <-time.After(wait):
		case <-s.life.Done():
			return
		}
	}
}

func (s *Store) vacuum() error {
	c, err := s.connect(s.life, tending)
	if err != nil {
		return err
	}
	defer c.kill()
	if err := c.do(s.life, "SET vacuum_cost_delay = 1"); err != nil {
		return err
	}
	return c.do(s.life, vacuuming)
}
