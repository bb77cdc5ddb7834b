package export

import (
	"context"
	"fmt"
	"io"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/objects"
)

// Verifier verifies the log of an export or of a running server.
type Verifier struct {
	Archive string // URL of the bucket with the entries before the export; empty for none
	Tenant  string // tenant that the export must belong to; empty for any
}

// VerifyFile verifies an export. The first entry shows whether the export is that of one tenant or
// of the whole log.
func (v *Verifier) VerifyFile(ctx context.Context, stdin io.Reader, file string, a verify.Options) (verify.Report, error) {
	f, done, err := OpenInput(stdin, file)
	if err != nil {
		return verify.Report{}, err
	}
	defer done()
	return v.verifyOpen(ctx, f, a)
}

func (v *Verifier) verifyOpen(ctx context.Context, f Input, a verify.Options) (verify.Report, error) {
	first, err := f.First()
	if err != nil {
		return verify.Report{}, err
	}
	key, named := KeyIn(first)
	if a.From > 1 && a.PublicKey == nil && named {
		if a.Fingerprint != "" && a.Fingerprint != key.Fingerprint() {
			return verify.Report{}, errAnotherLog(first.Sequence)
		}
		a.PublicKey, a.Fingerprint = key.Public, ""
	}
	a.Tenant = v.Tenant != "" || v.Archive == "" && a.From <= 1 && IsTenants(first)
	if v.Archive != "" && first != nil && first.Sequence > 1 {
		return v.behindArchive(ctx, f, first, a)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return verify.Report{}, fmt.Errorf("reading the export: %w", err)
	}
	report, err := verify.Export(f, a)
	switch broken, ok := audit.IsBroken(err); {
	case ok && broken.Sequence == 1 && first != nil && first.Sequence > 1 && a.From <= 1 && !a.Tenant:
		return verify.Report{}, fmt.Errorf("%w; if it goes on behind archived entries, give --archive, or --from %d to verify this part alone", err, first.Sequence)
	case err != nil:
		return verify.Report{}, err
	case v.Tenant != "" && report.Tenant != v.Tenant:
		return verify.Report{}, fmt.Errorf("the export is of tenant %q", report.Tenant)
	}
	return report, nil
}

// behindArchive verifies an export together with the archived entries before it.
func (v *Verifier) behindArchive(ctx context.Context, f Input, first *audit.Entry, a verify.Options) (verify.Report, error) {
	bucket, err := objects.OpenExisting(ctx, v.Archive)
	if err != nil {
		return verify.Report{}, fmt.Errorf("--archive: %w", err)
	}
	defer bucket.Close()
	segments, err := findSegments(ctx, bucket, f, first)
	if err != nil {
		return verify.Report{}, err
	}
	archived, base, err := verify.Archive(ctx, bucket, segments, a)
	if err != nil {
		return verify.Report{}, err
	}
	if a.Base = base; archived.Since != nil {
		a.Since = nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return verify.Report{}, fmt.Errorf("reading the export: %w", err)
	}
	report, err := verify.Export(f, a)
	if err != nil {
		return verify.Report{}, err
	}
	if report.From, report.Entries = archived.From, report.Entries+archived.Entries; archived.Since != nil {
		report.Since = archived.Since
	}
	return report, nil
}
