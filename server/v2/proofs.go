package v2

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/hex"
	"io"
	"net/http"
	"strconv"

	"github.com/gin-gonic/gin"
	"golang.org/x/mod/sumdb/tlog"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/server/gate"
)

// GetCheckpoint returns the newest signed checkpoint and its fields.
func (a *auditAPI) GetCheckpoint(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		signed, head, err := a.reader.ReadCheckpoint(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		return api.CheckpointAnswer{
			Success: true, Checkpoint: string(signed), Epoch: int64(head.Epoch), Sequence: int64(head.Sequence),
			Hash: hex.EncodeToString(head.Hash[:]), TreeSize: head.Size, RootHash: head.Root.String(), Timestamp: head.Time.UTC(),
		}, nil
	})
}

// ProveInclusion returns a proof that an entry of the caller's tenant is in the tree.
func (a *auditAPI) ProveInclusion(c *gin.Context, params api.ProveInclusionParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		p, err := a.reader.ProveInclusion(ctx, call.Principal(), uint64(params.Sequence), gate.Value(params.TreeSize))
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		return api.InclusionProof{
			Success: true, Sequence: int64(p.Sequence), Hash: p.Hash, LeafIndex: p.Index, TreeSize: p.Size, Path: hashPath(p.Path),
		}, nil
	})
}

// ProveConsistency returns a proof that the larger of two trees contains the smaller one.
func (a *auditAPI) ProveConsistency(c *gin.Context, params api.ProveConsistencyParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		from, to, p, err := a.reader.ProveConsistency(ctx, call.Principal(), params.From, gate.Value(params.To))
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		return api.ConsistencyProof{Success: true, From: from, To: to, Path: hashPath(p)}, nil
	})
}

// hashPath returns the hashes of a proof in base64.
func hashPath[P tlog.RecordProof | tlog.TreeProof](hashes P) []string {
	all := make([]string, len(hashes))
	for i, h := range hashes {
		all[i] = h.String() // base64
	}
	return all
}

// GetAuditPublicKey returns the public key that verifies entries and checkpoints.
func (a *auditAPI) GetAuditPublicKey(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		k, err := a.reader.ReadKey(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		return api.AuditPublicKey{
			Success: true, ChainId: k.ChainID, Fingerprint: k.Fingerprint, Verifier: k.Verifier, Key: api.JWK{
				Kty: "AKP", Alg: "ML-DSA-65", Use: "sig", Kid: k.Public.ID(), Pub: base64.RawURLEncoding.EncodeToString(k.Public.Bytes()),
			},
		}, nil
	})
}

// Levels of the tree, as written in the path.
const (
	bundles  = "entries" // hashes that the leaves are made from
	maxLevel = 7
)

var errTile = gate.BadRequest("a tile is at a level from 0 to 7 or at entries, and at an index of at least 0")

// GetTile returns hashes of the tree, or those that its leaves are made from.
func (a *auditAPI) GetTile(c *gin.Context, level string, index int64, params api.GetTileParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		n := -1
		if level != bundles {
			if len(level) != 1 || level[0] < '0' || level[0] > '0'+maxLevel {
				return nil, errTile
			}
			n = int(level[0] - '0')
		}
		if index < 0 {
			return nil, errTile
		}
		hashes, err := a.reader.Tile(ctx, call.Principal(), n, index, gate.Value(params.Width))
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		return gate.Document{ContentType: "application/octet-stream", Bytes: hashes}, nil
	})
}

var errExporting = fault.New(fault.Conflict, "another export of the log is being written: wait until it is done")

// ExportAuditLog streams the log while it verifies it. The export is recorded before the first byte
// is sent, so the exported log includes that entry.
func (a *auditAPI) ExportAuditLog(c *gin.Context, params api.ExportAuditLogParams) {
	gate.Stream(c, "application/jsonl", func(ctx context.Context, call *gate.Call) (func(context.Context, io.Writer) error, error) {
		if !a.exporting.TryLock() {
			return nil, cmp.Or(a.guard.RecordAttempt(ctx, call.Principal(), authz.ExportAudit, audit.Failure, "in_progress"), errExporting)
		}
		from := uint64(gate.Value(params.From))
		if newest, _, err := a.audit.Progress(ctx); err != nil || from > newest {
			a.exporting.Unlock()
			return nil, cmp.Or(err, gate.BadRequest("the log does not go that far: export from an earlier sequence"))
		}
		e := audit.Event{
			Type: audit.AuditExported, Outcome: audit.Success, Principal: call.Principal(), Resource: audit.Resource{Type: audit.LogResource},
		}
		if from > 0 {
			e.Attributes = map[string]string{"from": strconv.FormatUint(from, 10)}
		}
		if err := a.guard.Record(ctx, e); err != nil {
			a.exporting.Unlock()
			return nil, err
		}
		return func(ctx context.Context, w io.Writer) error {
			defer a.exporting.Unlock()
			return a.reader.Export(ctx, w, from)
		}, nil
	})
}

// AcceptRollback accepts the loss of entries, so that a halted log can continue.
func (a *auditAPI) AcceptRollback(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.AcceptRollbackRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		r, err := a.guard.AcceptRollback(ctx, call.Principal(), body.Reason)
		if fault.Of(err) == fault.Conflict {
			return nil, cmp.Or(a.guard.RecordAttempt(ctx, call.Principal(), authz.AcceptRollback, audit.Denied, "nothing_lost"), err)
		}
		if err != nil {
			return nil, err
		}
		return api.RollbackAnswer{
			Success: true, Epoch: int64(r.Epoch), LostFrom: int64(r.LostFrom), LostTo: int64(r.LostTo), Sequence: int64(r.Sequence), Hash: r.Hash,
		}, nil
	})
}
