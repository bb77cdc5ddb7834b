package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/controllers/cluster"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/objects"
)

// evidence is what proves the log to others, and what scores are made of.
type evidence struct {
	config.Audit
	config.Compliance

	cluster   *rest.Config // nil: there is none
	namespace string       // of the ConfigMap
	custody   string       // one of compliance's
	transport string       // likewise

	keeper  *audit.AnchorKeeper
	archive *archive          // nil: entries are kept for ever
	reports *objects.Bucket   // in the data directory; nil: they are kept elsewhere
	buckets []*objects.Bucket // to be closed
}

// devProving is that of a development server, whose log nobody anchors.
func devProving() *evidence {
	d := config.Default()
	return &evidence{
		Audit: d.Audit, Compliance: d.Compliance, custody: compliance.CustodyDevelopment, transport: compliance.TransportPlaintext,
	}
}

func (p *evidence) close() error {
	var errs []error
	for _, b := range p.buckets {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}

func (p *evidence) open(ctx context.Context, key, address string, o objects.SigningOptions) (*objects.Bucket, error) {
	b, err := objects.Open(ctx, address, o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	p.buckets = append(p.buckets, b)
	return b, nil
}

// configured opens the bucket that a setting names. A folder that is made at a
// start that is not the first one may be what a volume was mounted at.
func (p *evidence) configured(ctx context.Context, logger *slog.Logger, key, address string, o objects.SigningOptions) (*objects.Bucket, error) {
	b, err := p.open(ctx, key, address, o)
	if err == nil && b.Made() {
		logger.WarnContext(ctx, "created the folder of a bucket, which was missing: unless it is new, check that its volume is mounted", "setting", key)
	}
	return b, err
}

// openAnchors asks the places that keep checkpoints, before anything is written. What
// they know may have the log refuse to be written: that is logged and told by
// /readyz, and no reason not to start, since it is accepted over the interface.
func (p *evidence) openAnchors(ctx context.Context, log *audit.Log, guard *audit.Guard, logger *slog.Logger, now func() time.Time) error {
	log.SetSigning(audit.Signing(p.Signing))
	var places []audit.AnchorPlace
	if p.cluster != nil && p.Anchor.ConfigMap != "" {
		place, err := cluster.NewAnchor(p.cluster, p.namespace, p.Anchor.ConfigMap, log.ChainID())
		if err != nil {
			return err
		}
		places = append(places, place)
	}
	if p.Anchor.Bucket != "" {
		b, err := p.configured(ctx, logger, "audit.anchor.bucket", p.Anchor.Bucket, objects.SigningOptions{})
		if err != nil {
			return err
		}
		places = append(places, audit.NewBucketPlace(log.ChainID(), b))
	}
	p.keeper = audit.NewAnchorKeeper(log, guard, places, audit.AnchorOptions{Logger: logger, Now: now})
	_ = p.keeper.Check(ctx) // it has logged what it found, and the log is refused
	return nil
}

// openArchive opens the archive, when entries are not kept for ever.
func (p *evidence) openArchive(ctx context.Context, s *service) error {
	if p.Retention.Keep == 0 {
		return nil
	}
	b, err := p.configured(ctx, s.logger, "audit.retention.archive", p.Retention.Archive, objects.SigningOptions{})
	if err != nil {
		return err
	}
	cutter := &audit.Cutter{Log: s.log, Reader: s.reader, Archive: b, Keep: p.Retention.Keep, Before: s.compliance.Persist, Now: s.now, Logger: s.logger}
	p.archive = &archive{log: s.log, store: s.store, bucket: b, cutter: cutter, now: s.now, logger: s.logger}
	p.archive.probe(ctx, archivePatience) // so that the first state knows
	return nil
}

// What of the reports in the data directory is removed. Each of them can be made
// again.
const (
	reportsPrefix = "reports"      // of the names of all
	reportLasts   = 24 * time.Hour // without being asked for
	reportsRoom   = 64 << 20       // bytes of a tenant's, so that nobody fills the volume of the database
)

// expireReports removes reports that nobody asked for lately. What lies in a bucket of the
// operator's own is the operator's.
func (p *evidence) expireReports(ctx context.Context) error {
	if p.reports == nil {
		return nil
	}
	_, err := p.reports.Expire(ctx, reportsPrefix, time.Now().Add(-reportLasts), reportsRoom)
	return err
}

// run does what proves the log, and what keeps it short, until ctx ends.
func (p *evidence) run(ctx context.Context, s *service, g interface{ Go(func() error) }) {
	g.Go(func() error { audit.NewFollower(s.log).KeepFollowing(ctx, s.logger); return nil })
	g.Go(func() error { s.verifier.KeepVerified(ctx, p.Verification, s.logger); return nil })
	g.Go(func() error { p.keeper.Keep(ctx); return nil })
	if p.archive != nil {
		g.Go(func() error { p.archive.run(ctx); return nil })
	}
}
