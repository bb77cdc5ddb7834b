package audit

import (
	"context"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/store"
)

// compare compares the checkpoint of an anchor with the database. The checkpoint must be verified,
// or zero if the anchor has none. If the database does not continue from the checkpoint, compare
// halts the log. It reports whether the anchor knows of a loss.
func (k *AnchorKeeper) compare(ctx context.Context, a *anchorState, theirs Checkpoint) (lost bool, err error) {
	err = k.log.rollbacks.decide(ctx, func(r store.Reader, s logState) (func(), error) {
		found, err := k.log.chain.lostOf(r, s, theirs)
		if err != nil {
			return nil, err
		}
		known := a.lostOf // the loss stays known, whatever the anchor keeps by then
		still, err := k.log.chain.lostOf(r, s, known)
		return func() {
			if still == nil && a.lost != nil && err == nil {
				a.lost = nil // the entries were restored, or the loss was accepted
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

// checkDatabase is compare for the checkpoint in the database and for the entries that this process
// has seen. It writes nothing.
func (k *AnchorKeeper) checkDatabase(ctx context.Context) {
	if _, err := k.log.rollbacks.checkForRollback(ctx); err != nil {
		k.Logger.WarnContext(ctx, "the newest checkpoint of the audit log cannot be held against its entries", "err", err)
	}
	k.logLoss(ctx)
}

// knowsOfLoss reports whether the anchor knows of a loss.
func (k *AnchorKeeper) knowsOfLoss(a *anchorState) bool {
	k.log.rollbacks.mu.Lock()
	defer k.log.rollbacks.mu.Unlock()
	return a.lost != nil
}

// logLoss logs once for each loss that the log is halted.
func (k *AnchorKeeper) logLoss(ctx context.Context) {
	k.log.rollbacks.mu.Lock()
	lost := k.log.rollbacks.published
	said := lost == nil || lost == k.logged || !errors.Is(k.log.rollbacks.HaltedBy(), lost)
	if !said {
		k.logged = lost
	}
	k.log.rollbacks.mu.Unlock()
	if !said {
		k.Logger.ErrorContext(ctx, "entries of the audit log are lost, and nothing is served until that is accepted", "err", lost,
			"lost_from", lost.LostFrom, "lost_to", lost.LostTo, "place", lost.Place)
	}
}
