// Package vault stores credentials: it seals, lists, unseals, rotates and
// deletes them, and lets them expire.
//
// A credential is one signed record per tenant, id and version, of which only
// the newest is kept. Each version has its own ML-KEM-768 key pair, whose seed
// is wrapped under the tenant's key, which only the KMS opens. Records are
// looked up by (tenant, id), so that what belongs to another tenant does not
// exist; and every lookup that finds nothing does the work of one that does.
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
	log    *audit.Log
	keys   *keyring.Ring
	now    func() time.Time
	decoys sync.Map // tenant → *decoy
}

// New returns the vault in s.
func New(s store.Store, log *audit.Log, keys *keyring.Ring, now func() time.Time) *Vault {
	return &Vault{store: s, log: log, keys: keys, now: now}
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

// Seal stores a new credential. Errors: fault.Forbidden, fault.Invalid,
// fault.Unavailable.
func (v *Vault) Seal(ctx context.Context, p authz.Principal, req SealRequest) (Credential, error) {
	if err := v.log.Authorize(ctx, p, authz.SealCredential); err != nil {
		return Credential{}, err
	}
	if err := req.validate(); err != nil {
		return Credential{}, err
	}
	keys, err := v.current(ctx, p.Tenant)
	if err != nil {
		return Credential{}, err
	}
	now := v.now()
	r := newRecord(p.Tenant, authz.NewID(idPrefix), 1, now, now, req)
	if err := r.seal(keys, req.Values); err != nil {
		return Credential{}, err
	}
	err = v.store.Update(ctx, func(tx store.Tx) error {
		return errors.Join(putRecord(tx, r), v.append(tx, r.event(audit.CredentialSealed, p)))
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

// append is [audit.Log.Append] for those who do not need the receipt.
func (v *Vault) append(tx store.Tx, e audit.Event) error {
	_, err := v.log.Append(tx, e)
	return err
}

// event is the entry of a new version.
func (r *record) event(t audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{
		Type: t, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.CredentialResource, ID: r.id},
		Attributes: map[string]string{
			audit.AttributeVersion: strconv.FormatUint(r.version, 10),
			audit.AttributeDigest:  r.digest(),
		},
	}
}

// ListQuery selects a page of the list; zero means all of it.
type ListQuery struct {
	Limit  int
	Cursor string // from the page before
}

// List returns the credentials of p's tenant in the order of their ids,
// expired ones included and marked, and the cursor of the next page, if any.
// Damaged records are left out and counted in the entry.
// Errors: fault.Forbidden, fault.Invalid for a foreign cursor,
// fault.Unavailable.
func (v *Vault) List(ctx context.Context, p authz.Principal, q ListQuery) (list []Credential, next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListCredentials); err != nil {
		return nil, "", err
	}
	rng := store.Prefix(credentialPrefix(p.Tenant))
	if q.Cursor != "" {
		if !authz.ValidID(idPrefix, q.Cursor) {
			return nil, "", fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
		}
		rng.From = store.Prefix(versionsPrefix(p.Tenant, q.Cursor)).To
	}
	now := v.now()
	list = []Credential{}
	damaged := 0
	err = v.store.View(ctx, func(rd store.Reader) error {
		var bad error
		err := rd.Scan(rng, func(key, value []byte) bool {
			if q.Limit > 0 && len(list) == q.Limit {
				next = list[len(list)-1].ID
				return false
			}
			r, err := recordAt(key, value)
			if err != nil {
				damaged++ // one damaged record does not hide the others
				return true
			}
			owner, err := rd.Get(ownerKey(p.Tenant, r.id))
			if err != nil {
				bad = err
				return false
			}
			list = append(list, r.credential(now, owner != nil))
			return true
		})
		return errors.Join(err, bad)
	})
	if err != nil {
		return nil, "", fmt.Errorf("listing credentials: %w", err)
	}
	e := audit.Event{
		Type: audit.CredentialListed, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.CredentialResource},
		Attributes: map[string]string{"count": strconv.Itoa(len(list))},
	}
	if damaged > 0 {
		e.Outcome = audit.Failure
		e.Attributes[audit.AttributeReason], e.Attributes["damaged"] = reasonIntegrity, strconv.Itoa(damaged)
	}
	if err := v.log.Record(ctx, e); err != nil {
		return nil, "", fmt.Errorf("recording a list: %w", err)
	}
	return list, next, nil
}

// ready finds out, before anything is looked up, whether p may do a, whether
// that could be recorded, and whether the tenant's keys can be used; these it
// returns.
func (v *Vault) ready(ctx context.Context, p authz.Principal, a authz.Action) (*keyring.Keys, error) {
	if err := v.log.Ready(ctx); err != nil {
		return nil, err
	}
	if err := v.log.Authorize(ctx, p, a); err != nil {
		return nil, err
	}
	return v.current(ctx, p.Tenant)
}

// Unseal returns a credential with its values. Both signatures are verified
// before anything is decrypted, and the read is recorded before it returns.
// Errors: fault.Forbidden for all that is not there for p, fault.Unavailable.
func (v *Vault) Unseal(ctx context.Context, p authz.Principal, id string) (Unsealed, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	keys, err := v.ready(ctx, p, authz.UnsealCredential)
	if err != nil {
		return Unsealed{}, err
	}
	found, err := v.open(ctx, keys, p.Tenant, id)
	if err != nil {
		return Unsealed{}, err
	}
	now := v.now()
	e := found.event(audit.CredentialUnsealed, p, now)
	if err := v.log.Record(ctx, e); err != nil {
		found.zero()
		return Unsealed{}, fmt.Errorf("recording an unseal: %w", err)
	}
	if e.Outcome != audit.Success {
		found.zero()
		return Unsealed{}, errDenied
	}
	return Unsealed{found.record.credential(now, found.owned), found.values}, nil
}

// lookup is what an attempt to open a credential came to.
type lookup struct {
	id     string // as asked for, empty when it is not well formed
	record *record
	owned  bool
	values map[string]secret.Bytes
	failed bool // the record is there and does not hold
}

// open looks a credential up, verifies and decrypts it. When there is none, or
// it does not decode, the tenant's decoy is opened in its place: the same
// reads, the same signature and decryption work, and no values. An error means
// that the outcome is unknown.
func (v *Vault) open(ctx context.Context, keys *keyring.Keys, tenant authz.TenantID, id string) (*lookup, error) {
	decoy, err := v.decoy(keys, tenant)
	if err != nil {
		return nil, err
	}
	l := &lookup{}
	wanted := decoy.id // an id that cannot be there, for one that is malformed
	if authz.ValidID(idPrefix, id) {
		l.id, wanted = id, id
	}
	err = v.store.View(ctx, func(rd store.Reader) error {
		r, err := find(rd, tenant, wanted)
		owner, err2 := rd.Get(ownerKey(tenant, wanted))
		l.record, l.owned = r, owner != nil
		if errors.Is(err, fault.Internal) {
			l.failed, err = true, nil
		}
		return errors.Join(err, err2)
	})
	if err != nil {
		return nil, fmt.Errorf("reading a credential: %w", err)
	}
	subject := l.record
	if subject == nil || !v.now().Before(subject.expiresAt) {
		subject = decoy
	}
	values, err := v.openRecord(ctx, keys, subject)
	switch {
	case errors.Is(err, fault.Internal):
		l.failed = true
	case err != nil:
		return nil, err
	case subject == l.record:
		l.values = values
	}
	return l, nil
}

// openRecord opens a record with the current keys, or with the earlier versions
// that it names.
func (v *Vault) openRecord(ctx context.Context, current *keyring.Keys, r *record) (map[string]secret.Bytes, error) {
	wrapping, signing, err := r.keyVersions()
	if err != nil {
		return nil, err
	}
	keys := map[uint32]*keyring.Keys{current.Version: current}
	for _, version := range []uint32{wrapping, signing} {
		if keys[version] != nil {
			continue
		}
		if keys[version], err = v.keys.Version(ctx, r.tenant, version); err != nil {
			return nil, fmt.Errorf("opening a credential: %w", err)
		}
	}
	return r.open(keys[wrapping], keys[signing])
}

// decoy returns a record of the tenant that is in no store.
func (v *Vault) decoy(keys *keyring.Keys, tenant authz.TenantID) (*record, error) {
	if d, ok := v.decoys.Load(tenant); ok {
		r := d.(*record)
		if wrapping, _, err := r.keyVersions(); err == nil && wrapping == keys.Version {
			return r, nil
		}
	}
	now := v.now()
	r := newRecord(tenant, authz.NewID(idPrefix), 1, now, now, SealRequest{})
	if err := r.seal(keys, map[string]secret.Bytes{"decoy": make(secret.Bytes, 64)}); err != nil {
		return nil, fmt.Errorf("sealing a decoy: %w", err)
	}
	v.decoys.Store(tenant, r)
	return r, nil
}

// event says what a lookup came to. The resource is named only when the id is
// well formed.
func (l *lookup) event(t audit.EventType, p authz.Principal, now time.Time) audit.Event {
	e := audit.Event{
		Type: t, Outcome: audit.Denied, Principal: p,
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: l.id},
		Attributes: map[string]string{},
	}
	switch {
	case l.failed:
		e.Outcome = audit.Failure
		e.Attributes[audit.AttributeReason] = reasonIntegrity
	case l.record == nil:
		e.Attributes[audit.AttributeReason] = reasonMissing
	case !now.Before(l.record.expiresAt):
		e.Attributes[audit.AttributeReason] = reasonExpired
	default:
		e.Outcome = audit.Success
		e.Attributes[audit.AttributeVersion] = strconv.FormatUint(l.record.version, 10)
	}
	return e
}

