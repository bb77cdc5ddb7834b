package v2

import (
	"context"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

// maxHours bounds the look-back window: ten years.
const maxHours = 10 * 365 * 24

type auditEntries struct {
	success
	Entries    []audit.Entry `json:"entries"`
	NextCursor string        `json:"next_cursor,omitzero"`
}

func (a *API) auditLogs(ctx context.Context, p authz.Principal, in input) (any, error) {
	params := parameters{query: in.query}
	q := audit.Query{
		EventType: params.text("event_type", 64),
		UserID:    params.text("user_id", 128),
		From:      params.time("from"),
		To:        params.time("to"),
		Limit:     params.integer("limit", maxLimit),
		Cursor:    params.text("cursor", maxCursorLength),
	}
	hours := params.integer("hours", maxHours)
	if params.err != nil {
		return nil, params.err
	}
	if q.EventType != "" && !slices.Contains(audit.EventTypes(), audit.EventType(q.EventType)) {
		return nil, badQuery("the query parameter event_type is none of the event types")
	}
	if hours > 0 {
		if !q.From.IsZero() || !q.To.IsZero() {
			return nil, badQuery("the query parameter hours excludes from and to")
		}
		q.From = a.Now().Add(-time.Duration(hours) * time.Hour)
	}
	if !q.From.IsZero() && !q.To.IsZero() && q.To.Before(q.From) {
		return nil, badQuery("the query parameter to is earlier than from")
	}
	if q.Limit == 0 {
		q.Limit = defaultLimit
	}
	entries, next, err := a.Audit.Query(ctx, p, q)
	if err != nil {
		return nil, badCursor(err)
	}
	return auditEntries{success{true}, entries, next}, nil
}
