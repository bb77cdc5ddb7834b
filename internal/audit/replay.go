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

// ReplayPoint is an entry of a tenant after which a replay goes on. The zero one
// is the beginning.
type ReplayPoint struct {
	TenantSequence, Sequence uint64
	Hash                     string // lower-case hex
}

// errArchived answers a replay from a point that is not in the database.
var errArchived = fault.New(fault.Conflict, "entries behind the given one are in the archive: replay from the beginning")

// Replay visits the entries of a tenant behind a point up to a sequence, 0 being
// the newest, oldest first, and returns the point of the last one. Each is held
// against the one before by its hash and the tenant's link, and the signature of
// the last is verified, which so is one of them all; what visit was told counts
// only when the error is nil. From the zero point it begins with the first entry
// that is not archived. Errors: fault.Internal for entries that do not hold,
// fault.Conflict when some that are to be visited are archived,
// fault.Unavailable, or visit's own.
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

// orArchived returns the error of reading what comes behind a point, and errArchived
// when that is archived by now: it is no fault then that it is missing.
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

// replayPage reads some entries of a tenant behind a point.
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
