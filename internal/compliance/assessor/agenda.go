package assessor

import (
	"slices"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
)

// agenda remembers for each tenant the time until which nothing is due.
type agenda struct {
	mu   sync.Mutex
	next map[authz.TenantID]time.Time
	last authz.TenantID // the tenant of the last visit
}

// order returns the tenants, starting after the last one visited, so that no tenant blocks the
// others.
func (a *agenda) order(tenants []authz.TenantID) []authz.TenantID {
	a.mu.Lock()
	defer a.mu.Unlock()
	slices.Sort(tenants)
	from, found := slices.BinarySearch(tenants, a.last)
	if found {
		from++
	}
	return slices.Concat(tenants[from:], tenants[:from])
}

func (a *agenda) visited(at authz.TenantID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last = at
}

// due reports whether something may be due for the tenant. No tenant waits longer than a day: a
// later time comes from a clock that was set back.
func (a *agenda) due(now time.Time, tenant authz.TenantID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	wait := a.next[tenant].Sub(now)
	return wait <= 0 || wait > compliance.Day
}

func (a *agenda) postpone(tenant authz.TenantID, next time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.next == nil {
		a.next = make(map[authz.TenantID]time.Time)
	}
	a.next[tenant] = next
}
