package verify

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Segment checks the object of a segment as an export that continues from o.Base. It returns
// the base at the end of the segment.
func Segment(data []byte, s audit.Segment, o Options) (report Report, base *audit.Base, err error) {
	digest := audit.NewLineDigest()
	err = audit.Unzip(data, func(lines io.Reader) error {
		var v *Verifier
		if v, report, err = verifyExport(io.TeeReader(lines, digest), o); err != nil {
			return err
		}
		base, err = v.Base()
		return err
	})
	switch {
	case err != nil:
		return Report{}, nil, err
	case report.From != s.From || report.Sequence != s.To || base.Head.Hash != s.Hash:
		return Report{}, nil, &audit.Broken{Sequence: s.From, Reason: fmt.Sprintf("the segment has entries %d to %d, and is to have those from %d to %d", report.From, report.Sequence, s.From, s.To)}
	case digest.Sum() != s.Digest:
		return Report{}, nil, &audit.Broken{Sequence: s.From, Reason: "the segment has other bytes than were archived, such as another signature that verifies too"}
	}
	return report, base, nil
}

// Archive checks the segments of a log, which must be all from the first one on, as one log.
// It returns the base at their end. The report is that of a whole chain, compared with the
// fingerprint or public key in o. It ignores o.Base and the range of o, and uses o.Since only if
// that checkpoint lies in a segment. Errors: an [audit.Broken], also for an object that is missing
// or no segment; errors of the archive.
func Archive(ctx context.Context, a audit.Archive, segments []audit.Segment, o Options) (total Report, base *audit.Base, err error) {
	since := o.Since
	o.Base, o.Tenant, o.From, o.To = nil, false, 0, 0
	for i, s := range segments {
		data, err := a.Get(ctx, s.Name)
		if errors.Is(err, fault.NotFound) {
			return Report{}, nil, &audit.Broken{Sequence: s.From, Reason: "the archive lacks the object " + s.Name}
		}
		if err != nil {
			return Report{}, nil, fmt.Errorf("reading %s: %w", s.Name, err)
		}
		o.Since = nil
		if c, err := audit.PeekCheckpoint(since); err == nil && s.From <= c.Sequence && c.Sequence <= s.To {
			o.Since = since
		}
		report, next, err := Segment(data, s, o)
		if _, broken := audit.IsBroken(err); err != nil && !broken {
			err = &audit.Broken{Sequence: s.From, Reason: "the object " + s.Name + " cannot be read: " + err.Error()}
		}
		if err != nil {
			return Report{}, nil, err
		}
		report.Entries += total.Entries
		if i > 0 {
			report.From, report.Since = total.From, cmp.Or(report.Since, total.Since)
		}
		total, base, o.Base = report, next, next
	}
	return total, base, nil
}

// StoreWithArchive checks a whole log whose oldest entries are in the archive. It verifies the
// archive, then the store as [Store] does, and that the store continues where the archive
// ends. It returns the errors of both.
func StoreWithArchive(ctx context.Context, s store.Store, a audit.Archive, o Options) (Report, error) {
	var segments []audit.Segment
	err := s.View(ctx, func(r store.Reader) (err error) {
		segments, err = audit.Segments(r)
		return err
	})
	if errors.Is(err, audit.ErrDamagedLog) {
		return Report{}, &audit.Broken{Sequence: 1, Reason: "what the log says to be in the archive is damaged"}
	}
	if err != nil {
		return Report{}, err
	}
	archived, base, err := Archive(ctx, a, segments, o)
	if err != nil {
		return Report{}, err
	}
	stored, err := chain.ReadBase(ctx, s)
	if err != nil {
		return Report{}, err
	}
	if !base.Equal(stored) {
		return Report{}, &audit.Broken{Sequence: max(archived.Sequence, 1), Reason: "what the archive comes to is not what the log goes on from"}
	}
	o.From, o.To = 0, 0
	report, err := Store(ctx, s, o)
	if err == nil && base != nil {
		report.From, report.Entries = archived.From, report.Entries+archived.Entries
	}
	return report, err
}
