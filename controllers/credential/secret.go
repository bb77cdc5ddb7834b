package credential

import (
	"bytes"
	"cmp"
	"crypto/sha3"
	"encoding/hex"
	"encoding/json"
	"maps"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/compose"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// maxSecretBytes is the most data that the API server accepts in a Secret, in bytes.
const maxSecretBytes = 1 << 20

// render returns the data of the target Secret.
func render(target *v1beta1.Target, values map[string]secret.Bytes) (data map[string][]byte, err error) {
	data = make(map[string][]byte, max(len(values), len(target.Keys)))
	defer func() {
		if err != nil {
			clearData(&corev1.Secret{Data: data})
		}
	}()
	for key, value := range values {
		if len(target.Keys) == 0 {
			data[key] = bytes.Clone(value)
		}
	}
	for _, k := range target.Keys {
		if k.Template != "" {
			t, err := compose.Parse(k.Template)
			if err != nil {
				return data, refuseTarget(v1beta1.ReasonInvalidTarget, "keys[%s].template: %s", k.To, fault.Message(err))
			}
			text, err := t.Render(values, compose.Encoding(k.Encoding))
			if err != nil {
				return data, refuseTarget(v1beta1.ReasonInvalidTarget, "keys[%s].template: %s", k.To, fault.Message(err))
			}
			data[k.To] = text
			continue
		}
		value, ok := values[k.From]
		if !ok {
			return data, refuseTarget(v1beta1.ReasonInvalidTarget, "keys[%s].from: there is no value with the key %s", k.To, k.From)
		}
		data[k.To] = bytes.Clone(value)
	}
	return data, checkData(target.Type, data)
}

// requiredKeys are the keys that Kubernetes requires in a Secret of each type. For basic-auth, a
// user name alone is enough too.
var requiredKeys = map[corev1.SecretType][]string{
	corev1.SecretTypeTLS:              {corev1.TLSCertKey, corev1.TLSPrivateKeyKey},
	corev1.SecretTypeSSHAuth:          {corev1.SSHAuthPrivateKey},
	corev1.SecretTypeBasicAuth:        {corev1.BasicAuthPasswordKey},
	corev1.SecretTypeDockerConfigJson: {corev1.DockerConfigJsonKey},
}

// checkData returns a refusal if Kubernetes would not accept data in a Secret of that type. The API
// server's own message may quote the data, so it must not be needed.
func checkData(kind v1beta1.SecretType, data map[string][]byte) error {
	total := 0
	for _, value := range data {
		total += len(value)
	}
	if total > maxSecretBytes {
		return refuseTarget(v1beta1.ReasonInvalidTarget, "the Secret would be larger than 1 MiB: give it fewer keys")
	}
	if _, ok := data[corev1.BasicAuthUsernameKey]; ok && corev1.SecretType(kind) == corev1.SecretTypeBasicAuth {
		return nil
	}
	for _, key := range requiredKeys[corev1.SecretType(kind)] {
		if _, ok := data[key]; !ok {
			return refuseTarget(v1beta1.ReasonInvalidTarget, "a Secret of type %s needs the key %s: name it in spec.target.keys", kind, key)
		}
	}
	if corev1.SecretType(kind) == corev1.SecretTypeDockerConfigJson {
		var config map[string]json.RawMessage
		if json.Unmarshal(data[corev1.DockerConfigJsonKey], &config) != nil {
			return refuseTarget(v1beta1.ReasonInvalidTarget, "the key %s is not a JSON object", corev1.DockerConfigJsonKey)
		}
	}
	return nil
}

// clearData overwrites the values of a Secret that was read.
func clearData(s *corev1.Secret) {
	for _, value := range s.Data {
		clear(value)
	}
}

// source identifies what a target is made from: the digest of spec.target, and the hash of the
// version's audit entry.
type source struct{ spec, audit string }

func sourceOf(sc *v1beta1.SealedCredential, owned *vault.Owned) source {
	return source{targetDigest(sc), owned.Audit.Hash}
}

// targetDigest returns the SHA3-256 digest of spec.target in lower-case hex, or "" without a
// target. It covers no value.
func targetDigest(sc *v1beta1.SealedCredential) string {
	if sc.Spec.Target == nil {
		return ""
	}
	b, err := json.Marshal(sc.Spec.Target) // sorts map keys
	if err != nil {
		return ""
	}
	sum := sha3.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func targetName(sc *v1beta1.SealedCredential) string {
	if sc.Spec.Target == nil {
		return ""
	}
	if sc.Spec.Target.Name != "" {
		return sc.Spec.Target.Name
	}
	return sc.Name
}

// desiredSecret returns the Secret that sc asks for.
func desiredSecret(sc *v1beta1.SealedCredential, version uint64, data map[string][]byte) *corev1.Secret {
	target := sc.Spec.Target
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: sc.Namespace, Name: targetName(sc), Labels: maps.Clone(target.Labels), Annotations: maps.Clone(target.Annotations),
		},
		Type: corev1.SecretType(target.Type), Data: data,
	}
	if s.Type == "" {
		s.Type = corev1.SecretTypeOpaque
	}
	if s.Annotations == nil {
		s.Annotations = make(map[string]string)
	}
	if target.Immutable {
		s.Immutable = &target.Immutable
	}
	s.Annotations[v1beta1.AnnotationOwner] = string(sc.UID)
	s.Annotations[v1beta1.AnnotationVersion] = strconv.FormatUint(version, 10)
	s.Annotations[v1beta1.AnnotationDeletionPolicy] = string(cmp.Or(target.DeletionPolicy, v1beta1.DeletionDelete))
	return s
}

