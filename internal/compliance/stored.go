package compliance

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"sync"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// signatureEnding is what the name of a report's signature ends in.
const signatureEnding = ".sig"

var errNoReport = fault.New(fault.NotFound, "there is no such report: ask for it again")

// stored returns the URLs of a report, which render writes unless it lies in the
// bucket as render would write it, with our signature: what lies there is not
// believed, since others may write to the bucket too.
func (s *Service) stored(ctx context.Context, name string, render func() ([]byte, error)) (Link, error) {
	found, _, err := s.signed(ctx, name)
	if err != nil && fault.Of(err) != fault.NotFound {
		return Link{}, unstored(err)
	}
	there := err == nil
	if !there || !s.made.has(name, found) {
		report, err := render()
		if err != nil {
			return Link{}, fmt.Errorf("making a report: %w", err)
		}
		if there && !bytes.Equal(report, found) {
			s.logger.WarnContext(ctx, "a stored report is another one than its name says, and is made anew", "name", name)
			there = false
		}
		if !there {
			if err := s.put(ctx, name, report); err != nil {
				return Link{}, err
			}
		}
		s.made.add(name, report)
	}
	link := Link{ExpiresAt: s.now().Add(linkLifetime).UTC()}
	if link.URL, err = s.reports.SignedURL(ctx, name, linkLifetime); err != nil {
		return Link{}, unstored(err)
	}
	if link.SignatureURL, err = s.reports.SignedURL(ctx, name+signatureEnding, linkLifetime); err != nil {
		return Link{}, unstored(err)
	}
	return link, nil
}

// put signs a report and stores it. The signature is stored first, so that there
// is no report without one.
func (s *Service) put(ctx context.Context, name string, report []byte) error {
	signature, err := s.sign(report)
	if err != nil {
		return fmt.Errorf("signing a report: %w", err)
	}
	if err := s.reports.Put(ctx, name+signatureEnding, signature); err != nil {
		return unstored(err)
	}
	if err := s.reports.Put(ctx, name, report); err != nil {
		return unstored(err)
	}
	return nil
}

// signed returns a report that lies in the bucket and its signature, which
// verifies. Errors: fault.NotFound when either is missing or they do not belong
// together, and others when the bucket does not answer.
func (s *Service) signed(ctx context.Context, name string) (report, signature []byte, err error) {
	if report, err = s.reports.Get(ctx, name); err != nil {
		return nil, nil, err
	}
	if signature, err = s.reports.Get(ctx, name+signatureEnding); err != nil {
		return nil, nil, err
	}
	if !s.verify(report, signature) {
		s.logger.WarnContext(ctx, "the signature of a stored report does not verify, and it is not given out", "name", name)
		return nil, nil, errNoReport
	}
	return report, signature, nil
}

// Stored returns what lies under the name of a report or of a signature: no report
// without our signature is given out, and no signature without its report. Whether
// the caller may have it is not looked at. Errors: fault.NotFound,
// fault.Unavailable.
func (s *Service) Stored(ctx context.Context, name string) ([]byte, error) {
	of, isSignature := strings.CutSuffix(name, signatureEnding)
	report, signature, err := s.signed(ctx, of)
	switch {
	case err != nil && fault.Of(err) == fault.NotFound:
		return nil, errNoReport
	case err != nil:
		return nil, unstored(err)
	case isSignature:
		return signature, nil
	}
	return report, nil
}

func unstored(err error) error {
	return fault.Wrap(fault.Unavailable, "reports cannot be stored or fetched at the moment: retry", err)
}

// maxDigests is how many reports are remembered. One that is forgotten is rendered
// once more, to be compared.
const maxDigests = 1024

// digests are those of the reports that this process rendered or compared. A
// signature says that a report is ours, and not that it is the one of its name.
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
