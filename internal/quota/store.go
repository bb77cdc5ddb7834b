package quota

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/clock"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Shared is the [Lender] of all processes on one store. It uses the clock of that store. One small
// row, which reveals neither bucket nor limit, counts what was lent of a bucket in a minute.
//
// In each minute of the store's clock, no more than the limit of a bucket is lent, whatever the
// clocks of the machines say. A process also uses a lease in that minute, as exactly as it knows
// the store's time: to half of the time that the last measurement before a lease took.
type Shared struct {
	store store.Store
	clock *clock.Clock
}

// NewLender returns the lender of a store. The clock must tell the store's time.
func NewLender(s store.Store, c *clock.Clock) *Shared { return &Shared{s, c} }

// Now implements [Lender].
func (s *Shared) Now() time.Time { return s.clock.Now() }

// shareAtOnce bounds one lease: it is at most what is left divided by shareAtOnce, but at least
// one.
const shareAtOnce = 8

// freshness bounds the age of the measured time in a lease, because a machine that was suspended
// meanwhile has the wrong time.
const freshness = time.Second

var prefix = []byte("quota/")

func minutePrefix(minute time.Time) []byte {
	return binary.BigEndian.AppendUint64(bytes.Clone(prefix), uint64(minute.Unix()/60))
}

func bucketKey(minute time.Time, bucket string) []byte {
	hash := sha256.Sum256([]byte(bucket))
	return append(minutePrefix(minute), hash[:16]...)
}

// Lease implements [Lender].
func (s *Shared) Lease(ctx context.Context, bucket string, limit, want int) (Lease, error) {
	if err := s.clock.Fresh(ctx, freshness); err != nil {
		return Lease{}, fmt.Errorf("borrowing requests: %w", err)
	}
	minute := s.Now().UTC().Truncate(time.Minute)
	key := bucketKey(minute, bucket)
	var lease Lease
	err := s.store.Update(ctx, func(tx store.Tx) error {
		lease = Lease{Minute: minute}
		row, err := tx.Get(key)
		if err != nil {
			return err
		}
		if row != nil {
			if len(row) != 4 {
				return errDamaged
			}
			lease.Lent = int(binary.BigEndian.Uint32(row))
		}
		left := max(0, limit-lease.Lent)
		if lease.Granted = min(want, left, max(1, left/shareAtOnce)); lease.Granted == 0 {
			return nil
		}
		lease.Lent += lease.Granted
		return tx.Put(key, binary.BigEndian.AppendUint32(nil, uint32(lease.Lent)))
	})
	if err != nil {
		return Lease{}, fmt.Errorf("borrowing requests: %w", err)
	}
	return lease, nil
}

var errDamaged = fault.New(fault.Internal, "the counts of requests in the database are damaged: the next minute makes them again")

// kept is how long the rows of a minute stay, in case the store's clock is set back a little.
const kept = 3 * time.Minute

// sweepBatch bounds one transaction of [Shared.Sweep].
const sweepBatch = 1024

// Sweep removes the rows of minutes that are over. It is called about every minute, by any number
// of processes. Error: fault.Unavailable.
func (s *Shared) Sweep(ctx context.Context) error {
	if err := s.clock.Fresh(ctx, freshness); err != nil {
		return fmt.Errorf("forgetting old quotas: %w", err)
	}
	over := store.Range{From: prefix, To: minutePrefix(s.Now().Add(-kept))}
	for {
		var keys [][]byte
		err := s.store.View(ctx, func(r store.Reader) error {
			return r.Scan(over, func(key, _ []byte) bool {
				keys = append(keys, bytes.Clone(key))
				return len(keys) < sweepBatch
			})
		})
		if err == nil && len(keys) > 0 {
			err = s.store.Update(ctx, func(tx store.Tx) error {
				for _, key := range keys {
					if err := tx.Delete(key); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err != nil {
			return fmt.Errorf("forgetting old quotas: %w", err)
		}
		if len(keys) < sweepBatch {
			return nil
		}
	}
}
