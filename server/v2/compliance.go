package v2

import (
	"cmp"
	"context"
	"mime"
	"net/http"
	"net/url"
	"path"
	"time"

	"github.com/gin-gonic/gin"
	openapi_types "github.com/oapi-codegen/runtime/types"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/fair"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/server/gate"
)

// complianceAPI implements the endpoints of scores and reports.
type complianceAPI struct {
	compliance *assessor.Service
	reports    Reports // nil if the storage serves the reports itself
	guard      *guard.Guard
	computing  *fair.Semaphore[authz.TenantID] // one score or report at a time for each tenant
}

// Reports verifies the URLs of reports that the deployment serves itself. Verify returns the name
// of the report, or fault.Forbidden for an invalid URL.
type Reports interface {
	Verify(u *url.URL) (name string, err error)
}

// These are the time limits of a score and a report. Most of the time goes to the first read of a
// long history, and to the transfer to a bucket.
const (
	scoreTime  = 5 * time.Second
	reportTime = 20 * time.Second
)

func chainHead(h compliance.Head) api.ChainHead {
	return api.ChainHead{Sequence: int64(h.Sequence), Hash: h.Hash, Timestamp: h.Time.UTC()}
}

// GetComplianceScore returns the score that the log is evidence for.
func (a *complianceAPI) GetComplianceScore(c *gin.Context, params api.GetComplianceScoreParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if a.computing.Acquire(ctx, call.Principal().Tenant) != nil {
			return nil, fault.Unavailable
		}
		defer a.computing.Release(call.Principal().Tenant)
		s, err := a.compliance.Score(ctx, call.Principal(), compliance.Framework(params.Framework), uint64(gate.Value(params.Head)))
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		return score(s), nil
	})
}

// GetComplianceScores returns the scores of all frameworks.
func (a *complianceAPI) GetComplianceScores(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if a.computing.Acquire(ctx, call.Principal().Tenant) != nil {
			return nil, fault.Unavailable
		}
		defer a.computing.Release(call.Principal().Tenant)
		all, err := a.compliance.Scores(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		return scores(all), nil
	})
}

// scores names each probe once, since the same one is in controls of several frameworks.
func scores(all []compliance.Assessment) api.ComplianceScores {
	answer := api.ComplianceScores{
		Success: true, Head: chainHead(all[0].Head), Proof: proof(all[0].Proof), Scores: make([]api.FrameworkScore, len(all)), Probes: []api.ComplianceProbe{},
	}
	named := make(map[string]bool)
	for i, s := range all {
		answer.Scores[i] = api.FrameworkScore{
			Framework: api.Framework(s.Framework), Version: s.Version, Score: scoreOf(s), Reason: gate.NonZero(s.Reason), Provisional: s.Provisional,
			Coverage: coverage(s.Coverage), Controls: make([]api.ControlSummary, len(s.Controls)),
		}
		for j, c := range s.Controls {
			control := api.ControlSummary{
				Id: c.ID, Title: c.Title, Profile: gate.NonZero(c.Profile), Result: api.ComplianceControlResult(c.Result), Probes: make([]string, len(c.Probes)),
			}
			for k, p := range c.Probes {
				if control.Probes[k] = p.Name; !named[p.Name] {
					named[p.Name] = true
					answer.Probes = append(answer.Probes, probe(p))
				}
			}
			answer.Scores[i].Controls[j] = control
		}
	}
	return answer
}

func scoreOf(s compliance.Assessment) *float32 {
	if s.Score == nil {
		return nil
	}
	n := float32(*s.Score)
	return &n
}

func coverage(c compliance.Coverage) api.ComplianceCoverage {
	return api.ComplianceCoverage{Controls: c.Controls, Evidenced: c.Evidenced, Percent: float32(c.Percent)}
}

func proof(p compliance.Proof) api.ComplianceProof {
	answer := api.ComplianceProof{Status: api.ComplianceScoreProofStatus(p.Status), VerifiedTo: int64(p.VerifiedTo)}
	if !p.At.IsZero() {
		at := p.At.UTC()
		answer.VerifiedAt = &at
	}
	return answer
}

