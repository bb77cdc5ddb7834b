package vault

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// MaxVersions is how many versions of a credential are remembered.
const MaxVersions = 100

// Version is what is known of one version of a credential. Only the current
// one still has values, and the former one of an object's until its end.
type Version struct {
	Number    uint64
	Change    string // what made it: sealed, rotated or reencrypted
	Current   bool
	SealedAt  time.Time
	ExpiresAt time.Time // as it was sealed; a later version ended it earlier
}

// changes names, for [Version], the events that make a version.
var changes = map[audit.EventType]string{
	audit.CredentialSealed:      "sealed",
	audit.CredentialRotated:     "rotated",
	audit.CredentialReencrypted: "reencrypted",
}

// versionRow is one line of a credential's history, under its version, which
// stays when the version is gone. It also says where the version stood in the
// index of names, so that a credential leaves that when its record is damaged.
type versionRow struct {
	Change    string    `json:"change"`
	CreatedAt time.Time `json:"created_at"` // of the first version
	SealedAt  time.Time `json:"sealed_at"`
	ExpiresAt time.Time `json:"expires_at"`
	Name      string    `json:"name"`             // its keyed hash, as in the index
	Object    *Object   `json:"object,omitempty"` // that owned it
}

func historyPrefix(tenant authz.TenantID, id string) []byte {
	return []byte("credential-version/" + string(tenant) + "/" + id + "/")
}

func versionKey(tenant authz.TenantID, id string, version uint64) []byte {
	return binary.BigEndian.AppendUint64(historyPrefix(tenant, id), version)
}

func (v *Vault) decodeVersion(key, stored []byte) (uint64, *versionRow, error) {
	b, err := v.keys.OpenRow(key, stored)
	if err != nil {
		return 0, nil, err
	}
	var row versionRow
	if err := json.Unmarshal(b, &row); err != nil || len(key) < 8 {
		return 0, nil, errDamaged
	}
	return binary.BigEndian.Uint64(key[len(key)-8:]), &row, nil
}

// Versions returns what is known of a credential's versions, newest first and
// at most [MaxVersions]; the read is recorded before it returns. It opens
// nothing. Errors: fault.Forbidden for all that is not there for p,
// fault.Unavailable.
func (v *Vault) Versions(ctx context.Context, p authz.Principal, id string) ([]Version, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListVersions); err != nil {
		return nil, err
	}
	absent := authz.NewID(idPrefix)
	l := &lookup{}
	var list []Version
	err := v.store.View(ctx, func(rd store.Reader) error {
		if err := v.find(l, rd, p, byID(id), absent); err != nil {
			return err
		}
		wanted := l.id
		if l.record == nil {
			wanted = absent
		}
		var err error
		list, err = v.history(rd, p.Tenant, wanted, l.record)
		if errors.Is(err, fault.Internal) {
			l.failed, err = true, nil
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading a credential's versions: %w", err)
	}
	e := l.event(audit.CredentialListed, p, v.now())
	if e.Outcome != audit.Success {
		return nil, v.deny(ctx, e)
	}
	e.Attributes["count"] = strconv.Itoa(len(list))
	if err := v.guard.Record(ctx, e); err != nil {
		return nil, err
	}
	return list, nil
}

// history reads the rows of a credential; current is its record. A record whose
// own row is missing is damage.
func (v *Vault) history(rd store.Reader, tenant authz.TenantID, id string, current *record) ([]Version, error) {
	list := []Version{}
	rng := store.Prefix(historyPrefix(tenant, id))
	rng.Reverse = true
	var bad error
	err := rd.Scan(rng, func(key, value []byte) bool {
		number, row, err := v.decodeVersion(key, value)
		if err != nil {
			bad = err
			return false
		}
		list = append(list, Version{
			Number: number, Change: row.Change, Current: current != nil && number == current.version,
			SealedAt: row.SealedAt, ExpiresAt: row.ExpiresAt,
		})
		return true
	})
	if err := errors.Join(err, bad); err != nil {
		return nil, err
	}
	if current != nil && (len(list) == 0 || !list[0].Current) {
		return nil, errDamaged
	}
	return list, nil
}
