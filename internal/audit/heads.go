package audit

import (
	"cmp"
	"errors"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/store"
)

// heads is what the commit hook knows of the head of the log and of the newest entries of tenants.
// Only the hook uses the fields from committed to recent, and the store runs one hook at a time.
type heads struct {
	chain     *Chain
	rollbacks *Detector

	// The heads that the store may show at the next commit, unless another process has written:
	// committed if the last commit failed, proposed if it succeeded. The maps hold the tenants'
	// newest entries of each.
	committed, proposed               Head
	committedTenants, proposedTenants map[string]tenantHead
	ownCommits                        int         // number of latest commits that were all made by this process
	recent                            *recentRows // rows of the current commit; nil if no other process has written

	sharedLately atomic.Bool // another process has written lately
	knownTenants sync.Map    // newest known entry, by tenant
	readable     sync.Map    // tenants whose newest entry could be read once
	written      tally
}

// beginAt resets everything and begins at the head of the log.
func (h *heads) beginAt(head Head) {
	h.committed, h.proposed = head, head
	h.committedTenants, h.proposedTenants = make(map[string]tenantHead), nil
	h.knownTenants.Clear()
	h.readable.Clear()
}

// aloneAfter is the number of consecutive commits of this process after which it counts as the only
// writer.
const aloneAfter = 16

// take returns the head that the commit continues from. It also decides whether this process's last
// commit succeeded; the hook may have run more than once for that commit. If the current commit
// accepts a loss of entries, a names the loss.
func (h *heads) take(tx store.Tx, a *acceptance) (Head, error) {
	h.recent = nil
	since := *h.rollbacks.seen.Load() // read before the head: everything seen so far must be there
	head, err := readHead(tx)
	if err != nil {
		return Head{}, err
	}
	now, persisted, foreign := h.proposed, true, false
	switch head {
	case h.proposed.link:
	case h.committed.link:
		now, persisted = h.committed, false
		if _, err := hashOf(tx, head.sequence+1); !errors.Is(err, errNoEntry) {
			return Head{}, cmp.Or(err, error(errDamagedLog)) // a failed commit leaves no entry behind
		}
	default:
		foreign = true
		if now, h.recent, err = h.chain.foreignHead(tx, head); err != nil {
			return Head{}, err
		}
		if persisted = h.proposed != h.committed; persisted {
			if persisted, err = h.chain.has(tx, h.proposed.link); err != nil {
				return Head{}, err
			}
		}
		if persisted && !since.newer(h.proposed) {
			since = Head{} // the process knows of nothing later
		}
	}
	if foreign || since.newer(now) {
		if err := h.rollbacks.goesOn(tx, now, since, a); err != nil {
			return Head{}, err
		}
	}
	if persisted {
		h.remember(h.proposedTenants, h.proposed.epoch)
	}
	switch {
	case foreign:
		clear(h.committedTenants) // the other process may have added entries of any tenant
		h.ownCommits = 0
		h.sharedLately.Store(true)
	case persisted:
		maps.Copy(h.committedTenants, h.proposedTenants)
		if h.ownCommits++; h.ownCommits == aloneAfter {
			h.sharedLately.Store(false)
		}
	}
	h.written.settle(persisted)
	h.committed, h.proposed, h.proposedTenants = now, now, nil
	h.rollbacks.noteHead(now)
	return now, nil
}
