package vault

import (
	"cmp"
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
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/lastread"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Reference says which credential a caller asks for.
type Reference struct {
	id, name string
	version  uint64
	by       referenceKind
}

type referenceKind int

const (
	refersToCurrent referenceKind = iota
	refersToVersion
	refersToName
)

// ByID refers to the current version of a credential.
func ByID(id string) Reference { return Reference{id: id, by: refersToCurrent} }

// ByVersion refers to one version of a credential.
func ByVersion(id string, n uint64) Reference {
	return Reference{id: id, version: n, by: refersToVersion}
}

// ByName refers to the current version of the credential with a name.
func ByName(name string) Reference { return Reference{name: name, by: refersToName} }

// Changes reports whether the reference leads to another version once there is one.
func (r Reference) Changes() bool { return r.by != refersToVersion }

// Read returns a credential with its values. It verifies both signatures before it decrypts, and
// records the read before it returns. Errors: fault.Forbidden for a credential that does not exist
// for p, fault.Unavailable.
//
// By version there are the current one, those that a rule keeps, and the previous one until it ends:
// ExpiresAt of the answer is then that end. By name it prefers a credential that an object owns; for a
// ServiceAccount, only objects of its own namespace count. When no object has one, not even an expired one,
// it takes a credential without an object. Among several active credentials it takes the one created last.
// If more than 1000 are active, it compares only the 1000 that expire last.
func (v *Vault) Read(ctx context.Context, p authz.Principal, r Reference) (Unsealed, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	keys, err := v.ready(ctx, p, authz.UnsealCredential)
	if err != nil {
		return Unsealed{}, err
	}
	found, err := v.open(ctx, keys, p, v.records.finder(p, r, v.now()))
	if err != nil {
		return Unsealed{}, err
	}
	now := v.now()
	e := found.event(audit.CredentialUnsealed, p, now)
	if e.Outcome == audit.Success && !lastread.IsNoted(found.read, now) {
		err = v.store.Update(ctx, func(tx store.Tx) error {
			return errors.Join(v.records.noteRead(tx, p.Tenant, found.id, now), appendEvent(v.guard, tx, e))
		})
	} else {
		err = recordAccess(ctx, v.guard, e)
	}
	if err != nil {
		secret.ZeroAll(found.values)
		return Unsealed{}, err
	}
	c := listing.CredentialOf(found.record, now, found.owned)
	c.ExpiresAt = found.until
	return Unsealed{c, found.values}, nil
}

// Held is a version of a credential that a caller has already.
type Held struct{ ID, EntityTag string }

func heldOf(found *lookup) *Held {
	return &Held{found.id, record.EntityTag(found.id, found.record.Version)}
}

// FindHeld returns the version that p would read, if tags name it: p then has its values already. It
// opens nothing, and records that p asked: once an hour, with a count. waits says that p goes on to ask
// [Vault.StillHeld]. Otherwise it returns nil and records nothing: the caller goes on to [Vault.Read]. Errors:
// fault.Forbidden without the right to unseal, fault.Unavailable.
func (v *Vault) FindHeld(ctx context.Context, p authz.Principal, r Reference, tags Condition, waits bool) (*Held, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.UnsealCredential); err != nil {
		return nil, err
	}
	found, err := v.look(ctx, p, v.records.finder(p, r, v.now()), nil)
	if err != nil || !found.isNamed(tags, v.now()) {
		return nil, err
	}
	e := found.event(audit.CredentialListed, p, v.now())
	if waits {
		e.Attributes[audit.AttributeWait] = "true"
	}
	if err := v.guard.RecordRepeated(ctx, e); err != nil {
		return nil, err
	}
	return heldOf(found), nil
}

// StillHeld returns the version that p would read if tags still name it, or nil. It is for repeated looks
// after [Vault.FindHeld], and records nothing. Error: fault.Unavailable.
func (v *Vault) StillHeld(ctx context.Context, p authz.Principal, r Reference, tags Condition) (*Held, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	found, err := v.look(ctx, p, v.records.finder(p, r, v.now()), nil)
	if err != nil || !found.isNamed(tags, v.now()) {
		return nil, err
	}
	return heldOf(found), nil
}

