// Package apikey keeps the rows of API keys. It does not know who may make or revoke one: package
// identity does.
package apikey

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/identity/token"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Key describes an API key. The key itself is shown once, when it is made: 256 random bits
// behind a prefix.
type Key struct {
	ID, Name   string
	Tenant     authz.TenantID
	Scopes     []authz.Scope // in the order of authz.Scopes
	CreatedAt  time.Time
	ExpiresAt  time.Time // zero: never
	LastUsedAt time.Time // precise to about a minute; zero: never
	CreatedBy  string    // id of the principal
	Pending    bool      // the key works only when an owner has approved it
	waitsSince time.Time // if Pending
	User       string    // id of the user who answers for it; empty: none
	Limiters   []string  // see [Row.Limiters]
}

// Request asks for an API key.
type Request struct {
	Name          string // 1 to 255 bytes
	Scopes        []authz.Scope
	ExpiresInDays int // 1 to 3650; zero: never
}

// Prefix begins every API key.
const Prefix = "lk_live_"

// IDPrefix begins the id of an API key.
const IDPrefix = "key"

const (
	secretSize = 32 // bytes
	maxDays    = 3650
)

var (
	errScopes = fault.New(fault.Invalid, "an API key has at least one scope, and only scopes that exist")
	errDays   = fault.New(fault.Invalid, "an API key expires in 1 to 3650 days, or never")
)

// Check returns fault.Invalid for what no API key may be.
func (r Request) Check() error {
	known := authz.Scopes()
	unknown := func(s authz.Scope) bool { return !slices.Contains(known, s) }
	switch {
	case len(r.Scopes) == 0 || slices.ContainsFunc(r.Scopes, unknown):
		return errScopes
	case r.ExpiresInDays < 0 || r.ExpiresInDays > maxDays:
		return errDays
	}
	return tenant.ValidateName(r.Name)
}

// Row is an API key in the store, under the hash of the key. The hash is stored under tenant and id,
// and the time of the last use under the id. Each stored value starts with the keyring's MAC. Releases
// before names and expiry wrote rows without these fields.
type Row struct {
	ID        string         `json:"id"`
	Tenant    authz.TenantID `json:"tenant"`
	Name      string         `json:"name,omitempty"`
	Scopes    []authz.Scope  `json:"scopes"`
	CreatedAt time.Time      `json:"created_at"`
	CreatedBy string         `json:"created_by,omitempty"`
	ExpiresAt time.Time      `json:"expires_at,omitzero"`
	User      string         `json:"user,omitempty"` // id of the user who answers for it, also through a chain of API keys

	// Makers are the API keys by which CreatedBy was made, if it is one: the bindings of all of them
	// limit this key, too. Releases before policies wrote none.
	Makers []string `json:"makers,omitempty"`

	// Requested are the scopes that the key gets when an owner approves it. It has none until then.
	Requested []authz.Scope `json:"requested,omitempty"`
	// Suspended is when a rollback made the key pending; zero for one that was made so.
	Suspended time.Time `json:"suspended,omitzero"`
}

// Pending reports whether the key waits for an approval.
func (r Row) Pending() bool { return len(r.Requested) > 0 }

// Limiters returns whose policies limit the key: its own, and those of the user who answers for it and of
// the API keys by which it was made.
func (r Row) Limiters() []string {
	all := append([]string{r.ID}, r.Makers...)
	if authz.ValidID(IDPrefix, r.CreatedBy) {
		all = append(all, r.CreatedBy)
	}
	if r.User != "" {
		all = append(all, r.User)
	}
	return all
}

// Name identifies an API key in the list of its tenant.
type Name struct {
	Tenant authz.TenantID
	ID     string
}

// hashVersion is the version of the API-key hash key. It is part of the row's key, so keys hashed
// under different versions can be found side by side.
const hashVersion = "1"

// HashKey returns the key of the row of an API key.
func HashKey(hash string) []byte { return []byte("apikey/hash/" + hashVersion + "/" + hash) }

// tenantPrefix returns the prefix of the rows that list the API keys of a tenant.
func tenantPrefix(tenant authz.TenantID) []byte {
	return []byte("apikey/tenant/" + string(tenant) + "/")
}

// NameKey returns the key of the row that lists an API key, whose content is the hash.
func NameKey(n Name) []byte { return append(tenantPrefix(n.Tenant), n.ID...) }

func usedKey(id string) []byte { return []byte("apikey/used/" + id) }

// Store reads and writes the rows of API keys.
type Store struct {
	rows  *records.Store
	now   func() time.Time
	cache records.Cache[Row]
}

// NewStore returns the API keys among the rows of a store.
func NewStore(rows *records.Store, now func() time.Time) *Store { return &Store{rows: rows, now: now} }

func (s *Store) hash(raw []byte) string { return s.rows.Hash("latticekeep/api-key/v1", raw) }

// PendingFor is how long a key waits for an owner's approval.
const PendingFor = 14 * 24 * time.Hour

// Expired reports whether the key has ended, or waited too long for its approval.
func (k Key) Expired(now time.Time) bool {
	return !k.ExpiresAt.IsZero() && !now.Before(k.ExpiresAt) || k.Pending && !now.Before(k.waitsSince.Add(PendingFor))
}

