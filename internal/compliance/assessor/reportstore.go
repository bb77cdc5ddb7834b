package assessor

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
)

const (
	linkLifetime    = time.Hour // validity of the URL of a report
	signatureSuffix = ".sig"    // suffix of the name of a report's signature
)

var errNoReport = fault.New(fault.NotFound, "there is no such report: ask for it again")

// reportStore keeps signed reports in a bucket.
type reportStore struct {
	bucket    compliance.Reports
	renderers map[compliance.Format]compliance.Renderer
	program   string // name and version, on which the names of reports depend
	sign      func([]byte) ([]byte, error)
	verify    func(report, signature []byte) bool
	now       func() time.Time
	logger    *slog.Logger
	trusted   digests
}

// link returns the URLs of a report. It renders and stores the report unless the bucket holds
// exactly what render would write, with a valid signature. It does not trust the bucket, because
// others may write to it too.
func (s *reportStore) link(ctx context.Context, name string, render func() ([]byte, error)) (compliance.Link, error) {
	found, _, err := s.signed(ctx, name)
	if err != nil && fault.Of(err) != fault.NotFound {
		return compliance.Link{}, unstored(err)
	}
	exists := err == nil
	if !exists || !s.trusted.has(name, found) {
		report, err := render()
		if err != nil {
			return compliance.Link{}, fmt.Errorf("making a report: %w", err)
		}
		if exists && !bytes.Equal(report, found) {
			s.logger.WarnContext(ctx, "a stored report differs from what its name stands for; rendering it again", "name", name)
			exists = false
		}
		if !exists {
			if err := s.put(ctx, name, report); err != nil {
				return compliance.Link{}, err
			}
		}
		s.trusted.add(name, report)
	}
	link := compliance.Link{ExpiresAt: s.now().Add(linkLifetime).UTC()}
	if link.URL, err = s.bucket.SignedURL(ctx, name, linkLifetime); err != nil {
		return compliance.Link{}, unstored(err)
	}
	if link.SignatureURL, err = s.bucket.SignedURL(ctx, name+signatureSuffix, linkLifetime); err != nil {
		return compliance.Link{}, unstored(err)
	}
	return link, nil
}

// put signs a report and stores it. It stores the signature first, so that no report lacks one.
func (s *reportStore) put(ctx context.Context, name string, report []byte) error {
	signature, err := s.sign(report)
	if err != nil {
		return fmt.Errorf("signing a report: %w", err)
	}
	if err := s.bucket.Put(ctx, name+signatureSuffix, signature); err != nil {
		return unstored(err)
	}
	if err := s.bucket.Put(ctx, name, report); err != nil {
		return unstored(err)
	}
	return nil
}

// signed returns a report in the bucket with its valid signature. It returns fault.NotFound when
// either is missing or they do not belong together, and other errors when the bucket does not
// answer.
func (s *reportStore) signed(ctx context.Context, name string) (report, signature []byte, err error) {
	if report, err = s.bucket.Get(ctx, name); err != nil {
		return nil, nil, err
	}
	if signature, err = s.bucket.Get(ctx, name+signatureSuffix); err != nil {
		return nil, nil, err
	}
	if !s.verify(report, signature) {
		s.logger.WarnContext(ctx, "the signature of a stored report does not verify; the report is not served", "name", name)
		return nil, nil, errNoReport
	}
	return report, signature, nil
}

func unstored(err error) error {
	return fault.Outage(fault.ReasonObjects, "reports cannot be stored or fetched at the moment: retry", err)
}

// maxDigests bounds how many reports are remembered. A forgotten report is rendered once more for
// comparison.
const maxDigests = 1024

// digests holds the digests of the reports that this process rendered or compared. A signature
// proves that a report is ours, but not that it is the report of its name.
type digests struct {
	mu  sync.Mutex
	all map[string][sha256.Size]byte
}

func (d *digests) has(name string, report []byte) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	digest, ok := d.all[name]
	return ok && digest == sha256.Sum256(report)
}

func (d *digests) add(name string, report []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.all == nil || len(d.all) >= maxDigests {
		d.all = make(map[string][sha256.Size]byte)
	}
	d.all[name] = sha256.Sum256(report)
}