func (l *lookup) zero() { zero(l.values) }

func zero(values map[string]secret.Bytes) {
	for _, value := range values {
		value.Zero()
	}
}

// maxAttempts bounds how often an operation starts again because another one
// changed the credential between its lookup and its commit.
const maxAttempts = 8

// Rotate encrypts a credential anew with a new ML-KEM-768 key pair, as its
// next version with a full TTL; the old ciphertext is gone. Errors:
// fault.Forbidden for all that is not there for p or belongs to an object,
// fault.Unavailable.
func (v *Vault) Rotate(ctx context.Context, p authz.Principal, id string) (Credential, error) {
	for range maxAttempts {
		c, err := v.rotate(ctx, p, id)
		if !errors.Is(err, fault.Conflict) {
			return c, err
		}
	}
	return Credential{}, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), errMoved)
}

func (v *Vault) rotate(ctx context.Context, p authz.Principal, id string) (Credential, error) {
	keys, err := v.ready(ctx, p, authz.RotateCredential)
	if err != nil {
		return Credential{}, err
	}
	found, err := v.open(ctx, keys, p.Tenant, id)
	if err != nil {
		return Credential{}, err
	}
	defer found.zero()
	now := v.now()
	e := found.event(audit.CredentialReencrypted, p, now)
	if e.Outcome == audit.Success && found.owned {
		e.Outcome, e.Attributes[audit.AttributeReason] = audit.Denied, reasonOwned
	}
	if e.Outcome != audit.Success {
		return Credential{}, v.deny(ctx, e)
	}
	old := found.record
	r := newRecord(p.Tenant, old.id, old.version+1, old.createdAt, now,
		SealRequest{Name: old.name, Type: old.kind, TTLDays: int(old.ttlDays)})
	if err := r.seal(keys, found.values); err != nil {
		return Credential{}, err
	}
	err = v.store.Update(ctx, func(tx store.Tx) error {
		return errors.Join(replace(tx, old, r), v.append(tx, r.event(audit.CredentialReencrypted, p)))
	})
	if err != nil {
		return Credential{}, fmt.Errorf("rotating a credential: %w", err)
	}
	return r.credential(now, false), nil
}