// lookup is the result of a search for a credential.
type lookup struct {
	id      string // id that was asked for or found; empty when it is not well-formed or nothing was found
	record  *record.Record
	until   time.Time // when the record stops being readable
	read    time.Time // hour in which it was read last, for who opens it
	digest  string    // digest that the record must have, if not empty
	owned   bool
	values  map[string]secret.Bytes
	failed  bool // a row exists and its integrity check failed
	outside bool // outside the policies of the caller, so it does not exist
}

// finder says which credential is asked for.
type finder struct {
	// id returns the credential's id, or "" when no credential can be meant.
	id      func(rd store.Reader) (string, error)
	name    string                                                // name that the credential must have, if not empty
	action  authz.Action                                          // what the policies of the caller must allow on its path
	until   func(store.Reader, *record.Record) (time.Time, error) // until when it can be opened; nil: until it expires
	outside bool                                                  // the name is outside these policies, so none is looked up

	// version replaces the record of l by the version that is asked for; nil keeps the current one.
	// id is the id that was looked up, and by says which object owns it.
	version func(rd store.Reader, l *lookup, id string, by ownership) error
}

// finder finds what r names for a caller that reads.
func (s recordStore) finder(p authz.Principal, r Reference, now time.Time) finder {
	switch r.by {
	case refersToCurrent:
		return byID(authz.UnsealCredential, r.id)
	case refersToVersion:
		return s.byVersion(p.Tenant, r.id, r.version)
	}
	name := r.name
	outside := !p.Reaches(authz.UnsealCredential, name)
	if outside || !bounds.IsName(name) {
		name = "" // no credential has this name
	}
	query := s.names.Query(p, name, now)
	return finder{name: name, action: authz.UnsealCredential, outside: outside,
		id: func(rd store.Reader) (string, error) { return s.names.Find(rd, query) }}
}

// byID finds the credential with an id that the caller named, for an action.
func byID(a authz.Action, id string) finder {
	if !authz.ValidID(idPrefix, id) {
		id = ""
	}
	return finder{action: a, id: func(store.Reader) (string, error) { return id, nil }}
}

// byVersion finds one version of a credential. It reads and verifies the same rows, whether or not
// an object, an earlier version or the credential itself exists.
func (s recordStore) byVersion(tenant authz.TenantID, id string, version uint64) finder {
	which := byID(authz.UnsealCredential, id)
	which.version = func(rd store.Reader, l *lookup, id string, by ownership) error {
		key := history.PreviousKey(tenant, id, version)
		stored, err := rd.Get(key)
		if err != nil {
			return err
		}
		current, row := l.record, by.row
		kept, err := s.kept.Find(rd, current, tenant, id, version)
		if err != nil {
			return err
		}
		if current == nil || current.Version == version {
			return nil
		}
		l.record = nil
		switch {
		case by.damaged:
			l.failed = true
		case !by.owned && kept != nil:
			l.record = kept // readable as long as the credential is
		case row == nil || stored == nil || row.Version != current.Version || row.Previous == nil || row.Previous.Version != version:
		default:
			if l.record, err = history.PreviousAt(key, stored); err != nil {
				l.failed = true
			}
			l.until, l.digest = row.Previous.Until, row.Previous.Digest
		}
		return nil
	}
	return which
}

