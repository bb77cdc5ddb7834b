package audit

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// ReplayPoint is an entry of a tenant after which a replay continues. The zero value is the
// beginning.
type ReplayPoint struct {
	TenantSequence, Sequence uint64
	Hash                     string // lower-case hex
}

// errArchived rejects a replay from a point whose next entries are no longer in the database.
var errArchived = fault.New(fault.Conflict, "entries behind the given one are in the archive: replay from the beginning")

// Replay visits a tenant's entries after a point, up to the sequence to, oldest first; 0 means the
// newest. It returns the point of the last entry. It compares each entry with the previous one by
// the hash and the tenant's link, and verifies the signature of the last entry, which vouches for
// all of them. The results of visit count only if the error is nil. From the zero point, the replay
// begins with the first entry that is not archived. Errors: fault.Internal for entries that do not
// verify, fault.Conflict if some entries to visit are archived, fault.Unavailable, or the error of
// visit.
func (rd *Reader) Replay(ctx context.Context, tenant authz.TenantID, after ReplayPoint, to uint64, visit func(*Entry) error) (ReplayPoint, error) {
	at, err := rd.replayFrom(ctx, tenant, after)
	if err != nil {
		return ReplayPoint{}, fmt.Errorf("replaying a tenant's entries: %w", err)
	}
	if to == 0 {
		to = maxInteger
	}
	var last *stored
	for more := true; more; {
		var page []stored
		err := rd.chain.store.View(ctx, func(r store.Reader) (err error) {
			page, more, err = replayPage(r, string(tenant), at, to)
			return err
		})
		if err != nil {
			return ReplayPoint{}, fmt.Errorf("replaying a tenant's entries: %w", rd.orArchived(ctx, tenant, at, err))
		}
		for i := range page {
			e := page[i].entry
			if e.TenantID != string(tenant) || e.TenantSequence != at.TenantSequence+1 || e.TenantPreviousHash != at.Hash || e.Sequence <= at.Sequence {
				return ReplayPoint{}, fmt.Errorf("replaying a tenant's entries: %w", errDamagedLog)
			}
			at = ReplayPoint{e.TenantSequence, e.Sequence, e.Hash}
			if err := visit(e); err != nil {
				return ReplayPoint{}, err
			}
			last = &page[i]
		}
	}
	switch {
	case last == nil:
		return after, nil
	case !last.verify(rd.chain.key, nil):
		return ReplayPoint{}, fmt.Errorf("replaying a tenant's entries: %w", errDamagedLog)
	}
	return at, nil
}

// orArchived returns err, or errArchived if the entries after the point are archived by now. In
// that case their absence is no damage.
func (rd *Reader) orArchived(ctx context.Context, tenant authz.TenantID, at ReplayPoint, err error) error {
	if !errors.Is(err, errDamagedLog) {
		return err
	}
	base, failed := rd.chain.archivedTo(ctx)
	if failed != nil {
		return failed
	}
	if base != nil && base.tenants[string(tenant)] != nil && base.tenants[string(tenant)].sequence > at.TenantSequence {
		return errArchived
	}
	return err
}

// replayFrom returns the point before the first entry to visit.
func (rd *Reader) replayFrom(ctx context.Context, tenant authz.TenantID, after ReplayPoint) (ReplayPoint, error) {
	base, err := rd.chain.archivedTo(ctx)
	if err != nil {
		return ReplayPoint{}, err
	}
	if after == (ReplayPoint{}) {
		after.Hash = zeroHash
	}
	if base == nil || base.tenants[string(tenant)] == nil {
		return after, nil
	}
	archived := base.tenants[string(tenant)]
	switch {
	case after.TenantSequence >= archived.sequence:
		return after, nil
	case after.TenantSequence > 0:
		return ReplayPoint{}, errArchived
	}
	return ReplayPoint{TenantSequence: archived.sequence, Hash: archived.hash}, nil
}

// replayPage reads some of a tenant's entries after a point.
func replayPage(r store.Reader, tenant string, at ReplayPoint, to uint64) (page []stored, more bool, err error) {
	var sequences []uint64
	from := tenantKey(tenant, at.TenantSequence+1)
	bad := false
	err = r.Scan(store.Range{From: from, To: store.Prefix(tenantPrefix(tenant)).To}, func(key, value []byte) bool {
		row, err := decodeIndexRow(value)
		if bad = err != nil || len(key) != len(from) || binary.BigEndian.Uint64(key[len(key)-8:]) != at.TenantSequence+1+uint64(len(sequences)); bad {
			return false
		}
		if row.sequence > to {
			return false
		}
		sequences = append(sequences, row.sequence)
		more = len(sequences) == pageRows
		return !more
	})
	if err == nil && bad {
		err = errDamagedLog
	}
	for _, sequence := range sequences {
		if err != nil {
			return nil, false, err
		}
		var s stored
		if s, err = readStored(r, sequence); err == nil {
			page = append(page, s)
		}
	}
	return page, more, err
}
