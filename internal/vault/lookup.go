package vault

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// lookup is what an attempt to find a credential came to.
type lookup struct {
	id     string // as asked for or found, empty when there is none that is well formed
	record *record
	until  time.Time // when the record can be opened no more
	digest string    // that the record must have, if not empty
	owned  bool
	values map[string]secret.Bytes
	failed bool // something is there and does not hold
}

// finder tells the id of the credential that is asked for, and "" when no
// credential can be meant.
type finder struct {
	id   func(rd store.Reader) (string, error)
	name string // that the credential must have, if not empty

	// version has l hold the version that is asked for; nil leaves the current
	// one. wanted is the id that was looked up, by the object that owns it.
	version func(rd store.Reader, l *lookup, wanted string, by ownership) error
}

// byID finds the credential of an id that the caller named.
func byID(id string) finder {
	if !authz.ValidID(idPrefix, id) {
		id = ""
	}
	return finder{id: func(store.Reader) (string, error) { return id, nil }}
}

// open looks a credential up, verifies and decrypts it. When there is none, or
// it does not decode, the tenant's decoy is opened in its place: the same
// reads, the same signature and decryption work, and no values. An error means
// that the outcome is unknown.
func (v *Vault) open(ctx context.Context, keys *keyring.Keys, p authz.Principal, which finder) (*lookup, error) {
	decoy, err := v.decoy(keys, p.Tenant)
	if err != nil {
		return nil, err
	}
	l := &lookup{}
	err = v.store.View(ctx, func(rd store.Reader) error { return v.find(l, rd, p, which, decoy.id) })
	if err != nil {
		return nil, fmt.Errorf("reading a credential: %w", err)
	}
	subject := l.record
	if subject == nil || !v.now().Before(l.until) {
		subject = decoy
	}
	if which.version != nil {
		digest := subject.digest() // made of the decoy too, for the same work
		if subject == l.record && l.digest != "" && digest != l.digest {
			l.failed, subject = true, decoy
		}
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

// find reads the record and its owner into l, those of an id that cannot be
// there when none is meant.
func (v *Vault) find(l *lookup, rd store.Reader, p authz.Principal, which finder, absent string) error {
	*l = lookup{}
	id, err := which.id(rd)
	if errors.Is(err, fault.Internal) {
		l.failed, id, err = true, "", nil
	}
	wanted := id
	if l.id = id; id == "" {
		wanted = absent
	}
	r, err2 := find(rd, p.Tenant, wanted)
	by, err3 := v.ownership(rd, p.Tenant, wanted)
	l.record, l.owned = r, by.owned
	if r != nil {
		l.until = r.expiresAt
	}
	if errors.Is(err2, fault.Internal) {
		l.failed, err2 = true, nil
	}
	if r != nil && which.name != "" && r.name != which.name {
		l.failed, l.record = true, nil // the index is not of this state
	}
	if err = errors.Join(err, err2, err3); err == nil && which.version != nil {
		err = which.version(rd, l, wanted, by)
	}
	if by.hides(p) {
		l.record = nil
	}
	return err
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
	return v.opener(r, keys[wrapping], keys[signing])
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

// event says what a lookup came to.
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
	case !now.Before(l.until):
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
