package compliance

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
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Config is what a [Service] is made of. All but Catalogues, Now and Logger must
// be there.
type Config struct {
	Store      store.Store
	Guard      *audit.Guard
	Reader     *audit.Reader
	Verifier   *audit.LiveVerifier
	Catalogues string // directory whose files replace the embedded ones of the same names; empty: none

	// State says how the deployment is now. Error: fault.Unavailable.
	State func(ctx context.Context) (State, error)

	// Seal returns content as a row under its key, with a MAC that nobody else
	// can make, and Open the content of such a row, or an error.
	Seal func(key, content []byte) []byte
	Open func(key, row []byte) ([]byte, error)

	Reports   Reports
	Renderers map[Format]Renderer
	Sign      func(report []byte) ([]byte, error) // a detached signature of the deployment
	Verify    func(report, signature []byte) bool // whether it is that, over these bytes

	// Inventory writes the bill of materials of the principal's tenant.
	Inventory func(ctx context.Context, p authz.Principal) ([]byte, error)

	Program string // name and version
	Now     func() time.Time
	Logger  *slog.Logger
}

// Service answers what the log of a deployment is evidence for. Its methods may be
// called concurrently.
type Service struct {
	store      store.Store
	guard      *audit.Guard
	reader     *audit.Reader
	verifier   *audit.LiveVerifier
	catalogues map[Framework]*Catalogue
	state      func(context.Context) (State, error)
	seal       func(key, content []byte) []byte
	unseal     func(key, row []byte) ([]byte, error)
	reports    Reports
	renderers  map[Format]Renderer
	sign       func([]byte) ([]byte, error)
	verify     func(report, signature []byte) bool
	inventory  func(context.Context, authz.Principal) ([]byte, error)
	program    string
	now        func() time.Time
	logger     *slog.Logger

	folds                folds
	pasts                pasts
	made                 digests
	agenda               agenda
	saveEvery, milestone uint64
	patience, assessTime time.Duration

	// computing bounds the callers that judge or render at a time: some cores stay for all else.
	computing *semaphore.Weighted
}

// New returns a service. Error: a catalogue that is malformed, with its file and
// line.
func New(c Config) (*Service, error) {
	if c.Store == nil || c.Guard == nil || c.Reader == nil || c.Verifier == nil || c.State == nil || c.Seal == nil || c.Open == nil || c.Reports == nil || c.Sign == nil || c.Verify == nil ||
		c.Inventory == nil {
		return nil, errors.New("the compliance service lacks a part")
	}
	catalogues, err := LoadCatalogues(c.Catalogues)
	if err != nil {
		return nil, err
	}
	s := &Service{
		store: c.Store, guard: c.Guard, reader: c.Reader, verifier: c.Verifier, catalogues: catalogues, state: c.State, seal: c.Seal, unseal: c.Open, reports: c.Reports,
		renderers: c.Renderers, sign: c.Sign, verify: c.Verify, inventory: c.Inventory, program: c.Program, now: c.Now, logger: c.Logger,
		saveEvery: defaultSaveEvery, milestone: defaultMilestone, computing: semaphore.NewWeighted(int64(max(1, runtime.GOMAXPROCS(0)/2))),
		patience: defaultPatience, assessTime: defaultAssessTime,
	}
	if s.now == nil {
		s.now = time.Now
	}
	s.logger = cmp.Or(s.logger, slog.New(slog.DiscardHandler))
	return s, nil
}

// defaultPatience bounds what is looked up for one answer: the rest of a long
// history is gathered and verified by the next ones, or in the background.
const defaultPatience = 3 * time.Second

var errFramework = fault.New(fault.Invalid, "framework must be one of soc2, iso27001, pci_dss, hipaa, gdpr, nist_csf, fedramp, apra, nist_800_53")

// Reasons of a score that is withheld.
const (
	reasonBroken    = "the audit chain does not verify: run latticekeep audit verify"
	reasonVerifying = "the audit chain is not verified up to the head yet: ask again"
	reasonGathering = "the evidence is not gathered up to the head yet: ask again"
	reasonArchived  = "the evidence of archived entries is lost: restore a backup, or score an export of the whole log"
)

// Reasons in audit entries.
const reasonNoHead = "no_such_head"

