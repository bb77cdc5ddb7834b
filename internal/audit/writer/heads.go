package writer

import (
	"cmp"
	"errors"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/store"
)

// heads is what the commit hook knows of the head of the log and of the newest entries of tenants.
type heads struct {
	chain    *chain.Chain
	detector *Detector

	// Only the hook uses these fields, and the store runs one hook at a time. The store shows one
	// of two heads at the next commit, unless another process has written: committed if the last
	// commit failed, proposed if it succeeded. The maps hold the tenants' newest entries of each.
	committed, proposed               audit.Head
	committedTenants, proposedTenants map[string]audit.TenantHead
	ownCommits                        int               // number of latest commits that were all made by this process
	recent                            *chain.RecentRows // rows of the current commit; nil if no other process has written

	// Callers of [Log.Append] use these fields, too.
	sharedLately atomic.Bool // another process has written lately
	knownTenants sync.Map    // newest known entry, by tenant
	readable     sync.Map    // tenants whose newest entry could be read once
	written      tally
}

// beginAt resets everything and begins at the head of the log.
func (h *heads) beginAt(head audit.Head) {
	h.committed, h.proposed = head, head
	h.committedTenants, h.proposedTenants = make(map[string]audit.TenantHead), nil
	h.knownTenants.Clear()
	h.readable.Clear()
}

// aloneAfter is the number of consecutive commits of this process after which it counts as the only
// writer.
const aloneAfter = 16

