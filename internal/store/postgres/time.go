package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// Time returns the time of the server's clock, which all users of the database share. Error:
// fault.Unavailable.
func (s *Store) Time(ctx context.Context) (time.Time, error) {
	if !s.enter() {
		return time.Time{}, errClosed()
	}
	defer s.leave()
	if s.down.Load() {
		return time.Time{}, errRecovering
	}
	ctx, cancel := context.WithTimeout(ctx, commitLimit)
	defer cancel()
	now, err := s.time(ctx, false)
	if err != nil && ctx.Err() == nil { // an idle session may have died
		now, err = s.time(ctx, true)
	}
	if err != nil {
		return time.Time{}, fault.Wrap(fault.Unavailable, "the database does not tell its time: retry", fmt.Errorf("reading the server's clock: %w", err))
	}
	return now, nil
}

func (s *Store) time(ctx context.Context, fresh bool) (time.Time, error) {
	c, err := s.pool.get(ctx, fresh)
	if err != nil {
		return time.Time{}, err
	}
	defer s.pool.put(c)
	r := c.pg.ExecParams(ctx, "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint", nil, nil, nil, nil).Read()
	if r.Err != nil {
		return time.Time{}, r.Err
	}
	if len(r.Rows) != 1 || len(r.Rows[0]) != 1 {
		return time.Time{}, errors.New("PostgreSQL does not tell its time")
	}
	micros, err := strconv.ParseInt(string(r.Rows[0][0]), 10, 64)
	return time.UnixMicro(micros).UTC(), err
}
