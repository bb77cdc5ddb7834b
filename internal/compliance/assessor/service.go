// Package assessor scores tenants and makes reports, with the catalogues and probes of package
// compliance.
//
// It gathers the evidence of a tenant from the audit log up to a head entry, and keeps it in memory
// and in the store, so that it reads a long history only once. All evidence follows from the log.
// Stored evidence has a MAC and is gathered again when it is damaged. A score is withheld while the
// log is not verified up to the head. Each score and report is recorded as an audit entry.
package assessor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Config is the configuration of a [Service]. All fields except Catalogues, Now and Logger are
// required.
type Config struct {
	Reader     *reader.Reader
	Verifier   *verify.LiveVerifier
	Catalogues string // directory whose files replace the embedded ones of the same names; "": none

	// State returns the present state of the deployment. Error: fault.Unavailable.
	State func(ctx context.Context) (compliance.State, error)

	// Seal returns content as a row under its key, with a MAC that only this deployment can make.
	// Open returns the content of such a row, or an error.
	Seal func(key, content []byte) []byte
	Open func(key, row []byte) ([]byte, error)

	Reports   compliance.Reports
	Renderers map[compliance.Format]compliance.Renderer
	Sign      func(report []byte) ([]byte, error) // returns a detached signature of the deployment
	Verify    func(report, signature []byte) bool // reports whether it is such a signature

	// Inventory returns the bill of materials of the principal's tenant.
	Inventory func(ctx context.Context, p authz.Principal) ([]byte, error)

	// Organisation returns the name of a tenant.
	Organisation func(ctx context.Context, id authz.TenantID) (string, error)

	Program string // name and version of this program
	Now     func() time.Time
	Logger  *slog.Logger
}

// Service scores tenants and makes reports. Its methods may be called concurrently.
type Service struct {
	guard        *guard.Guard
	reader       *reader.Reader
	verifier     *verify.LiveVerifier
	catalogues   map[compliance.Framework]*compliance.Catalogue
	state        func(context.Context) (compliance.State, error)
	inventory    func(context.Context, authz.Principal) ([]byte, error)
	organisation func(context.Context, authz.TenantID) (string, error)
	now          func() time.Time
	logger       *slog.Logger

	evidence *gatherer
	reports  *reportStore
	agenda   agenda
	// computing bounds how many callers judge or render at the same time, so that some cores stay
	// free for other work.
	computing            *semaphore.Weighted
	patience, assessTime time.Duration
}

// New returns a service. It returns an error for a malformed catalogue, with its file and line.
func New(s store.Store, guard *guard.Guard, c Config) (*Service, error) {
	if s == nil || guard == nil || c.Reader == nil || c.Verifier == nil || c.State == nil || c.Seal == nil || c.Open == nil || c.Reports == nil || c.Sign == nil || c.Verify == nil ||
		c.Inventory == nil || c.Organisation == nil {
		return nil, errors.New("the compliance service lacks a part")
	}
	catalogues, err := compliance.LoadCatalogues(c.Catalogues)
	if err != nil {
		return nil, err
	}
	now := c.Now
	if now == nil {
		now = time.Now
	}
	logger := cmp.Or(c.Logger, slog.New(slog.DiscardHandler))
	return &Service{
		guard: guard, reader: c.Reader, verifier: c.Verifier, catalogues: catalogues, state: c.State, inventory: c.Inventory, organisation: c.Organisation,
		now: now, logger: logger,
		evidence: newGatherer(evidenceRows{store: s, seal: c.Seal, unseal: c.Open, logger: logger}, c.Reader),
		reports: &reportStore{
			bucket: c.Reports, renderers: c.Renderers, program: c.Program, sign: c.Sign, verify: c.Verify, now: now, logger: logger,
		},
		computing: semaphore.NewWeighted(int64(max(1, runtime.GOMAXPROCS(0)/2))),
		patience:  defaultPatience, assessTime: defaultAssessTime,
	}, nil
}

// defaultPatience bounds the work for one answer. Later calls, or the background work, gather and
// verify the rest of a long history.
const defaultPatience = 3 * time.Second

