package vault

import (
	"bytes"
	"crypto/sha3"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

const (
	recordVersion = 1
	recordContext = "latticekeep/record/v1"
	digestLabel   = "latticekeep/record-digest/v1"
)

// record is one version of a credential as the store holds it: a version byte, then the fields in
// this order. A string or blob follows its u32 length. A number is a u64. Both are big-endian.
// Times are in Unix microseconds.
//
// Everything up to and including body is signed. The wrap is not: its own associated data binds it
// to the record, so the seed can be wrapped again without a new signature.
type record struct {
	tenant    authz.TenantID
	id        string
	version   uint64
	name      string
	kind      string // credential type
	ttlDays   uint64
	createdAt time.Time
	sealedAt  time.Time
	expiresAt time.Time
	body      []byte // envelope.Credential
	signature []byte // dual signature over everything above
	wrap      []byte // seed and r under the tenant's wrapping key
}

// newRecord returns a record without its sealed part; see [record.seal].
func newRecord(tenant authz.TenantID, id string, version uint64, created, now time.Time, req SealRequest) *record {
	ttl := req.ttlDays()
	now = now.UTC().Truncate(time.Microsecond)
	return &record{
		tenant: tenant, id: id, version: version, name: req.Name, kind: req.Type, ttlDays: uint64(ttl),
		createdAt: created.UTC().Truncate(time.Microsecond), sealedAt: now, expiresAt: now.AddDate(0, 0, ttl),
	}
}

// signed returns the encoding of the signed fields.
func (r *record) signed() []byte {
	b := make([]byte, 0, 256+len(r.body)+len(r.signature)+len(r.wrap))
	b = append(b, recordVersion)
	b = appendBlob(b, []byte(r.tenant))
	b = appendBlob(b, []byte(r.id))
	b = binary.BigEndian.AppendUint64(b, r.version)
	b = appendBlob(b, []byte(r.name))
	b = appendBlob(b, []byte(r.kind))
	b = binary.BigEndian.AppendUint64(b, r.ttlDays)
	for _, t := range []time.Time{r.createdAt, r.sealedAt, r.expiresAt} {
		b = binary.BigEndian.AppendUint64(b, uint64(t.UnixMicro()))
	}
	return appendBlob(b, r.body)
}

func (r *record) encode() []byte {
	return appendBlob(appendBlob(r.signed(), r.signature), r.wrap)
}

// digest returns SHA3-256 over the signed part and the signature, in lower-case hex. The audit
// entry of the version holds it.
func (r *record) digest() string {
	h := sha3.New256()
	frame.Write(h, digestLabel, r.signed(), r.signature)
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

// decodeRecord decodes a record. The result shares no memory with row.
func decodeRecord(row []byte) (*record, error) { return viewRecord(bytes.Clone(row)) }

// viewRecord is decodeRecord without the copy: the result shares row's memory.
func viewRecord(row []byte) (*record, error) {
	f := fields{rest: row}
	if v := f.take(1); f.bad || v[0] != recordVersion {
		return nil, errDamaged
	}
	r := &record{
		tenant: authz.TenantID(f.blob()), id: string(f.blob()), version: f.number(),
		name: string(f.blob()), kind: string(f.blob()), ttlDays: f.number(),
		createdAt: f.time(), sealedAt: f.time(), expiresAt: f.time(),
		body: f.blob(), signature: f.blob(), wrap: f.blob(),
	}
	if f.bad || len(f.rest) != 0 {
		return nil, errDamaged
	}
	return r, nil
}

// seal sets body, wrap and signature for the values.
func (r *record) seal(keys *keyring.Keys, values map[string]secret.Bytes) error {
	plaintext := encodeValues(values)
	defer plaintext.Zero()
	body, wrap, err := envelope.SealCredential(keys.Wrapping, keys.Version, r.context(), plaintext)
	if err != nil {
		return fmt.Errorf("sealing a credential: %w", err)
	}
	if r.body, err = body.MarshalBinary(); err != nil {
		return fmt.Errorf("encoding a credential: %w", err)
	}
	r.wrap = wrap
	if r.signature, err = keys.Signing.Sign(recordContext, r.signed()); err != nil {
		return fmt.Errorf("signing a credential: %w", err)
	}
	return nil
}

// open verifies both signatures and then decrypts. wrapping and signing are the versions of the
// tenant's keys that keyVersions returns. All failures give the same error.
func (r *record) open(wrapping, signing *keyring.Keys) (map[string]secret.Bytes, error) {
	if !signing.Signing.Verify(recordContext, r.signed(), r.signature) {
		return nil, errDamaged
	}
	body, err := envelope.ParseCredential(r.body)
	if err != nil {
		return nil, errDamaged
	}
	plaintext, err := envelope.OpenCredential(wrapping.Wrapping, r.context(), body, r.wrap)
	if err != nil {
		return nil, errDamaged
	}
	defer plaintext.Zero()
	return decodeValues(plaintext)
}

// keyVersions returns the versions of the tenant's keys that open the record.
func (r *record) keyVersions() (wrapping, signing uint32, err error) {
	wrapping, err = envelope.WrapKeyVersion(r.wrap)
	if err == nil {
		signing, err = dualsig.KeyVersion(r.signature)
	}
	if err != nil {
		return 0, 0, errDamaged
	}
	return wrapping, signing, nil
}

func (r *record) context() envelope.Context {
	return envelope.Context{Tenant: string(r.tenant), ID: r.id, Version: r.version}
}

// credential returns the record's metadata. owned says that a SealedCredential owns it.
func (r *record) credential(now time.Time, owned bool) Credential {
	return Credential{
		ID: r.id, Name: r.name, Type: r.kind, Version: r.version,
		CreatedAt: r.createdAt, SealedAt: r.sealedAt, ExpiresAt: r.expiresAt,
		Expired: !now.Before(r.expiresAt), Owned: owned,
	}
}

// The plaintext of a record is a version byte followed by the values in the byte order of their
// keys. Key and value each follow their u32 length.
const valuesVersion = 1

func encodeValues(values map[string]secret.Bytes) secret.Bytes {
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
		return nil, errDamaged
	}
	values := make(map[string]secret.Bytes)
	last := ""
	for len(f.rest) > 0 {
		k, v := string(f.blob()), f.blob()
		if f.bad || (len(values) > 0 && k <= last) {
			return nil, errDamaged
		}
		values[k], last = bytes.Clone(v), k
		if values[k] == nil {
			values[k] = secret.Bytes{}
		}
	}
	return values, nil
}

const idPrefix = "cred"

// tenantPrefix returns the prefix of a tenant's records. A new version is a new row and the old row
// is deleted, so the store scrubs what remains of it.
func tenantPrefix(tenant authz.TenantID) []byte {
	return []byte("credential/" + string(tenant) + "/")
}

func recordPrefix(tenant authz.TenantID, id string) []byte {
	return append(tenantPrefix(tenant), id+"/"...)
}

func recordKey(tenant authz.TenantID, id string, version uint64) []byte {
	return binary.BigEndian.AppendUint64(recordPrefix(tenant, id), version)
}

// findRecord returns the newest version of a credential, or nil when there is none. It returns
// errDamaged for a row under the key of another record.
func findRecord(rd store.Reader, tenant authz.TenantID, id string) (*record, error) {
	var r *record
	var bad error
	newest := store.Prefix(recordPrefix(tenant, id))
	newest.Reverse = true
	err := rd.Scan(newest, func(key, value []byte) bool {
		r, bad = recordAt(key, value)
		return false
	})
	return r, errors.Join(err, bad)
}

func recordAt(key, value []byte) (*record, error) {
	return viewRecordAt(key, bytes.Clone(value))
}

// viewRecordAt is recordAt without the copy: the result shares value's memory.
func viewRecordAt(key, value []byte) (*record, error) {
	r, err := viewRecord(value)
	if err != nil || string(recordKey(r.tenant, r.id, r.version)) != string(key) {
		return nil, errDamaged
	}
	return r, nil
}
