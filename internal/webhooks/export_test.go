package webhooks

import (
	"log/slog"

	"github.com/latticekeep/latticekeep/internal/egress"
	"github.com/latticekeep/latticekeep/internal/outbox"
)

// Courier is the state of a Run, for a test that makes its passes itself.
func (s *Service) Courier(client *egress.Client, logger *slog.Logger) *outbox.Courier {
	return s.outbox.Courier(logger, s.deliver(client))
}

// For tests from outside.
var (
	Sign  = sign
	Waits = waits
)