var errFramework = fault.New(fault.Invalid, "framework must be one of soc2, iso27001, pci_dss, hipaa, gdpr, nist_csf, fedramp, apra, nist_800_53")

// Reasons for withholding a score.
const (
	reasonBroken    = "the audit chain does not verify: run latticekeep audit verify"
	reasonVerifying = "the audit chain is not verified up to the head yet: ask again"
	reasonGathering = "the evidence is not gathered up to the head yet: ask again"
	reasonArchived  = "the evidence of archived entries is lost: restore a backup, or score an export of the whole log"
)

// Reasons in audit entries.
const reasonNoHead = "no_such_head"

// Score judges a framework as of an entry of p's tenant; 0 means the newest one. While the chain is
// not verified up to that entry, the score is nil and Reason says why. When verification is
// disabled, the status says so and there is a score. Errors: fault.Forbidden, fault.Invalid for an
// unknown framework, fault.NotFound for an entry that the tenant does not have, fault.Unavailable.
func (s *Service) Score(ctx context.Context, p authz.Principal, f compliance.Framework, head uint64) (compliance.Assessment, error) {
	j, err := s.judged(ctx, p, authz.ReadScore, f, head)
	if err != nil {
		return compliance.Assessment{}, err
	}
	e := scoreEvent(p, j.Assessment)
	if head != 0 {
		e.Attributes[compliance.AttributePinned] = "true"
	}
	if err := s.guard.Record(ctx, e); err != nil {
		return compliance.Assessment{}, err
	}
	return j.Assessment, nil
}

// Scores judges all frameworks as of the newest entry of p's tenant, in the order of
// [compliance.Frameworks], and records one entry for all of them. All have the same head and proof.
// It returns the errors of Score.
func (s *Service) Scores(ctx context.Context, p authz.Principal) ([]compliance.Assessment, error) {
	if err := s.guard.Admit(ctx, p, authz.ReadScore); err != nil {
		return nil, err
	}
	if s.computing.Acquire(ctx, 1) != nil {
		return nil, errBusy
	}
	catalogues := make([]*compliance.Catalogue, 0, len(s.catalogues))
	for _, f := range compliance.Frameworks() {
		catalogues = append(catalogues, s.catalogues[f])
	}
	judged, err := func() ([]judgement, error) {
		defer s.computing.Release(1) // after a panic, too
		return s.judge(ctx, p.Tenant, 0, catalogues...)
	}()
	if err != nil {
		return nil, err
	}
	all := make([]compliance.Assessment, len(judged))
	for i, j := range judged {
		all[i] = j.Assessment
	}
	if err := s.guard.Record(ctx, scoresEvent(p, all)); err != nil {
		return nil, err
	}
	return all, nil
}

// scoreEvent returns the audit event for a score.
func scoreEvent(p authz.Principal, a compliance.Assessment) audit.Event {
	e := audit.Event{
		Type: audit.ComplianceScored, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.ComplianceResource},
		Attributes: map[string]string{compliance.AttributeFramework: string(a.Framework), compliance.AttributeHead: formatUint(a.Head.Sequence)},
	}
	if a.Score == nil {
		e.Attributes[compliance.AttributeWithheld] = a.Proof.Status
	} else {
		e.Attributes[compliance.AttributeScore] = formatScore(*a.Score)
	}
	return e
}

func formatUint(n uint64) string { return strconv.FormatUint(n, 10) }

func formatScore(x float64) string { return strconv.FormatFloat(x, 'f', 1, 64) }

// History returns the last score of each day, oldest first. It omits scores for an older head. It
// returns the errors of Score.
func (s *Service) History(ctx context.Context, p authz.Principal, f compliance.Framework) ([]compliance.DayScore, error) {
	if err := s.ready(ctx, p, authz.ReadScoreHistory, f); err != nil {
		return nil, err
	}
	if s.computing.Acquire(ctx, 1) != nil {
		return nil, errBusy
	}
	days, err := func() ([]compliance.DayScore, error) {
		defer s.computing.Release(1) // also after a panic
		return s.history(ctx, p.Tenant, f)
	}()
	if err != nil {
		return nil, err
	}
	err = s.guard.Record(ctx, audit.Event{
		Type: audit.ComplianceHistoryRead, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.ComplianceResource},
		Attributes: map[string]string{compliance.AttributeFramework: string(f)},
	})
	if err != nil {
		return nil, err
	}
	return days, nil
}

