// Package settings has what the admins of a tenant decide for all of it. A setting that nobody has made is
// the strictest one, so a new tenant, and one of an earlier release, has those.
package settings

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// MaxPaths bounds the paths of one setting.
const MaxPaths = 100

// Settings are those of one tenant. It is also what the row holds.
type Settings struct {
	// NeverExpires are the globs of the paths on which a credential may never expire, sorted, in the form of
	// [authz.NormalizeName].
	NeverExpires []string `json:"never_expires_paths,omitempty"`
	// NamesKept is how many days the names of what is gone or has another name are kept, nil for
	// [DefaultNamesKept].
	NamesKept *int `json:"names_kept_days,omitempty"`
}

// Days for which past names are kept. 0 is for none.
const (
	DefaultNamesKept = 400
	MaxNamesKept     = 3650
)

// NamesKeptDays returns for how many days past names are kept.
func (s Settings) NamesKeptDays() int {
	if s.NamesKept == nil {
		return DefaultNamesKept
	}
	return *s.NamesKept
}

// MayNeverExpire reports whether a credential with a name may never expire.
func (s Settings) MayNeverExpire(name string) bool {
	return slices.ContainsFunc(s.NeverExpires, func(path string) bool {
		g, err := authz.ParseGlob(path)
		return err == nil && g.Matches(name)
	})
}

// Change says what is to be other than it is. A nil field stays as it is.
type Change struct {
	NeverExpires *[]string
	NamesKept    *int
}

// Family begins the keys of the rows, one for each tenant.
const Family = "settings/"

func key(tenant authz.TenantID) []byte { return []byte(Family + string(tenant)) }

// Keeper reads and changes the settings of tenants. It is safe for concurrent use.
type Keeper struct {
	store store.Store
	guard *guard.Guard
	rows  mac.Rows

	Ready format.Readers // asks about [format.Settings]
}

// NewKeeper returns the settings among the rows of a store.
func NewKeeper(s store.Store, guard *guard.Guard, rows mac.Rows) *Keeper {
	return &Keeper{store: s, guard: guard, rows: rows}
}

var (
	errLimited  = fault.New(fault.Forbidden, "your policies do not allow all paths, so the settings of the tenant are not yours to see or change")
	errReplicas = fault.New(fault.Conflict, "a replica of an earlier release still runs, which knows no settings: end it first")
)

// Attributes and reasons of entries.
const (
	attributeNeverExpires = "never_expires_paths"        // number of paths
	attributeDigest       = "never_expires_paths_digest" // keyed hash of the paths; an entry holds no names
	attributeNamesKept    = "names_kept_days"
	reasonReplicas        = "earlier_replicas"
)

// Of returns the settings of a tenant as a transaction sees them. Error: fault.Internal for a damaged row.
func (k *Keeper) Of(rd store.Reader, tenant authz.TenantID) (Settings, error) {
	return Of(k.rows, rd, tenant)
}

// Of is [Keeper.Of] of rows.
func Of(rows mac.Rows, rd store.Reader, tenant authz.TenantID) (Settings, error) {
	row, err := mac.Get[Settings](rows, rd, key(tenant))
	if err != nil || row == nil {
		return Settings{}, err
	}
	return *row, nil
}

var errMustExpire = fault.New(fault.Invalid, "never_expires: credentials on this path must expire: give ttl_days, or have an admin add the path to never_expires_paths of the settings")

// CheckLifetime refuses a record that never expires where the settings of its tenant do not allow that. A
// lifetime that does not begin with the record was allowed earlier. Errors: fault.Invalid, and those of
// [Keeper.Of].
func (k *Keeper) CheckLifetime(rd store.Reader, r *record.Record, begins bool) error {
	if !begins || !r.NeverExpires() {
		return nil
	}
	s, err := k.Of(rd, r.Tenant)
	if err == nil && !s.MayNeverExpire(r.Name) {
		err = errMustExpire
	}
	return err
}

func event(t audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.TenantResource, ID: string(p.Tenant)}}
}

