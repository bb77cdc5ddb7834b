package seal

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
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
func targetOfSecret(s *corev1.Secret) (target *v1alpha1.Target, left []error) {
	if err := targetType(s.Type, "type"); err != nil {
		return nil, []error{err}
	}
	target = &v1alpha1.Target{Name: s.Name}
	if s.Type != corev1.SecretTypeOpaque {
		target.Type = v1alpha1.SecretType(s.Type)
	}
	var lost []error
	target.Labels, lost = allowed("metadata", "label", s.Labels, maxLabel)
	left = append(left, lost...)
	target.Annotations, lost = allowed("metadata", "annotation", s.Annotations, v1alpha1.MaxAnnotationBytes)
	left = append(left, lost...)
	if s.Immutable != nil && *s.Immutable {
		left = append(left, errors.New("immutable: a target is never immutable, since it follows the rotation"))
	}
	return target, left
}

// Bounds of the schema, in bytes.
const (
	maxMetadataKey = 317 // key of a label or annotation, with its prefix
	maxLabel       = 63
)

// allowed returns the labels or annotations that a target may have. left names the others, except
// those that only kubectl, Sealed Secrets or this program reads.
func allowed(field, kind string, all map[string]string, maxValue int) (kept map[string]string, left []error) {
	for _, k := range slices.Sorted(maps.Keys(all)) {
		switch {
		case strings.HasPrefix(k, sealedsecrets.Domain), k == corev1.LastAppliedConfigAnnotation:
			continue
		case len(k) > maxMetadataKey || len(all[k]) > maxValue || sealing.Reserved(k, kind == "label"):
			left = append(left, fmt.Errorf("%s: a target does not take the %s %.100q", field, kind, k))
			continue
		case len(kept) == v1alpha1.MaxMetadata:
			left = append(left, fmt.Errorf("%s: a target takes only %d %ss, without %.100q", field, v1alpha1.MaxMetadata, kind, k))
			continue
		case kept == nil:
			kept = make(map[string]string)
		}
		kept[k] = all[k]
	}
	return kept, left
}