func (s *Service) history(ctx context.Context, tenant authz.TenantID, f compliance.Framework) (days []compliance.DayScore, err error) {
	err = s.withNewest(ctx, tenant, func(e *compliance.Evidence) { days = append([]compliance.DayScore{}, e.Scores[f]...) })
	return days, err
}

// withNewest calls f with the evidence of all entries of a tenant. Error: fault.Unavailable, at once when
// many entries are not gathered yet.
func (s *Service) withNewest(ctx context.Context, tenant authz.TenantID, f func(*compliance.Evidence)) error {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	g, release, err := s.evidence.acquire(ctx, tenant)
	if err != nil {
		return err
	}
	defer release()
	switch err := s.evidence.catchUpSoon(ctx, g); {
	case errors.Is(err, errUnfinished):
		return errBusy
	case err != nil:
		return err
	}
	f(g.evidence)
	return nil
}

// Inventory returns the cryptographic bill of materials of p's tenant. Errors: fault.Forbidden,
// fault.Unavailable.
func (s *Service) Inventory(ctx context.Context, p authz.Principal) ([]byte, error) {
	if err := s.guard.Admit(ctx, p, authz.ReadInventory); err != nil {
		return nil, err
	}
	b, err := s.inventory(ctx, p)
	if err != nil {
		return nil, fmt.Errorf("making an inventory: %w", err)
	}
	err = s.guard.Record(ctx, audit.Event{
		Type: audit.InventoryRead, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.ComplianceResource},
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// ready checks that the log takes entries, that p may do a, and that the framework exists. It runs
// before any lookup.
func (s *Service) ready(ctx context.Context, p authz.Principal, a authz.Action, f compliance.Framework) error {
	if err := s.guard.Admit(ctx, p, a); err != nil {
		return err
	}
	if !slices.Contains(compliance.Frameworks(), f) {
		return errFramework
	}
	return nil
}

// judged calls ready and judge, and records a refusal when the head does not exist.
func (s *Service) judged(ctx context.Context, p authz.Principal, a authz.Action, f compliance.Framework, head uint64) (judgement, error) {
	if err := s.ready(ctx, p, a, f); err != nil {
		return judgement{}, err
	}
	if s.computing.Acquire(ctx, 1) != nil {
		return judgement{}, errBusy
	}
	all, err := func() ([]judgement, error) {
		defer s.computing.Release(1) // after a panic, too
		return s.judge(ctx, p.Tenant, head, s.catalogues[f])
	}()
	if errors.Is(err, compliance.ErrNoHead) {
		if failed := s.guard.RecordAttempt(ctx, p, a, audit.Denied, reasonNoHead); failed != nil {
			return judgement{}, failed
		}
	}
	if err != nil {
		return judgement{}, err
	}
	return all[0], nil
}

// judgement is an assessment with further contents of a report.
type judgement struct {
	compliance.Assessment
	history                   []compliance.DayScore
	activity                  []compliance.Activity
	chainID, publicKey, keyID string
}

func judgementOf(c *compliance.Catalogue, e *compliance.Evidence) judgement {
	return judgement{
		c.Assess(e), append([]compliance.DayScore{}, e.Scores[c.Framework]...), e.Activity(), e.ChainID, e.PublicKey, e.KeyID,
	}
}

// judge gathers the evidence, judges it by each catalogue and verifies the chain. Errors:
// fault.NotFound, fault.Unavailable.
func (s *Service) judge(ctx context.Context, tenant authz.TenantID, head uint64, catalogues ...*compliance.Catalogue) ([]judgement, error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	all, err := s.gather(ctx, tenant, head, catalogues)
	withhold := func(proof compliance.Proof, reason string) {
		for i := range all {
			all[i].Proof = proof
			all[i].Assessment.Withhold(proof.Status, reason)
		}
	}
	switch kind := fault.Of(err); {
	case err == nil:
	case errors.Is(err, errUnfinished), errors.Is(err, compliance.ErrNotNext):
		p, reason := s.verifier.Proof(), reasonGathering
		if errors.Is(err, compliance.ErrNotNext) {
			reason = reasonArchived
		}
		withhold(compliance.Proof{Status: compliance.Verifying, VerifiedTo: p.VerifiedTo, Hash: p.Hash, At: p.At}, reason)
		return all, nil
	case kind == fault.NotFound, kind == fault.Unavailable:
		return nil, err
	default:
		s.logger.ErrorContext(ctx, "the tenant's part of the log does not verify; its score is withheld", "tenant", tenant, "error", err)
		withhold(compliance.Proof{Status: compliance.Broken}, reasonBroken)
		return all, nil
	}
	proof := compliance.Assessment{Head: all[0].Head} // all have the same head
	if err := s.prove(ctx, &proof); err != nil {
		return nil, err
	}
	for i := range all {
		all[i].Proof = proof.Proof
		if proof.Reason != "" {
			all[i].Assessment.Withhold(proof.Proof.Status, proof.Reason)
		}
	}
	return all, nil
}

// gather judges as of the head, by each catalogue. It does not verify the chain.
func (s *Service) gather(ctx context.Context, tenant authz.TenantID, head uint64, catalogues []*compliance.Catalogue) ([]judgement, error) {
	all := make([]judgement, len(catalogues))
	for i, c := range catalogues {
		all[i] = judgement{Assessment: compliance.Assessment{
			Framework: c.Framework, Version: c.Version, Coverage: c.Coverage(), Controls: []compliance.ControlResult{},
		}}
	}
	judged := func(e *compliance.Evidence) []judgement {
		for i, c := range catalogues {
			all[i] = judgementOf(c, e)
		}
		return all
	}
	g, release, err := s.evidence.acquire(ctx, tenant)
	if err != nil {
		return all, err
	}
	defer release()
	if head != 0 {
		archived, err := s.reader.Archived(ctx)
		if err != nil {
			return all, err
		}
		if head <= archived {
			return all, compliance.ErrNoHead
		}
	}
	err = s.evidence.catchUp(ctx, g, head)
	if err == nil && head == 0 {
		err = s.updateState(ctx, g, s.now().Add(-stateEvery))
	}
	if e := g.evidence; e != nil && e.Count > 0 {
		for i := range all {
			all[i].Head = e.Head()
		}
	}
	switch {
	case err != nil:
		return all, err
	case head == 0 || g.evidence.Last.Sequence == head:
		return judged(g.evidence), nil
	case g.evidence.Last.Sequence < head:
		return all, compliance.ErrNoHead
	}
	release() // an older head does not need the newest evidence
	e, release, err := s.evidence.asOf(ctx, tenant, head)
	if err != nil {
		return all, err
	}
	defer release()
	return judged(e), nil
}

// prove verifies the chain up to the head, or withholds the score. When verification is disabled
// there is still a score: the tenant's own entries were checked against each other, and a probe
// fails because of it.
func (s *Service) prove(ctx context.Context, a *compliance.Assessment) error {
	p, err := s.verifier.Verify(ctx)
	if err != nil && ctx.Err() == nil {
		if fault.Of(err) == fault.Unavailable {
			return fmt.Errorf("verifying the log: %w", err)
		}
		s.logger.ErrorContext(ctx, "verifying the log failed; the score is withheld", "error", err)
		p.Status = compliance.Broken
	}
	a.Proof = compliance.Proof{Status: p.Status, VerifiedTo: p.VerifiedTo, Hash: p.Hash, At: p.At}
	switch {
	case p.Broken != nil || p.Status == compliance.Broken:
		a.Withhold(compliance.Broken, reasonBroken)
	case p.Status == compliance.Disabled:
		a.Proof.Status = compliance.Disabled
	case p.VerifiedTo >= a.Head.Sequence:
		a.Proof.Status = compliance.Verified
	default:
		a.Withhold(compliance.Verifying, reasonVerifying)
	}
	return nil
}
