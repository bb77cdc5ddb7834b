package audit

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/store"
)

// The rows that name a tenant's newest entry are not signed. Whoever has the database
// and not the key could so have any replica sign an entry that forks the tenant's
// history. Hence a row is believed only if it names what this process knows to be the
// tenant's newest entry, or one that is signed and no older. What it cannot know is
// which one is the newest of a tenant that it has never met and whose last rows were
// removed: a verification finds that, also that of the running log.

// tenantHead is the newest entry of a tenant.
type tenantHead struct {
	sequence uint64 // of the tenant
	last     link
}

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

// recentRows reads what is read to go on from another process's head, of which most
// tenants' newest entries are, without asking for it again.
type recentRows struct {
	store.Reader
	entries []row // newest first
	memo    memo  // of groups, most of which have several of these
}

// mostRecent is no more than what a scan gets from any store at once.
const mostRecent = 16

// Get implements [store.Reader].
func (r *recentRows) Get(key []byte) ([]byte, error) {
	for _, e := range r.entries {
		if bytes.Equal(e.key, key) {
			return e.value, nil
		}
	}
	return r.Reader.Get(key)
}

// of reports whether an entry is the one at this position.
func (p tenantHead) of(e *Entry, tenant string) bool {
	return e.TenantID == tenant && e.TenantSequence == p.sequence && e.link() == p.last
}

// checkSigned fails unless what a row says is signed: by the entry that it names or, when
// that is archived or the row says that there is none, by the base. The memo may be
// nil. Error: errDamagedLog.
func (ch *Chain) checkSigned(r store.Reader, tenant string, p tenantHead, m *memo) error {
	if p.sequence > 0 {
		e, err := storedEntry(r, p.last.sequence)
		switch {
		case err == nil && p.of(e.entry, tenant) && e.verify(ch.key, m):
			return nil
		case err == nil:
			return errDamagedLog
		case !errors.Is(err, errNoEntry):
			return err
		}
	}
	base, err := ch.baseIn(r)
	if err != nil {
		return err
	}
	var archived tenantHead
	if base != nil && base.tenants[tenant] != nil {
		archived = tenantHead{base.tenants[tenant].sequence, base.tenants[tenant].last}
	}
	if archived != p {
		return errDamagedLog
	}
	return nil
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

// lastOf reads a tenant's newest entry from its index.
func lastOf(r store.Reader, tenant string) (p tenantHead, err error) {
	rng := store.Prefix(tenantPrefix(tenant))
	rng.Reverse = true
	var bad error
	err = r.Scan(rng, func(key, value []byte) bool {
		row, err := decodeIndexRow(value)
		if err != nil || len(key) < 8 {
			bad = errDamagedLog
			return false
		}
		p = tenantHead{binary.BigEndian.Uint64(key[len(key)-8:]), row.link}
		return false
	})
	return p, errors.Join(err, bad)
}

// entryRows returns copies of the row of an entry, nil when there is none, and of that
// of its group, if it has one.
func entryRows(r store.Reader, sequence uint64) (row, batch []byte, err error) {
	row, err = r.Get(entryKey(sequence))
	if err != nil {
		return nil, nil, fmt.Errorf("reading an audit entry: %w", err)
	}
	row = bytes.Clone(row)
	if first, ok := rowBatch(row); ok {
		if batch, err = r.Get(batchKey(first)); err != nil {
			return nil, nil, fmt.Errorf("reading the signature of audit entries: %w", err)
		}
	}
	return row, bytes.Clone(batch), nil
}

// storedEntry is [readEntry] without the signature as text.
func storedEntry(r store.Reader, sequence uint64) (stored, error) {
	row, batch, err := entryRows(r, sequence)
	switch {
	case err != nil:
		return stored{}, err
	case row == nil:
		return stored{}, errNoEntry
	}
	e, err := decodeStored(row, batch)
	if err != nil || e.entry.Sequence != sequence {
		return stored{}, errDamagedLog
	}
	return e, nil
}
