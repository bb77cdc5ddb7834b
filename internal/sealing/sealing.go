// Package sealing makes, checks and opens SealedCredential manifests. It also handles the signed
// document that carries the public key for sealing.
//
// Each value is sealed separately with HPKE (see package envelope). It is bound to suite, sealing
// key, scope, namespace, name and credential type. One function takes these from the manifest, so
// the same fields decide when sealing and when opening. Labels, annotations and everything else in
// a manifest have no influence. The data key and the time of sealing are bound as associated data.
//
// HPKE's base mode says what a value is bound to, not who sealed it: everybody with the public key
// can seal. Kubernetes decides what may be applied to a namespace.
//
// Every mistake of a manifest's author is a [fault.Invalid]. Its message names the place and the
// remedy. Messages may name data keys and metadata, which are not secret. They never quote a value,
// sealed or not.
//
// The package has no clock, no store and no network. Its callers fetch key documents, keep private
// keys, and remember which values were accepted last.
package sealing

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// header is the only mapping from a manifest to the fields that its values are bound to.
func header(spec *v1beta1.SealedCredentialSpec, namespace, name string) envelope.Header {
	return envelope.Header{
		Suite:          envelope.Suite(spec.Sealed.Suite),
		KeyID:          spec.Sealed.KeyID,
		Scope:          envelope.Scope(scopeOf(spec.Sealed)),
		Namespace:      namespace,
		Name:           name,
		CredentialType: spec.CredentialType,
	}
}

// Request describes the manifest that [Seal] makes.
type Request struct {
	Namespace      string // namespace of the object; may be empty with scope Cluster only
	Name           string // name of the object
	CredentialType string
	TTLDays        int32         // 0 leaves the default to the API server
	Scope          v1beta1.Scope // "" means Strict
	Values         map[string]secret.Bytes
}

// Seal returns the manifest of r. Its values are sealed at now, in whole seconds, for the holder of
// key's private half. Seal refuses what the API server would refuse.
func Seal(key *envelope.SealingPublicKey, r Request, now time.Time) (*v1beta1.SealedCredential, error) {
	obj := &v1beta1.SealedCredential{
		TypeMeta: metav1.TypeMeta{
			APIVersion: v1beta1.GroupVersion.String(),
			Kind:       v1beta1.KindSealedCredential,
		},
		ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: r.Name},
		Spec: v1beta1.SealedCredentialSpec{
			CredentialType: r.CredentialType,
			TTLDays:        r.TTLDays,
			Sealed: &v1beta1.Sealed{
				Version: v1beta1.SealedVersion,
				Suite:   v1beta1.Suite(key.Suite()),
				KeyID:   key.ID(),
				Scope:   r.Scope,
				Values:  make(map[string]v1beta1.SealedValue, len(r.Values)),
			},
		},
	}
	obj.Spec.Sealed.Scope = scopeOf(obj.Spec.Sealed)
	if r.Namespace == "" && obj.Spec.Sealed.Scope != v1beta1.ScopeCluster {
		return nil, fault.New(fault.Invalid, "the namespace is missing: with scope Strict or Namespace the values are bound to it")
	}

	if found := checkObject(obj); len(found) > 0 {
		return nil, invalid(found)
	}

	at := now.UTC().Truncate(time.Second)
	h := header(&obj.Spec, r.Namespace, r.Name)
	for _, k := range slices.Sorted(maps.Keys(r.Values)) {
		data, err := key.SealValue(h, k, at, r.Values[k])
		if err != nil {
			return nil, fmt.Errorf("sealing a value: %w", err)
		}
		obj.Spec.Sealed.Values[k] = v1beta1.SealedValue{
			SealedAt: metav1.Time{Time: at},
			Data:     base64.StdEncoding.EncodeToString(data),
		}
	}
	if found := checkSealed(obj.Spec.Sealed); len(found) > 0 {
		return nil, invalid(found)
	}
	return obj, nil
}

var errNotSealed = fault.New(fault.Invalid, "spec.sealed: is missing")

