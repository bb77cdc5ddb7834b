package audit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// verifySegment checks the object of a segment as an export that continues from o.Base. It returns
// the base at the end of the segment.
func verifySegment(data []byte, s Segment, o Options) (report Report, base *Base, err error) {
	digest := newLineDigest()
	err = unzip(data, func(lines io.Reader) error {
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
	case report.From != s.From || report.Sequence != s.To || base.head.hash != s.Hash:
		return Report{}, nil, &Broken{s.From, fmt.Sprintf("the segment has entries %d to %d, and is to have those from %d to %d", report.From, report.Sequence, s.From, s.To)}
	case digest.sum() != s.Digest:
		return Report{}, nil, &Broken{s.From, "the segment has other bytes than were archived, such as another signature that verifies too"}
	}
	return report, base, nil
}

// VerifyArchive checks the segments of a log, which must be all from the first one on, as one log.
// It returns the base at their end. The report is that of a whole chain, compared with the
// fingerprint or public key in o. It ignores o.Base and the range of o, and uses o.Since only if
// that checkpoint lies in a segment. Errors: a [Broken], also for an object that is missing or no
// segment; errors of the archive.
func VerifyArchive(ctx context.Context, a Archive, segments []Segment, o Options) (total Report, base *Base, err error) {
	since := o.Since
	o.Base, o.Tenant, o.From, o.To = nil, false, 0, 0
	for i, s := range segments {
		data, err := a.Get(ctx, s.Name)
		if errors.Is(err, fault.NotFound) {
			return Report{}, nil, &Broken{s.From, "the archive lacks the object " + s.Name}
		}
		if err != nil {
			return Report{}, nil, fmt.Errorf("reading %s: %w", s.Name, err)
		}
		o.Since = nil
		if c, err := peekCheckpoint(since); err == nil && s.From <= c.Sequence && c.Sequence <= s.To {
			o.Since = since
		}
		report, next, err := verifySegment(data, s, o)
		if _, broken := IsBroken(err); err != nil && !broken {
			err = &Broken{s.From, "the object " + s.Name + " cannot be read: " + err.Error()}
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

// VerifyWithArchive checks a whole log whose oldest entries are in the archive. It verifies the
// archive, then the store as [VerifyStore] does, and that the store continues where the archive
// ends. It returns the errors of both.
func VerifyWithArchive(ctx context.Context, s store.Store, a Archive, o Options) (Report, error) {
	var segments []Segment
	err := s.View(ctx, func(r store.Reader) (err error) {
		segments, err = Segments(r)
		return err
	})
	if errors.Is(err, errDamagedLog) {
		return Report{}, &Broken{1, "what the log says to be in the archive is damaged"}
	}
	if err != nil {
		return Report{}, err
	}
	archived, base, err := VerifyArchive(ctx, a, segments, o)
	if err != nil {
		return Report{}, err
	}
	stored, err := readBase(ctx, s)
	if err != nil {
		return Report{}, err
	}
	if !base.equal(stored) {
		return Report{}, &Broken{max(archived.Sequence, 1), "what the archive comes to is not what the log goes on from"}
	}
	o.From, o.To = 0, 0
	report, err := VerifyStore(ctx, s, o)
	if err == nil && base != nil {
		report.From, report.Entries = archived.From, report.Entries+archived.Entries
	}
	return report, err
}
