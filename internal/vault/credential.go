package vault

import (
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Bounds of a credential. The API contract and the CRD state the same bounds.
const (
	MaxValues      = 64
	MaxValuesBytes = 256 << 10 // keys and values together
	MaxNameBytes   = 255
	MaxTTLDays     = 3650
	DefaultTTLDays = 90

	maxIdempotencyKey = 255
)

// Credential is the metadata of a credential: everything except its values.
type Credential struct {
	ID        string
	Name      string
	Type      string
	Version   uint64
	CreatedAt time.Time // time of the first version
	SealedAt  time.Time // time of this version
	ExpiresAt time.Time
	Expired   bool
	Owned     bool // a SealedCredential owns it: read-only over REST
}

const idPrefix = record.IDPrefix

// credentialOf returns the record's metadata. owned says that a SealedCredential owns it.
func credentialOf(r *record.Record, now time.Time, owned bool) Credential {
	return Credential{
		ID: r.ID, Name: r.Name, Type: r.Type, Version: r.Version,
		CreatedAt: r.CreatedAt, SealedAt: r.SealedAt, ExpiresAt: r.ExpiresAt,
		Expired: !now.Before(r.ExpiresAt), Owned: owned,
	}
}

// newRecord returns a record without its sealed part; see [record.Record.Seal].
func newRecord(tenant authz.TenantID, id string, version uint64, created, now time.Time, req SealRequest) *record.Record {
	ttl := req.ttlDays()
	now = now.UTC().Truncate(time.Microsecond)
	return &record.Record{
		Tenant: tenant, ID: id, Version: version, Name: req.Name, Type: req.Type, TTLDays: uint64(ttl),
		CreatedAt: created.UTC().Truncate(time.Microsecond), SealedAt: now, ExpiresAt: now.AddDate(0, 0, ttl),
	}
}

// Unsealed is a credential with its values. The caller zeroes them.
type Unsealed struct {
	Credential
	Values map[string]secret.Bytes
}

// Version is the metadata of one version of a credential. Only two versions can have values: the
// current one and, until it ends, the previous version of an object's credential.
type Version struct {
	Number    uint64
	Change    string // event that created it: sealed, rotated or reencrypted
	Current   bool
	SealedAt  time.Time
	ExpiresAt time.Time // as sealed, even if a later version ended it earlier
}

// SealRequest asks for a new credential.
type SealRequest struct {
	Name    string
	Type    string
	TTLDays int // 0 means DefaultTTLDays
	Values  map[string]secret.Bytes

	// IdempotencyKey makes a repeated request safe: 1 to 255 visible ASCII characters, chosen by
	// the caller. Empty means none.
	IdempotencyKey string
}

// ReplaceRequest asks for new values of a credential.
type ReplaceRequest struct {
	Values  map[string]secret.Bytes
	TTLDays int // 0 keeps the credential's current TTL
	IfMatch Condition
}

var (
	typePattern = regexp.MustCompile(`^[a-zA-Z0-9][-._a-zA-Z0-9]{0,62}$`)
	keyPattern  = regexp.MustCompile(`^[-._a-zA-Z0-9]{1,253}$`)
)

func (req SealRequest) ttlDays() int {
	if req.TTLDays == 0 {
		return DefaultTTLDays
	}
	return req.TTLDays
}

func (req SealRequest) validate() error {
	invalid := func(msg string) error { return fault.New(fault.Invalid, msg) }
	if !validName(req.Name) {
		return invalid("name must have 1 to 255 bytes of text without control characters")
	}
	if !typePattern.MatchString(req.Type) {
		return invalid("credential_type must have 1 to 63 letters, digits, '-', '.' or '_', and begin with a letter or digit")
	}
	if ttl := req.ttlDays(); ttl < 1 || ttl > MaxTTLDays {
		return invalid("ttl_days must be 1 to 3650")
	}
	if len(req.IdempotencyKey) > maxIdempotencyKey || strings.ContainsFunc(req.IdempotencyKey, invisible) {
		return invalid("Idempotency-Key must have 1 to 255 visible ASCII characters")
	}
	return validateValues(req.Values)
}

// values returns the new values, whatever the former ones are.
func (req ReplaceRequest) values(map[string]secret.Bytes) (map[string]secret.Bytes, error) {
	return req.Values, nil
}

func (req ReplaceRequest) validate() error {
	if req.TTLDays < 0 || req.TTLDays > MaxTTLDays {
		return fault.New(fault.Invalid, "ttl_days must be 1 to 3650")
	}
	return validateValues(req.Values)
}

func validName(name string) bool {
	return name != "" && len(name) <= MaxNameBytes && utf8.ValidString(name) && !strings.ContainsFunc(name, unicode.IsControl)
}

// validatePath refuses a new name with a segment that would mean another path elsewhere. Names of
// that kind which exist stay as they are.
func validatePath(name string) error {
	for segment := range strings.SplitSeq(name, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return fault.New(fault.Invalid, `name must be a path without empty segments, and without segments "." and ".."`)
		}
	}
	return nil
}

func invisible(r rune) bool { return r <= ' ' || r > '~' }

func validateValues(values map[string]secret.Bytes) error {
	invalid := func(msg string) error { return fault.New(fault.Invalid, msg) }
	if len(values) < 1 || len(values) > MaxValues {
		return invalid("values must have 1 to 64 keys")
	}
	total := 0
	for k, v := range values {
		if !keyPattern.MatchString(k) {
			return invalid("the keys of values must have 1 to 253 letters, digits, '-', '.' or '_'")
		}
		total += len(k) + len(v)
	}
	if total > MaxValuesBytes {
		return invalid("values must be at most 256 KiB in all")
	}
	return nil
}

func zero(values map[string]secret.Bytes) {
	for _, value := range values {
		value.Zero()
	}
}
