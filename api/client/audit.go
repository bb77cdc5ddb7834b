package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// GetCheckpoint answers the newest checkpoint as a signed note, and what it says.
// The method does not verify it; latticekeep audit verify does.
func (v *V2) GetCheckpoint(ctx context.Context) (*v2.CheckpointAnswer, error) {
	return answer[v2.CheckpointAnswer](read(v.api.GetCheckpoint(ctx)))
}

// ProveInclusion answers that one of the tenant's own entries is in the tree.
// ErrNotFound: the tenant has no such entry there.
func (v *V2) ProveInclusion(ctx context.Context, p *v2.ProveInclusionParams) (*v2.InclusionProof, error) {
	return answer[v2.InclusionProof](read(v.api.ProveInclusion(ctx, p)))
}

// ProveConsistency answers that the larger of two trees begins with the smaller.
func (v *V2) ProveConsistency(ctx context.Context, p *v2.ProveConsistencyParams) (*v2.ConsistencyProof, error) {
	return answer[v2.ConsistencyProof](read(v.api.ProveConsistency(ctx, p)))
}

// GetAuditPublicKey answers what entries and checkpoints verify with.
func (v *V2) GetAuditPublicKey(ctx context.Context) (*v2.AuditPublicKey, error) {
	return answer[v2.AuditPublicKey](read(v.api.GetAuditPublicKey(ctx)))
}

// GetTile answers hashes of the tree at a level from "0" to "7", or at "entries"
// those that its leaves are made of, each behind its length. ErrNotFound: the tree
// is not that large.
func (v *V2) GetTile(ctx context.Context, level string, index int64, p *v2.GetTileParams) ([]byte, error) {
	return raw(read(v.api.GetTile(ctx, segment(level), index, p)))
}

// ExportAuditLog returns the log as JSON lines while the server verifies and writes
// it, for as long as ctx allows. The caller reads it to its end and closes it. An
// export that was broken off lacks its last line: see latticekeep audit verify.
func (v *V2) ExportAuditLog(ctx context.Context, p *v2.ExportAuditLogParams) (io.ReadCloser, error) {
	return stream(v.api.ExportAuditLog(with(ctx, manner{lasting: true}), p))
}

// AcceptRollback has a log go on from which entries were lost. ErrConflict: none
// are.
func (v *V2) AcceptRollback(ctx context.Context, r v2.AcceptRollbackRequest) (*v2.RollbackAnswer, error) {
	return answer[v2.RollbackAnswer](read(v.api.AcceptRollback(ctx, r)))
}

// GetComplianceScore answers what the log is evidence for. Its score is nil when
// the chain does not verify.
func (v *V2) GetComplianceScore(ctx context.Context, p *v2.GetComplianceScoreParams) (*v2.ComplianceScore, error) {
	return answer[v2.ComplianceScore](read(v.api.GetComplianceScore(ctx, p)))
}

// GetComplianceHistory answers the last score of each day that has one.
func (v *V2) GetComplianceHistory(ctx context.Context, p *v2.GetComplianceHistoryParams) (*v2.ComplianceHistory, error) {
	return answer[v2.ComplianceHistory](read(v.api.GetComplianceHistory(ctx, p)))
}

// GetComplianceReport answers where a report is and where its signature is, for
// [V2.DownloadReport].
func (v *V2) GetComplianceReport(ctx context.Context, p *v2.GetComplianceReportParams) (*v2.ComplianceReport, error) {
	return answer[v2.ComplianceReport](read(v.api.GetComplianceReport(ctx, p)))
}

// GetInventory answers the cryptographic bill of materials, CycloneDX in JSON, as
// it is to be kept.
func (v *V2) GetInventory(ctx context.Context) ([]byte, error) {
	return raw(read(v.api.GetInventory(ctx)))
}

// DownloadReport answers what a URL of [V2.GetComplianceReport] leads to, at the
// deployment or in the bucket where it keeps reports. The URL says all: no
// credential is sent with it. ErrForbidden: it has expired, or is not as it was
// given.
func (v *V2) DownloadReport(ctx context.Context, signed *url.URL) ([]byte, error) {
	if signed == nil || signed.Host == "" || signed.User != nil || signed.Scheme != "https" && signed.Scheme != "http" {
		return nil, fmt.Errorf("making the request: the URL is not one of a report: %w", ErrInvalid)
	}
	if signed.Scheme == "http" && !v.plain && !loopback(signed.Hostname()) {
		return nil, fmt.Errorf("making the request: plain HTTP to another machine shows it the report: use https, or WithPlainHTTP: %w", ErrInvalid)
	}
	r, err := http.NewRequestWithContext(anonymous(ctx), http.MethodGet, signed.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	return raw(read(v.api.Client.Do(r)))
}
