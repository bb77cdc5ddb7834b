package credential

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// status returns the status that sc should have at now. It takes from the previous status what the
// vault does not or cannot tell now, and the time since which each condition holds.
func (o *outcome) status(sc *v1beta1.SealedCredential, now time.Time) v1beta1.SealedCredentialStatus {
	before := sc.Status.DeepCopy()
	s := v1beta1.SealedCredentialStatus{ObservedGeneration: before.ObservedGeneration, Target: before.Target}
	switch {
	case !o.entryKnown:
		s = *before
		s.Conditions = nil
	case o.owned == nil: // keep what a store restored from a backup does not know
		s.CredentialID, s.LastTrigger = before.CredentialID, before.LastTrigger
	default:
		s.CredentialID = o.owned.ID
		s.Version = int64(o.owned.Version)
		s.LastTrigger = o.owned.Trigger
		s.Audit = before.Audit // the vault has no audit hash for a missing entry
		s.SealingKeyID = o.owned.SealingKey
		if !o.owned.Missing {
			s.Audit = &v1beta1.AuditReference{Sequence: int64(o.owned.Audit.Sequence), Hash: o.owned.Audit.Hash}
			s.SealedAt, s.ExpiresAt = seconds(o.owned.SealedAt), seconds(o.owned.ExpiresAt)
			s.ValuesChangedAt = seconds(o.owned.ValuesChangedAt)
			if f := o.owned.Previous; f != nil && now.Before(f.Until) {
				s.Previous = &v1beta1.Previous{Version: int64(f.Version), ReadableUntil: *seconds(f.Until)}
			}
			if !sc.Spec.Suspend {
				s.NextRotationTime = seconds(nextRotation(sc, o.owned))
			}
		}
	}
	if o.target != nil {
		s.Target = o.target
	} else if o.targetDropped {
		s.Target = nil
	}
	// A spec that could not be tried has not been observed, so clients that wait for it keep
	// waiting.
	if o.specRefused != nil || o.err == nil {
		s.ObservedGeneration = sc.Generation
	}

	add := func(c metav1.Condition) {
		c.LastTransitionTime = *seconds(now)
		if old := meta.FindStatusCondition(before.Conditions, c.Type); old != nil && old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		s.Conditions = append(s.Conditions, c)
	}
	add(o.readyCondition(sc, s, now))
	if o.err != nil {
		add(reconcilingCondition(sc, o.err))
	}
	if refused := cmp.Or(o.specRefused, o.targetRefused); refused != nil {
		add(stalledCondition(sc, refused))
	}
	if sc.Spec.Target != nil {
		add(o.targetSyncedCondition(sc, s))
	}
	if c, ok := o.valuesStaleCondition(sc, before, now); ok {
		add(c)
	}
	add(o.expiringCondition(sc, s, now))
	return s
}

// readyCondition returns the Ready condition that goes with the other fields of s. It is true while
// the vault serves what the spec says.
func (o *outcome) readyCondition(sc *v1beta1.SealedCredential, s v1beta1.SealedCredentialStatus, now time.Time) metav1.Condition {
	c := metav1.Condition{Type: v1beta1.ConditionReady, Status: metav1.ConditionFalse, ObservedGeneration: sc.Generation}
	expired := s.ExpiresAt != nil && !now.Before(s.ExpiresAt.Time)
	served := "nothing is served"
	if s.ExpiresAt != nil && !expired {
		served = fmt.Sprintf("version %d is served until %s", s.Version, s.ExpiresAt.UTC().Format(time.RFC3339))
	}
	switch {
	case o.specRefused != nil:
		c.Reason, c.Message = o.specRefused.reason, fault.Message(o.specRefused.err)+"; "+served
	case o.targetUnwritten:
		c.Reason, c.Message = v1beta1.ReasonPending, "the target Secret could not be written yet; in the vault "+served
	case o.err != nil:
		// Keep the previous condition: nothing is known to have changed except the time. The one that
		// the schema gives to a new object is nobody's.
		if old := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionReady); old != nil && old.Status != metav1.ConditionUnknown && !expired {
			return *old
		}
		c.Reason, c.Message = v1beta1.ReasonVaultUnavailable, served
	case o.targetRefused != nil:
		c.Reason, c.Message = o.targetRefused.reason, fault.Message(o.targetRefused.err)+"; in the vault "+served
	case sc.Spec.Suspend:
		c.Reason, c.Message = v1beta1.ReasonSuspended, "suspended: nothing is sealed or rotated; "+served
		if o.entryCurrent && !expired {
			c.Status = metav1.ConditionTrue
		}
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1beta1.ReasonSealed, served
	}
	return c
}