// Read returns the settings of p's tenant. Errors: fault.Forbidden, also for everybody whom a policy limits;
// fault.Unavailable.
func (k *Keeper) Read(ctx context.Context, p authz.Principal) (Settings, error) {
	if err := k.guard.Admit(ctx, p, authz.ReadSettings); err != nil {
		return Settings{}, err
	}
	if p.Access.IsLimited() { // the paths are names
		return Settings{}, k.guard.Refuse(ctx, event(audit.SettingsRead, p), audit.Denied, string(authz.OutsidePolicy), errLimited)
	}
	var s Settings
	err := k.store.View(ctx, func(rd store.Reader) (err error) {
		s, err = k.Of(rd, p.Tenant)
		return err
	})
	if err != nil {
		return Settings{}, fmt.Errorf("reading the settings of a tenant: %w", err)
	}
	return s, k.guard.Record(ctx, event(audit.SettingsRead, p))
}

// Change changes the settings of p's tenant, and returns them. Errors: fault.Forbidden, also for everybody
// whom a policy limits; fault.Invalid; fault.Conflict beside an earlier release; fault.Unavailable.
func (k *Keeper) Change(ctx context.Context, p authz.Principal, c Change) (Settings, error) {
	if err := k.guard.Authorize(ctx, p, authz.ChangeSettings); err != nil {
		return Settings{}, err
	}
	var paths []string
	if c.NeverExpires != nil {
		var err error
		if paths, err = globs(*c.NeverExpires); err != nil {
			return Settings{}, err
		}
	}
	if days := c.NamesKept; days != nil && (*days < 0 || *days > MaxNamesKept) {
		return Settings{}, fault.New(fault.Invalid, fmt.Sprintf("names_kept_days is from 0 to %d", MaxNamesKept))
	}
	e := event(audit.SettingsChanged, p)
	if p.Access.IsLimited() {
		return Settings{}, k.guard.Refuse(ctx, e, audit.Denied, string(authz.OutsidePolicy), errLimited)
	}
	ready, err := k.Ready.All(ctx)
	switch {
	case err != nil:
		return Settings{}, err
	case !ready:
		return Settings{}, k.guard.Refuse(ctx, e, audit.Denied, reasonReplicas, errReplicas)
	}
	var after Settings
	err = k.store.Update(ctx, func(tx store.Tx) (err error) {
		if after, err = k.Of(tx, p.Tenant); err != nil {
			return err
		}
		if c.NeverExpires != nil {
			after.NeverExpires = paths
		}
		if c.NamesKept != nil {
			after.NamesKept = c.NamesKept
		}
		if err := format.Raise(tx, format.Settings, format.Settings); err != nil {
			return err
		}
		e.Attributes = k.attributes(p.Tenant, after)
		if _, err := k.guard.Append(tx, e); err != nil {
			return err
		}
		return mac.Put(k.rows, tx, key(p.Tenant), after)
	})
	if err != nil {
		return Settings{}, fmt.Errorf("changing the settings of a tenant: %w", err)
	}
	return after, nil
}

// attributes returns what an entry says of settings.
func (k *Keeper) attributes(tenant authz.TenantID, s Settings) map[string]string {
	fields := [][]byte{[]byte(tenant)}
	for _, path := range s.NeverExpires {
		fields = append(fields, []byte(path))
	}
	return map[string]string{
		attributeNeverExpires: strconv.Itoa(len(s.NeverExpires)),
		attributeNamesKept:    strconv.Itoa(s.NamesKeptDays()),
		attributeDigest:       k.rows.KeyedHex("latticekeep/never-expires-paths/v1", fields...)[:32],
	}
}

// globs returns paths sorted, each once. Error: fault.Invalid.
func globs(given []string) ([]string, error) {
	paths := make([]string, len(given))
	for i, path := range given {
		if _, err := authz.ParseGlob(path); err != nil {
			return nil, fault.New(fault.Invalid, "never_expires_paths "+err.Error())
		}
		paths[i] = authz.NormalizeName(path)
	}
	slices.SortFunc(paths, strings.Compare)
	paths = slices.Compact(paths)
	if len(paths) > MaxPaths {
		return nil, fault.New(fault.Invalid, fmt.Sprintf("never_expires_paths has at most %d paths: one glob may stand for several", MaxPaths))
	}
	return paths, nil
}