// isOfEarlierRelease reports whether an earlier release wrote a target Secret: with an owner
// reference, or without its deletion policy.
func isOfEarlierRelease(is client.Object) bool {
	return len(is.GetOwnerReferences()) != 0 || is.GetAnnotations()[v1beta1.AnnotationDeletionPolicy] == ""
}

// outlivesTarget reports whether the Secret of sc is kept when its target goes. About the current
// target the spec decides. A previous one says it itself, or as earlier releases did, by whether it
// has an owner reference.
func outlivesTarget(is client.Object, sc *v1beta1.SealedCredential) bool {
	if is.GetName() == targetName(sc) {
		return sc.Spec.Target.DeletionPolicy == v1beta1.DeletionRetain
	}
	switch v1beta1.DeletionPolicy(is.GetAnnotations()[v1beta1.AnnotationDeletionPolicy]) {
	case v1beta1.DeletionDelete:
		return false
	case "":
		return !metav1.IsControlledBy(is, sc)
	}
	return true
}

// isAsWanted reports whether a Secret is as it should be: it has the wanted data and no other, the
// wanted labels and annotations beside those of others, and no owner.
func isAsWanted(is, want *corev1.Secret) bool {
	own := ownFields(is)
	return len(is.OwnerReferences) == 0 && isImmutable(is) == isImmutable(want) && maps.EqualFunc(is.Data, want.Data, bytes.Equal) &&
		hasOf(is.Labels, want.Labels, own, "labels") && hasOf(is.Annotations, want.Annotations, own, "annotations")
}

func isImmutable(s *corev1.Secret) bool { return s.Immutable != nil && *s.Immutable }

// hasOf reports whether is has all of want, and of what the operator wrote to the field of the
// metadata nothing else.
func hasOf(is, want map[string]string, own *fieldpath.Set, field string) bool {
	for key, value := range want {
		if has, ok := is[key]; !ok || has != value {
			return false
		}
	}
	for key := range is {
		if _, ok := want[key]; !ok && own.Has(fieldpath.MakePathOrDie("metadata", field, key)) {
			return false
		}
	}
	return true
}
