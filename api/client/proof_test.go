package client_test

import (
	"bytes"
	"net/url"
	"testing"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"

	"github.com/latticekeep/latticekeep/api/client"
)

// The log proves its own integrity. Anybody with its URL may download a report on what the log is
// evidence for.
func TestProofsAndReports(t *testing.T) {
	ctx, c := t.Context(), connect(t, withKey())
	head := must(c.V2.GetCheckpoint(ctx))(t)
	entries := must(c.V2.QueryAuditLog(ctx, nil))(t).Entries
	oldest := entries[len(entries)-1]
	if oldest.Sequence <= head.Sequence {
		p := must(c.V2.ProveInclusion(ctx, &v2.ProveInclusionParams{Sequence: oldest.Sequence, TreeSize: &head.TreeSize}))(t)
		if p.Hash != string(oldest.Hash) || p.TreeSize != head.TreeSize {
			t.Errorf("%+v", p)
		}
	}
	if p := must(c.V2.ProveConsistency(ctx, &v2.ProveConsistencyParams{From: 1}))(t); p.To < head.TreeSize {
		t.Errorf("%+v", p)
	}
	_, err := c.V2.ProveInclusion(ctx, &v2.ProveInclusionParams{Sequence: 1}) // an entry of the deployment
	fails(t, err, client.ErrNotFound)
	_, err = c.V2.ExportAuditLog(ctx, nil)
	fails(t, err, client.ErrForbidden)
	_, err = c.V2.AcceptRollback(ctx, v2.AcceptRollbackRequest{Reason: "none"})
	fails(t, err, client.ErrForbidden)

	_, err = c.V2.GetComplianceScore(ctx, &v2.GetComplianceScoreParams{Framework: "soc3"})
	fails(t, err, client.ErrInvalid)
	score := must(c.V2.GetComplianceScore(ctx, &v2.GetComplianceScoreParams{Framework: v2.FrameworkSoc2}))(t)
	made := must(c.V2.GetComplianceReport(ctx, &v2.GetComplianceReportParams{Framework: v2.FrameworkSoc2, Head: &score.Head.Sequence}))(t)
	if made.Head != score.Head {
		t.Errorf("of %+v, not %+v", made.Head, score.Head)
	}
	u, err := url.Parse(made.Url)
	succeeds(t, err)
	report, err := connect(t).V2.DownloadReport(ctx, u)
	succeeds(t, err)
	if !bytes.HasPrefix(report, []byte("%PDF-")) {
		t.Errorf("%d bytes, %.20q", len(report), report)
	}
	u.RawQuery += "a"
	_, err = connect(t).V2.DownloadReport(ctx, u)
	fails(t, err, client.ErrForbidden)
	if bom, err := c.V2.GetInventory(ctx); err != nil || !bytes.Contains(bom, []byte(`"CycloneDX"`)) {
		t.Errorf("%.100s %v", bom, err)
	}
}
