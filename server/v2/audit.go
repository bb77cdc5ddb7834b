package v2

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/names"
	"github.com/latticekeep/latticekeep/internal/nodelog"
	"github.com/latticekeep/latticekeep/internal/nodelog/receiver"
	"github.com/latticekeep/latticekeep/server/gate"
)

// auditAPI implements the endpoints of the audit log.
type auditAPI struct {
	audit     *writer.Log
	reader    *reader.Reader
	names     *names.Names
	nodeLogs  *receiver.Service
	guard     *guard.Guard
	now       func() time.Time
	exporting sync.Mutex // held while an export is written
	tails     *gate.Places
}

// auditEntries is the generated type with the entries exactly as the log returns them. Their bytes
// were hashed and signed.
type auditEntries struct {
	Success    bool          `json:"success"`
	Entries    []audit.Entry `json:"entries"`
	NextCursor string        `json:"next_cursor,omitzero"`
}

// QueryAuditLog returns entries of the caller's tenant, newest first.
func (a *auditAPI) QueryAuditLog(c *gin.Context, params api.QueryAuditLogParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		q := reader.Query{
			EventType: string(gate.Value(params.EventType)), Category: audit.Category(gate.Value(params.Category)), UserID: gate.Value(params.UserId),
			ResourceID: gate.Value(params.ResourceId), Outcome: audit.Outcome(gate.Value(params.Outcome)),
			From: gate.Value(params.From), To: gate.Value(params.To),
			Limit: gate.Value(params.Limit), Cursor: gate.Value(params.Cursor),
		}
		if hours := gate.Value(params.Hours); hours > 0 {
			if !q.From.IsZero() || !q.To.IsZero() {
				return nil, gate.BadRequest("the parameter hours excludes from and to")
			}
			q.From = a.now().Add(-time.Duration(hours) * time.Hour)
		}
		if !q.From.IsZero() && !q.To.IsZero() && q.To.Before(q.From) {
			return nil, gate.BadRequest("the parameter to is earlier than from")
		}
		if q.Limit == 0 {
			q.Limit = gate.DefaultLimit
		}
		entries, next, err := a.reader.Query(ctx, call.Principal(), q)
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		return auditEntries{true, entries, next}, nil
	})
}

// auditEntry is the generated type with the entry exactly as the log returns it.
type auditEntry struct {
	Success bool        `json:"success"`
	Entry   audit.Entry `json:"entry"`
}

// GetAuditEntry returns one entry of the caller's tenant.
func (a *auditAPI) GetAuditEntry(c *gin.Context, sequence int64) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		e, err := a.reader.ReadEntry(ctx, call.Principal(), uint64(max(sequence, 0)))
		if err != nil {
			return nil, err
		}
		return auditEntry{true, e}, nil
	})
}

// EraseNames erases the past names of one thing.
func (a *auditAPI) EraseNames(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := a.names.Erase(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.ErasedNames{Success: true, Id: id}, nil
	})
}

// RecordNodeLog records which entries the log of a node has.
func (a *auditAPI) RecordNodeLog(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.NodeLogRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		first, last := nodeLogEntry(body.First), nodeLogEntry(body.Last)
		at, recorded, err := a.nodeLogs.Receive(ctx, call.Principal(), body.PublicKey, &first, &last)
		if err != nil {
			return nil, err
		}
		return api.NodeLogReceipt{Success: true, Node: first.Node, Chain: first.Chain, Sequence: int64(at.Sequence), Hash: at.Hash, Recorded: recorded}, nil
	})
}

func nodeLogEntry(e api.NodeLogEntry) nodelog.Entry {
	return nodelog.Entry{
		Version: int(e.Version), Node: e.Node, Chain: e.Chain, Sequence: uint64(e.Sequence), Previous: e.Previous, At: e.At, Kind: nodelog.Kind(e.Kind),
		KeyID: gate.Value(e.KeyId), Seed: gate.Value(e.Seed), Count: uint64(gate.Value(e.Count)), Signature: e.Signature,
	}
}

// FindNames returns what ids of entries are called.
func (a *auditAPI) FindNames(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.NamesRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		found, err := a.names.Of(ctx, call.Principal(), body.Ids)
		if err != nil {
			return nil, err
		}
		answer := api.NameList{Success: true, Names: make([]api.Name, len(found))}
		for i, n := range found {
			answer.Names[i] = api.Name{Id: n.ID, Type: api.NameType(n.Type), Name: n.Name, Gone: gate.NonZero(n.Gone)}
			if len(n.Former) > 0 {
				answer.Names[i].PastNames = &n.Former
			}
		}
		return answer, nil
	})
}
