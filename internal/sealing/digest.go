package sealing

import (
	"cmp"
	"crypto/sha3"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/frame"
)

const (
	specLabel   = "latticekeep/spec-digest/v1"
	sealedLabel = "latticekeep/values-digest/v1"
	madeLabel   = "latticekeep/generate-digest/v1"
	formLabel   = "latticekeep/form-digest/v1"
)

// SpecDigest returns the SHA3-256 digest of every field of obj that leads to a new version of its
// credential: credential type, TTL, and the sealed values or the entries of spec.generate. It
// changes exactly when one of them changes. It covers only ciphertext, so it reveals nothing about
// a value.
func SpecDigest(obj *v1beta1.SealedCredential) [32]byte {
	ttl := obj.Spec.TTLDays
	if ttl == 0 {
		ttl = v1beta1.DefaultTTLDays
	}
	var source [32]byte
	switch {
	case obj.Spec.Sealed != nil:
		source = sealedDigest(obj.Spec.Sealed)
	case len(obj.Spec.Generate) > 0:
		source = generateDigest(obj.Spec.Generate)
	}
	return sha3.Sum256(frame.Join(specLabel,
		[]byte(obj.Spec.CredentialType),
		frame.Uint64(uint64(ttl)),
		source[:],
	))
}

// FormDigest returns the SHA3-256 digest of every field of obj that a later object of its name must
// share to go on with its credential unasked: credential type, source of the values, and target. So
// whoever may only make objects gets kept values nowhere else than where they already were.
func FormDigest(obj *v1beta1.SealedCredential) [32]byte {
	var kind string
	var source [32]byte
	switch {
	case obj.Spec.Sealed != nil:
		kind, source = "sealed", sealedDigest(obj.Spec.Sealed)
	case len(obj.Spec.Generate) > 0:
		kind, source = "generate", generateDigest(obj.Spec.Generate)
	case obj.Spec.ValuesFrom != nil:
		kind, source = "valuesFrom", sha3.Sum256([]byte(obj.Spec.ValuesFrom.SecretRef.Name))
	}
	var target []byte
	if t := obj.Spec.Target.DeepCopy(); t != nil {
		t.Name, t.Type, t.DeletionPolicy = targetName(obj), cmp.Or(t.Type, "Opaque"), cmp.Or(t.DeletionPolicy, v1beta1.DeletionDelete)
		target, _ = json.Marshal(t) // cannot fail: strings, lists and maps, whose keys it sorts
	}
	return sha3.Sum256(frame.Join(formLabel, []byte(obj.Spec.CredentialType), []byte(kind), source[:], target))
}

// sealedDigest covers the sealed values and the spec fields that they are bound to.
func sealedDigest(sealed *v1beta1.Sealed) [32]byte {
	fields := [][]byte{
		frame.Uint64(uint64(sealed.Version)),
		[]byte(sealed.Suite),
		[]byte(sealed.KeyID),
		[]byte(scopeOf(sealed)),
	}
	for _, k := range slices.Sorted(maps.Keys(sealed.Values)) {
		v := sealed.Values[k]
		fields = append(fields, []byte(k), frame.Uint64(uint64(v.SealedAt.Unix())), []byte(v.Data))
	}
	return sha3.Sum256(frame.Join(sealedLabel, fields...))
}

// generateDigest covers what is generated, in any order of the entries.
func generateDigest(entries []v1beta1.Generator) [32]byte {
	entries = slices.SortedFunc(slices.Values(entries), func(a, b v1beta1.Generator) int { return strings.Compare(a.Key, b.Key) })
	var fields [][]byte
	for _, g := range entries {
		fields = append(fields, []byte(g.Key))
		if r := g.Random; r != nil {
			fields = append(fields, []byte("random"), frame.Uint64(uint64(r.Length)), []byte(r.Charset))
		}
		if k := g.KeyPair; k != nil {
			fields = append(fields, []byte("keyPair"), []byte(k.Algorithm), []byte(k.PublicKeyName))
		}
	}
	return sha3.Sum256(frame.Join(madeLabel, fields...))
}
