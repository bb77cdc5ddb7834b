package assessor

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// maxOrganisation bounds the name of an organisation that a caller states, in characters.
const maxOrganisation = 200

var (
	errOrganisation = fault.New(fault.Invalid, "organisation must have 1 to 200 characters, and none that shows nothing, such as a control character, a joiner or U+3164")
	errFrom         = fault.New(fault.Invalid, "from must not be later than the day of the head")
	errKSIAbout     = fault.New(fault.Invalid, "organisation and from are for the formats pdf and oscal: a report of the format ksi has no place for them")

	errFormat      = fault.New(fault.Invalid, "format must be one of pdf, oscal and ksi, and ksi is for the framework fedramp alone")
	errNotVerified = fault.New(fault.Conflict, "the audit chain does not verify, so that no report is made of it: run latticekeep audit verify")
	errVerifying   = fault.New(fault.Unavailable, "the audit chain is not verified up to the head yet: retry")
)

// Report returns a link to the report on a framework, as of an entry of p's tenant; 0 means the
// newest one. It renders the report unless it is stored already: the same head, name of the tenant,
// catalogue, program and about give the same bytes. Errors: fault.Forbidden, fault.Invalid for an unknown
// framework or format, fault.NotFound for an entry that the tenant does not have, fault.Conflict when
// the chain does not verify, fault.Unavailable. The last one also means that the chain is not verified up to
// the head yet, or that the report could not be stored; then there is no report.
func (s *Service) Report(ctx context.Context, p authz.Principal, f compliance.Framework, head uint64, format compliance.Format, about compliance.About) (compliance.Link, error) {
	if err := s.ready(ctx, p, authz.ReadReport, f); err != nil {
		return compliance.Link{}, err
	}
	render := s.reports.renderers[format]
	if render == nil || format == compliance.KSI && f != compliance.FedRAMP {
		return compliance.Link{}, errFormat
	}
	if err := checkAbout(about, format); err != nil {
		return compliance.Link{}, err
	}
	j, err := s.judged(ctx, p, authz.ReadReport, f, head)
	if err != nil {
		return compliance.Link{}, err
	}
	switch j.Proof.Status {
	case compliance.Verified, compliance.Disabled: // the document contains the status
	case compliance.Verifying:
		return compliance.Link{}, errVerifying
	default:
		return compliance.Link{}, errNotVerified
	}
	if about.From.After(j.Head.Time) {
		return compliance.Link{}, errFrom
	}
	organisation, err := s.organisation(ctx, p.Tenant)
	if err != nil {
		return compliance.Link{}, fmt.Errorf("reading the name of the tenant: %w", err)
	}
	if about.Organisation == organisation {
		about.Organisation = "" // nothing is stated that is not so
	}
	name := s.reportName(p.Tenant, organisation, j.Assessment, format, about)
	link, err := s.reports.link(ctx, name, func() ([]byte, error) {
		if s.computing.Acquire(ctx, 1) != nil { // acquired late, so that no caller holds it while it waits for the bucket
			return nil, errBusy
		}
		defer s.computing.Release(1)
		d, err := s.document(ctx, p.Tenant, organisation, j, about)
		if err != nil {
			return nil, err
		}
		return render(d)
	})
	if err != nil {
		return compliance.Link{}, err
	}
	link.Head = j.Head
	err = s.guard.Record(ctx, audit.Event{
		Type: audit.ComplianceReported, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.ComplianceResource},
		Attributes: map[string]string{
			compliance.AttributeFramework: string(f), compliance.AttributeFormat: string(format), compliance.AttributeHead: formatUint(j.Head.Sequence),
		},
	})
	if err != nil {
		return compliance.Link{}, err
	}
	return link, nil
}

// reportName returns the name of a report in the bucket. The name depends on everything that
// determines the contents of the report.
func (s *Service) reportName(tenant authz.TenantID, organisation string, a compliance.Assessment, format compliance.Format, about compliance.About) string {
	from := ""
	if !about.From.IsZero() {
		from = about.From.UTC().Format(time.DateOnly)
	}
	input := frame.Join("latticekeep/report-name/v3", []byte(organisation), []byte(about.Organisation), []byte(from), []byte(a.Head.Hash), []byte(s.catalogues[a.Framework].Digest), []byte(s.reports.program), []byte(a.Proof.Status))
	sum := sha256.Sum256(input)
	return fmt.Sprintf("reports/%s/%s-%d-%s.%s", tenant, a.Framework, a.Head.Sequence, hex.EncodeToString(sum[:6]), format.Extension())
}

