package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strconv"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// GetCheckpoint returns the newest checkpoint as a signed note and as fields. The method does not
// verify it; latticekeep audit verify does.
func (v *V2) GetCheckpoint(ctx context.Context) (*v2.CheckpointAnswer, error) {
	return do[v2.CheckpointAnswer](ctx, v.transport, get("/api/v2/audit/checkpoint"))
}

// ProveInclusion returns a proof that one of the tenant's own entries is in the tree. ErrNotFound:
// the tenant has no such entry in the tree.
func (v *V2) ProveInclusion(ctx context.Context, p *v2.ProveInclusionParams) (*v2.InclusionProof, error) {
	return do[v2.InclusionProof](ctx, v.transport, get("/api/v2/audit/proof/inclusion").with(p))
}

// ProveConsistency returns a proof that the larger of two trees begins with the smaller one.
func (v *V2) ProveConsistency(ctx context.Context, p *v2.ProveConsistencyParams) (*v2.ConsistencyProof, error) {
	return do[v2.ConsistencyProof](ctx, v.transport, get("/api/v2/audit/proof/consistency").with(p))
}

// GetAuditPublicKey returns the key that verifies entries and checkpoints.
func (v *V2) GetAuditPublicKey(ctx context.Context) (*v2.AuditPublicKey, error) {
	return do[v2.AuditPublicKey](ctx, v.transport, get("/api/v2/audit/public-key"))
}

// GetTile returns hashes of the tree for a level from "0" to "7". For the level "entries" it
// returns the data of the leaves, each after its length. ErrNotFound: the tree is not that large.
func (v *V2) GetTile(ctx context.Context, level string, index int64, p *v2.GetTileParams) ([]byte, error) {
	return v.transport.raw(ctx, get("/api/v2/audit/tile/{level}/{index}", level, strconv.FormatInt(index, 10)).with(p))
}

// ExportAuditLog returns the log as JSON lines while the server verifies and writes it, for as long
// as ctx allows. The caller must read it to the end and close it. An interrupted export lacks its
// last line: see latticekeep audit verify.
func (v *V2) ExportAuditLog(ctx context.Context, p *v2.ExportAuditLogParams) (io.ReadCloser, error) {
	return v.transport.stream(ctx, get("/api/v2/system/audit/export").with(p).lasting())
}

// GetAuditEntry returns one of the tenant's own entries. ErrNotFound: the tenant has no such entry,
// or it is only in the archive.
func (v *V2) GetAuditEntry(ctx context.Context, sequence int64) (*v2.AuditEntryAnswer, error) {
	return do[v2.AuditEntryAnswer](ctx, v.transport, get("/api/v2/audit/entries/{sequence}", strconv.FormatInt(sequence, 10)))
}

// FindNames returns what up to 200 ids of entries are called. It leaves out ids without a name.
func (v *V2) FindNames(ctx context.Context, ids ...string) (*v2.NameList, error) {
	return do[v2.NameList](ctx, v.transport, post("/api/v2/audit/names", v2.NamesRequest{Ids: ids}))
}

// GetReviews returns what waits for a review by the caller.
func (v *V2) GetReviews(ctx context.Context) (*v2.ReviewsWaiting, error) {
	return do[v2.ReviewsWaiting](ctx, v.transport, get("/api/v2/audit/reviews"))
}

// CreateReview records a review by the signed-in user. An API key gets ErrForbidden.
func (v *V2) CreateReview(ctx context.Context, r v2.ReviewRequest) (*v2.Review, error) {
	return do[v2.Review](ctx, v.transport, post("/api/v2/audit/reviews", r))
}

// EraseNames erases the past names of something that has another name or is gone. ErrNotFound: there are none.
func (v *V2) EraseNames(ctx context.Context, id string) error {
	return v.transport.run(ctx, remove("/api/v2/audit/names/{id}", id))
}

// RecordNodeLog records which entries the log of a node has. Sent again, it records nothing again.
func (v *V2) RecordNodeLog(ctx context.Context, r v2.NodeLogRequest) (*v2.NodeLogReceipt, error) {
	return do[v2.NodeLogReceipt](ctx, v.transport, post("/api/v2/audit/node-logs", r).repeatable())
}

// GetReviewNote returns the note of a review.
func (v *V2) GetReviewNote(ctx context.Context, noteID string) (*v2.ReviewNote, error) {
	return do[v2.ReviewNote](ctx, v.transport, get("/api/v2/audit/review-notes/{note_id}", noteID))
}

// EraseReviewNote deletes the note of a review. The review stays.
func (v *V2) EraseReviewNote(ctx context.Context, noteID string) error {
	return v.transport.run(ctx, remove("/api/v2/audit/review-notes/{note_id}", noteID))
}

