package compliance

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// linkLifetime is how long the URL of a report works.
const linkLifetime = time.Hour

var (
	errFormat      = fault.New(fault.Invalid, "format must be one of pdf, oscal and ksi, and ksi is for the framework fedramp alone")
	errNotVerified = fault.New(fault.Conflict, "the audit chain does not verify, so that no report is made of it: run latticekeep audit verify")
	errVerifying   = fault.New(fault.Unavailable, "the audit chain is not verified up to the head yet: retry")
)

// extension is what the name of a report ends in.
func (f Format) extension() string {
	if f == PDF {
		return "pdf"
	}
	return string(f) + ".json"
}

// Report returns where the report on a framework lies, as of an entry of p's
// tenant; 0 is the newest one. It is made unless it is there: the same head, and
// catalogue and program, give the same bytes. Errors: fault.Forbidden,
// fault.Invalid for an unknown framework or format, fault.NotFound for an entry
// that the tenant does not have, fault.Conflict when the chain does not verify,
// fault.Unavailable, also while it is not verified up to the head and when the
// report cannot be stored; then there is none.
func (s *Service) Report(ctx context.Context, p authz.Principal, f Framework, head uint64, format Format) (Link, error) {
	if err := s.ready(ctx, p, authz.ReadReport, f); err != nil {
		return Link{}, err
	}
	render := s.renderers[format]
	if render == nil || format == KSI && f != FedRAMP {
		return Link{}, errFormat
	}
	j, err := s.judged(ctx, p, authz.ReadReport, f, head)
	if err != nil {
		return Link{}, err
	}
	switch j.Proof.Status {
	case Verified, Disabled: // the document says which
	case Verifying:
		return Link{}, errVerifying
	default:
		return Link{}, errNotVerified
	}
	name := s.reportName(p.Tenant, j.Assessment, format)
	link, err := s.stored(ctx, name, func() ([]byte, error) {
		if s.computing.Acquire(ctx, 1) != nil { // nobody holds it while a bucket is waited for
			return nil, errBusy
		}
		defer s.computing.Release(1)
		d, err := s.document(ctx, p.Tenant, j)
		if err != nil {
			return nil, err
		}
		return render(d)
	})
	if err != nil {
		return Link{}, err
	}
	link.Head = j.Head
	err = s.guard.Record(ctx, audit.Event{
		Type: audit.ComplianceReported, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.ComplianceResource},
		Attributes: map[string]string{
			attributeFramework: string(f), attributeFormat: string(format), attributeHead: decimalOf(j.Head.Sequence),
		},
	})
	if err != nil {
		return Link{}, err
	}
	return link, nil
}

// reportName is the object's: it names all that the report is made of.
func (s *Service) reportName(tenant authz.TenantID, a Assessment, format Format) string {
	of := frame.Join("latticekeep/report-name/v1", []byte(a.Head.Hash), []byte(s.catalogues[a.Framework].digest), []byte(s.program), []byte(a.Proof.Status))
	sum := sha256.Sum256(of)
	return fmt.Sprintf("reports/%s/%s-%d-%s.%s", tenant, a.Framework, a.Head.Sequence, hex.EncodeToString(sum[:6]), format.extension())
}

// document is what the renderers get. Nothing in it is of the moment.
func (s *Service) document(ctx context.Context, tenant authz.TenantID, j judgement) (Document, error) {
	checkpoint, err := s.reader.CheckpointAt(ctx, j.Head.Sequence)
	if err != nil {
		return Document{}, fmt.Errorf("making the checkpoint at the head: %w", err)
	}
	public, err := base64.StdEncoding.DecodeString(j.publicKey)
	if err != nil {
		return Document{}, fault.Wrap(fault.Internal, "internal error", err)
	}
	c := s.catalogues[j.Framework]
	if j.Proof = (Proof{Status: j.Proof.Status}); j.Proof.Status == Verified {
		j.Proof.VerifiedTo, j.Proof.Hash = j.Head.Sequence, j.Head.Hash
	}
	fingerprint := audit.Fingerprint(j.chainID, public)
	return Document{
		Tenant: tenant, Assessment: j.Assessment, Name: c.Name, Limits: c.Limits, Profiles: c.Profiles(),
		ChainID: j.chainID, Fingerprint: fingerprint, KeyID: j.keyID, PublicKey: j.publicKey,
		Checkpoint: checkpoint.Text(), History: withHead(j.history, j.Assessment), Activity: j.activity,
		Command: fmt.Sprintf("latticekeep compliance score --file export.jsonl --fingerprint %s --tenant %s --framework %s --head %d",
			fingerprint, tenant, j.Framework, j.Head.Sequence),
		Program: s.program,
	}, nil
}

// withHead adds the score of the head itself, whose entry comes behind it, so that
// the history ends with the score that the document tells.
func withHead(history []DayScore, a Assessment) []DayScore {
	if a.Score == nil {
		return history
	}
	own := DayScore{a.Head.Time.Format(time.DateOnly), *a.Score, a.Head.Sequence}
	if n := len(history); n > 0 && history[n-1].Date == own.Date {
		history = history[:n-1]
	}
	return append(slices.Clip(history), own)
}
