package audit

import (
	"cmp"
	"errors"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/store"
)

// heads is what the hook knows of the head of the log and of the newest entries of tenants. Only the
// hook, which the store runs once at a time, uses the fields of the first block.
type heads struct {
	chain     *Chain
	rollbacks *Detector

	// The heads that the store may show at the next commit, unless another process
	// has written: the one before the last commit, should that have failed, or the
	// one after; and the positions of the tenants that either brought.
	committed, proposed               Head
	committedTenants, proposedTenants map[string]tenantHead
	ownCommits                        int         // how many commits of this process were the last ones
	recent                            *recentRows // of the commit that the hook is in; nil when nobody else has written

	sharedLately atomic.Bool // others have written lately
	knownTenants sync.Map    // by tenant: what it is known to have had
	readable     sync.Map    // tenants whose newest entry could be read once
	written      tally
}

// beginAt forgets all and begins at the head of the log.
func (h *heads) beginAt(head Head) {
	h.committed, h.proposed = head, head
	h.committedTenants, h.proposedTenants = make(map[string]tenantHead), nil
	h.knownTenants.Clear()
	h.readable.Clear()
}

// aloneAfter is after how many commits of this process, none of another between them, it
// counts as the only one that writes.
const aloneAfter = 16

// take returns the head that the commit goes on from, and decides what became of
// the last one of this process, for which the hook may have run more than once. If
// the commit accepts that entries are lost, a says which.
func (h *heads) take(tx store.Tx, a *acceptance) (Head, error) {
	h.recent = nil
	since := *h.rollbacks.seen.Load() // before the head is read: what was seen by now must be there
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
			return Head{}, cmp.Or(err, error(errDamagedLog)) // of what failed nothing is there
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
			since = Head{} // nothing later is known
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
		clear(h.committedTenants) // which others may have moved on
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
