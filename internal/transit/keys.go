package transit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Bounds of a key, and of the number of keys per tenant.
const (
	MaxNameBytes        = 255
	MaxRotationDays     = 3650
	DefaultRotationDays = 90
	MaxKeys             = 1000

	defaultName = "default"
)

// Key is the public information about a named key.
type Key struct {
	ID           string
	Name         string
	Version      uint32 // newest version
	RotationDays int
	Default      bool // used when no key is named
	CreatedAt    time.Time
	RotatedAt    time.Time // time of the newest version
	NextRotation time.Time
}

func (k *namedKey) public() Key {
	return Key{
		ID: k.id, Name: k.Name, Version: k.Version, RotationDays: k.RotationDays, Default: k.Default,
		CreatedAt: k.CreatedAt, RotatedAt: k.RotatedAt, NextRotation: k.NextRotation,
	}
}

// due reports whether the period of the key has ended and it can have another version.
func (k *namedKey) due(now time.Time) bool {
	return k.Version < maxVersions && !now.Before(k.NextRotation)
}

// stamp returns the current time with the precision of stored rows.
func (t *Transit) stamp() time.Time { return t.now().UTC().Truncate(time.Microsecond) }

// newKey returns version 1 of a new key.
func (t *Transit) newKey(tenant authz.TenantID, name string, days int) *namedKey {
	now := t.stamp()
	return &namedKey{tenant, authz.NewID(idPrefix), keyRow{
		Name: name, Version: 1, RotationDays: days, CreatedAt: now, RotatedAt: now, NextRotation: now.AddDate(0, 0, days),
	}}
}

// newSeed returns a new seed for the key's newest version, wrapped under wrapper.
func (k *namedKey) newSeed(wrapper *keyring.Keys) (*seedRow, error) {
	blob, err := wrapper.NewMessageKey(seedContext(k.tenant, k.id, k.Version))
	if err != nil {
		return nil, fmt.Errorf("making an encryption key: %w", err)
	}
	return &seedRow{k.Version, wrapper.Version, blob}, nil
}

// putSeed stores a seed. It never overwrites one.
func (k *namedKey) putSeed(tx store.Tx, seed *seedRow) error {
	key := seedKey(k.tenant, k.id, seed.version, seed.wrapping)
	if b, err := tx.Get(key); err != nil || b != nil {
		return errors.Join(err, errDamaged)
	}
	return tx.Put(key, seed.blob)
}

// event returns the entry of a new key or version.
func (k *namedKey) event(what audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{
		Type: what, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.KeyResource, ID: k.id},
		Attributes: map[string]string{
			attributeKeyVersion:         number(k.Version),
			audit.AttributeRotationDays: strconv.Itoa(k.RotationDays),
			audit.AttributeNextRotation: k.NextRotation.UTC().Format(time.RFC3339Nano),
		},
	}
}

func (t *Transit) append(tx store.Tx, e audit.Event) error {
	_, err := t.guard.Append(tx, e)
	return err
}

func checkKey(name string, rotationDays int) error {
	if name == "" || len(name) > MaxNameBytes || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return fault.New(fault.Invalid, "name must have 1 to 255 bytes of text without control characters")
	}
	if rotationDays < 0 || rotationDays > MaxRotationDays {
		return fault.New(fault.Invalid, "rotation_period must be 1 to 3650 days")
	}
	return nil
}

var errTooMany = fault.New(fault.Forbidden, "the tenant has 1000 keys, which is the most: use one of them")