func probe(p compliance.ProbeResult) api.ComplianceProbe {
	answer := api.ComplianceProbe{
		Name: p.Name, Title: p.Title, Result: api.ProbeResult(p.Result), Sample: p.Sample, WindowDays: p.WindowDays, Detail: p.Detail,
		Evidence: make([]api.EntryReference, len(p.Evidence)), Responsible: api.ComplianceProbeResponsible(p.Responsible),
		Since: p.Since, Remedy: gate.NonZero(p.Remedy), Guide: gate.NonZero(p.Guide),
	}
	if len(p.Objects) > 0 {
		answer.Objects = &p.Objects
	}
	for i, e := range p.Evidence {
		answer.Evidence[i] = api.EntryReference{
			Sequence: int64(e.Sequence), Hash: e.Hash, EventType: api.EventType(e.Event), Actor: e.Actor, Timestamp: e.Time,
		}
	}
	return answer
}

func score(s compliance.Assessment) api.ComplianceScore {
	answer := api.ComplianceScore{
		Success: true, Framework: api.Framework(s.Framework), Version: s.Version, Score: scoreOf(s), Reason: gate.NonZero(s.Reason), Provisional: s.Provisional,
		Coverage: coverage(s.Coverage), Proof: proof(s.Proof), Head: chainHead(s.Head), Controls: make([]api.ComplianceControl, len(s.Controls)),
	}
	for i, c := range s.Controls {
		answer.Controls[i] = api.ComplianceControl{
			Id: c.ID, Title: c.Title, Profile: gate.NonZero(c.Profile), Related: c.Related, Weight: float32(c.Weight),
			Result: api.ComplianceControlResult(c.Result), Probes: make([]api.ComplianceProbe, len(c.Probes)),
		}
		for j, p := range c.Probes {
			answer.Controls[i].Probes[j] = probe(p)
		}
	}
	return answer
}

// GetComplianceHistory returns how a score changed over time.
func (a *complianceAPI) GetComplianceHistory(c *gin.Context, params api.GetComplianceHistoryParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if a.computing.Acquire(ctx, call.Principal().Tenant) != nil {
			return nil, fault.Unavailable
		}
		defer a.computing.Release(call.Principal().Tenant)
		days, err := a.compliance.History(ctx, call.Principal(), compliance.Framework(params.Framework))
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		answer := api.ComplianceHistory{Success: true, Framework: params.Framework, Scores: []api.DayScore{}}
		for _, d := range days {
			at, err := time.Parse(time.DateOnly, d.Date)
			if err != nil {
				return nil, fault.Wrap(fault.Internal, "internal error", err)
			}
			answer.Scores = append(answer.Scores, api.DayScore{Date: openapi_types.Date{Time: at}, Score: float32(d.Score), Sequence: int64(d.Sequence)})
		}
		return answer, nil
	})
}

// GetComplianceReport returns the location of a report, and makes the report if necessary.
func (a *complianceAPI) GetComplianceReport(c *gin.Context, params api.GetComplianceReportParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		format := compliance.PDF
		if params.Format != nil {
			format = compliance.Format(*params.Format)
		}
		about := compliance.About{Organisation: gate.Value(params.Organisation)}
		if params.From != nil {
			about.From = params.From.Time
		}
		if a.computing.Acquire(ctx, call.Principal().Tenant) != nil {
			return nil, fault.Unavailable
		}
		defer a.computing.Release(call.Principal().Tenant)
		l, err := a.compliance.Report(ctx, call.Principal(), compliance.Framework(params.Framework), uint64(gate.Value(params.Head)), format, about)
		if fault.Of(err) == fault.Conflict { // no report is made from a log that fails verification
			return nil, cmp.Or(a.guard.RecordAttempt(ctx, call.Principal(), authz.ReadReport, audit.Failure, "not_verified"), err)
		}
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		return api.ComplianceReport{
			Success: true, Url: l.URL, SignatureUrl: l.SignatureURL, ExpiresAt: l.ExpiresAt.UTC(), Head: chainHead(l.Head),
			Framework: params.Framework, Format: api.ComplianceReportFormat(format),
		}, nil
	})
}

