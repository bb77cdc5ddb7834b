package v2

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/server/gate"
)

// defaultLimit is the length of a page when the caller names none.
const defaultLimit = 20

// auditEntries is the generated type with entries as the log gives them, whose
// bytes are what was hashed and signed.
type auditEntries struct {
	Success    bool          `json:"success"`
	Entries    []audit.Entry `json:"entries"`
	NextCursor string        `json:"next_cursor,omitzero"`
}

// QueryAuditLog answers entries of the caller's tenant, newest first.
func (a *API) QueryAuditLog(c *gin.Context, params api.QueryAuditLogParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		q := audit.Query{
			EventType: string(value(params.EventType)), UserID: value(params.UserId),
			From: value(params.From), To: value(params.To),
			Limit: value(params.Limit), Cursor: value(params.Cursor),
		}
		if hours := value(params.Hours); hours > 0 {
			if !q.From.IsZero() || !q.To.IsZero() {
				return nil, gate.BadRequest("the parameter hours excludes from and to")
			}
			q.From = a.Now().Add(-time.Duration(hours) * time.Hour)
		}
		if !q.From.IsZero() && !q.To.IsZero() && q.To.Before(q.From) {
			return nil, gate.BadRequest("the parameter to is earlier than from")
		}
		if q.Limit == 0 {
			q.Limit = defaultLimit
		}
		entries, next, err := a.Audit.Query(ctx, call.Principal(), q)
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		return auditEntries{true, entries, next}, nil
	})
}

// GetSealingKey answers the document as it was signed: a field beside it would
// make it another document, and the answer can be kept as a key file.
func (a *API) GetSealingKey(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, _ *gate.Call) (any, error) {
		document, err := a.Keys.SealingDocument(ctx)
		if err == nil {
			c.Header("Cache-Control", "public, max-age=60") // the same for everyone
		}
		return document, err
	})
}
