// Package record is the signed form in which the vault stores one version of a credential: its
// encoding, its key in the store, and the sealing and opening of its values. It does not decide who
// may read a record, and it writes nothing to the store.
package record

import (
	"bytes"
	"crypto/sha3"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
)

// IDPrefix begins the id of a credential.
const IDPrefix = "cred"

const (
	formatVersion    = 1
	signatureContext = "latticekeep/record/v1"
	digestLabel      = "latticekeep/record-digest/v1"
)

// ErrDamaged is the only error of a record that cannot be decoded or opened.
var ErrDamaged = fault.New(fault.Internal, "the stored record is damaged: find the row with latticekeep doctor, and restore a backup")

// Record is one version of a credential as the store holds it: a version byte, then the fields in
// this order. A string or blob follows its u32 length. A number is a u64. Both are big-endian.
// Times are in Unix microseconds.
//
// Everything up to and including Body is signed. Wrap is not: its own associated data binds it
// to the record, so the seed can be wrapped again without a new signature.
type Record struct {
	Tenant    authz.TenantID
	ID        string
	Version   uint64
	Name      string
	Type      string // credential type
	TTLDays   uint64 // 0: it never expires
	CreatedAt time.Time
	SealedAt  time.Time
	ExpiresAt time.Time
	Body      []byte // envelope.Credential
	Signature []byte // dual signature over everything above
	Wrap      []byte // seed and r under the tenant's wrapping key
}

// Never returns when a credential expires that never does: the last second that RFC 3339 can write.
func Never() time.Time { return time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC) }

// NeverExpires reports whether the credential never expires. In the trash, none does not.
func (r *Record) NeverExpires() bool { return r.ExpiresAt.Equal(Never()) }

// Days returns the days of the lifetime as a request has them.
func (r *Record) Days() int {
	if r.TTLDays == 0 {
		return bounds.NeverExpires
	}
	return int(r.TTLDays)
}

// SetLifetime sets the days of the lifetime, which begins when the version is sealed, and its end.
func (r *Record) SetLifetime(days int) {
	if r.TTLDays, r.ExpiresAt = 0, Never(); days != bounds.NeverExpires {
		r.TTLDays, r.ExpiresAt = uint64(days), r.SealedAt.AddDate(0, 0, days)
	}
}

// IsTrashed reports whether the credential was put in the trash: it expired when the version was sealed.
func (r *Record) IsTrashed() bool { return !r.ExpiresAt.After(r.SealedAt) }

// Until returns until when the record can be read. In the trash that is long ago, so that it does not
// depend on the clock of the process that put it there.
func (r *Record) Until() time.Time {
	if r.IsTrashed() {
		return time.Unix(0, 0)
	}
	return r.ExpiresAt
}

// signed returns the encoding of the signed fields.
func (r *Record) signed() []byte {
	b := make([]byte, 0, 256+len(r.Body)+len(r.Signature)+len(r.Wrap))
	b = append(b, formatVersion)
	b = appendBlob(b, []byte(r.Tenant))
	b = appendBlob(b, []byte(r.ID))
	b = binary.BigEndian.AppendUint64(b, r.Version)
	b = appendBlob(b, []byte(r.Name))
	b = appendBlob(b, []byte(r.Type))
	b = binary.BigEndian.AppendUint64(b, r.TTLDays)
	for _, t := range []time.Time{r.CreatedAt, r.SealedAt, r.ExpiresAt} {
		b = binary.BigEndian.AppendUint64(b, uint64(t.UnixMicro()))
	}
	return appendBlob(b, r.Body)
}

// Encode returns what the store holds.
func (r *Record) Encode() []byte {
	return appendBlob(appendBlob(r.signed(), r.Signature), r.Wrap)
}

// Digest returns SHA3-256 over the signed part and the signature, in lower-case hex. The audit
// entry of the version holds it.
func (r *Record) Digest() string {
	h := sha3.New256()
	frame.Write(h, digestLabel, r.signed(), r.Signature)
	return hex.EncodeToString(h.Sum(nil))
}

