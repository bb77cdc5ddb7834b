package postgres

import (
	"time"
)

// Deleted rows stay in the files of PostgreSQL until the table is vacuumed. The server vacuums by
// itself after enough changes, which may never happen in a quiet deployment. So every replica
// requests a VACUUM within vacuumAfter of a commit that deleted rows, and after its own start. It
// skips a table that is being vacuumed already. After a VACUUM the replica waits vacuumShare times
// its duration.
const (
	vacuumAfter = 30 * time.Second
	vacuumShare = 10
)

// The server pauses a millisecond for each 200 units of cost. It does not truncate the table,
// because that would need a lock that excludes everybody.
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
		select { // do not vacuum a slow table all the time
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