// settleHead returns the head that the commit continues from. It also settles whether this
// process's last commit persisted; the hook may have run more than once for that commit. If the
// current commit accepts a loss of entries, a names the loss. The comment above [audit.Head] has
// the rule.
func (h *heads) settleHead(tx store.Tx, a *acceptance) (audit.Head, error) {
	h.recent = nil
	since := *h.detector.seen.Load() // read before the head: everything seen so far must be there
	head, err := audit.ReadHead(tx)
	if err != nil {
		return audit.Head{}, err
	}
	now, persisted, foreign := h.proposed, true, false
	switch head {
	case h.proposed.Position:
		// The last commit persisted, and nobody has written since.
	case h.committed.Position:
		// The last commit failed. It leaves no entry behind.
		now, persisted = h.committed, false
		if _, err := entries.ReadHash(tx, head.Sequence+1); !errors.Is(err, audit.ErrNoEntry) {
			return audit.Head{}, cmp.Or(err, error(audit.ErrDamagedLog))
		}
	default:
		// Another process has written. The last commit persisted if there was one, and if its entry
		// is still in the log. That entry then need not be looked for again.
		foreign = true
		if now, h.recent, err = h.chain.VerifyForeignHead(tx, head); err != nil {
			return audit.Head{}, err
		}
		if persisted = h.proposed != h.committed; persisted {
			if persisted, err = h.chain.HasEntry(tx, h.proposed.Position); err != nil {
				return audit.Head{}, err
			}
		}
		if persisted && !since.Newer(h.proposed) {
			since = audit.Head{} // the process knows of nothing later
		}
	}
	if foreign || since.Newer(now) {
		if err := h.detector.checkNothingLost(tx, now, since, a); err != nil {
			return audit.Head{}, err
		}
	}
	if persisted {
		h.remember(h.proposedTenants, h.proposed.Epoch)
	}
	switch {
	case foreign:
		// The other process may have added entries of any tenant.
		clear(h.committedTenants)
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
	h.detector.noteHead(now)
	return now, nil
}

// knownTenantHead is the newest position that a tenant is known to have had, and the log's epoch at
// that time.
type knownTenantHead struct {
	audit.TenantHead
	epoch uint64
}

// contradicts reports that p cannot be the tenant's newest entry, in a log of the same epoch.
func (k knownTenantHead) contradicts(p audit.TenantHead) bool {
	return p.Sequence < k.Sequence || p.Sequence == k.Sequence && p.Last != k.Last
}

// remember stores the positions of a commit. Positions from an earlier epoch set no bound.
func (h *heads) remember(tenants map[string]audit.TenantHead, epoch uint64) {
	for tenant, p := range tenants {
		h.knownTenants.Store(tenant, knownTenantHead{p, epoch})
	}
}

// knownHeadOf returns a tenant's newest known position. It is zero for a tenant that this process
// has not met.
func (h *heads) knownHeadOf(tenant string) knownTenantHead {
	k, _ := h.knownTenants.Load(tenant)
	known, _ := k.(knownTenantHead)
	return known
}

// tenantHead returns a tenant's newest committed entry, for the hook of a commit in an epoch. It
// reads that entry when the hook first meets the tenant, and again after another process has
// written. Error: audit.ErrDamagedLog.
func (h *heads) tenantHead(r store.Reader, tenant string, epoch uint64) (audit.TenantHead, error) {
	if p, ok := h.committedTenants[tenant]; ok {
		return p, nil
	}
	p, err := audit.ReadTenantHead(r, tenant)
	k := h.knownHeadOf(tenant)
	switch {
	case err != nil:
		return audit.TenantHead{}, err
	case k.epoch == epoch && k.contradicts(p):
		return audit.TenantHead{}, audit.ErrDamagedLog
	case k.TenantHead == p && p.Sequence > 0:
		return p, nil
	case h.recent != nil:
		return p, h.chain.VerifyTenantHead(h.recent, tenant, p, &h.recent.Memo)
	}
	return p, h.chain.VerifyTenantHead(r, tenant, p, nil)
}

// checkTenantHead reads what the hook will read for the tenant, before the hook runs. Damage then
// fails only this tenant's commit. While other processes write too, it always reads: a remote store
// then has the rows at hand in the hook, for which all writers wait.
func (h *heads) checkTenantHead(tx store.Tx, tenant string) error {
	shared := h.sharedLately.Load()
	_, sound := h.readable.Load(tenant)
	if sound && !shared {
		return nil
	}
	k := h.knownHeadOf(tenant) // loaded before the row is read, so the row cannot be older
	p, err := audit.ReadTenantHead(tx, tenant)
	switch {
	case err != nil:
		return err
	case k.TenantHead == p && p.Sequence > 0:
	case k.contradicts(p):
		err = h.contradicted(tx, tenant, k, p)
	case sound:
		err = prefetchEntry(tx, p) // the hook checks the signature
	default:
		err = h.chain.VerifyTenantHead(tx, tenant, p, nil)
	}
	if err != nil {
		return err
	}
	h.readable.Store(tenant, nil)
	if w := h.written.latest.Load(); shared && w != nil {
		_, err = entries.ReadRow(tx, w.head.Sequence) // prefetched for settleHead, which looks for this entry
	}
	return err
}

// prefetchEntry reads the rows that prove a tenant's head, unless the hook reads them anyway.
func prefetchEntry(r store.Reader, p audit.TenantHead) error {
	head, err := audit.ReadHead(r)
	if err == nil && p.Last.Sequence+chain.MaxRecentRows <= head.Sequence {
		_, _, err = entries.ReadRows(r, p.Last.Sequence)
	}
	return err
}

// contradicted decides why a row contradicts the known position. It returns audit.ErrDamagedLog for
// a rewritten row. It leaves an older copy of the database to the hook. In another epoch, entries
// may be lost, so it only checks that the row names a signed entry.
func (h *heads) contradicted(r store.Reader, tenant string, k knownTenantHead, p audit.TenantHead) error {
	head, err := audit.ReadHead(r)
	if err != nil {
		return err
	}
	number, err := h.chain.CurrentEpoch(r, head)
	if err != nil {
		return err
	}
	if number == k.epoch {
		lost, err := h.chain.FindLossSince(r, audit.Head{Position: head, Epoch: number}, *h.detector.seen.Load())
		if lost == nil && err == nil {
			err = audit.ErrDamagedLog
		}
		return err
	}
	return h.chain.VerifyTenantHead(r, tenant, p, nil)
}
