package audit

import (
	"github.com/latticekeep/latticekeep/internal/store"
)

// knownTenantHead is the newest position that a tenant is known to have had, and the epoch that
// the log was in then.
type knownTenantHead struct {
	tenantHead
	epoch uint64
}

// contradicts reports whether a log of the same epoch cannot have p as the tenant's
// newest entry.
func (k knownTenantHead) contradicts(p tenantHead) bool {
	return p.sequence < k.sequence || p.sequence == k.sequence && p.last != k.last
}

// remember takes up positions that a commit has brought. An earlier epoch's are no bound.
func (h *heads) remember(tenants map[string]tenantHead, epoch uint64) {
	for tenant, p := range tenants {
		h.knownTenants.Store(tenant, knownTenantHead{p, epoch})
	}
}

// knownHeadOf returns the zero one for a tenant that this process has not met.
func (h *heads) knownHeadOf(tenant string) knownTenantHead {
	k, _ := h.knownTenants.Load(tenant)
	of, _ := k.(knownTenantHead)
	return of
}

// position returns a tenant's newest committed entry, for the hook of a commit in an
// epoch. It is read when that first meets the tenant, and anew after another process
// has written. Error: errDamagedLog.
func (h *heads) position(r store.Reader, tenant string, epoch uint64) (tenantHead, error) {
	if p, ok := h.committedTenants[tenant]; ok {
		return p, nil
	}
	p, err := lastOf(r, tenant)
	k := h.knownHeadOf(tenant)
	switch {
	case err != nil:
		return tenantHead{}, err
	case k.epoch == epoch && k.contradicts(p):
		return tenantHead{}, errDamagedLog
	case k.tenantHead == p && p.sequence > 0:
		return p, nil
	case h.recent != nil:
		return p, h.chain.checkSigned(h.recent, tenant, p, &h.recent.memo)
	}
	return p, h.chain.checkSigned(r, tenant, p, nil)
}

// checkTenantHead reads what the hook will read for the tenant, to find damage while that fails
// nobody else. While other processes write, too, it always does: a store that is far
// away then has it at hand in the hook, for which all of them wait.
func (h *heads) checkTenantHead(tx store.Tx, tenant string) error {
	shared := h.sharedLately.Load()
	_, sound := h.readable.Load(tenant)
	if sound && !shared {
		return nil
	}
	k := h.knownHeadOf(tenant) // before the row is read, which cannot be behind it
	p, err := lastOf(tx, tenant)
	switch {
	case err != nil:
		return err
	case k.tenantHead == p && p.sequence > 0:
	case k.contradicts(p):
		err = h.contradicted(tx, tenant, k, p)
	case sound:
		err = prefetchEntry(tx, p) // the hook judges
	default:
		err = h.chain.checkSigned(tx, tenant, p, nil)
	}
	if err != nil {
		return err
	}
	h.readable.Store(tenant, nil)
	if w := h.written.latest.Load(); shared && w != nil {
		_, err = tx.Get(entryKey(w.head.sequence))
	}
	return err
}

// prefetchEntry reads what shows that a position is one, unless the hook will come by it.
func prefetchEntry(r store.Reader, p tenantHead) error {
	head, err := readHead(r)
	if err == nil && p.last.sequence+mostRecent <= head.sequence {
		_, _, err = entryRows(r, p.last.sequence)
	}
	return err
}

// contradicted tells a row that was rewritten from one of an older copy of the database,
// or of a log that goes on without entries that were lost: that is for the hook.
func (h *heads) contradicted(r store.Reader, tenant string, k knownTenantHead, p tenantHead) error {
	head, err := readHead(r)
	if err != nil {
		return err
	}
	number, err := h.chain.epochNow(r, head)
	if err != nil {
		return err
	}
	if number == k.epoch {
		lost, err := h.chain.lacks(r, Head{head, number}, *h.rollbacks.seen.Load())
		if lost == nil && err == nil {
			err = errDamagedLog
		}
		return err
	}
	return h.chain.checkSigned(r, tenant, p, nil)
}
