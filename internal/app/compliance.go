package app

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/clock"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/compliance/report"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/objects"
)

// inventory lists the algorithms in use and the live keys that protect a tenant's data: the
// tenant's own keys and the deployment's.
func (p *evidence) inventory(ctx context.Context, s *service, who authz.Principal) ([]byte, error) {
	in := report.Inventory{
		Tenant: who.Tenant, Program: "latticekeep", Version: buildinfo.Version(), At: s.now(),
		Algorithms: []report.Algorithm{
			report.MLKEM768, report.MLDSA65, report.AES256GCM, report.HKDFSHA512, report.HMACSHA512, report.SHA3256, report.SHA256, report.Argon2id, report.X25519,
			report.HPKEHybrid, report.HPKEPure,
		},
	}
	switch p.transport {
	case compliance.TransportTLS13Quantum:
		in.Algorithms = append(in.Algorithms, report.GroupHybrid)
	case compliance.TransportTLS13:
		in.Algorithms = append(in.Algorithms, report.GroupHybrid, report.GroupX25519, report.GroupSecp256r1, report.GroupSecp384r1)
	}
	custody := "the key-management service"
	if p.custody != compliance.CustodyKMS {
		custody = "a local key file"
	}
	add := func(k report.Key) {
		k.SecuredBy, k.WrappedBy = custody, report.AES256GCM
		in.Keys = append(in.Keys, k)
	}
	add(report.Key{ID: "audit/" + s.keys.Audit().Public().ID(), Name: "audit log", Type: report.PrivateKey, Algorithm: report.MLDSA65, State: report.Active})
	add(report.Key{ID: "identity/" + s.keys.Identity().ID(), Name: "deployment identity", Type: report.PrivateKey, Algorithm: report.MLDSA65, State: report.Active})
	signing, err := s.keys.PublicKeys(ctx, who.Tenant)
	if err != nil {
		return nil, err
	}
	for i, k := range signing { // newest first
		state := report.Active
		if i > 0 {
			state = report.Deactivated
		}
		version := strconv.FormatUint(uint64(k.Version), 10)
		add(report.Key{ID: "signing/" + version, Name: "signatures of the tenant", Type: report.PrivateKey, Algorithm: report.MLDSA65, State: state})
		add(report.Key{ID: "mac/" + version, Name: "signatures of the tenant", Type: report.SecretKey, Algorithm: report.HMACSHA512, State: state})
		add(report.Key{ID: "wrapping/" + version, Name: "wrapping key of the tenant", Type: report.SecretKey, Algorithm: report.AES256GCM, State: state})
	}
	named, err := s.transit.Survey(ctx, who.Tenant)
	if err != nil {
		return nil, err
	}
	for _, k := range named {
		add(report.Key{
			ID: k.ID + "/" + strconv.FormatUint(uint64(k.Version), 10), Name: "named key", Type: report.PrivateKey, Algorithm: report.MLKEM768, State: report.Active,
			CreatedAt: k.RotatedAt, ExpiresAt: k.NextRotation,
		})
	}
	sealing, err := s.keys.SealingKeys(ctx)
	if err != nil {
		return nil, err
	}
	for _, k := range sealing {
		state := report.Deactivated
		switch k.State {
		case keyring.SealingKeyCurrent:
			state = report.Active
		case keyring.SealingKeyRetired:
			state = report.Suspended
		}
		add(report.Key{ID: "sealing/" + k.ID, Name: "sealed values", Type: report.PrivateKey, Algorithm: report.Algorithm(k.Suite), State: state, CreatedAt: k.CreatedAt})
	}
	return report.CBOM(in)
}

// reportsDirectory is the folder in the data directory that keeps reports when no bucket is
// configured.
const reportsDirectory = "reports"

// downloads is the path under which the server serves the reports that it keeps itself.
const downloads = "/api/v2/compliance/download"

// transportOf returns the compliance.Transport constant that describes how a listener is encrypted.
func transportOf(t config.TLS) string {
	switch {
	case t.Terminated:
		return compliance.TransportTerminated
	case t.PQRequired:
		return compliance.TransportTLS13Quantum
	case t.CertFile != "" || t.SecretName != "":
		return compliance.TransportTLS13 // X25519MLKEM768 comes first; older clients may use a classical group
	}
	return compliance.TransportPlaintext
}

// openCompliance creates the compliance service. It also returns the bucket of reports if the
// server serves them itself, and nil otherwise.
func (p *evidence) openCompliance(ctx context.Context, s *service, dir, publicURL string) (*assessor.Service, *objects.Bucket, error) {
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
	service, err := assessor.New(s.store, s.guard, assessor.Config{
		Reader: s.reader, Verifier: s.verifier, Catalogues: p.Catalogues, Reports: bucket, Sign: s.keys.SignReport, Verify: s.keys.VerifyReport, Seal: s.keys.SealRow, Open: s.keys.OpenRow,
		Renderers:    map[compliance.Format]compliance.Renderer{compliance.PDF: report.PDF, compliance.OSCAL: report.OSCAL, compliance.KSI: report.KSI},
		State:        func(ctx context.Context) (compliance.State, error) { return p.state(ctx, s) },
		Inventory:    func(ctx context.Context, who authz.Principal) ([]byte, error) { return p.inventory(ctx, s, who) },
		Organisation: s.identity.TenantName,
		Program:      "latticekeep " + buildinfo.Version(), Now: s.now, Logger: s.logger,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("compliance.catalogues: %w", err)
	}
	if u, err := url.Parse(p.Reports); err != nil || p.Reports != "" && u.Scheme != "file" {
		bucket = nil // users download from the bucket itself
	}
	return service, bucket, nil
}

// suites lists the algorithms that protect data at rest and in transit.
var suites = []string{"AES-256-GCM", "HKDF-SHA-512", "HMAC-SHA-512", "ML-DSA-65", "ML-KEM-768", "SHA3-256"}

// state returns the facts about the deployment that compliance scores use and the log records.
func (p *evidence) state(ctx context.Context, s *service) (compliance.State, error) {
	state := compliance.State{
		Custody: p.custody, Transport: p.transport, Signing: p.Signing, VerifyEvery: p.Verification,
		Archive:  p.archive.state(),
		Anchored: anchored(p.keeper.Status(), s.now()), SealingKeyLifetime: s.sealingLifetime, ClockSynchronised: clock.Synchronised(), Suites: suites,
	}
	var err error
	if state.RetentionDays, err = p.archive.retentionDays(ctx); err != nil {
		return state, err
	}
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

// anchored reports whether at least one anchor had a checkpoint of the log when it was last
// checked, and that check is recent.
func anchored(places []keeper.AnchorStatus, now time.Time) bool {
	return slices.ContainsFunc(places, func(a keeper.AnchorStatus) bool {
		return a.State == keeper.AnchorOK && a.Sequence > 0 && now.Sub(a.Checked) < anchorLasts
	})
}

// anchorLasts is how long the last check of an anchor stays valid.
const anchorLasts = 24 * time.Hour