func (v *Vault) deny(ctx context.Context, e audit.Event) error {
	if err := v.log.Record(ctx, e); err != nil {
		return fmt.Errorf("recording a refusal: %w", err)
	}
	return errDenied
}

// Delete removes a credential, expired or not, with its ciphertext. Errors:
// fault.Forbidden for all that is not there for p or belongs to an object,
// fault.Unavailable.
func (v *Vault) Delete(ctx context.Context, p authz.Principal, id string) error {
	if _, err := v.ready(ctx, p, authz.DeleteCredential); err != nil {
		return err
	}
	e := audit.Event{
		Type: audit.CredentialDeleted, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.CredentialResource},
	}
	if authz.ValidID(idPrefix, id) {
		e.Resource.ID = id
	}
	denied := false
	err := v.store.Update(ctx, func(tx store.Tx) error {
		e, reason := e, ""
		current, err := find(tx, p.Tenant, e.Resource.ID)
		damaged := errors.Is(err, fault.Internal) // which can be deleted like any other
		if err != nil && !damaged {
			return err
		}
		owner, err := tx.Get(ownerKey(p.Tenant, e.Resource.ID))
		if err != nil {
			return err
		}
		switch {
		case current == nil && !damaged:
			reason = reasonMissing
		case owner != nil && p.Kind != authz.System:
			reason = reasonOwned
		default:
			err = deleteVersions(tx, p.Tenant, e.Resource.ID)
		}
		if denied = reason != ""; denied {
			e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reason}
		}
		return errors.Join(err, v.append(tx, e))
	})
	if err != nil {
		return fmt.Errorf("deleting a credential: %w", err)
	}
	if denied {
		return errDenied
	}
	return nil
}
