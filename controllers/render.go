package controllers

import (
	"bytes"
	"encoding/json"

	corev1 "k8s.io/api/core/v1"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/compose"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// maxSecretBytes is how much data the API server takes in a Secret.
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

// requiredKeys are the keys without which Kubernetes takes no Secret of a type. Of basic-auth, a user name will do instead.
var requiredKeys = map[corev1.SecretType][]string{
	corev1.SecretTypeTLS:              {corev1.TLSCertKey, corev1.TLSPrivateKeyKey},
	corev1.SecretTypeSSHAuth:          {corev1.SSHAuthPrivateKey},
	corev1.SecretTypeBasicAuth:        {corev1.BasicAuthPasswordKey},
	corev1.SecretTypeDockerConfigJson: {corev1.DockerConfigJsonKey},
}

// checkData returns a refusal when Kubernetes would not take data in a Secret of that type: its own words may quote the data.
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
