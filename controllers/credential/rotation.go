package credential

import (
	"fmt"
	"hash/fnv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// triggerOwed is the trigger of a version that was only encrypted anew when it should have had new values. It is not that of the
// spec, so these are made as soon as the spec is accepted.
const triggerOwed = "latticekeep.dev/owed"

// regenerates reports whether a rotation of sc makes new values.
func regenerates(sc *v1alpha1.SealedCredential) bool {
	return sc.Spec.Rotation != nil && sc.Spec.Rotation.Policy == v1alpha1.RotationRegenerate && len(sc.Spec.Generate) > 0
}

// nextRotation returns when the version that the vault holds is to be rotated: spec.rotation.before ahead of its end,
// by default a third of its life. The API server keeps before an hour shorter than spec.ttlDays; when the version was
// sealed with a shorter TTL than the spec now has, and the spec is refused, before may not fit, and the default holds:
// otherwise each rotation would be due the moment it is made. Up to a tenth of before is added, always the same for one
// version, so that objects that were made together are not rotated together. It is a whole second, as the status shows it.
func nextRotation(sc *v1alpha1.SealedCredential, owned *vault.Owned) time.Time {
	before := rotationLead(sc, owned)
	jitter := min(before, owned.ExpiresAt.Sub(owned.SealedAt)-before) / 10
	h := fnv.New64a()
	fmt.Fprintf(h, "%s/%d", sc.UID, owned.Version)
	early := time.Duration(h.Sum64()%uint64(jitter/time.Second+1)) * time.Second
	return owned.ExpiresAt.Add(-before - early).Truncate(time.Second)
}

// rotationLead returns how long before its end the version is to be rotated.
func rotationLead(sc *v1alpha1.SealedCredential, owned *vault.Owned) time.Duration {
	life := owned.ExpiresAt.Sub(owned.SealedAt)
	if r := sc.Spec.Rotation; r != nil && r.Before != nil && r.Before.Duration <= life-time.Hour {
		return r.Before.Duration
	}
	return life / 3
}

// rotationTrigger returns spec.rotation.trigger.
func rotationTrigger(sc *v1alpha1.SealedCredential) string {
	if sc.Spec.Rotation == nil {
		return ""
	}
	return sc.Spec.Rotation.Trigger
}

// seconds returns t as the API server will give it back.
func seconds(t time.Time) *metav1.Time {
	m := metav1.NewTime(t).Rfc3339Copy()
	return &m
}
