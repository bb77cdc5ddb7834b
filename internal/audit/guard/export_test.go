package guard

import (
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

const (
	MaxStrangers       = maxStrangers
	MaxRepeats         = maxRepeats
	MaxRepeatsOfTenant = maxRepeatsOfTenant
)

type Limit = limit

// NewMinuteLimit returns a limit of so many sources in a group and minute, or of any number for 0.
func NewMinuteLimit(most int) *Limit { return &limit{period: time.Minute, most: most} }

func (r *limit) First(group, source string, now time.Time) bool {
	return r.first(group, source, now)
}

type Repeats = repeats

func NewRepeats() *Repeats {
	return &repeats{byKey: make(map[string]*repeated), tenants: make(map[authz.TenantID]int)}
}

// Add counts an event of a tenant, and reports whether there was room for it.
func (r *repeats) Add(tenant authz.TenantID, key string) bool {
	before := len(r.byKey)
	r.countEvent(key, audit.Event{Principal: authz.Principal{Tenant: tenant}}, time.Time{})
	return len(r.byKey) > before
}
