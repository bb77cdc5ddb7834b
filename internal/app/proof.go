package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/compliance/report"
	"github.com/latticekeep/latticekeep/internal/objects"
)

// reportsDirectory in a data directory keeps reports unless a bucket does.
const reportsDirectory = "reports"

// downloads is where the server gives out the reports that it keeps itself.
const downloads = "/api/v2/compliance/download"

// proving is what proves the log to others, and what scores are made of.
type proving struct {
	AuditSettings
	ComplianceSettings

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
func devProving() *proving {
	d := defaults()
	return &proving{
		AuditSettings: d.Audit, ComplianceSettings: d.Compliance, custody: compliance.CustodyDevelopment, transport: compliance.TransportPlaintext,
	}
}

// transportOf says how a listener is encrypted.
func transportOf(t TLSSettings) string {
	switch {
	case t.Terminated:
		return compliance.TransportTerminated
	case t.PQRequired:
		return compliance.TransportTLS13Quantum
	case t.CertFile != "" || t.SecretName != "":
		return compliance.TransportTLS13 // X25519MLKEM768 comes first, and an older client may do without
	}
	return compliance.TransportPlaintext
}

func (p *proving) close() error {
	var errs []error
	for _, b := range p.buckets {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}

func (p *proving) open(ctx context.Context, key, address string, o objects.SigningOptions) (*objects.Bucket, error) {
	b, err := objects.Open(ctx, address, o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	p.buckets = append(p.buckets, b)
	return b, nil
}

// configured opens the bucket that a setting names. A folder that is made at a
// start that is not the first one may be what a volume was mounted at.
func (p *proving) configured(ctx context.Context, logger *slog.Logger, key, address string, o objects.SigningOptions) (*objects.Bucket, error) {
	b, err := p.open(ctx, key, address, o)
	if err == nil && b.Made() {
		logger.WarnContext(ctx, "made the folder of a bucket, which was not there: unless it is new, look whether its volume is mounted", "setting", key)
	}
	return b, err
}

// begin asks the places that keep checkpoints, before anything is written. What
// they know may have the log refuse to be written: that is logged and told by
// /readyz, and no reason not to start, since it is accepted over the interface.
func (p *proving) begin(ctx context.Context, log *audit.Log, guard *audit.Guard, logger *slog.Logger, now func() time.Time) error {
	log.SetSigning(audit.Signing(p.Signing))
	var places []audit.AnchorPlace
	if p.cluster != nil && p.Anchor.ConfigMap != "" {
		place, err := controllers.NewAnchor(p.cluster, p.namespace, p.Anchor.ConfigMap, log.ChainID())
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

// keepArchive opens the archive, when entries are not kept for ever.
func (p *proving) keepArchive(ctx context.Context, s *service) error {
	if p.Retention.Keep == 0 {
		return nil
	}
	b, err := p.configured(ctx, s.logger, "audit.retention.archive", p.Retention.Archive, objects.SigningOptions{})
	if err != nil {
		return err
	}
	cutter := &audit.Cutter{Log: s.log, Reader: s.reader, Archive: b, Keep: p.Retention.Keep, Before: s.compliance.Persist, Now: s.now, Logger: s.logger}
	p.archive = &archive{log: s.log, store: s.store, bucket: b, cutter: cutter, now: s.now, logger: s.logger}
	p.archive.look(ctx, archivePatience) // so that the first state knows
	return nil
}

// judge makes the compliance service, and returns the bucket of its reports if
// the server gives them out itself.
func (p *proving) judge(ctx context.Context, s *service, dir, publicURL string) (*compliance.Service, *objects.Bucket, error) {
	const setting = "compliance.reports"
	var bucket *objects.Bucket
	var err error
	o := objects.SigningOptions{BaseURL: publicURL + downloads, Secret: s.keys.ReportURLKey(), Now: s.now}
	if p.Reports != "" {
		bucket, err = p.configured(ctx, s.logger, setting, p.Reports, o)
	} else {
		folder := url.URL{Scheme: "file", Path: filepath.ToSlash(filepath.Join(dir, reportsDirectory))}
		bucket, err = p.open(ctx, setting, folder.String(), o)
		p.reports = bucket
	}
	if err != nil {
		return nil, nil, err
	}
	service, err := compliance.New(compliance.Config{
		Store: s.store, Guard: s.guard, Reader: s.reader, Verifier: s.verifier, Catalogues: p.Catalogues, Reports: bucket, Sign: s.keys.SignReport, Verify: s.keys.VerifyReport, Seal: s.keys.SealRow, Open: s.keys.OpenRow,
		Renderers: map[compliance.Format]compliance.Renderer{compliance.PDF: report.PDF, compliance.OSCAL: report.OSCAL, compliance.KSI: report.KSI},
		State:     func(ctx context.Context) (compliance.State, error) { return p.state(ctx, s) },
		Inventory: func(ctx context.Context, who authz.Principal) ([]byte, error) { return p.inventory(ctx, s, who) },
		Program:   "latticekeep " + version(), Now: s.now, Logger: s.logger,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("compliance.catalogues: %w", err)
	}
	if u, err := url.Parse(p.Reports); err != nil || p.Reports != "" && u.Scheme != "file" {
		bucket = nil // whoever keeps them gives them out
	}
	return service, bucket, nil
}

// suites are the algorithms that protect what the service keeps and moves.
var suites = []string{"AES-256-GCM", "HKDF-SHA-512", "HMAC-SHA-512", "ML-DSA-65", "ML-KEM-768", "SHA3-256"}

// state is what the deployment says of itself, for the log.
func (p *proving) state(ctx context.Context, s *service) (compliance.State, error) {
	state := compliance.State{
		Custody: p.custody, Transport: p.transport, Signing: p.Signing, VerifyEvery: p.Verification,
		RetentionDays: int(p.Retention.Keep / (24 * time.Hour)), Archive: p.archive.state(),
		Anchored: anchored(p.keeper.Status(), s.now()), SealingKeyLifetime: s.sealingLifetime, ClockSynchronised: clockSynchronised(), Suites: suites,
	}
	var err error
	if state.LastBackup, err = s.compliance.LastOf(ctx, authz.SystemTenant, audit.BackupTaken); err != nil {
		return state, err
	}
	keys, err := s.keys.SealingKeys(ctx)
	if err != nil {
		return state, err
	}
	for _, k := range keys {
		if k.CreatedAt.After(state.SealingKeyCreated) {
			state.SealingKeyCreated = k.CreatedAt
		}
	}
	return state, nil
}

// anchored reports whether a place had a checkpoint of the log when it was last
// looked at, which was lately.
func anchored(places []audit.PlaceStatus, now time.Time) bool {
	return slices.ContainsFunc(places, func(a audit.PlaceStatus) bool {
		return a.State == audit.PlaceOK && a.Sequence > 0 && now.Sub(a.Checked) < anchorLasts
	})
}

// anchorLasts is how long a checkpoint counts as kept that was not looked at since.
const anchorLasts = 24 * time.Hour

// What of the reports in the data directory is removed. Each of them can be made
// again.
const (
	reportsPrefix = "reports"      // of the names of all
	reportLasts   = 24 * time.Hour // without being asked for
	reportsRoom   = 64 << 20       // bytes of a tenant's, so that nobody fills the volume of the database
)

// forget removes reports that nobody asked for lately. What lies in a bucket of the
// operator's own is the operator's.
func (p *proving) forget(ctx context.Context) error {
	if p.reports == nil {
		return nil
	}
	_, err := p.reports.Expire(ctx, reportsPrefix, time.Now().Add(-reportLasts), reportsRoom)
	return err
}

// run does what proves the log, and what keeps it short, until ctx ends.
func (p *proving) run(ctx context.Context, s *service, g interface{ Go(func() error) }) {
	g.Go(func() error { audit.NewFollower(s.log).KeepFollowing(ctx, s.logger); return nil })
	g.Go(func() error { s.verifier.KeepVerified(ctx, p.Verification, s.logger); return nil })
	g.Go(func() error { p.keeper.Keep(ctx); return nil })
	if p.archive != nil {
		g.Go(func() error { p.archive.keep(ctx); return nil })
	}
}

// proofCollector shows how the log is proven. It reads memory alone.
type proofCollector struct {
	log      *audit.Log
	verifier *audit.LiveVerifier
	keeper   *audit.AnchorKeeper
}

var (
	checkpointLag = prometheus.NewDesc("latticekeep_audit_checkpoint_lag_entries", "Entries that the newest checkpoint does not cover yet.", nil, nil)
	verifiedTo    = prometheus.NewDesc("latticekeep_audit_verified_sequence", "The log was verified up to this sequence by this process.", nil, nil)
	brokenLog     = prometheus.NewDesc("latticekeep_audit_broken", "1 when the last verification found that the log does not hold.", nil, nil)
	anchorState   = prometheus.NewDesc("latticekeep_audit_anchor_state",
		"1 for the state that an anchored checkpoint was found in last: ok, unreachable, refused or rollback.", []string{"place", "state"}, nil)
	anchorSequence = prometheus.NewDesc("latticekeep_audit_anchor_sequence", "Sequence of the checkpoint that is anchored there.", []string{"place"}, nil)
	anchorRefusals = prometheus.NewDesc("latticekeep_audit_anchor_refusals_total",
		"Checkpoints found there that did not verify or belong to another chain.", []string{"place"}, nil)
)

func (c proofCollector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{checkpointLag, verifiedTo, brokenLog, anchorState, anchorSequence, anchorRefusals} {
		descriptions <- d
	}
}

func (c proofCollector) Collect(metrics chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(checkpointLag, float64(audit.NewFollower(c.log).Lag()))
	proof := c.verifier.Proof()
	gauge(verifiedTo, float64(proof.VerifiedTo))
	broken := 0.0
	if proof.Broken != nil {
		broken = 1
	}
	gauge(brokenLog, broken)
	for _, a := range c.keeper.Status() {
		for _, state := range []audit.PlaceState{audit.PlaceOK, audit.PlaceUnreachable, audit.PlaceRefused, audit.PlaceRollback} {
			is := 0.0
			if a.State == state {
				is = 1
			}
			gauge(anchorState, is, a.Place, string(state))
		}
		gauge(anchorSequence, float64(a.Sequence), a.Place)
		metrics <- prometheus.MustNewConstMetric(anchorRefusals, prometheus.CounterValue, float64(a.Refused), a.Place)
	}
}