// TailAuditLog follows the tenant's own entries as they are written, until the server or ctx ends
// the tail. The caller must close it. To continue later, open it again with LastEventID set to the
// sequence that was read last.
func (v *V2) TailAuditLog(ctx context.Context, p *v2.TailAuditLogParams) (*AuditTail, error) {
	c := get("/api/v2/audit/tail").with(p).lasting()
	if p != nil && p.LastEventID != nil {
		c = c.withHeader("Last-Event-ID", strconv.FormatInt(*p.LastEventID, 10))
	}
	body, err := v.transport.stream(ctx, c)
	if err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, maxEvent)
	return &AuditTail{body, lines}, nil
}

// AuditTail is an open tail. Only one goroutine may use it.
type AuditTail struct {
	body  io.Closer
	lines *bufio.Scanner
}

// maxEvent is the length of the longest line of a tail.
const maxEvent = 1 << 20

// Next waits for the next entry. It returns io.EOF when the server has ended the tail.
func (t *AuditTail) Next() (*v2.AuditEntry, error) {
	for t.lines.Scan() {
		data, ok := bytes.CutPrefix(t.lines.Bytes(), []byte("data: "))
		if !ok {
			continue // an empty line, or an id, which the entry contains too
		}
		e := new(v2.AuditEntry)
		if err := json.Unmarshal(data, e); err != nil {
			return nil, fmt.Errorf("reading an entry: %w", err)
		}
		return e, nil
	}
	if err := t.lines.Err(); err != nil {
		return nil, fmt.Errorf("reading the tail: %w", err)
	}
	return nil, io.EOF
}

// Close ends the tail.
func (t *AuditTail) Close() error { return t.body.Close() }

// ListSealedCredentials returns the SealedCredential objects of the tenant's namespaces, without
// their values.
func (v *V2) ListSealedCredentials(ctx context.Context, p *v2.ListSealedCredentialsParams) (*v2.SealedCredentialList, error) {
	return do[v2.SealedCredentialList](ctx, v.transport, get("/api/v2/cluster/sealed-credentials").with(p))
}

// AcceptRollback lets a log continue from which entries were lost. ErrConflict: no entries were
// lost.
func (v *V2) AcceptRollback(ctx context.Context, r v2.AcceptRollbackRequest) (*v2.RollbackAnswer, error) {
	return do[v2.RollbackAnswer](ctx, v.transport, post("/api/v2/system/audit/accept-rollback", r))
}

// GetComplianceScore returns the assessment of a framework. Its score is nil when the chain does
// not verify.
func (v *V2) GetComplianceScore(ctx context.Context, p *v2.GetComplianceScoreParams) (*v2.ComplianceScore, error) {
	return do[v2.ComplianceScore](ctx, v.transport, get("/api/v2/compliance/score").with(p))
}

// GetComplianceScores returns the scores of all frameworks, and each of their probes once.
func (v *V2) GetComplianceScores(ctx context.Context) (*v2.ComplianceScores, error) {
	return do[v2.ComplianceScores](ctx, v.transport, get("/api/v2/compliance/scores"))
}

// GetComplianceHistory returns the last score of each day that has one.
func (v *V2) GetComplianceHistory(ctx context.Context, p *v2.GetComplianceHistoryParams) (*v2.ComplianceHistory, error) {
	return do[v2.ComplianceHistory](ctx, v.transport, get("/api/v2/compliance/history").with(p))
}

// GetComplianceReport returns the URLs of a report and of its signature, for [V2.DownloadReport].
func (v *V2) GetComplianceReport(ctx context.Context, p *v2.GetComplianceReportParams) (*v2.ComplianceReport, error) {
	return do[v2.ComplianceReport](ctx, v.transport, get("/api/v2/compliance/report").with(p))
}

// GetInventory returns the cryptographic bill of materials, CycloneDX in JSON, byte for byte.
func (v *V2) GetInventory(ctx context.Context) ([]byte, error) {
	return v.transport.raw(ctx, get("/api/v2/compliance/cbom"))
}

// DownloadReport downloads from a URL of [V2.GetComplianceReport], at the deployment or in the
// bucket where it keeps reports. The URL itself authorises the call, so no credential is sent.
// ErrForbidden: the URL has expired or was changed.
func (v *V2) DownloadReport(ctx context.Context, signed *url.URL) ([]byte, error) {
	if signed == nil || signed.Host == "" || signed.User != nil || signed.Scheme != "https" && signed.Scheme != "http" {
		return nil, fmt.Errorf("making the request: the URL is not one of a report: %w", ErrInvalid)
	}
	if signed.Scheme == "http" && !v.plain && !loopback(signed.Hostname()) {
		return nil, fmt.Errorf("making the request: plain HTTP to another machine shows it the report: use https, or WithPlainHTTP: %w", ErrInvalid)
	}
	return v.transport.raw(ctx, getFrom(signed).anonymous())
}
