// Package vault stores credentials: it seals, lists, unseals, rotates and
// deletes them, and lets them expire.
//
// A credential is one signed record per tenant, id and version, of which only
// the newest is listed and found by its name. Each version has its own ML-KEM-768 key pair, whose seed
// is wrapped under the tenant's key, which only the KMS opens. Records are
// looked up by (tenant, id), so that what belongs to another tenant does not
// exist; and every lookup that finds nothing does the work of one that does.
//
// Beside the record stand its place in an index of names, whose rows hold keyed
// hashes, and a history of its versions, which has no values. Both change in the
// transaction of the record and go with it. A repeated seal is known by its
// idempotency key for a day; what tells of its values goes with them.
//
// A credential can belong to a SealedCredential, which alone changes it, and is
// then not there for the ServiceAccounts of other namespaces of the tenant. A row
// of the object is the operator's memory: what was applied last, and the one
// former version that new values may leave readable until its end.
//
// Every operation is recorded in the audit log in the transaction of its
// change, and reads return only after their entry is durable.
package vault

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Credential is what may be known of a credential without opening it.
type Credential struct {
	ID        string
	Name      string
	Type      string
	Version   uint64
	CreatedAt time.Time // of the first version
	SealedAt  time.Time // of this version
	ExpiresAt time.Time
	Expired   bool
	Owned     bool // by a SealedCredential: read-only over REST
}

// Unsealed is a credential with its values. The caller zeroes them.
type Unsealed struct {
	Credential
	Values map[string]secret.Bytes
}

// Vault is safe for concurrent use.
type Vault struct {
	store  store.Store
	guard  *audit.Guard
	keys   *keyring.Ring
	now    func() time.Time
	decoys sync.Map    // tenant → *record
	tidy   atomic.Bool // no request outlives its idempotency key
	opener func(r *record, wrapping, signing *keyring.Keys) (map[string]secret.Bytes, error)

	forPage, forSummary effort // at most
}

// New returns the vault in s.
func New(s store.Store, guard *audit.Guard, keys *keyring.Ring, now func() time.Time) *Vault {
	return &Vault{store: s, guard: guard, keys: keys, now: now, opener: (*record).open, forPage: ofPage(), forSummary: ofSummary()}
}

// readTimeout bounds a read, so that one that cannot be recorded is refused
// within a second whatever hangs.
const readTimeout = 900 * time.Millisecond

// errDenied is the one answer to a credential that is not there for the
// caller, whatever the reason.
var errDenied = fault.New(fault.Forbidden, "access denied")

// Reasons in audit entries.
const (
	reasonMissing   = "no_such_credential" // foreign, deleted and never existing alike
	reasonExpired   = "expired"
	reasonOwned     = "owned_by_object"
	reasonIntegrity = "integrity"
)

// Seal stores a new credential, or, when the request has an idempotency key
// that made one within a day, returns what it answered then. Errors:
// fault.Forbidden; fault.Invalid, also for a key that came with another
// request; fault.Unavailable.
func (v *Vault) Seal(ctx context.Context, p authz.Principal, req SealRequest) (Credential, error) {
	if err := v.guard.Authorize(ctx, p, authz.SealCredential); err != nil {
		return Credential{}, err
	}
	if err := req.validate(); err != nil {
		return Credential{}, err
	}
	once := v.once(p.Tenant, req)
	return retried(func() (Credential, error) {
		if once != nil {
			if first, err := v.replay(ctx, p, once); err != nil {
				return Credential{}, err
			} else if first != nil {
				return *first, nil
			}
		}
		return v.seal(ctx, p, req, once)
	})
}

func (v *Vault) seal(ctx context.Context, p authz.Principal, req SealRequest, once *once) (Credential, error) {
	keys, err := v.current(ctx, p.Tenant)
	if err != nil {
		return Credential{}, err
	}
	now := v.now()
	r := newRecord(p.Tenant, authz.NewID(idPrefix), 1, now, now, req)
	if err := r.seal(keys, req.Values); err != nil {
		return Credential{}, err
	}
	rows, err := v.newRows(r)
	if err != nil {
		return Credential{}, fmt.Errorf("encoding a credential: %w", err)
	}
	e := r.event(audit.CredentialSealed, p)
	err = v.store.Update(ctx, func(tx store.Tx) error {
		if err := v.remember(tx, once, r, now); err != nil {
			return err
		}
		return errors.Join(putRows(tx, rows), v.append(tx, e))
	})
	if err != nil {
		return Credential{}, fmt.Errorf("storing a credential: %w", err)
	}
	return r.credential(now, false), nil
}

func newRecord(tenant authz.TenantID, id string, version uint64, created, now time.Time, req SealRequest) *record {
	ttl := req.ttlDays()
	now = now.UTC().Truncate(time.Microsecond)
	return &record{
		tenant: tenant, id: id, version: version, name: req.Name, kind: req.Type, ttlDays: uint64(ttl),
		createdAt: created.UTC().Truncate(time.Microsecond), sealedAt: now, expiresAt: now.AddDate(0, 0, ttl),
	}
}

// current returns the tenant's keys, of which each operation asks the KMS once.
func (v *Vault) current(ctx context.Context, tenant authz.TenantID) (*keyring.Keys, error) {
	keys, err := v.keys.Current(ctx, tenant)
	if err != nil {
		return nil, fmt.Errorf("unwrapping the tenant's keys: %w", err)
	}
	return keys, nil
}

// append is [audit.Guard.Append] for callers that do not need the receipt.
func (v *Vault) append(tx store.Tx, e audit.Event) error {
	_, err := v.guard.Append(tx, e)
	return err
}

// event is the entry of a new version.
func (r *record) event(t audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{
		Type: t, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.CredentialResource, ID: r.id},
		Attributes: map[string]string{
			audit.AttributeVersion:   strconv.FormatUint(r.version, 10),
			audit.AttributeDigest:    r.digest(),
			audit.AttributeExpiresAt: r.expiresAt.Format(time.RFC3339Nano),
			audit.AttributeTTLDays:   strconv.FormatUint(r.ttlDays, 10),
		},
	}
}

// ready finds out, before anything is looked up, whether p may do a, whether
// that could be recorded, and whether the tenant's keys can be used; these it
// returns.
func (v *Vault) ready(ctx context.Context, p authz.Principal, a authz.Action) (*keyring.Keys, error) {
	if err := v.guard.Admit(ctx, p, a); err != nil {
		return nil, err
	}
	return v.current(ctx, p.Tenant)
}

// Unseal returns a credential with its values. Both signatures are verified
// before anything is decrypted, and the read is recorded before it returns.
// Errors: fault.Forbidden for all that is not there for p, fault.Unavailable.
func (v *Vault) Unseal(ctx context.Context, p authz.Principal, id string) (Unsealed, error) {
	return v.unseal(ctx, p, byID(id))
}

func (v *Vault) unseal(ctx context.Context, p authz.Principal, which finder) (Unsealed, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	keys, err := v.ready(ctx, p, authz.UnsealCredential)
	if err != nil {
		return Unsealed{}, err
	}
	found, err := v.open(ctx, keys, p, which)
	if err != nil {
		return Unsealed{}, err
	}
	now := v.now()
	e := found.event(audit.CredentialUnsealed, p, now)
	if err := v.guard.Record(ctx, e); err != nil {
		found.zero()
		return Unsealed{}, err
	}
	if e.Outcome != audit.Success {
		found.zero()
		return Unsealed{}, errDenied
	}
	c := found.record.credential(now, found.owned)
	c.ExpiresAt = found.until
	return Unsealed{c, found.values}, nil
}
