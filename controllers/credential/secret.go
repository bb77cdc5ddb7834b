package credential

import (
	"bytes"
	"crypto/sha3"
	"encoding/hex"
	"encoding/json"
	"maps"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/compose"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// maxSecretBytes is the most data that the API server accepts in a Secret, in bytes.
const maxSecretBytes = 1 << 20

// render returns the data of the target Secret.
func render(target *v1alpha1.Target, values map[string]secret.Bytes) (data map[string][]byte, err error) {
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
				return data, refuseTarget(v1alpha1.ReasonInvalidTarget, "keys[%s].template: %s", k.To, fault.Message(err))
			}
			text, err := t.Render(values, compose.Encoding(k.Encoding))
			if err != nil {
				return data, refuseTarget(v1alpha1.ReasonInvalidTarget, "keys[%s].template: %s", k.To, fault.Message(err))
			}
			data[k.To] = text
			continue
		}
		value, ok := values[k.From]
		if !ok {
			return data, refuseTarget(v1alpha1.ReasonInvalidTarget, "keys[%s].from: there is no value with the key %s", k.To, k.From)
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
func checkData(kind v1alpha1.SecretType, data map[string][]byte) error {
	total := 0
	for _, value := range data {
		total += len(value)
	}
	if total > maxSecretBytes {
		return refuseTarget(v1alpha1.ReasonInvalidTarget, "the Secret would be larger than 1 MiB: give it fewer keys")
	}
	if _, ok := data[corev1.BasicAuthUsernameKey]; ok && corev1.SecretType(kind) == corev1.SecretTypeBasicAuth {
		return nil
	}
	for _, key := range requiredKeys[corev1.SecretType(kind)] {
		if _, ok := data[key]; !ok {
			return refuseTarget(v1alpha1.ReasonInvalidTarget, "a Secret of type %s needs the key %s: name it in spec.target.keys", kind, key)
		}
	}
	if corev1.SecretType(kind) == corev1.SecretTypeDockerConfigJson {
		var config map[string]json.RawMessage
		if json.Unmarshal(data[corev1.DockerConfigJsonKey], &config) != nil {
			return refuseTarget(v1alpha1.ReasonInvalidTarget, "the key %s is not a JSON object", corev1.DockerConfigJsonKey)
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

func sourceOf(sc *v1alpha1.SealedCredential, owned *vault.Owned) source {
	return source{targetDigest(sc), owned.Audit.Hash}
}

// targetDigest returns the SHA3-256 digest of spec.target in lower-case hex, or "" without a
// target. It covers no value.
func targetDigest(sc *v1alpha1.SealedCredential) string {
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

func targetName(sc *v1alpha1.SealedCredential) string {
	if sc.Spec.Target == nil {
		return ""
	}
	if sc.Spec.Target.Name != "" {
		return sc.Spec.Target.Name
	}
	return sc.Name
}

// desiredSecret returns the Secret that sc asks for.
func desiredSecret(sc *v1alpha1.SealedCredential, version uint64, data map[string][]byte) *corev1.Secret {
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
	s.Annotations[v1alpha1.AnnotationOwner] = string(sc.UID)
	s.Annotations[v1alpha1.AnnotationVersion] = strconv.FormatUint(version, 10)
	if target.DeletionPolicy != v1alpha1.DeletionRetain {
		controller := true
		s.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: v1alpha1.GroupVersion.String(), Kind: v1alpha1.KindSealedCredential, Name: sc.Name, UID: sc.UID, Controller: &controller,
		}}
	}
	return s
}

// equalSecrets reports whether a Secret already matches the wanted one.
func equalSecrets(is, want *corev1.Secret) bool {
	if len(is.OwnerReferences) != len(want.OwnerReferences) || len(want.OwnerReferences) == 1 && is.OwnerReferences[0].UID != want.OwnerReferences[0].UID {
		return false
	}
	return maps.Equal(is.Labels, want.Labels) && maps.Equal(is.Annotations, want.Annotations) && maps.EqualFunc(is.Data, want.Data, bytes.Equal)
}

func statusOfTarget(sc *v1alpha1.SealedCredential, is *corev1.Secret, owned *vault.Owned) *v1alpha1.TargetStatus {
	of := sourceOf(sc, owned)
	return &v1alpha1.TargetStatus{
		Name: is.Name, UID: is.UID, ResourceVersion: is.ResourceVersion, Version: int64(owned.Version), Audit: of.audit, Spec: of.spec,
	}
}