// CreateKey creates a named key. A rotationDays of 0 means [DefaultRotationDays]. Names need not be
// unique. Errors: fault.Forbidden, also when the tenant has [MaxKeys]; fault.Invalid;
// fault.Unavailable.
func (t *Transit) CreateKey(ctx context.Context, p authz.Principal, name string, rotationDays int) (Key, error) {
	if err := t.guard.Authorize(ctx, p, authz.CreateKey); err != nil {
		return Key{}, err
	}
	if err := checkKey(name, rotationDays); err != nil {
		return Key{}, err
	}
	keys, err := t.current(ctx, p.Tenant)
	if err != nil {
		return Key{}, err
	}
	key := t.newKey(p.Tenant, name, cmp.Or(rotationDays, DefaultRotationDays))
	seed, err := key.newSeed(keys.Keys)
	if err != nil {
		return Key{}, err
	}
	full := false
	err = t.store.Update(ctx, func(tx store.Tx) error {
		n, err := countKeys(tx, p.Tenant)
		if err != nil {
			return err
		}
		if full = n >= MaxKeys; full {
			return t.append(tx, audit.Event{
				Type: audit.KeyCreated, Outcome: audit.Denied, Principal: p, Resource: audit.Resource{Type: audit.KeyResource},
				Attributes: map[string]string{audit.AttributeReason: reasonLimit},
			})
		}
		return errors.Join(key.putSeed(tx, seed), t.put(tx, nil, key), t.append(tx, key.event(audit.KeyCreated, p)))
	})
	if err != nil {
		return Key{}, fmt.Errorf("storing a key: %w", err)
	}
	if full {
		return Key{}, errTooMany
	}
	return key.public(), nil
}

func countKeys(rd store.Reader, tenant authz.TenantID) (n int, err error) {
	err = rd.Scan(store.Prefix(keysPrefix(tenant)), func(_, _ []byte) bool {
		n++
		return true
	})
	return n, err
}

// createDefault creates the tenant's default key, unless another request created it meanwhile.
func (t *Transit) createDefault(ctx context.Context, p authz.Principal, keys *keyring.Keys) error {
	key := t.newKey(p.Tenant, defaultName, DefaultRotationDays)
	key.Default = true
	seed, err := key.newSeed(keys)
	if err != nil {
		return err
	}
	err = t.store.Update(ctx, func(tx store.Tx) error {
		if id, err := t.getDefault(tx, p.Tenant); err != nil || id != "" {
			return err
		}
		row := defaultKey(p.Tenant)
		return errors.Join(key.putSeed(tx, seed), t.put(tx, nil, key), tx.Put(row, t.keys.SealRow(row, []byte(key.id))),
			t.append(tx, key.event(audit.KeyCreated, p)))
	})
	if err != nil {
		return fmt.Errorf("storing the default key: %w", err)
	}
	return nil
}

// Keys returns up to limit of the tenant's keys, starting at offset, oldest first, and the total
// number. Damaged rows are left out and counted in the entry. Errors: fault.Forbidden,
// fault.Invalid, fault.Unavailable.
func (t *Transit) Keys(ctx context.Context, p authz.Principal, offset, limit int) (page []Key, total int, err error) {
	return t.list(ctx, p, limit, func([]Key) (int, error) {
		if offset < 0 {
			return 0, errPage
		}
		return offset, nil
	})
}

// KeysAfter is [Transit.Keys] with a cursor. An empty cursor starts at the first page. next is the
// cursor of the next page, empty after the last one. Errors: those of Keys, and fault.Invalid for a
// cursor of another list.
func (t *Transit) KeysAfter(ctx context.Context, p authz.Principal, cursor string, limit int) (page []Key, next string, err error) {
	from := 0
	page, total, err := t.list(ctx, p, limit, func(all []Key) (int, error) {
		if cursor == "" {
			return 0, nil
		}
		// The cursor is the id of the last key on the previous page. Keys are never deleted.
		from = 1 + slices.IndexFunc(all, func(k Key) bool { return k.ID == cursor })
		if from == 0 {
			return 0, fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
		}
		return from, nil
	})
	if err == nil && from+len(page) < total {
		next = page[len(page)-1].ID
	}
	return page, next, err
}

var errPage = fault.New(fault.Invalid, "page and limit must be positive")

// list returns a page of the tenant's keys. first returns the index at which the page begins.
func (t *Transit) list(ctx context.Context, p authz.Principal, limit int, first func(all []Key) (int, error)) (page []Key, total int, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := t.guard.Admit(ctx, p, authz.ListKeys); err != nil {
		return nil, 0, err
	}
	if limit < 1 {
		return nil, 0, errPage
	}
	all, damaged, err := t.survey(ctx, p.Tenant)
	if err != nil {
		return nil, 0, err
	}
	offset, err := first(all)
	if err != nil {
		return nil, 0, err
	}
	from := min(offset, len(all))
	page = append([]Key{}, all[from:from+min(limit, len(all)-from)]...)
	e := listed(p, "", len(page))
	if damaged > 0 {
		e.Outcome = audit.Failure
		e.Attributes[audit.AttributeReason], e.Attributes["damaged"] = reasonIntegrity, strconv.Itoa(damaged)
	}
	if err := t.guard.Record(ctx, e); err != nil {
		return nil, 0, err
	}
	return page, len(all), nil
}

