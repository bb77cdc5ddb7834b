package app

import (
	"context"
	"time"
)

// maintenance is the interval of background work.
const maintenance = time.Minute

// maintain does the due work every minute until ctx ends. It then stores for the last time when API
// keys were used.
func (s *service) maintain(ctx context.Context) {
	tick := time.NewTicker(maintenance)
	defer tick.Stop()
	for {
		s.maintainOnce(ctx)
		select {
		case <-tick.C:
			s.flush(ctx)
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
			defer cancel()
			s.flush(last)
			return
		}
	}
}

// maintainOnce rotates the keys that are due, including the sealing key, removes old idempotency
// keys and reports, and assesses tenants. A failed step is tried again at the next run. While the
// log is halted nothing can be written, and the halt is already logged.
func (s *service) maintainOnce(ctx context.Context) {
	if err := s.evidence.expireReports(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("removing old reports failed; retrying", "in", maintenance, "error", err)
	}
	if s.log.HaltedBy() != nil {
		return
	}
	if n, err := s.transit.RotateDue(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("rotating due keys failed; retrying", "in", maintenance, "error", err)
	} else if n > 0 {
		s.logger.Info("rotated due keys", "keys", n)
	}
	if rotated, err := s.sealing.RotateDue(ctx, s.sealingLifetime); err != nil && ctx.Err() == nil {
		s.logger.Error("rotating the sealing key failed; retrying", "in", maintenance, "error", err)
	} else if rotated {
		s.logger.Info("rotated the sealing key, which was due")
	}
	if s.lender != nil {
		if err := s.lender.Sweep(ctx); err != nil && ctx.Err() == nil {
			s.logger.Error("deleting old quotas failed; retrying", "in", maintenance, "error", err)
		}
	}
	if _, err := s.vault.Sweep(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("deleting expired idempotency keys failed; retrying", "in", maintenance, "error", err)
	}
	if err := s.compliance.AssessAll(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("assessing tenants failed; retrying", "in", maintenance, "error", err)
	}
}

// flushTimeout bounds the last writes of a server that ends.
const flushTimeout = 5 * time.Second

func (s *service) flush(ctx context.Context) {
	if s.log.HaltedBy() != nil {
		return
	}
	if err := s.identity.FlushLastUsed(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("writing the last use of API keys failed; retrying", "in", maintenance, "error", err)
	}
}