// Open checks obj, which has sealed values, and opens them. lookup returns the private sealing key
// with an id. It fails with fault.NotFound when no usable key has this id; that message is for the
// author of the manifest. Open returns any other failure of lookup as an infrastructure error. All
// other errors are [fault.Invalid] and address the author. The caller owns the values and zeroes
// them.
func Open(obj *v1beta1.SealedCredential, lookup func(keyID string) (*envelope.SealingKey, error)) (map[string]secret.Bytes, error) {
	if found := check(obj); len(found) > 0 {
		return nil, invalid(found)
	}
	sealed := obj.Spec.Sealed
	if sealed == nil {
		return nil, errNotSealed
	}
	key, err := lookup(sealed.KeyID)
	if errors.Is(err, fault.NotFound) {
		return nil, fault.Wrap(fault.Invalid, "spec.sealed.keyID: "+fault.Message(err), err)
	}
	if err != nil {
		return nil, fmt.Errorf("looking up sealing key %s: %w", sealed.KeyID, err)
	}
	if key.Public().Suite() != envelope.Suite(sealed.Suite) {
		return nil, fault.New(fault.Invalid, "spec.sealed.suite: this is not the suite of the sealing key that keyID names; "+
			"restore the manifest as it was sealed, or seal the values again")
	}

	h := header(&obj.Spec, obj.Namespace, obj.Name)
	values := make(map[string]secret.Bytes, len(sealed.Values))
	for _, k := range slices.Sorted(maps.Keys(sealed.Values)) {
		plaintext, err := openValue(key, h, k, sealed.Values[k])
		if err != nil {
			for _, v := range values {
				v.Zero()
			}
			return nil, fault.Wrap(fault.Invalid, fmt.Sprintf("%s: does not open here: either it was sealed for another %s, data key "+
				"or sealedAt, or its scope, type or data were changed afterwards; restore the manifest as it was "+
				"sealed, or seal the value again for this object (latticekeep seal)", valuePath(k), boundTo(h.Scope)), err)
		}
		values[k] = plaintext
	}
	return values, nil
}

func openValue(key *envelope.SealingKey, h envelope.Header, dataKey string, v v1beta1.SealedValue) (secret.Bytes, error) {
	data, err := decode(v.Data)
	if err != nil {
		return nil, err
	}
	return key.OpenValue(h, dataKey, v.SealedAt.UTC(), data)
}

// boundTo lists, for an error message, what a value of this scope is bound to besides its data key.
func boundTo(s envelope.Scope) string {
	switch v1beta1.Scope(s) {
	case v1beta1.ScopeCluster:
		return "scope, credential type"
	case v1beta1.ScopeNamespace:
		return "namespace, scope, credential type"
	default:
		return "namespace, name, scope, credential type"
	}
}

// SealedAt returns when each value of obj was sealed, or nil when the values have another source.
func SealedAt(obj *v1beta1.SealedCredential) map[string]time.Time {
	if obj.Spec.Sealed == nil {
		return nil
	}
	at := make(map[string]time.Time, len(obj.Spec.Sealed.Values))
	for k, v := range obj.Spec.Sealed.Values {
		at[k] = v.SealedAt.UTC()
	}
	return at
}

// Older returns a [fault.Invalid] when a value of obj was sealed before the value that was accepted
// last for its key. This happens when an old manifest is applied again. Older returns nil when obj
// allows older values.
func Older(obj *v1beta1.SealedCredential, accepted map[string]time.Time) error {
	if obj.Spec.Sealed == nil || obj.Spec.Sealed.AllowOlder {
		return nil
	}
	var found report
	at := SealedAt(obj)
	for _, k := range slices.Sorted(maps.Keys(at)) {
		if at[k].Before(accepted[k]) {
			found.add(valuePath(k), "was sealed at %s, before the value that was last accepted for this key, which was sealed at %s; "+
				"apply the newer manifest, seal the value again, or set spec.sealed.allowOlder to go back on purpose",
				at[k].UTC().Format(time.RFC3339), accepted[k].UTC().Format(time.RFC3339))
		}
	}
	return invalid(found)
}