// GetInventory returns the document as it is, without an envelope.
func (a *complianceAPI) GetInventory(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		bom, err := a.compliance.Inventory(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		return gate.Document{ContentType: "application/vnd.cyclonedx+json", Bytes: bom}, nil
	})
}

// DownloadReport returns a report to anyone with its signed URL. There is no session, only the URL
// counts, and the answer does not tell why a URL is invalid.
func (a *complianceAPI) DownloadReport(c *gin.Context, _ api.DownloadReportParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, _ *gate.Call) (any, error) {
		if a.reports == nil { // a bucket serves the reports itself
			return nil, gate.ErrSigned
		}
		name, err := a.reports.Verify(c.Request.URL)
		if err != nil {
			return nil, gate.ErrSigned
		}
		b, err := a.compliance.Stored(ctx, name)
		if fault.Of(err) == fault.NotFound {
			return nil, gate.ErrSigned
		}
		if err != nil {
			return nil, err
		}
		c.Header("Cache-Control", "private, no-store")
		c.Header("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": path.Base(name)}))
		return gate.Document{ContentType: reportType(name), Bytes: b}, nil
	})
}

// reportType returns the content type of a report by its extension.
func reportType(name string) string {
	switch path.Ext(name) {
	case ".pdf":
		return "application/pdf"
	case ".json":
		return "application/json"
	}
	return "application/octet-stream" // a signature
}

// GetReviews returns what waits for a review.
func (a *complianceAPI) GetReviews(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		w, err := a.compliance.Waiting(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		return api.ReviewsWaiting{
			Success: true, Denials: w.Denials, Failures: w.Failures, OwnDenials: w.Own.Denials, OwnFailures: w.Own.Failures,
			Oldest: gate.NonZero(w.Oldest), From: int64(w.From), To: int64(w.To),
			LogReviewedAt: gate.NonZero(w.Log), AccessReviewedAt: gate.NonZero(w.Access), InventoryReviewedAt: gate.NonZero(w.Inventory),
		}, nil
	})
}

var (
	errRangeNeeded = fault.New(fault.Invalid, "a review of denials needs from and to")
	errRangeExtra  = fault.New(fault.Invalid, "from and to are for a review of denials")
)

// CreateReview records a review by the user who calls.
func (a *complianceAPI) CreateReview(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.ReviewRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		ranged := body.From != nil && body.To != nil
		switch {
		case body.Subject == api.ReviewSubjectDenials && !ranged:
			return nil, errRangeNeeded
		case body.Subject != api.ReviewSubjectDenials && (body.From != nil || body.To != nil):
			return nil, errRangeExtra
		}
		note := gate.Value(body.Note)
		var r assessor.Review
		var err error
		switch body.Subject {
		case api.ReviewSubjectDenials:
			r, err = a.compliance.Acknowledge(ctx, call.Principal(), uint64(*body.From), uint64(*body.To), note)
		case api.ReviewSubjectAccess:
			r, err = a.compliance.ReviewAccess(ctx, call.Principal(), note)
		default:
			r, err = a.compliance.ReviewInventory(ctx, call.Principal(), note)
		}
		if err != nil {
			return nil, err
		}
		return api.Review{
			Success: true, Sequence: int64(r.Sequence), Subject: body.Subject, Count: r.Count, Digest: r.Digest, NoteId: gate.NonZero(r.NoteID),
			Denials: r.Denials, Failures: r.Failures, OwnDenials: r.Own.Denials, OwnFailures: r.Own.Failures,
		}, nil
	})
}

// GetReviewNote returns the note of a review.
func (a *complianceAPI) GetReviewNote(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		n, err := a.compliance.Note(ctx, call.Principal(), id)
		if err != nil {
			return nil, err
		}
		return api.ReviewNote{Success: true, Note: n.Text, Salt: n.Salt}, nil
	})
}

// EraseReviewNote deletes the note of a review.
func (a *complianceAPI) EraseReviewNote(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.compliance.EraseNote(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.ErasedReviewNote{Success: true, NoteId: id}, nil
	})
}