// targetSyncedCondition returns the condition that says whether the target Secret holds the vault's
// version.
func (o *outcome) targetSyncedCondition(sc *v1beta1.SealedCredential, s v1beta1.SealedCredentialStatus) metav1.Condition {
	c := metav1.Condition{Type: v1beta1.ConditionTargetSynced, Status: metav1.ConditionFalse, ObservedGeneration: sc.Generation}
	t := s.Target
	holds := "the Secret does not exist yet"
	if t != nil {
		holds = fmt.Sprintf("the Secret holds version %d", t.Version)
		if t.SeenAt != nil { // earlier releases do not say it
			holds += ", seen at " + t.SeenAt.UTC().Format(time.RFC3339)
		}
	}
	switch {
	case o.targetRefused != nil:
		c.Reason, c.Message = o.targetRefused.reason, fault.Message(o.targetRefused.err)
	case o.targetUnwritten:
		c.Reason, c.Message = v1beta1.ReasonPending, "the Secret could not be written yet"
	case o.targetDrifted:
		c.Reason, c.Message = v1beta1.ReasonPending, "the Secret is gone or was changed, and is left alone while the object is suspended"
	case t != nil && t.Name == targetName(sc) && s.Audit != nil && t.Audit == s.Audit.Hash &&
		(t.Spec == targetDigest(sc) || sc.Spec.Suspend || o.specRefused != nil || o.err != nil):
		// The Secret holds the values. Other changes to spec.target may wait.
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1beta1.ReasonSynced, holds
	default:
		c.Reason, c.Message = v1beta1.ReasonPending, holds
	}
	return c
}

// valuesStaleCondition returns the condition that says whether the oldest value is older than
// spec.rotation.maxValueAge. It returns false if the condition does not apply.
func (o *outcome) valuesStaleCondition(sc *v1beta1.SealedCredential, before *v1beta1.SealedCredentialStatus, now time.Time) (metav1.Condition, bool) {
	c := metav1.Condition{Type: v1beta1.ConditionValuesStale, Status: metav1.ConditionFalse, ObservedGeneration: sc.Generation}
	if sc.Spec.Rotation == nil || sc.Spec.Rotation.MaxValueAge == nil {
		return c, false
	}
	if !o.entryKnown {
		if old := meta.FindStatusCondition(before.Conditions, c.Type); old != nil {
			return *old, true
		}
		return c, false
	}
	at := o.staleAt(sc)
	if at == nil {
		return c, false
	}
	day := o.oldestValue(sc).UTC().Format(time.RFC3339)
	if now.Before(at.Time) {
		c.Reason, c.Message = v1beta1.ReasonWithinMaxAge, fmt.Sprintf("the oldest value is of %s", day)
	} else {
		c.Status, c.Reason = metav1.ConditionTrue, v1beta1.ReasonTooOld
		c.Message = fmt.Sprintf("the oldest value is of %s, which is longer ago than spec.rotation.maxValueAge: renew it where it is used, and seal the new value", day)
	}
	return c, true
}

