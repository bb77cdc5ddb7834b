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
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A former version is the record that a rotation of an object's credential
// replaced, kept beside the current one until its end, so that consumers can
// move to the new values without an outage. There is at most one. The object's
// row, which is under a MAC, says which it is and when it ends; a record that
// stands in its place without that is nothing.

// Former names the former version of an object's credential while it is
// readable.
type Former struct {
	Version uint64
	Until   time.Time
}

// formerRow is what the object's row says of the former version.
type formerRow struct {
	Version uint64    `json:"version"`
	Until   time.Time `json:"until"`
	Digest  string    `json:"digest"` // of its record
}

func (f *formerRow) readable(now time.Time) bool { return f != nil && now.Before(f.Until) }

// formerOf returns what is said of old when new values replace it at now: nil
// when it ends there and then.
func formerOf(old *record, overlap time.Duration, now time.Time) *formerRow {
	f := &formerRow{Version: old.version, Until: now.Add(overlap).Truncate(time.Microsecond), Digest: old.digest()}
	if old.expiresAt.Before(f.Until) {
		f.Until = old.expiresAt
	}
	if !f.readable(now) {
		return nil
	}
	return f
}

// Rows: the record, and an index of ends, whose word is checked against the
// object's row. Each version has a key of its own, so that the one before is
// deleted, not overwritten.
func formerPrefix(tenant authz.TenantID, id string) []byte {
	return []byte("former/" + string(tenant) + "/" + id + "/")
}

func formerKey(tenant authz.TenantID, id string, version uint64) []byte {
	return binary.BigEndian.AppendUint64(formerPrefix(tenant, id), version)
}

var endPrefix = []byte("former-end/")

func endKey(until time.Time, tenant authz.TenantID, uid string) []byte {
	b := binary.BigEndian.AppendUint64(bytes.Clone(endPrefix), uint64(until.UnixMicro()))
	return append(b, string(tenant)+"/"+uid...)
}

// formerAt decodes a former version. A row that stands under another key than
// its own is damage.
func formerAt(key, stored []byte) (*record, error) {
	r, err := decodeRecord(stored)
	if err != nil || string(formerKey(r.tenant, r.id, r.version)) != string(key) {
		return nil, errDamaged
	}
	return r, nil
}

// readableFormer returns the former version that the object's row names, nil
// when it has ended, is not there or is not the one.
func readableFormer(rd store.Reader, tenant authz.TenantID, row *ownedRow, now time.Time) (*Former, error) {
	if !row.Former.readable(now) {
		return nil, nil
	}
	key := formerKey(tenant, row.Credential, row.Former.Version)
	stored, err := rd.Get(key)
	if err != nil || stored == nil {
		return nil, err
	}
	if r, bad := formerAt(key, stored); bad == nil && r.digest() == row.Former.Digest {
		return &Former{row.Former.Version, row.Former.Until}, nil
	}
	return nil, nil
}

// keepFormer stores the record that row.Former speaks of.
func keepFormer(tx store.Tx, tenant authz.TenantID, uid string, row *ownedRow, stored []byte) error {
	return errors.Join(
		tx.Put(formerKey(tenant, row.Credential, row.Former.Version), stored),
		tx.Put(endKey(row.Former.Until, tenant, uid), nil),
	)
}

// dropFormer deletes whatever former version there is of the credential that
// row speaks of.
func dropFormer(tx store.Tx, tenant authz.TenantID, uid string, row *ownedRow) error {
	err := deleteAll(tx, formerPrefix(tenant, row.Credential))
	if row.Former != nil {
		err = errors.Join(err, tx.Delete(endKey(row.Former.Until, tenant, uid)))
	}
	return err
}

// UnsealVersion is [Vault.Unseal] of one version: the current one, or the former
// one until its end, which is then the ExpiresAt of the answer. Any other is not
// there.
func (v *Vault) UnsealVersion(ctx context.Context, p authz.Principal, id string, version uint64) (Unsealed, error) {
	return v.unseal(ctx, p, v.byVersion(p.Tenant, id, version))
}

// byVersion finds one version of a credential. The same rows are read and
// verified, whether there is an object, a former version, or anything at all.
func (v *Vault) byVersion(tenant authz.TenantID, id string, version uint64) finder {
	which := byID(id)
	which.version = func(rd store.Reader, l *lookup, wanted string, by ownership) error {
		former := formerKey(tenant, wanted, version)
		kept, err := rd.Get(former)
		if err != nil {
			return err
		}
		current, row := l.record, by.row
		if current == nil || current.version == version {
			return nil
		}
		l.record = nil
		switch {
		case by.damaged:
			l.failed = true
		case row == nil || kept == nil || row.Version != current.version || row.Former == nil || row.Former.Version != version:
		default:
			if l.record, err = formerAt(former, kept); err != nil {
				l.failed = true
			}
			l.until, l.digest = row.Former.Until, row.Former.Digest
		}
		return nil
	}
	return which
}

// endBatch bounds how many former versions one transaction of [Vault.Sweep]
// ends.
const endBatch = 64

// endFormers deletes the former versions whose end has come and returns how many
// there were.
func (v *Vault) endFormers(ctx context.Context) (n int, err error) {
	due := store.Range{From: endPrefix, To: endKey(v.now().Add(time.Microsecond), "", "")}
	for {
		var keys [][]byte
		err := v.store.View(ctx, func(rd store.Reader) error {
			return rd.Scan(due, func(key, _ []byte) bool {
				keys = append(keys, bytes.Clone(key))
				return len(keys) < endBatch
			})
		})
		if err == nil && len(keys) > 0 {
			err = v.store.Update(ctx, func(tx store.Tx) error {
				for _, key := range keys {
					if err := v.endFormer(tx, key); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err != nil {
			return n, fmt.Errorf("ending former versions: %w", err)
		}
		if n += len(keys); len(keys) < endBatch {
			return n, nil
		}
	}
}

// endFormer ends the former version that a row of the index of ends speaks of,
// if the object's row says the same.
func (v *Vault) endFormer(tx store.Tx, end []byte) error {
	if err := tx.Delete(end); err != nil {
		return err
	}
	name, uid, _ := strings.Cut(string(end[min(len(end), len(endPrefix)+8):]), "/")
	tenant := authz.TenantID(name)
	row, err := v.getOwned(tx, tenant, uid)
	if errors.Is(err, fault.Internal) {
		return nil // nothing is readable without the row
	}
	if err != nil || row == nil || row.Former == nil || string(endKey(row.Former.Until, tenant, uid)) != string(end) {
		return err
	}
	version := row.Former.Version
	kept, err := tx.Get(formerKey(tenant, row.Credential, version))
	if err != nil {
		return err
	}
	err = dropFormer(tx, tenant, uid, row)
	row.Former = nil
	if err = errors.Join(err, v.putOwned(tx, tenant, uid, row)); err != nil || kept == nil {
		return err // it went with the credential, and that is recorded
	}
	return v.append(tx, audit.Event{
		Type: audit.CredentialVersionEnded, Outcome: audit.Success,
		Principal:  authz.Principal{Tenant: tenant, Kind: authz.System, ID: "latticekeep"},
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: row.Credential},
		Attributes: map[string]string{audit.AttributeVersion: strconv.FormatUint(version, 10)},
	})
}