// document returns the input of the renderers. Nothing in it depends on the present time.
func (s *Service) document(ctx context.Context, tenant authz.TenantID, organisation string, j judgement, about compliance.About) (compliance.Document, error) {
	checkpoint, err := s.reader.CheckpointAt(ctx, j.Head.Sequence)
	if err != nil {
		return compliance.Document{}, fmt.Errorf("making the checkpoint at the head: %w", err)
	}
	public, err := base64.StdEncoding.DecodeString(j.publicKey)
	if err != nil {
		return compliance.Document{}, fault.Wrap(fault.Internal, "internal error", err)
	}
	c := s.catalogues[j.Framework]
	if j.Proof = (compliance.Proof{Status: j.Proof.Status}); j.Proof.Status == compliance.Verified {
		j.Proof.VerifiedTo, j.Proof.Hash = j.Head.Sequence, j.Head.Hash
	}
	fingerprint := audit.Fingerprint(j.chainID, public)
	return compliance.Document{
		Tenant: tenant, Subject: compliance.Subject{Organisation: organisation, Stated: about.Organisation, From: about.From}, Assessment: j.Assessment, Name: c.Name, Limits: c.Limits, Profiles: c.Profiles(),
		ChainID: j.chainID, Fingerprint: fingerprint, KeyID: j.keyID, PublicKey: j.publicKey,
		Checkpoint: checkpoint.Text(), History: since(about.From, withHead(j.history, j.Assessment)), Activity: j.activity,
		Command: fmt.Sprintf("latticekeep compliance score --file export.jsonl --fingerprint %s --tenant %s --framework %s --head %d",
			fingerprint, tenant, j.Framework, j.Head.Sequence),
		Program: s.reports.program,
	}, nil
}

// checkAbout checks what a caller states for a report.
func checkAbout(about compliance.About, format compliance.Format) error {
	name := about.Organisation
	switch {
	case format == compliance.KSI && about != (compliance.About{}):
		return errKSIAbout
	case name != "" && (!utf8.ValidString(name) || utf8.RuneCountInString(name) > maxOrganisation || strings.TrimSpace(name) == "" ||
		strings.ContainsFunc(name, showsNothing)):
		return errOrganisation
	}
	return nil
}

// showsNothing reports whether a character that is no space is not seen: controls, what Unicode has programs ignore
// (Default_Ignorable_Code_Point), and the empty pattern of Braille, which is not among these.
func showsNothing(r rune) bool {
	const emptyBraille = '\u2800'
	return r == emptyBraille || unicode.IsControl(r) ||
		unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Variation_Selector, unicode.Other_Default_Ignorable_Code_Point)
}

// since returns the scores from a day on.
func since(from time.Time, history []compliance.DayScore) []compliance.DayScore {
	if from.IsZero() {
		return history
	}
	first := slices.IndexFunc(history, func(d compliance.DayScore) bool { return d.Date >= from.UTC().Format(time.DateOnly) })
	if first < 0 {
		return nil
	}
	return history[first:]
}

// withHead adds the score of the head itself. Its entry comes after the head, so the history would
// otherwise lack the score in the document.
func withHead(history []compliance.DayScore, a compliance.Assessment) []compliance.DayScore {
	if a.Score == nil {
		return history
	}
	own := compliance.DayScore{Date: a.Head.Time.Format(time.DateOnly), Score: *a.Score, Sequence: a.Head.Sequence}
	if n := len(history); n > 0 && history[n-1].Date == own.Date {
		history = history[:n-1]
	}
	return append(slices.Clip(history), own)
}

// Stored returns the report or signature with this name. It returns no report without a valid
// signature, and no signature without its report. It does not check whether the caller may have it.
// Errors: fault.NotFound, fault.Unavailable.
func (s *Service) Stored(ctx context.Context, name string) ([]byte, error) {
	report, isSignature := strings.CutSuffix(name, signatureSuffix)
	content, signature, err := s.reports.signed(ctx, report)
	switch {
	case err != nil && fault.Of(err) == fault.NotFound:
		return nil, errNoReport
	case err != nil:
		return nil, unstored(err)
	case isSignature:
		return signature, nil
	}
	return content, nil
}
