package guard

import (
	"maps"
	"strconv"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

// These are the highest numbers of events whose repetitions are counted at the same time. Each event beyond them
// has an entry of its own. A few tenants cannot take all room: when maxRepeats are taken, each tenant still has fewRepeats.
const (
	maxRepeats         = 10_000
	maxRepeatsOfTenant = 2_000
	spareRepeats       = 10_000 // beyond maxRepeats, for tenants with less than fewRepeats
	fewRepeats         = 100
)

// repeats counts the repetitions of events in an hour.
type repeats struct {
	mu      sync.Mutex
	byKey   map[string]*repeated
	tenants map[authz.TenantID]int // events of each tenant
}

// repeated is an event that has an entry in an hour.
type repeated struct {
	last  audit.Event
	hour  time.Time
	count int // repetitions that no entry stands for yet
}

// withRepeats returns the entry that stands for n events like e.
func withRepeats(e audit.Event, n int) audit.Event {
	e.Attributes = maps.Clone(e.Attributes)
	e.Attributes[audit.AttributeRepeats] = strconv.Itoa(n)
	return e
}

// countEvent counts an event. It returns how many events the entry stands for that the caller writes, unless
// there is one in this hour already.
func (r *repeats) countEvent(key string, e audit.Event, hour time.Time) (n int, counted bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.byKey[key]
	switch {
	case known == nil && !r.hasRoom(e.Principal.Tenant):
		return 1, false
	case known == nil:
		known = &repeated{}
		r.add(key, e.Principal.Tenant, known)
	case known.hour.Equal(hour):
		known.last = e
		known.count++
		return 0, true
	}
	n = known.count + 1
	*known = repeated{last: e, hour: hour}
	return n, false
}

func (r *repeats) hasRoom(tenant authz.TenantID) bool {
	of := r.tenants[tenant]
	return len(r.byKey) < maxRepeats && of < maxRepeatsOfTenant || len(r.byKey) < maxRepeats+spareRepeats && of < fewRepeats
}

// undoEntry takes back an entry that could not be written: the next event tries again. It keeps what was only
// counted.
func (r *repeats) undoEntry(key string, e audit.Event, counted int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.byKey[key]
	if known == nil { // the hour has ended meanwhile
		known = &repeated{last: e}
		r.add(key, e.Principal.Tenant, known)
	}
	known.hour = time.Time{}
	known.count += counted
}

func (r *repeats) add(key string, tenant authz.TenantID, known *repeated) {
	r.byKey[key] = known
	r.tenants[tenant]++
}

// takeDue removes the events of earlier hours, or all, and returns those that need an entry.
func (r *repeats) takeDue(hour time.Time, all bool) map[string]*repeated {
	r.mu.Lock()
	defer r.mu.Unlock()
	due := make(map[string]*repeated)
	for key, known := range r.byKey {
		if !all && known.hour.Equal(hour) {
			continue
		}
		if known.count > 0 {
			due[key] = known
		}
		delete(r.byKey, key)
		if tenant := known.last.Principal.Tenant; r.tenants[tenant] > 1 {
			r.tenants[tenant]--
		} else {
			delete(r.tenants, tenant)
		}
	}
	return due
}

// restoreDue undoes takeDue.
func (r *repeats) restoreDue(key string, taken *repeated) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.byKey[key]; known != nil {
		known.count += taken.count
	} else {
		r.add(key, taken.last.Principal.Tenant, taken)
	}
}
