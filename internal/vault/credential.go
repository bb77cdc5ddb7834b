package vault

import (
	"cmp"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

const maxIdempotencyKey = 255

// Credential is the metadata of a credential: everything except its values.
type Credential = listing.Credential

const idPrefix = record.IDPrefix

// newRecord returns a record without its sealed part; see [record.Record.Seal].
func newRecord(tenant authz.TenantID, id string, version uint64, created, now time.Time, req SealRequest) *record.Record {
	r := &record.Record{
		Tenant: tenant, ID: id, Version: version, Name: req.Name, Type: req.Type,
		CreatedAt: created.UTC().Truncate(time.Microsecond), SealedAt: now.UTC().Truncate(time.Microsecond),
	}
	r.SetLifetime(req.ttlDays())
	return r
}

// Unsealed is a credential with its values. The caller zeroes them.
type Unsealed struct {
	Credential
	Values map[string]secret.Bytes
}

// SealRequest asks for a new credential.
type SealRequest struct {
	Name    string
	Type    string
	TTLDays int // 0 means [bounds.DefaultTTLDays]; [bounds.NeverExpires]
	Values  map[string]secret.Bytes

	// IdempotencyKey makes a repeated request safe: 1 to 255 visible ASCII characters, chosen by
	// the caller. Empty means none.
	IdempotencyKey string
}

// ReplaceRequest asks for new values of a credential.
type ReplaceRequest struct {
	Values  map[string]secret.Bytes
	TTLDays int // 0 keeps the credential's current TTL; [bounds.NeverExpires]
	IfMatch Condition
}

func (req SealRequest) ttlDays() int {
	if req.TTLDays == 0 {
		return bounds.DefaultTTLDays
	}
	return req.TTLDays
}

func (req SealRequest) validate() error {
	if err := cmp.Or(bounds.CheckName(req.Name), bounds.CheckType(req.Type), bounds.CheckTTL(req.ttlDays())); err != nil {
		return err
	}
	if len(req.IdempotencyKey) > maxIdempotencyKey || strings.ContainsFunc(req.IdempotencyKey, invisible) {
		return fault.New(fault.Invalid, "Idempotency-Key must have 1 to 255 visible ASCII characters")
	}
	return bounds.CheckValues(req.Values)
}

// values returns the new values, whatever the former ones are.
func (req ReplaceRequest) values(map[string]secret.Bytes) (map[string]secret.Bytes, error) {
	return req.Values, nil
}

func (req ReplaceRequest) validate() error {
	return cmp.Or(checkTTL(req.TTLDays), bounds.CheckValues(req.Values))
}

// checkTTL is [bounds.CheckTTL] where 0 keeps the current one.
func checkTTL(days int) error { return bounds.CheckTTL(cmp.Or(days, bounds.DefaultTTLDays)) }

func invisible(r rune) bool { return r <= ' ' || r > '~' }
