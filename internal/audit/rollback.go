package audit

import (
	"context"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/store"
)

// compare holds the checkpoint that a place keeps, which verifies or is the zero
// one for none, against the database. It has the log refused when that does not
// go on from there, and reports whether the place knows of such a loss.
func (k *AnchorKeeper) compare(ctx context.Context, a *anchorState, theirs Checkpoint) (lost bool, err error) {
	err = k.log.rollbacks.decide(ctx, func(r store.Reader, s logState) (func(), error) {
		found, err := k.log.chain.lostOf(r, s, theirs)
		if err != nil {
			return nil, err
		}
		known := a.lostOf // it stays known, whatever lies in its place by then
		still, err := k.log.chain.lostOf(r, s, known)
		return func() {
			if still == nil && a.lost != nil && err == nil {
				a.lost = nil // it is there again, or was accepted
			}
			if found != nil && a.accepted != nil && found.LostTo == a.accepted.LostTo && found.Hash == a.accepted.Hash {
				found = nil
			}
			if found != nil && (a.lost == nil || found.LostTo > a.lost.LostTo) {
				a.note(found, s)
				a.lostOf = theirs
			}
		}, unlessDamage(err)
	})
	k.logLoss(ctx)
	if err != nil {
		return false, fmt.Errorf("comparing the anchor with the database: %w", err)
	}
	return k.knowsOfLoss(a), nil
}

// checkDatabase does for what the database itself and this process know what compare
// does for a place. There is nothing to write.
func (k *AnchorKeeper) checkDatabase(ctx context.Context) {
	if _, err := k.log.rollbacks.checkForRollback(ctx); err != nil {
		k.Logger.WarnContext(ctx, "the newest checkpoint of the audit log cannot be held against its entries", "err", err)
	}
	k.logLoss(ctx)
}

// knowsOfLoss reports whether a place knows of a loss.
func (k *AnchorKeeper) knowsOfLoss(a *anchorState) bool {
	k.log.rollbacks.mu.Lock()
	defer k.log.rollbacks.mu.Unlock()
	return a.lost != nil
}

// logLoss logs, once, that the log is refused.
func (k *AnchorKeeper) logLoss(ctx context.Context) {
	k.log.rollbacks.mu.Lock()
	lost := k.log.rollbacks.published
	said := lost == nil || lost == k.logged || k.log.rollbacks.HaltedBy() != error(lost)
	if !said {
		k.logged = lost
	}
	k.log.rollbacks.mu.Unlock()
	if !said {
		k.Logger.ErrorContext(ctx, "entries of the audit log are lost, and nothing is served until that is accepted", "err", lost,
			"lost_from", lost.LostFrom, "lost_to", lost.LostTo, "place", lost.Place)
	}
}
