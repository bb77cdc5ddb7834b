package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/controllers/cluster"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/backup/schedule"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault/pathindex"
)

// evidence holds the parts that prove the log to others, and the facts that scores use.
type evidence struct {
	config.Audit
	config.Compliance
	backup config.Backup

	cluster   *rest.Config // nil without a cluster
	namespace string       // namespace of the anchor ConfigMap
	custody   string       // one of the compliance.Custody constants
	transport string       // one of the compliance.Transport constants

	keeper  *keeper.AnchorKeeper
	archive *archive          // nil: entries stay in the database for ever
	reports *objects.Bucket   // bucket in the data directory; nil when reports are kept elsewhere
	buckets []*objects.Bucket // buckets to close
}

// devProving returns the evidence of a development server, whose log has no anchors.
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

// configured opens the bucket that a setting names. If it has to create a folder at a later start,
// a volume may be missing at that place.
func (p *evidence) configured(ctx context.Context, logger *slog.Logger, key, address string, o objects.SigningOptions) (*objects.Bucket, error) {
	b, err := p.open(ctx, key, address, o)
	if err == nil && b.Made() {
		logger.WarnContext(ctx, "created the folder of a bucket, which was missing: unless it is new, check that its volume is mounted", "setting", key)
	}
	return b, err
}

// openAnchors asks the anchors for their checkpoints before anything is written. A checkpoint may
// halt the log. That is logged and shown by /readyz?verbose, but it does not stop the start, because an
// administrator accepts the loss over the API.
func (p *evidence) openAnchors(ctx context.Context, log *writer.Log, guard *guard.Guard, logger *slog.Logger, now func() time.Time) error {
	log.SetSigning(writer.Signing(p.Signing))
	var places []keeper.Anchor
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
		places = append(places, keeper.NewBucketAnchor(log.ChainID(), b))
	}
	p.keeper = keeper.NewAnchorKeeper(log, guard, places, keeper.AnchorOptions{Logger: logger, Now: now})
	_ = p.keeper.Check(ctx) // Check logs what it finds and halts the log
	return nil
}

// hasAnchors reports whether checkpoints are kept outside of the database.
func (p *evidence) hasAnchors() bool {
	return p.cluster != nil && p.Anchor.ConfigMap != "" || p.Anchor.Bucket != ""
}

// openArchive opens the archive, unless entries stay in the database for ever.
func (p *evidence) openArchive(ctx context.Context, s *service) error {
	if p.Retention.Archive == "" {
		return nil
	}
	b, err := p.configured(ctx, s.logger, "audit.retention.archive", p.Retention.Archive, objects.SigningOptions{})
	if err != nil {
		return err
	}
	cutter := &keeper.Cutter{Log: s.log, Reader: s.reader, Archive: b, Keep: p.Retention.Keep, MaxEntries: uint64(p.Retention.MaxEntries), Before: s.compliance.Persist, Ready: s.everyReplicaReads(format.Bases), Now: s.now, Logger: s.logger}
	p.archive = &archive{log: s.log, store: s.store, bucket: b, cutter: cutter, now: s.now, logger: s.logger}
	p.archive.probe(ctx, archivePatience) // lets the first state know the answer
	return nil
}

// openBackups prepares the backups that the server takes by itself, and the log of commits that goes on
// after them.
func (p *evidence) openBackups(ctx context.Context, s *service) error {
	c := p.backup
	if c.Bucket == "" {
		return nil
	}
	b, err := p.configured(ctx, s.logger, "backup.bucket", c.Bucket, objects.SigningOptions{})
	if err != nil {
		return err
	}
	keys := make([]keyring.KMS, len(s.kms))
	for i, k := range s.kms {
		keys[i] = k
	}
	if database, embedded := state.Unguarded(s.store).(*bolt.Store); embedded {
		s.commits, err = commits.NewShipper(commits.Config{
			Database: database, Store: s.store, Bucket: b, Folder: commits.Folder(s.log.ChainID()), Chain: s.log.Fingerprint(),
			Signer: s.keys, Recipients: s.recipients, Now: s.now, Logger: s.logger,
		})
		if err != nil {
			return err
		}
	}
	s.backups = schedule.New(s.commits, schedule.Config{
		Store: s.store, Log: s.log, Guard: s.guard, Keys: s.keys, KMS: keys, KMSKeys: s.keyFiles, Recipients: s.recipients,
		Bucket: b, Place: c.Bucket, Every: c.Every, Keep: c.Keep, Scratch: cmp.Or(c.Scratch, s.dir), Program: buildinfo.Version(), Now: s.now, Logger: s.logger,
	})
	return nil
}

// Limits for the reports in the data directory. Every report can be made again.
const (
	reportsPrefix = "reports"      // prefix of all report names
	reportLasts   = 24 * time.Hour // lifetime without a download
	reportsRoom   = 64 << 20       // bytes per tenant, so that no tenant fills the database volume
)

// expireReports removes reports that nobody asked for lately. It leaves a bucket that the
// administrator configured alone.
func (p *evidence) expireReports(ctx context.Context) error {
	if p.reports == nil {
		return nil
	}
	_, err := p.reports.Expire(ctx, reportsPrefix, time.Now().Add(-reportLasts), reportsRoom)
	return err
}

// everyReplicaReads returns a function that reports whether the store may be raised to a format.
func (s *service) everyReplicaReads(least int) format.Readers {
	return func(ctx context.Context) (bool, error) {
		if !s.rows.State.Complete() {
			return false, nil // an earlier release may still be writing
		}
		return s.store.ReplicasRead(ctx, least)
	}
}

// run follows, verifies, anchors, packs, archives and backs up the log until ctx ends.
func (p *evidence) run(ctx context.Context, s *service, g interface{ Go(func() error) }) {
	g.Go(func() error { writer.NewFollower(s.log).KeepFollowing(ctx, s.logger); return nil })
	g.Go(func() error { s.verifier.KeepVerified(ctx, p.Verification, s.logger); return nil })
	g.Go(func() error { p.keeper.Keep(ctx); return nil })
	paths := &pathindex.Builder{Store: s.store, Ready: s.everyReplicaReads(format.Paths), Logger: s.logger}
	g.Go(func() error { paths.Run(ctx); return nil })
	packer := &keeper.Packer{Log: s.log, Logger: s.logger, Ready: s.everyReplicaReads(format.Packs)}
	g.Go(func() error { packer.Keep(ctx); return nil })
	if p.archive != nil {
		g.Go(func() error { p.archive.run(ctx); return nil })
	}
	if s.backups != nil {
		g.Go(func() error { s.backups.Run(ctx); return nil })
	}
	if s.commits != nil {
		g.Go(func() error { s.commits.Run(ctx); return nil })
	}
}