// staleAt returns when the oldest value becomes older than spec.rotation.maxValueAge, or nil for
// never.
func (o *outcome) staleAt(sc *v1beta1.SealedCredential) *metav1.Time {
	if sc.Spec.Rotation == nil || sc.Spec.Rotation.MaxValueAge == nil || o.entryMissing() {
		return nil
	}
	return seconds(o.oldestValue(sc).Add(sc.Spec.Rotation.MaxValueAge.Duration))
}

// oldestValue returns the time of the oldest value in the vault. If the entry matches the spec,
// that is the earliest time at which a sealed value says that it was sealed, or the last change of
// values if that is earlier.
func (o *outcome) oldestValue(sc *v1beta1.SealedCredential) time.Time {
	oldest := o.owned.ValuesChangedAt
	if o.entryCurrent {
		for _, at := range sealing.SealedAt(sc) {
			if at.Before(oldest) {
				oldest = at
			}
		}
	}
	return oldest
}

// overdueAfter is the delay after which a missed rotation is reported.
const overdueAfter = time.Hour

// overdueAt returns when a missed rotation is reported as late, or nil for never.
func (o *outcome) overdueAt(sc *v1beta1.SealedCredential) *metav1.Time {
	if o.entryMissing() {
		return nil
	}
	return seconds(nextRotation(sc, o.owned).Add(overdueAfter))
}

// expiringCondition returns the condition that says whether the entry has expired or its rotation
// is overdue.
func (o *outcome) expiringCondition(sc *v1beta1.SealedCredential, s v1beta1.SealedCredentialStatus, now time.Time) metav1.Condition {
	c := metav1.Condition{
		Type: v1beta1.ConditionExpiring, Status: metav1.ConditionFalse, ObservedGeneration: sc.Generation,
		Reason: v1beta1.ReasonOnSchedule, Message: "nothing is about to expire",
	}
	at := o.overdueAt(sc)
	if !o.entryKnown { // no answer from the vault: use the time in the status
		if t := s.NextRotationTime; t != nil {
			at = seconds(t.Add(overdueAfter))
		}
	}
	const remedy = "see the other conditions for what keeps it from being rotated"
	switch {
	case s.ExpiresAt != nil && !now.Before(s.ExpiresAt.Time):
		c.Status, c.Reason = metav1.ConditionTrue, v1beta1.ReasonExpired
		c.Message = fmt.Sprintf("the entry ended at %s, and nothing is served: %s", s.ExpiresAt.UTC().Format(time.RFC3339), remedy)
	case at != nil && s.ExpiresAt != nil && !now.Before(at.Time):
		c.Status, c.Reason = metav1.ConditionTrue, v1beta1.ReasonRotationOverdue
		c.Message = fmt.Sprintf("the rotation is late, and the entry ends at %s: %s", s.ExpiresAt.UTC().Format(time.RFC3339), remedy)
	}
	return c
}

func reconcilingCondition(sc *v1beta1.SealedCredential, trouble error) metav1.Condition {
	c := metav1.Condition{
		Type: v1beta1.ConditionReconciling, Status: metav1.ConditionTrue, ObservedGeneration: sc.Generation,
		Reason:  v1beta1.ReasonVaultUnavailable,
		Message: fault.Message(trouble) + "; the operator retries",
	}
	if errors.As(trouble, new(apiError)) {
		c.Reason = v1beta1.ReasonPending
	}
	if !sc.DeletionTimestamp.IsZero() {
		c.Reason = v1beta1.ReasonDeleting
		c.Message += "; to delete the object without its vault entry, annotate it with " + v1beta1.AnnotationAbandon + "=true"
	}
	return c
}

func stalledCondition(sc *v1beta1.SealedCredential, refused *refusal) metav1.Condition {
	return metav1.Condition{
		Type: v1beta1.ConditionStalled, Status: metav1.ConditionTrue, ObservedGeneration: sc.Generation,
		Reason: refused.reason, Message: fault.Message(refused.err),
	}
}
