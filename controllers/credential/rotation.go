package credential

import (
	"fmt"
	"hash/fnv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// triggerOwed is the trigger of a version that was only re-encrypted when it should have got new
// values. It differs from the trigger in the spec, so new values are generated as soon as the spec
// is accepted.
const triggerOwed = "latticekeep.dev/owed"

// regenerates reports whether a rotation of sc generates new values.
func regenerates(sc *v1beta1.SealedCredential) bool {
	return sc.Spec.Rotation != nil && sc.Spec.Rotation.Policy == v1beta1.RotationRegenerate && len(sc.Spec.Generate) > 0
}

// nextRotation returns when the vault's version is to be rotated: spec.rotation.before ahead of its
// expiry, by default a third of its life.
//
// The API server requires before to be an hour shorter than spec.ttlDays. But a version may have
// been sealed with a shorter TTL than a refused spec now has. If before does not fit into its life,
// the default applies: otherwise each rotation would be due as soon as it is made.
//
// The rotation is earlier by up to a tenth of before, or of the rest of the life if that is
// shorter. This jitter is constant for one version, so that objects created together are not
// rotated together. The result is a whole second, as the status shows it.
func nextRotation(sc *v1beta1.SealedCredential, owned *vault.Owned) time.Time {
	before := rotationLead(sc, owned)
	jitter := min(before, owned.ExpiresAt.Sub(owned.SealedAt)-before) / 10
	h := fnv.New64a()
	fmt.Fprintf(h, "%s/%d", sc.UID, owned.Version)
	early := time.Duration(h.Sum64()%uint64(jitter/time.Second+1)) * time.Second
	return owned.ExpiresAt.Add(-before - early).Truncate(time.Second)
}

// rotationLead returns how long before its expiry the version is to be rotated.
func rotationLead(sc *v1beta1.SealedCredential, owned *vault.Owned) time.Duration {
	life := owned.ExpiresAt.Sub(owned.SealedAt)
	if r := sc.Spec.Rotation; r != nil && r.Before != nil && r.Before.Duration <= life-time.Hour {
		return r.Before.Duration
	}
	return life / 3
}

// rotationTrigger returns spec.rotation.trigger.
func rotationTrigger(sc *v1beta1.SealedCredential) string {
	if sc.Spec.Rotation == nil {
		return ""
	}
	return sc.Spec.Rotation.Trigger
}

// seconds returns t in whole seconds, as the API server returns it.
func seconds(t time.Time) *metav1.Time {
	m := metav1.NewTime(t).Rfc3339Copy()
	return &m
}
