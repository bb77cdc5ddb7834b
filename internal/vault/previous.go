package vault

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// PreviousVersion names the version of an object's credential that the last rotation replaced,
// while it is readable. Meanwhile consumers move to the new values without an outage. A credential
// has at most one. The object's row, which is under a MAC, says which record it is and when it
// ends. Any other record in its place is ignored.
type PreviousVersion struct {
	Version uint64
	Until   time.Time
}

// previousOf returns the part of the object's row about old when new values replace it at now. It
// returns nil when old ends at once.
func previousOf(old *record.Record, overlap time.Duration, now time.Time) *previousRow {
	p := &previousRow{Version: old.Version, Until: now.Add(overlap).Truncate(time.Microsecond), Digest: old.Digest()}
	if old.ExpiresAt.Before(p.Until) {
		p.Until = old.ExpiresAt
	}
	if !p.readable(now) {
		return nil
	}
	return p
}

// previousPrefix returns the prefix of a credential's previous versions. Each version has its own
// key, so the earlier one is deleted and not overwritten.
func previousPrefix(tenant authz.TenantID, id string) []byte {
	return []byte("former/" + string(tenant) + "/" + id + "/")
}

func previousKey(tenant authz.TenantID, id string, version uint64) []byte {
	return binary.BigEndian.AppendUint64(previousPrefix(tenant, id), version)
}

// endPrefix begins the keys of the index of ends. The index has no MAC; it is compared with the
// object's row.
var endPrefix = []byte("former-end/")

func endKey(until time.Time, tenant authz.TenantID, uid string) []byte {
	b := binary.BigEndian.AppendUint64(bytes.Clone(endPrefix), uint64(until.UnixMicro()))
	return append(b, string(tenant)+"/"+uid...)
}

// previousAt decodes a previous version. Error: record.ErrDamaged, also for a row under the
// key of another version.
func previousAt(key, stored []byte) (*record.Record, error) {
	r, err := record.Decode(stored)
	if err != nil || string(previousKey(r.Tenant, r.ID, r.Version)) != string(key) {
		return nil, record.ErrDamaged
	}
	return r, nil
}

// readablePrevious returns the previous version that the object's row names. It returns nil when
// that version has ended, is missing or is another record.
func readablePrevious(rd store.Reader, tenant authz.TenantID, row *ownerRow, now time.Time) (*PreviousVersion, error) {
	if !row.Previous.readable(now) {
		return nil, nil
	}
	key := previousKey(tenant, row.Credential, row.Previous.Version)
	stored, err := rd.Get(key)
	if err != nil || stored == nil {
		return nil, err
	}
	if r, bad := previousAt(key, stored); bad == nil && r.Digest() == row.Previous.Digest {
		return &PreviousVersion{row.Previous.Version, row.Previous.Until}, nil
	}
	return nil, nil
}

// putPrevious stores the record that row.Previous names.
func putPrevious(tx store.Tx, tenant authz.TenantID, uid string, row *ownerRow, stored []byte) error {
	return errors.Join(
		tx.Put(previousKey(tenant, row.Credential, row.Previous.Version), stored),
		tx.Put(endKey(row.Previous.Until, tenant, uid), nil),
	)
}

// deletePrevious deletes all previous versions of the credential that row names.
func deletePrevious(tx store.Tx, tenant authz.TenantID, uid string, row *ownerRow) error {
	if err := deleteAll(tx, previousPrefix(tenant, row.Credential)); err != nil || row.Previous == nil {
		return err
	}
	return tx.Delete(endKey(row.Previous.Until, tenant, uid))
}

// previousVersions ends the previous versions whose time is over.
type previousVersions struct {
	store  store.Store
	guard  *guard.Guard
	owners ownerRows
	now    func() time.Time
}

// endBatch bounds how many previous versions one transaction ends.
const endBatch = 64

// endDue deletes the previous versions whose end is reached and returns their number.
func (v *previousVersions) endDue(ctx context.Context) (int, error) {
	due := store.Range{From: endPrefix, To: endKey(v.now().Add(time.Microsecond), "", "")}
	n, err := store.Sweep(ctx, v.store, due, endBatch, v.end)
	if err != nil {
		return n, fmt.Errorf("ending previous versions: %w", err)
	}
	return n, nil
}

// end deletes a row of the index of ends, with the previous version that it names if the object's row
// agrees. When somebody has changed one of these rows, nothing is readable, and the row of the index
// stays until they are mended.
func (v *previousVersions) end(tx store.Tx, due []byte) (gone bool, err error) {
	name, uid, _ := strings.Cut(string(due[min(len(due), len(endPrefix)+8):]), "/")
	tenant := authz.TenantID(name)
	row, err := v.owners.get(tx, tenant, uid)
	if errors.Is(err, fault.Internal) {
		row, err = nil, nil // without the object's row nothing is readable
	}
	var stored []byte
	if row != nil && row.Previous != nil && string(endKey(row.Previous.Until, tenant, uid)) == string(due) {
		if stored, err = tx.Get(previousKey(tenant, row.Credential, row.Previous.Version)); err == nil && stored != nil {
			err = deletePrevious(tx, tenant, uid, row)
		}
	}
	if state.IsRefused(err) {
		return false, nil
	}
	if err == nil {
		err = tx.Delete(due)
	}
	if err != nil || stored == nil {
		return err == nil, err // a version that was deleted with its credential has an entry
	}
	version := row.Previous.Version
	row.Previous = nil
	if err := v.owners.put(tx, tenant, uid, row); err != nil {
		return false, err
	}
	return true, appendEvent(v.guard, tx, audit.Event{
		Type: audit.CredentialVersionEnded, Outcome: audit.Success,
		Principal:  authz.Principal{Tenant: tenant, Kind: authz.System, ID: "latticekeep"},
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: row.Credential},
		Attributes: map[string]string{audit.AttributeVersion: strconv.FormatUint(version, 10)},
	})
}
