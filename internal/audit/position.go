package audit

import (
	"github.com/latticekeep/latticekeep/internal/store"
)

// knownTenantHead is the newest position that a tenant is known to have had, and the log's epoch at
// that time.
type knownTenantHead struct {
	tenantHead
	epoch uint64
}

// contradicts reports that p cannot be the tenant's newest entry, in a log of the same epoch.
func (k knownTenantHead) contradicts(p tenantHead) bool {
	return p.sequence < k.sequence || p.sequence == k.sequence && p.last != k.last
}

// remember stores the positions of a commit. Positions from an earlier epoch set no bound.
func (h *heads) remember(tenants map[string]tenantHead, epoch uint64) {
	for tenant, p := range tenants {
		h.knownTenants.Store(tenant, knownTenantHead{p, epoch})
	}
}

// knownHeadOf returns a tenant's newest known position. It is zero for a tenant that this process
// has not met.
func (h *heads) knownHeadOf(tenant string) knownTenantHead {
	k, _ := h.knownTenants.Load(tenant)
	of, _ := k.(knownTenantHead)
	return of
}

// position returns a tenant's newest committed entry, for the hook of a commit in an epoch. It
// reads that entry when the hook first meets the tenant, and again after another process has
// written. Error: errDamagedLog.
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
	p, err := lastOf(tx, tenant)
	switch {
	case err != nil:
		return err
	case k.tenantHead == p && p.sequence > 0:
	case k.contradicts(p):
		err = h.contradicted(tx, tenant, k, p)
	case sound:
		err = prefetchEntry(tx, p) // the hook checks the signature
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

// prefetchEntry reads the rows that prove a position, unless the hook reads them anyway.
func prefetchEntry(r store.Reader, p tenantHead) error {
	head, err := readHead(r)
	if err == nil && p.last.sequence+mostRecent <= head.sequence {
		_, _, err = entryRows(r, p.last.sequence)
	}
	return err
}

// contradicted decides why a row contradicts the known position. It returns errDamagedLog for a
// rewritten row. It leaves an older copy of the database to the hook. In another epoch, entries may
// be lost, so it only checks that the row names a signed entry.
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