// Key returns the description of the key, which was last used at the given time. The scopes of a
// pending key are those that it gets.
func (r Row) Key(used time.Time) Key {
	k := Key{
		ID: r.ID, Name: r.Name, Tenant: r.Tenant, Scopes: r.Scopes,
		CreatedAt: r.CreatedAt, ExpiresAt: r.ExpiresAt, LastUsedAt: used,
		CreatedBy: r.CreatedBy, Pending: r.Pending(), User: r.User, Limiters: r.Limiters(),
	}
	if k.waitsSince = r.CreatedAt; r.Suspended.After(r.CreatedAt) {
		k.waitsSince = r.Suspended
	}
	if k.Pending {
		k.Scopes = r.Requested
	}
	return k
}

// Fresh is an API key that is not stored yet.
type Fresh struct {
	Secret string // the API key itself
	Row    Row
	hash   string
}

// New makes a key for the request r, which the caller has checked.
func (s *Store) New(tenant authz.TenantID, by string, r Request) *Fresh {
	key, raw := token.New(Prefix, secretSize)
	k := &Fresh{Secret: key, hash: s.hash(raw)}
	k.Row = Row{ID: authz.NewID(IDPrefix), Tenant: tenant, Name: r.Name, CreatedAt: s.now().UTC(), CreatedBy: by}
	for _, scope := range authz.Scopes() {
		if slices.Contains(r.Scopes, scope) {
			k.Row.Scopes = append(k.Row.Scopes, scope)
		}
	}
	if r.ExpiresInDays > 0 {
		k.Row.ExpiresAt = k.Row.CreatedAt.AddDate(0, 0, r.ExpiresInDays)
	}
	return k
}

// Put writes a new key.
func (s *Store) Put(tx store.Tx, k *Fresh) error {
	n := Name{k.Row.Tenant, k.Row.ID}
	return errors.Join(s.rows.Put(tx, NameKey(n), k.hash), s.rows.Put(tx, HashKey(k.hash), k.Row))
}

// Lookup reads the row of a secret and reports whether it exists. A secret of another form has none.
func (s *Store) Lookup(r store.Reader, secret string) (row Row, found bool, err error) {
	raw := token.Parse(Prefix, secret, secretSize)
	if raw == nil {
		return row, false, nil
	}
	return s.cache.Get(s.rows, r, HashKey(s.hash(raw)))
}

// Replace writes the row of a key that exists.
func (s *Store) Replace(tx store.Tx, row Row) error {
	var hash string
	if found, err := s.rows.Get(tx, NameKey(Name{row.Tenant, row.ID}), &hash); err != nil {
		return err
	} else if !found {
		return records.ErrDamaged
	}
	return s.rows.Put(tx, HashKey(hash), row)
}

// Find reads a key and reports whether it exists.
func (s *Store) Find(r store.Reader, n Name) (row Row, found bool, err error) {
	var hash string
	if found, err := s.rows.Get(r, NameKey(n), &hash); err != nil || !found {
		return row, false, err
	}
	if found, err = s.rows.Get(r, HashKey(hash), &row); err == nil && !found {
		err = records.ErrDamaged
	}
	return row, found, err
}

// Delete deletes a key and reports whether it existed.
func (s *Store) Delete(tx store.Tx, n Name) (bool, error) {
	var hash string
	if found, err := s.rows.Get(tx, NameKey(n), &hash); err != nil || !found {
		return false, err
	}
	return true, errors.Join(tx.Delete(HashKey(hash)), tx.Delete(NameKey(n)), tx.Delete(usedKey(n.ID)))
}

// Count returns how many keys a tenant has.
func (s *Store) Count(r store.Reader, tenant authz.TenantID) (n int, err error) {
	err = r.Scan(store.Prefix(tenantPrefix(tenant)), func(_, _ []byte) bool { n++; return true })
	return n, err
}

// Of reads a tenant's keys, oldest first.
func (s *Store) Of(r store.Reader, tenant authz.TenantID) (all []Key, err error) {
	var bad error
	err = r.Scan(store.Prefix(tenantPrefix(tenant)), func(key, value []byte) bool {
		var hash string
		var row Row
		var used time.Time
		if bad = s.rows.Decode(key, value, &hash); bad != nil {
			return false
		}
		if found, err := s.rows.Get(r, HashKey(hash), &row); err != nil || !found {
			bad = cmp.Or(err, records.ErrDamaged)
			return false
		}
		if _, bad = s.rows.Get(r, usedKey(row.ID), &used); bad != nil {
			return false
		}
		all = append(all, row.Key(used))
		return true
	})
	slices.SortFunc(all, func(a, b Key) int { return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID)) })
	return all, errors.Join(err, bad)
}

// Attributes returns the attributes of the entry that records that the key was made or approved.
func (r Row) Attributes() map[string]string {
	var scopes []string
	for _, scope := range r.Key(time.Time{}).Scopes {
		scopes = append(scopes, string(scope))
	}
	a := map[string]string{audit.AttributeScopes: strings.Join(scopes, " ")}
	if r.Pending() {
		a[audit.AttributePending] = "true"
	}
	if !r.ExpiresAt.IsZero() {
		a[audit.AttributeExpiresAt] = r.ExpiresAt.UTC().Format(time.RFC3339Nano)
	}
	if r.User != "" {
		a[audit.AttributeUser] = r.User
	}
	return a
}