// open looks a credential up, verifies its signatures and decrypts it. When there is no such
// credential, it has expired, or its row does not decode, open opens the tenant's decoy instead.
// That takes the same reads and the same signature and decryption work, and yields no values. An
// error means that the outcome is unknown.
func (v *Vault) open(ctx context.Context, keys *keyring.Keys, p authz.Principal, which finder) (*lookup, error) {
	decoy, err := v.decoys.of(keys, p.Tenant, v.now())
	if err != nil {
		return nil, err
	}
	l := &lookup{}
	err = v.store.View(ctx, func(rd store.Reader) (err error) {
		if err = v.find(l, rd, p, which, decoy.ID); err == nil {
			l.read, err = lastread.At(rd, p.Tenant, cmp.Or(l.id, decoy.ID))
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading a credential: %w", err)
	}
	subject := l.record
	if subject == nil || !v.now().Before(l.until) {
		subject = decoy
	}
	if which.version != nil {
		digest := subject.Digest() // computed for the decoy too, for equal work
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

// look finds a credential without opening it. If read is not nil, look calls it to read further rows of the
// id. When there is no credential, read gets an id that does not exist.
func (v *Vault) look(ctx context.Context, p authz.Principal, which finder, read func(rd store.Reader, l *lookup, id string) error) (*lookup, error) {
	absent := authz.NewID(idPrefix)
	l := &lookup{}
	err := v.store.View(ctx, func(rd store.Reader) error {
		err := v.find(l, rd, p, which, absent)
		if err != nil || read == nil {
			return err
		}
		wanted := l.id
		if l.record == nil {
			wanted = absent
		}
		return read(rd, l, wanted)
	})
	if err != nil {
		return nil, fmt.Errorf("reading a credential's metadata: %w", err)
	}
	return l, nil
}

// find reads the record and its owner into l. When no credential can be meant, it reads the rows of
// absent, an id that does not exist.
func (v *Vault) find(l *lookup, rd store.Reader, p authz.Principal, which finder, absent string) error {
	*l = lookup{outside: which.outside}
	id, err := which.id(rd)
	if isDamaged(err) {
		l.failed, id, err = true, "", nil
	}
	wanted := id
	if l.id = id; id == "" {
		wanted = absent
	}
	r, err2 := record.Find(rd, p.Tenant, wanted)
	by, err3 := v.records.owners.of(rd, p.Tenant, wanted)
	l.record, l.owned = r, by.owned
	if r != nil {
		l.until = r.Until()
	}
	var err4 error
	if which.until != nil { // the same reads, whether or not there is one
		l.until, err4 = which.until(rd, cmp.Or(r, &record.Record{}))
	}
	if isDamaged(err2) {
		l.failed, err2 = true, nil
	}
	if state.IsRefused(err3) {
		l.failed, l.record, err3 = true, nil, nil
	}
	if r != nil && which.name != "" && r.Name != which.name {
		l.failed, l.record = true, nil // the index and the record are from different states
	}
	if err = errors.Join(err, err2, err3, err4); err == nil && which.version != nil {
		if err = which.version(rd, l, wanted, by); isDamaged(err) {
			l.failed, l.record, err = true, nil, nil
		}
	}
	l.outside = l.outside || r != nil && !p.Reaches(which.action, r.Name)
	if l.outside || by.hides(p) {
		l.record = nil
	}
	return err
}

// openRecord opens a record with the current keys, or with the earlier versions that the record
// names.
func (v *Vault) openRecord(ctx context.Context, current *keyring.Keys, r *record.Record) (map[string]secret.Bytes, error) {
	wrapping, signing, err := r.KeyVersions()
	if err != nil {
		return nil, err
	}
	keys := map[uint32]*keyring.Keys{current.Version: current}
	for _, version := range []uint32{wrapping, signing} {
		if keys[version] != nil {
			continue
		}
		if keys[version], err = v.keys.Version(ctx, r.Tenant, version); err != nil {
			return nil, fmt.Errorf("opening a credential: %w", err)
		}
	}
	return v.opener(r, keys[wrapping], keys[signing])
}

// decoys holds a record of each tenant that is not in the store.
type decoys struct{ sync.Map }

// of returns the decoy of a tenant.
func (d *decoys) of(keys *keyring.Keys, tenant authz.TenantID, now time.Time) (*record.Record, error) {
	if known, ok := d.Load(tenant); ok {
		r := known.(*record.Record)
		if wrapping, _, err := r.KeyVersions(); err == nil && wrapping == keys.Version {
			return r, nil
		}
	}
	r := newRecord(tenant, authz.NewID(idPrefix), 1, now, now, SealRequest{})
	if err := r.Seal(keys, map[string]secret.Bytes{"decoy": make(secret.Bytes, 64)}); err != nil {
		return nil, fmt.Errorf("sealing a decoy: %w", err)
	}
	d.Store(tenant, r)
	return r, nil
}

// isNamed reports whether the lookup found a version that can be read and that tags name.
func (l *lookup) isNamed(tags Condition, now time.Time) bool {
	return l.record != nil && !l.failed && now.Before(l.until) && (l.digest == "" || l.record.Digest() == l.digest) && tags.Names(l.id, l.record.Version)
}

// event returns the entry of a lookup.
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
	case l.outside:
		e.Attributes[audit.AttributeReason] = string(authz.OutsidePolicy)
	case l.record == nil:
		e.Attributes[audit.AttributeReason] = reasonMissing
	case !now.Before(l.until):
		e.Attributes[audit.AttributeReason] = reasonExpired
	default:
		e.Outcome = audit.Success
		e.Attributes[audit.AttributeVersion] = strconv.FormatUint(l.record.Version, 10)
	}
	return e
}
