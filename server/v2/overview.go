package v2

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
	openapi_types "github.com/oapi-codegen/runtime/types"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/overview"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/server/gate"
	"github.com/latticekeep/latticekeep/server/v2/credentials"
)

// overviewAPI implements the endpoint of the overview.
type overviewAPI struct{ overview *overview.Service }

// overviewTime limits an overview, each part of which has a limit of its own.
const overviewTime = 5 * time.Second

// GetOverview says what is wrong, what waits for the caller, and what happened.
func (a *overviewAPI) GetOverview(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		o, err := a.overview.Of(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		answer := api.Overview{
			Success: true, Todo: make([]api.Todo, len(o.Todo)),
			Setup: api.Setup{Credential: o.Setup.Credential, ApiKey: o.Setup.APIKey, Member: o.Setup.Member, Email: o.Setup.Email},
		}
		for i, t := range o.Todo {
			answer.Todo[i] = api.Todo{Kind: api.TodoKind(t.Kind), Count: t.Count, Framework: gate.NonZero(api.Framework(t.Framework))}
		}
		answer.Health = listed(o.Health, func(h overview.Health) api.PartHealth {
			return api.PartHealth{Part: api.PartHealthPart(h.Part), Status: api.PartHealthStatus(h.Status), Message: h.Message}
		})
		answer.Unavailable = listed(o.Unavailable, func(p overview.Part) api.OverviewPart { return api.OverviewPart(p) })
		answer.Scores = overviewScores(o)
		answer.Credentials = overviewCredentials(o.Credentials)
		if days := listed(o.Days, activityDay); days != nil {
			answer.Activity = &api.Activity{Complete: o.Whole, Days: *days}
		}
		return answer, nil
	})
}

// listed encodes a list; nil for none.
func listed[T, U any](all []T, encode func(T) U) *[]U {
	if len(all) == 0 {
		return nil
	}
	out := make([]U, len(all))
	for i, one := range all {
		out[i] = encode(one)
	}
	return &out
}

func activityDay(d overview.Day) api.ActivityDay {
	return api.ActivityDay{Date: openapi_types.Date{Time: d.Start}, Secrets: d.Secrets, Changes: d.Changes, Denials: d.Denials}
}

func overviewScores(o overview.Overview) *[]api.OverviewScore {
	if o.Scores == nil {
		return nil
	}
	scores := make([]api.OverviewScore, len(o.Scores))
	for i, s := range o.Scores {
		scores[i] = api.OverviewScore{Framework: api.Framework(s.Framework), Covered: float32(s.Covered), Failing: s.Failing, Provisional: s.Provisional}
		if s.Score != nil {
			scores[i].Score = new(float32(*s.Score))
		}
	}
	return &scores
}

func overviewCredentials(s *vault.Summary) *api.OverviewCredentials {
	if s == nil {
		return nil
	}
	answer := api.OverviewCredentials{Complete: s.Complete, Total: s.Total, Active: s.Active, Expired: s.Expired, ExpiringSoon: s.ExpiringSoon}
	if u := s.Unread; u != nil {
		answer.Unread = &api.UnreadCredentials{Count: u.Count, Complete: u.Complete, Days: overview.UnreadDays, Credentials: credentials.List(u.Oldest)}
	}
	return &answer
}