// Score judges a framework as of an entry of p's tenant; 0 is the newest one. The
// score is nil, and Reason says why, while the chain is not verified up to there;
// when nothing verifies it, the status says so, and the score that it is one of.
// Errors: fault.Forbidden, fault.Invalid for an unknown framework, fault.NotFound
// for an entry that the tenant does not have, fault.Unavailable.
func (s *Service) Score(ctx context.Context, p authz.Principal, f Framework, head uint64) (Assessment, error) {
	j, err := s.judged(ctx, p, authz.ReadScore, f, head)
	if err != nil {
		return Assessment{}, err
	}
	e := s.scored(p, j.Assessment)
	if head != 0 {
		e.Attributes[attributePinned] = "true"
	}
	if err := s.guard.Record(ctx, e); err != nil {
		return Assessment{}, err
	}
	return j.Assessment, nil
}

// scored is the entry of a score.
func (s *Service) scored(p authz.Principal, a Assessment) audit.Event {
	e := audit.Event{
		Type: audit.ComplianceScored, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.ComplianceResource},
		Attributes: map[string]string{attributeFramework: string(a.Framework), attributeHead: decimalOf(a.Head.Sequence)},
	}
	if a.Score == nil {
		e.Attributes[attributeWithheld] = a.Proof.Status
	} else {
		e.Attributes[attributeScore] = scoreOf(*a.Score)
	}
	return e
}

func decimalOf(n uint64) string { return strconv.FormatUint(n, 10) }

func scoreOf(x float64) string { return strconv.FormatFloat(x, 'f', 1, 64) }

// History returns the last score of each day on which there was one, oldest first,
// as far as they were of the newest entry then. Errors: as of Score.
func (s *Service) History(ctx context.Context, p authz.Principal, f Framework) ([]DayScore, error) {
	if err := s.ready(ctx, p, authz.ReadScoreHistory, f); err != nil {
		return nil, err
	}
	if s.computing.Acquire(ctx, 1) != nil {
		return nil, errBusy
	}
	days, err := func() ([]DayScore, error) {
		defer s.computing.Release(1) // after a panic, too
		return s.history(ctx, p.Tenant, f)
	}()
	if err != nil {
		return nil, err
	}
	err = s.guard.Record(ctx, audit.Event{
		Type: audit.ComplianceHistoryRead, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.ComplianceResource},
		Attributes: map[string]string{attributeFramework: string(f)},
	})
	if err != nil {
		return nil, err
	}
	return days, nil
}

func (s *Service) history(ctx context.Context, tenant authz.TenantID, f Framework) ([]DayScore, error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	fold, leave, err := s.enter(ctx, tenant)
	if err != nil {
		return nil, err
	}
	defer leave()
	switch err := s.catchUp(ctx, fold, 0); {
	case errors.Is(err, errUnfinished):
		return nil, errBusy
	case err != nil:
		return nil, err
	}
	return append([]DayScore{}, fold.evidence.Scores[f]...), nil
}

// Inventory returns the cryptographic bill of materials of p's tenant. Errors:
// fault.Forbidden, fault.Unavailable.
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

// ready finds out, before anything is looked up, whether the log can be written,
// whether p may do a, and whether there is such a framework.
func (s *Service) ready(ctx context.Context, p authz.Principal, a authz.Action, f Framework) error {
	if err := s.guard.Admit(ctx, p, a); err != nil {
		return err
	}
	if !slices.Contains(Frameworks(), f) {
		return errFramework
	}
	return nil
}

// judged is ready and judge, with an entry when there is no such head.
func (s *Service) judged(ctx context.Context, p authz.Principal, a authz.Action, f Framework, head uint64) (judgement, error) {
	if err := s.ready(ctx, p, a, f); err != nil {
		return judgement{}, err
	}
	if s.computing.Acquire(ctx, 1) != nil {
		return judgement{}, errBusy
	}
	j, err := func() (judgement, error) {
		defer s.computing.Release(1) // after a panic, too
		return s.judge(ctx, p.Tenant, s.catalogues[f], head)
	}()
	if errors.Is(err, errNoHead) {
		if failed := s.guard.RecordAttempt(ctx, p, a, audit.Denied, reasonNoHead); failed != nil {
			return judgement{}, failed
		}
	}
	return j, err
}

