package sealing

import (
	"crypto/sha3"
	"maps"
	"slices"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/frame"
)

const (
	specLabel   = "latticekeep/spec-digest/v1"
	valuesLabel = "latticekeep/values-digest/v1"
)

// SpecDigest is the SHA3-256 digest of everything in obj that leads to a new version of its vault entry: credential
// type, TTL and the sealed values. It changes when, and only when, one of them does.
func SpecDigest(obj *v1alpha1.SealedCredential) [32]byte {
	ttl := obj.Spec.TTLDays
	if ttl == 0 {
		ttl = v1alpha1.DefaultTTLDays
	}
	values := ValuesDigest(obj)
	return sha3.Sum256(frame.Join(specLabel,
		[]byte(obj.Spec.CredentialType),
		frame.Uint64(uint64(ttl)),
		values[:],
	))
}

// ValuesDigest is the SHA3-256 digest of the sealed values of obj and what they are bound to in the spec. It tells new
// values from a changed TTL. It covers ciphertext only, so it says nothing about a value.
func ValuesDigest(obj *v1alpha1.SealedCredential) [32]byte {
	sealed := &obj.Spec.Sealed
	fields := [][]byte{
		frame.Uint64(uint64(sealed.Version)),
		[]byte(sealed.Suite),
		[]byte(sealed.KeyID),
		[]byte(scopeOf(&obj.Spec)),
	}
	for _, k := range slices.Sorted(maps.Keys(sealed.Values)) {
		v := sealed.Values[k]
		fields = append(fields, []byte(k), frame.Uint64(uint64(v.SealedAt.Unix())), []byte(v.Data))
	}
	return sha3.Sum256(frame.Join(valuesLabel, fields...))
}
