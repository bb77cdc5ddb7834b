package seal

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/sealedsecrets"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// targetType refuses Secret types that a target cannot have.
func targetType(t corev1.SecretType, field string) error {
	switch t {
	case "", corev1.SecretTypeOpaque, corev1.SecretTypeTLS, corev1.SecretTypeDockerConfigJson, corev1.SecretTypeBasicAuth, corev1.SecretTypeSSHAuth:
		return nil
	case corev1.SecretTypeServiceAccountToken, corev1.SecretTypeBootstrapToken:
		return errors.New("a token is not sealed: the cluster that knows it makes new ones")
	}
	return fmt.Errorf("the target of a SealedCredential has no type %.100q: if its reader takes another, such as Opaque, "+
		"change %s, which the values are not bound to", string(t), field)
}

// targetOfSecret describes s, so that the operator makes the same Secret again. left names the parts
// that a target cannot have.
func targetOfSecret(s *corev1.Secret) (target *v1beta1.Target, left []error) {
	if err := targetType(s.Type, "type"); err != nil {
		return nil, []error{err}
	}
	target = &v1beta1.Target{Name: s.Name}
	if s.Type != corev1.SecretTypeOpaque {
		target.Type = v1beta1.SecretType(s.Type)
	}
	var lost []error
	target.Labels, lost = allowed("metadata", "label", s.Labels, v1beta1.MaxLabelBytes)
	left = append(left, lost...)
	target.Annotations, lost = allowed("metadata", "annotation", s.Annotations, v1beta1.MaxAnnotationBytes)
	left = append(left, lost...)
	target.Immutable = s.Immutable != nil && *s.Immutable
	return target, left
}

// allowed returns the labels or annotations that a target may have. left names the others, except
// those that only kubectl, Sealed Secrets or this program reads.
func allowed(field, kind string, all map[string]string, maxValue int) (kept map[string]string, left []error) {
	for _, k := range slices.Sorted(maps.Keys(all)) {
		switch {
		case strings.HasPrefix(k, sealedsecrets.Domain), k == corev1.LastAppliedConfigAnnotation:
			continue
		case len(k) > v1beta1.MaxMetadataKeyBytes || len(all[k]) > maxValue || sealing.Reserved(k, kind == "label"):
			left = append(left, fmt.Errorf("%s: a target does not take the %s %.100q", field, kind, k))
			continue
		case len(kept) == v1beta1.MaxMetadata:
			left = append(left, fmt.Errorf("%s: a target takes only %d %ss, without %.100q", field, v1beta1.MaxMetadata, kind, k))
			continue
		case kept == nil:
			kept = make(map[string]string)
		}
		kept[k] = all[k]
	}
	return kept, left
}