// Overdue returns how many keys of p's tenant should have rotated by now, for a caller that records the
// read itself. damaged is the number of keys that are left out. Errors: fault.Forbidden, fault.Unavailable.
func (t *Transit) Overdue(ctx context.Context, p authz.Principal) (n, damaged int, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := t.guard.Admit(ctx, p, authz.ListKeys); err != nil {
		return 0, 0, err
	}
	all, damaged, err := t.survey(ctx, p.Tenant)
	now := t.now()
	for _, k := range all {
		if k.NextRotation.Before(now) {
			n++
		}
	}
	return n, damaged, err
}

// listed returns the entry of a read of keys, or of the versions of one key.
func listed(p authz.Principal, id string, count int) audit.Event {
	return audit.Event{
		Type: audit.KeyListed, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.KeyResource, ID: id},
		Attributes: map[string]string{attributeCount: strconv.Itoa(count)},
	}
}

// Key returns a key and its newest versions, newest first and at most [MaxKeyVersions]. Errors:
// fault.Forbidden, fault.NotFound, fault.Internal for a damaged row, fault.Unavailable.
func (t *Transit) Key(ctx context.Context, p authz.Principal, id string) (Key, []KeyVersion, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := t.guard.Admit(ctx, p, authz.ListKeys); err != nil {
		return Key{}, nil, err
	}
	var key *namedKey
	var versions []KeyVersion
	err := t.store.View(ctx, func(rd store.Reader) (err error) {
		if key, err = t.get(rd, p.Tenant, validID(id)); err == nil && key != nil {
			versions, err = t.versions(rd, key)
		}
		return err
	})
	e := listed(p, validID(id), len(versions))
	switch {
	case errors.Is(err, fault.Internal):
		return Key{}, nil, t.guard.Refuse(ctx, e, audit.Failure, reasonIntegrity, err)
	case err != nil:
		return Key{}, nil, fmt.Errorf("reading a key: %w", err)
	case key == nil:
		return Key{}, nil, t.guard.Refuse(ctx, e, audit.Denied, reasonMissing, errNoKey)
	}
	if err := t.guard.Record(ctx, e); err != nil {
		return Key{}, nil, err
	}
	return key.public(), versions, nil
}

// Survey returns all of a tenant's keys, oldest first. It needs no principal and leaves no entry:
// the service itself calls it, for its own reports. Damaged rows are left out. Error:
// fault.Unavailable.
func (t *Transit) Survey(ctx context.Context, tenant authz.TenantID) ([]Key, error) {
	all, _, err := t.survey(ctx, tenant)
	return all, err
}

func (t *Transit) survey(ctx context.Context, tenant authz.TenantID) (all []Key, damaged int, err error) {
	err = t.store.View(ctx, func(rd store.Reader) error {
		all, damaged = nil, 0
		prefix := keysPrefix(tenant)
		return rd.Scan(store.Prefix(prefix), func(key, value []byte) bool {
			k, err := t.decode(tenant, string(key[len(prefix):]), value)
			if err != nil {
				damaged++
				return true
			}
			all = append(all, k.public())
			return true
		})
	})
	if err != nil {
		return nil, 0, fmt.Errorf("listing keys: %w", err)
	}
	slices.SortFunc(all, func(a, b Key) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return all, damaged, nil
}

// Name returns the name of a key of the tenant, and "" if there is none with the id.
func (t *Transit) Name(r store.Reader, tenant authz.TenantID, id string) (string, error) {
	if !authz.ValidID(idPrefix, id) {
		return "", nil
	}
	k, err := t.get(r, tenant, id)
	if err != nil || k == nil {
		return "", err
	}
	return k.Name, nil
}
