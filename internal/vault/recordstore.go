package vault

import (
	"errors"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/details"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/idempotency"
	"github.com/latticekeep/latticekeep/internal/vault/kept"
	"github.com/latticekeep/latticekeep/internal/vault/lastread"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/nameindex"
	"github.com/latticekeep/latticekeep/internal/vault/pathindex"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

var errMoved = fault.New(fault.Conflict, "the credential changed meanwhile: retry")

// recordStore changes records together with their rows in the name index and in the history.
type recordStore struct {
	mac.Rows
	names   nameindex.Index
	history history.Rows
	kept    kept.Rows
	details details.Rows
	owners  ownerRows
	past    past.Names
}

// newRows returns all rows of a new credential. The caller makes them before the transaction,
// because others wait for it. No other row in the store has the new id.
func (s recordStore) newRows(r *record.Record) ([]mac.Row, error) {
	rows, err := s.indexRows(r, audit.CredentialSealed, nil)
	return append(rows, mac.Row{Key: record.Key(r.Tenant, r.ID, r.Version), Value: r.Encode()}), err
}

// put stores r as the only version of its credential, with its line in the history and its rows in
// the name index, and deletes the earlier version. o is the object that owns the credential, nil
// for none.
func (s recordStore) put(tx store.Tx, r *record.Record, change audit.EventType, o *Object) error {
	if err := s.unindex(tx, r.Tenant, r.ID); err != nil {
		return err
	}
	if err := mac.DeleteAll(tx, record.Prefix(r.Tenant, r.ID)); err != nil {
		return err
	}
	return errors.Join(
		tx.Put(record.Key(r.Tenant, r.ID, r.Version), r.Encode()),
		s.index(tx, r, change, o),
	)
}

// replace stores next in place of old, if old is still the newest version. Otherwise it returns
// errMoved. With other values it keeps old, where a rule says so, and forgets the request that made old,
// whose row depends on the old ones.
func (s recordStore) replace(tx store.Tx, old, next *record.Record, change audit.EventType) error {
	current, err := record.Find(tx, old.Tenant, old.ID)
	if err != nil {
		return err
	}
	if current == nil || current.Version != old.Version {
		return errMoved
	}
	if next.Name != old.Name {
		err = s.past.Keep(tx, old.Tenant, audit.CredentialResource, old.ID, old.Name)
	}
	if change != audit.CredentialReencrypted {
		err = errors.Join(err, tx.Delete(idempotency.RequestKey(next.Tenant, next.ID)))
	}
	return errors.Join(err, s.put(tx, next, change, nil), s.kept.Replaced(tx, old, next, change != audit.CredentialReencrypted))
}

// Remove deletes all rows of a credential, damaged ones too. Its name is kept for readers of the log.
func (s recordStore) Remove(tx store.Tx, tenant authz.TenantID, id string) error {
	name, err := record.NameOf(tx, tenant, id)
	if isDamaged(err) {
		name, err = "", nil
	}
	return errors.Join(
		err, s.past.Keep(tx, tenant, audit.CredentialResource, id, name),
		s.unindex(tx, tenant, id),
		mac.DeleteAll(tx, history.Prefix(tenant, id)),
		mac.DeleteAll(tx, record.Prefix(tenant, id)),
		mac.DeleteAll(tx, kept.Prefix(tenant, id)),
		mac.DeleteAll(tx, history.PreviousPrefix(tenant, id)), // the object's row may still name one, without effect
		tx.Delete(idempotency.RequestKey(tenant, id)),
		tx.Delete(details.Key(tenant, id)),
		tx.Delete(lastread.Key(tenant, id)),
		tx.Delete(releasedKey(tenant, id)),
	)
}

// noteRead notes that a credential is read, unless it is deleted meanwhile.
func (s recordStore) noteRead(tx store.Tx, tenant authz.TenantID, id string, now time.Time) error {
	key, _, err := record.Newest(tx, tenant, id)
	if state.IsRefused(err) { // somebody changed the row since it was read, and this read is none of that
		err = nil
	}
	if err != nil || key == nil {
		return err
	}
	return lastread.Note(tx, tenant, id, now)
}

// IsObjects implements [lifetime.Rows].
func (s recordStore) IsObjects(rd store.Reader, tenant authz.TenantID, id string) (bool, error) {
	by, err := s.owners.of(rd, tenant, id)
	if err != nil || by.owned {
		return by.owned, err
	}
	left, err := rd.Get(releasedKey(tenant, id))
	return left != nil, err
}

// disown moves a credential whose object is deleted to the section of names without an object. A
// damaged credential is only removed from the index.
func (s recordStore) disown(tx store.Tx, tenant authz.TenantID, id string, current *record.Record) error {
	err := s.unindex(tx, tenant, id)
	if err != nil || current == nil {
		return err
	}
	change, bad := chain.LastChange(tx, tenant, id)
	if bad != nil { // audit verify reports this damage
		if change = audit.CredentialSealed; current.Version > 1 {
			change = audit.CredentialRotated
		}
	}
	return s.index(tx, current, change, nil)
}

// index writes the line in the history and the rows in the indexes of r, and deletes what an object's
// credential does not have: kept versions.
func (s recordStore) index(tx store.Tx, r *record.Record, change audit.EventType, o *Object) error {
	rows, err := s.indexRows(r, change, o)
	if err == nil && o != nil {
		err = mac.DeleteAll(tx, kept.Prefix(r.Tenant, r.ID))
	}
	if err != nil {
		return err
	}
	if err := mac.PutAll(tx, rows); err != nil {
		return err
	}
	return s.history.Trim(tx, r)
}

// indexRows returns the line in the history and the rows in the indexes of names and paths of r.
func (s recordStore) indexRows(r *record.Record, change audit.EventType, o *Object) ([]mac.Row, error) {
	hash := s.names.Hash(r.Tenant, r.Name)
	line, err := s.history.Encode(r, change, hash, o)
	place := mac.Row{Key: pathindex.Key(r.Tenant, r.Name, r.ID), Value: []byte{}}
	return append([]mac.Row{line, place}, s.names.Encode(r, hash, o)...), err
}

// versions returns the history of a credential, newest version first. current is the credential's record,
// nil for none; the same rows are read then. Error: one that isDamaged knows.
func (s recordStore) versions(rd store.Reader, tenant authz.TenantID, id string, current *record.Record, now time.Time) ([]history.Version, error) {
	list, err := s.history.List(rd, tenant, id, current)
	if err != nil {
		return nil, err
	}
	by, err := s.owners.of(rd, tenant, id)
	if err != nil {
		return nil, err
	}
	name := ""
	if current != nil {
		name = current.Name
	}
	readable, err := s.kept.Versions(rd, tenant, id, name)
	if by.owned {
		readable = nil
	}
	if by.row != nil && by.row.Previous.Readable(now) {
		readable = append(readable, by.row.Previous.Version)
	}
	for i, version := range list {
		list[i].Readable = version.Current || slices.Contains(readable, version.Number)
	}
	return list, err
}

// unindex removes a credential from every section of the name index that its record, its newest
// readable line in the history or the row of its object names. When one of them is damaged, the
// others still say where it is.
func (s recordStore) unindex(tx store.Tx, tenant authz.TenantID, id string) error {
	r, err := record.Find(tx, tenant, id)
	if err != nil && !errors.Is(err, fault.Internal) {
		return err
	}
	row, err := s.history.Newest(tx, tenant, id)
	if err != nil {
		return err
	}
	by, err := s.owners.of(tx, tenant, id)
	if err != nil {
		return err
	}
	objects := []*Object{nil}
	if by.row != nil {
		objects = append(objects, &by.row.Object)
	}
	if row != nil && row.Object != nil {
		objects = append(objects, row.Object)
	}
	leave := func(hash string, expires, created time.Time) (err error) {
		for _, o := range objects {
			for _, section := range s.names.Sections(tenant, hash, o) {
				err = errors.Join(err, tx.Delete(nameindex.Key(tenant, section, expires, created, id)))
			}
		}
		return err
	}
	if r == nil && row != nil { // a damaged record does not say its name
		err = pathindex.Remove(tx, tenant, id)
	}
	if r != nil {
		err = errors.Join(tx.Delete(pathindex.Key(tenant, r.Name, id)), leave(s.names.Hash(tenant, r.Name), r.ExpiresAt, r.CreatedAt))
	}
	if row != nil {
		err = errors.Join(err, leave(row.Name, row.ExpiresAt, row.CreatedAt))
	}
	return err
}
