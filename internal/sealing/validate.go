package sealing

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/envelope"
)

// Expect says what a manifest should be for. Zero fields are not checked.
type Expect struct {
	Namespace string
	Name      string
	Scope     v1beta1.Scope
	Key       *envelope.SealingPublicKey
	Now       time.Time // no value may be sealed more than [MaxAhead] later
}

// MaxAhead is by how much the clock of whoever seals may be ahead. A value of the future would keep
// out the ones after it, which would count as older.
const MaxAhead = 10 * time.Minute

// Validate checks, without any private key, whether obj is well-formed and matches want. It finds
// what the API server would refuse, values that cannot open and a target that cannot be made. Only
// the vault can tell whether a value does open and what it was bound to.
func Validate(obj *v1beta1.SealedCredential, want Expect) []Problem {
	found := check(obj)
	add := found.add
	// kubectl applies a manifest without a namespace to the namespace in want.
	if want.Namespace != "" && obj.Namespace != "" && obj.Namespace != want.Namespace {
		add("metadata.namespace", "the manifest is for another namespace than %s", want.Namespace)
	}
	if want.Name != "" && obj.Name != want.Name {
		add("metadata.name", "the manifest is for another name than %s", want.Name)
	}
	found = append(found, checkComposition(obj)...)
	sealed := obj.Spec.Sealed
	if sealed == nil {
		return found
	}
	if want.Scope != "" && scopeOf(sealed) != want.Scope {
		add("spec.sealed.scope", "the values have another scope than %s; a scope cannot be changed in the manifest: seal them again", want.Scope)
	}
	if want.Key != nil {
		if sealed.KeyID != want.Key.ID() {
			add("spec.sealed.keyID", "the values are sealed for another key than %s; seal them again with this one", want.Key.ID())
		} else if sealed.Suite != v1beta1.Suite(want.Key.Suite()) {
			add("spec.sealed.suite", "the suite is not the key's, which is %s", want.Key.Suite())
		}
	}
	if !want.Now.IsZero() {
		found = append(found, ahead(sealed, want.Now)...)
	}
	return found
}

// Ahead returns a [fault.Invalid] when a value of obj was sealed more than [MaxAhead] after now.
func Ahead(obj *v1beta1.SealedCredential, now time.Time) error {
	if obj.Spec.Sealed == nil {
		return nil
	}
	return invalid(ahead(obj.Spec.Sealed, now))
}

func ahead(sealed *v1beta1.Sealed, now time.Time) report {
	var found report
	for _, k := range slices.Sorted(maps.Keys(sealed.Values)) {
		if at := sealed.Values[k].SealedAt.Time; at.After(now.Add(MaxAhead)) {
			found.add(valuePath(k)+".sealedAt", "is %s, more than %d minutes after now, which is %s; set the clock of the machine that seals, and seal the value again",
				at.UTC().Format(time.RFC3339), int(MaxAhead.Minutes()), now.UTC().Format(time.RFC3339))
		}
	}
	return found
}

// Check returns a [fault.Invalid] when obj is not well-formed: the API server would refuse it, or
// its values cannot open anywhere. [Open] begins with the same check.
func Check(obj *v1beta1.SealedCredential) error { return invalid(check(obj)) }

// check returns all mistakes in obj that do not depend on its purpose, in the order of the
// manifest. The schema of the CRD has the same rules. They are repeated here for manifests that no
// API server has seen.
func check(obj *v1beta1.SealedCredential) report {
	found := checkObject(obj)
	if obj.Spec.Sealed != nil {
		found = append(found, checkSealed(obj.Spec.Sealed)...)
	}
	return found
}

func checkSealed(sealed *v1beta1.Sealed) report {
	var found report
	add := found.add
	if sealed.Version != v1beta1.SealedVersion {
		add("spec.sealed.version", "is %d; this program knows version %d", sealed.Version, v1beta1.SealedVersion)
	}
	smallest := smallestValue(envelope.Suite(sealed.Suite))
	if smallest == 0 {
		add("spec.sealed.suite", "is neither %s nor %s", envelope.SuiteMLKEM768X25519, envelope.SuiteMLKEM768)
	}
	if id, err := hex.DecodeString(sealed.KeyID); err != nil || len(id) != 32 || hex.EncodeToString(id) != sealed.KeyID {
		add("spec.sealed.keyID", "is not the id of a sealing key, which has 64 lower-case hexadecimal digits")
	}
	switch scopeOf(sealed) {
	case v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster:
	default:
		add("spec.sealed.scope", "is none of Strict, Namespace and Cluster")
	}
	if n := len(sealed.Values); n < 1 || n > v1beta1.MaxValues {
		add("spec.sealed.values", "has %d values; it has 1 to %d", n, v1beta1.MaxValues)
	}
	total := 0
	for _, k := range slices.Sorted(maps.Keys(sealed.Values)) {
		v := sealed.Values[k]
		total += len(v.Data)
		if !isDataKey(k) {
			// Not quoted: the key may be a value in the wrong place.
			add("spec.sealed.values", "a data key is not 1 to 253 letters, digits, '-', '_' or '.'")
			continue
		}
		if at := v.SealedAt.Time; at.IsZero() {
			add(valuePath(k)+".sealedAt", "is missing")
		} else if at.Nanosecond() != 0 {
			add(valuePath(k)+".sealedAt", "is not in whole seconds")
		}
		data, err := decode(v.Data)
		switch {
		case err != nil:
			add(valuePath(k)+".data", "%v; copy the manifest again or seal the value again", err)
		case len(data) < 1 || data[0] != valueVersion:
			add(valuePath(k)+".data", "is not a sealed value of a version that this program knows; seal the value again")
		case len(data) < smallest:
			add(valuePath(k)+".data", "has %d bytes, and a sealed value of suite %s at least %d: it was cut or belongs to another suite; seal the value again",
				len(data), sealed.Suite, smallest)
		}
	}
	if total > v1beta1.MaxSealedText {
		add("spec.sealed.values", "the values together are larger than 256 KiB; split them over several objects")
	}
	return found
}

// valueVersion is the first byte of every sealed value.
const valueVersion = 1

// smallestValue returns the length of an empty sealed value in bytes: version, encapsulated key
// (ML-KEM-768: 1088, FIPS 203 §8; X25519: 32) and AES-256-GCM tag. It returns 0 for an unknown
// suite.
func smallestValue(s envelope.Suite) int {
	switch s {
	case envelope.SuiteMLKEM768X25519:
		return 1 + 1088 + 32 + 16
	case envelope.SuiteMLKEM768:
		return 1 + 1088 + 16
	}
	return 0
}

// decode reads standard base64 in its canonical form only.
func decode(text string) ([]byte, error) {
	data, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || strings.ContainsAny(text, "\r\n") {
		return nil, errors.New("is not standard base64")
	}
	return data, nil
}

func valuePath(dataKey string) string { return "spec.sealed.values[" + dataKey + "]" }