// judgement is an assessment and what a report says besides.
type judgement struct {
	Assessment
	history                   []DayScore
	activity                  []Activity
	chainID, publicKey, keyID string
}

func (c *Catalogue) judge(e *evidence) judgement {
	return judgement{
		c.assess(e), append([]DayScore{}, e.Scores[c.Framework]...), e.activity(), e.ChainID, e.PublicKey, e.KeyID,
	}
}

// judge gathers, judges and verifies. Errors: fault.NotFound, fault.Unavailable.
func (s *Service) judge(ctx context.Context, tenant authz.TenantID, c *Catalogue, head uint64) (judgement, error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	j, err := s.gather(ctx, tenant, c, head)
	switch kind := fault.Of(err); {
	case err == nil:
	case errors.Is(err, errUnfinished), errors.Is(err, errNotNext):
		p := s.verifier.Proof()
		j.Proof = Proof{VerifiedTo: p.VerifiedTo, Hash: p.Hash, At: p.At}
		if j.Assessment.withhold(Verifying, reasonGathering); errors.Is(err, errNotNext) {
			j.Reason = reasonArchived
		}
		return j, nil
	case kind == fault.NotFound, kind == fault.Unavailable:
		return judgement{}, err
	default:
		s.logger.ErrorContext(ctx, "the tenant's part of the log does not hold", "tenant", tenant, "error", err)
		j.Assessment.withhold(Broken, reasonBroken)
		return j, nil
	}
	return j, s.prove(ctx, &j.Assessment)
}

// gather judges as of the head, which it finds. It verifies nothing.
func (s *Service) gather(ctx context.Context, tenant authz.TenantID, c *Catalogue, head uint64) (judgement, error) {
	j := judgement{Assessment: Assessment{Framework: c.Framework, Version: c.Version, Coverage: c.coverage(), Controls: []ControlResult{}}}
	f, leave, err := s.enter(ctx, tenant)
	if err != nil {
		return j, err
	}
	defer leave()
	if head != 0 {
		archived, err := s.reader.Archived(ctx)
		if err != nil {
			return j, err
		}
		if head <= archived {
			return j, errNoHead
		}
	}
	err = s.catchUp(ctx, f, head)
	if err == nil && head == 0 {
		err = s.current(ctx, f, s.now().Add(-stateEvery))
	}
	if e := f.evidence; e != nil && e.Count > 0 {
		j.Head = e.head()
	}
	switch {
	case err != nil:
		return j, err
	case head == 0 || f.evidence.Last.Sequence == head:
		return c.judge(f.evidence), nil
	case f.evidence.Last.Sequence < head:
		return j, errNoHead
	}
	leave() // the newest evidence is not needed for it
	e, leave, err := s.past(ctx, tenant, head)
	if err != nil {
		return j, err
	}
	defer leave()
	return c.judge(e), nil
}

// withhold takes the score, and all that would come to one.
func (a *Assessment) withhold(status, reason string) {
	a.Score, a.Reason, a.Controls = nil, reason, []ControlResult{}
	a.Proof.Status = status
}

// prove verifies the chain up to the head, or withholds the score. A chain that
// nothing is to verify has one nevertheless: its tenant's own entries were held
// against each other, and a probe fails for it.
func (s *Service) prove(ctx context.Context, a *Assessment) error {
	p, err := s.verifier.Verify(ctx)
	if err != nil && ctx.Err() == nil {
		if fault.Of(err) == fault.Unavailable {
			return fmt.Errorf("verifying the log: %w", err)
		}
		s.logger.ErrorContext(ctx, "verifying the log", "error", err)
		p.Status = Broken
	}
	a.Proof = Proof{p.Status, p.VerifiedTo, p.Hash, p.At}
	switch {
	case p.Broken != nil || p.Status == Broken:
		a.withhold(Broken, reasonBroken)
	case p.Status == Disabled:
		a.Proof.Status = Disabled
	case p.VerifiedTo >= a.Head.Sequence:
		a.Proof.Status = Verified
	default:
		a.withhold(Verifying, reasonVerifying)
	}
	return nil
}