func appendBlob(b, blob []byte) []byte {
	return append(binary.BigEndian.AppendUint32(b, uint32(len(blob))), blob...)
}

// fields reads what appendBlob and AppendUint64 wrote.
type fields struct {
	rest []byte
	bad  bool
}

func (f *fields) take(n int) []byte {
	if f.bad || n > len(f.rest) {
		f.bad = true
		return nil
	}
	b := f.rest[:n:n]
	f.rest = f.rest[n:]
	return b
}

func (f *fields) number() uint64 {
	b := f.take(8)
	if f.bad {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

func (f *fields) blob() []byte {
	b := f.take(4)
	if f.bad {
		return nil
	}
	n := binary.BigEndian.Uint32(b)
	if n > math.MaxInt32 {
		f.bad = true
		return nil
	}
	return f.take(int(n))
}

func (f *fields) time() time.Time { return time.UnixMicro(int64(f.number())).UTC() }

// Decode decodes a record. The result shares no memory with row.
func Decode(row []byte) (*Record, error) { return view(bytes.Clone(row)) }

// view is Decode without the copy: the result shares row's memory.
func view(row []byte) (*Record, error) {
	f := fields{rest: row}
	if v := f.take(1); f.bad || v[0] != formatVersion {
		return nil, ErrDamaged
	}
	r := &Record{
		Tenant: authz.TenantID(f.blob()), ID: string(f.blob()), Version: f.number(),
		Name: string(f.blob()), Type: string(f.blob()), TTLDays: f.number(),
		CreatedAt: f.time(), SealedAt: f.time(), ExpiresAt: f.time(),
		Body: f.blob(), Signature: f.blob(), Wrap: f.blob(),
	}
	if f.bad || len(f.rest) != 0 {
		return nil, ErrDamaged
	}
	return r, nil
}

// Seal sets Body, Wrap and Signature for the values.
func (r *Record) Seal(keys *keyring.Keys, values map[string]secret.Bytes) error {
	plaintext := EncodeValues(values)
	defer plaintext.Zero()
	body, wrap, err := envelope.SealCredential(keys.Wrapping, keys.Version, r.context(), plaintext)
	if err != nil {
		return fmt.Errorf("sealing a credential: %w", err)
	}
	if r.Body, err = body.MarshalBinary(); err != nil {
		return fmt.Errorf("encoding a credential: %w", err)
	}
	r.Wrap = wrap
	if r.Signature, err = keys.Signing.Sign(signatureContext, r.signed()); err != nil {
		return fmt.Errorf("signing a credential: %w", err)
	}
	return nil
}

// Open verifies both signatures and then decrypts. wrapping and signing are the versions of the
// tenant's keys that KeyVersions returns. Error: ErrDamaged for all failures.
func (r *Record) Open(wrapping, signing *keyring.Keys) (map[string]secret.Bytes, error) {
	if !signing.Signing.Verify(signatureContext, r.signed(), r.Signature) {
		return nil, ErrDamaged
	}
	body, err := envelope.ParseCredential(r.Body)
	if err != nil {
		return nil, ErrDamaged
	}
	plaintext, err := envelope.OpenCredential(wrapping.Wrapping, r.context(), body, r.Wrap)
	if err != nil {
		return nil, ErrDamaged
	}
	defer plaintext.Zero()
	return decodeValues(plaintext)
}

// KeyVersions returns the versions of the tenant's keys that open the record. Error:
// ErrDamaged.
func (r *Record) KeyVersions() (wrapping, signing uint32, err error) {
	wrapping, err = envelope.WrapKeyVersion(r.Wrap)
	if err == nil {
		signing, err = dualsig.KeyVersion(r.Signature)
	}
	if err != nil {
		return 0, 0, ErrDamaged
	}
	return wrapping, signing, nil
}

func (r *Record) context() envelope.Context {
	return envelope.Context{Tenant: string(r.Tenant), ID: r.ID, Version: r.Version}
}

// The plaintext of a record is a version byte followed by the values in the byte order of their
// keys. Key and value each follow their u32 length.
const valuesVersion = 1

// EncodeValues returns the plaintext for values. The caller zeroes it.
func EncodeValues(values map[string]secret.Bytes) secret.Bytes {
	n := 1
	for k, v := range values {
		n += 8 + len(k) + len(v)
	}
	b := append(make([]byte, 0, n), valuesVersion) // never grows, so no copy stays in memory
	for _, k := range slices.Sorted(maps.Keys(values)) {
		b = appendBlob(appendBlob(b, []byte(k)), values[k])
	}
	return b
}

func decodeValues(plaintext []byte) (map[string]secret.Bytes, error) {
	f := fields{rest: plaintext}
	if v := f.take(1); f.bad || v[0] != valuesVersion {
		return nil, ErrDamaged
	}
	values := make(map[string]secret.Bytes)
	last := ""
	for len(f.rest) > 0 {
		k, v := string(f.blob()), f.blob()
		if f.bad || (len(values) > 0 && k <= last) {
			return nil, ErrDamaged
		}
		values[k], last = bytes.Clone(v), k
		if values[k] == nil {
			values[k] = secret.Bytes{}
		}
	}
	return values, nil
}

// Family begins the keys of all records.
const Family = "credential/"

// TenantPrefix returns the prefix of a tenant's records. A new version is a new row and the old row
// is deleted, so the store scrubs what remains of it.
func TenantPrefix(tenant authz.TenantID) []byte {
	return []byte(Family + string(tenant) + "/")
}

// Prefix returns the prefix of the versions of a credential.
func Prefix(tenant authz.TenantID, id string) []byte {
	return append(TenantPrefix(tenant), id+"/"...)
}

// Key returns the key of a record in the store.
func Key(tenant authz.TenantID, id string, version uint64) []byte {
	return binary.BigEndian.AppendUint64(Prefix(tenant, id), version)
}

// Find returns the newest version of a credential, or nil when there is none. Error:
// ErrDamaged for a row under the key of another record.
func Find(rd store.Reader, tenant authz.TenantID, id string) (*Record, error) {
	key, value, err := Newest(rd, tenant, id)
	if err != nil || key == nil {
		return nil, err
	}
	return At(key, value)
}

// Newest returns the row of the newest version of a credential, or nil when there is none. The slices
// are the store's.
func Newest(rd store.Reader, tenant authz.TenantID, id string) (key, value []byte, err error) {
	newest := store.Prefix(Prefix(tenant, id))
	newest.Reverse = true
	err = rd.Scan(newest, func(k, v []byte) bool {
		key, value = k, v
		return false
	})
	return key, value, err
}

// At decodes the record under a key, and copies it. Error: ErrDamaged, also for a row under the key
// of another record.
func At(key, value []byte) (*Record, error) {
	return ViewAt(key, bytes.Clone(value))
}

// IsOutside reports whether the policies of p do not allow an action on the credential of a row. A
// damaged row has no path, so nobody with a policy reaches it.
func IsOutside(p authz.Principal, a authz.Action, key, value []byte) bool {
	if !p.Access.IsLimited() {
		return false
	}
	r, err := ViewAt(key, value)
	return err != nil || !p.Reaches(a, r.Name)
}

// ViewAt is At without the copy: the result shares value's memory.
func ViewAt(key, value []byte) (*Record, error) {
	r, err := view(value)
	if err != nil || string(Key(r.Tenant, r.ID, r.Version)) != string(key) {
		return nil, ErrDamaged
	}
	return r, nil
}

// NameOf returns the name of a credential of the tenant, expired or not, and "" if there is none with the
// id.
func NameOf(r store.Reader, tenant authz.TenantID, id string) (string, error) {
	if !authz.ValidID(IDPrefix, id) {
		return "", nil
	}
	found, err := Find(r, tenant, id)
	if err != nil || found == nil {
		return "", err
	}
	return found.Name, nil
}
