package audit

import (
	"context"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// parts are a log and everything in a process that reads, follows and verifies it.
type parts struct {
	*Log
	*Reader
	*Follower
	*LiveVerifier
	chain *Chain
	guard *Guard
}

func newParts(now func() time.Time) *parts {
	l := New(now)
	g := NewGuard(l)
	return &parts{l, NewReader(l, g), NewFollower(l), NewLiveVerifier(l), l.chain, g}
}

func (p *parts) AcceptRollback(ctx context.Context, by authz.Principal, reason string) (Rollback, error) {
	return p.guard.AcceptRollback(ctx, by, reason)
}
