package gate

import (
	"context"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fair"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// Places bounds the requests that last, such as tails and waits: so that no caller takes all places of its
// tenant, and no tenant those of all. It is safe for concurrent use.
type Places struct {
	perCaller, perTenant int

	mu    sync.Mutex
	taken map[holder]int
	pool  *fair.Pool[authz.TenantID]
}

// holder is a caller of a tenant, or, without a caller, the tenant.
type holder struct {
	tenant      authz.TenantID
	caller, pod string
}

// When all places are taken, the tenant with the most of them gives way to one with fewer, and any request
// that is as old as placeGrace. Their clients go on where they were.
const (
	placeGrace = time.Minute

	// PlaceWait is how long a request waits for a place, and so the time in which one that gives way must
	// be gone.
	PlaceWait = 500 * time.Millisecond
)

// NewPlaces returns so many places for each caller, for each tenant and for all. The pods of a
// ServiceAccount are callers of their own.
func NewPlaces(perCaller, perTenant, all int) *Places {
	return &Places{perCaller: perCaller, perTenant: perTenant, taken: make(map[holder]int), pool: fair.NewPool[authz.TenantID](int64(all), placeGrace)}
}

// Take takes a place; release returns it. end is called if it must be released for another tenant. Errors:
// fault.Exhausted if the caller or the tenant has too many places, fault.Unavailable if all tenants
// together have too many.
func (s *Places) Take(ctx context.Context, p authz.Principal, end func()) (release func(), err error) {
	caller, tenant := holder{p.Tenant, p.ID, p.Pod}, holder{tenant: p.Tenant}
	if !s.reserve(caller, tenant) {
		return nil, fault.Exhausted
	}
	ctx, cancel := context.WithTimeout(ctx, PlaceWait)
	defer cancel()
	place, err := s.pool.Acquire(ctx, p.Tenant, 1, end)
	if err != nil {
		s.unreserve(caller, tenant)
		return nil, fault.Unavailable
	}
	return func() {
		place.Release()
		s.unreserve(caller, tenant)
	}, nil
}

// reserve counts one more place, or returns false if the caller or the tenant has its maximum.
func (s *Places) reserve(caller, tenant holder) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[caller] >= s.perCaller || s.taken[tenant] >= s.perTenant {
		return false
	}
	s.taken[caller]++
	s.taken[tenant]++
	return true
}

func (s *Places) unreserve(caller, tenant holder) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range []holder{caller, tenant} {
		if s.taken[of]--; s.taken[of] == 0 {
			delete(s.taken, of)
		}
	}
}
