package controllers

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// outcome is what one reconcile observed of an object. Together with the object and the time it decides the status.
type outcome struct {
	owned   *vault.Owned // what the vault holds for the object; nil for nothing
	known   bool         // owned is what the vault answered, not the lack of an answer
	current bool         // owned holds what the spec says
	refused *refusal     // why the spec cannot be applied as it is written
	trouble error        // why something could not be done just now: it is tried again
}

// refusal is a mistake of an object's author. It stands until the object changes, or the world around it does.
type refusal struct {
	reason string
	err    error // its fault.Message goes into the condition
}

// status returns the status that sc should have at time now. It reads the former status for what the vault does not
// tell or cannot tell now, and for since when a condition has held.
func (o *outcome) status(sc *v1alpha1.SealedCredential, now time.Time) v1alpha1.SealedCredentialStatus {
	former := sc.Status.DeepCopy()
	s := v1alpha1.SealedCredentialStatus{ObservedGeneration: former.ObservedGeneration}
	switch {
	case !o.known:
		s = *former
		s.Conditions = nil
	case o.owned != nil:
		s.CredentialID = o.owned.ID
		s.Version = int64(o.owned.Version)
		s.LastTrigger = o.owned.Trigger
		s.Audit = former.Audit               // of a missing entry the vault knows none
		s.SealingKeyID = former.SealingKeyID // of the version that keeps serving, while the spec has another one
		if o.current {
			s.SealingKeyID = sc.Spec.Sealed.KeyID
		}
		if !o.owned.Missing {
			s.Audit = &v1alpha1.AuditReference{Sequence: int64(o.owned.Audit.Sequence), Hash: o.owned.Audit.Hash}
			s.SealedAt, s.ExpiresAt = seconds(o.owned.SealedAt), seconds(o.owned.ExpiresAt)
			if !sc.Spec.Suspend {
				s.NextRotationTime = seconds(nextRotation(sc, o.owned))
			}
		}
	}
	// A spec that could not be tried has not been observed: whoever waits for it goes on waiting.
	if o.refused != nil || o.trouble == nil {
		s.ObservedGeneration = sc.Generation
	}

	add := func(c metav1.Condition) {
		c.LastTransitionTime = *seconds(now)
		if old := meta.FindStatusCondition(former.Conditions, c.Type); old != nil && old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		s.Conditions = append(s.Conditions, c)
	}
	add(o.ready(sc, s, now))
	if o.trouble != nil {
		add(reconciling(sc, o.trouble))
	}
	if o.refused != nil {
		add(stalled(sc, o.refused))
	}
	return s
}

// ready returns the Ready condition that goes with the other fields of s: true while the vault serves what the spec
// says.
func (o *outcome) ready(sc *v1alpha1.SealedCredential, s v1alpha1.SealedCredentialStatus, now time.Time) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, ObservedGeneration: sc.Generation}
	expired := s.ExpiresAt != nil && !now.Before(s.ExpiresAt.Time)
	served := "nothing is served"
	if s.ExpiresAt != nil && !expired {
		served = fmt.Sprintf("version %d is served until %s", s.Version, s.ExpiresAt.UTC().Format(time.RFC3339))
	}
	switch {
	case o.refused != nil:
		c.Reason, c.Message = o.refused.reason, fault.Message(o.refused.err)+"; "+served
	case o.trouble != nil:
		// Nothing is known to have changed, except that time has passed.
		if old := meta.FindStatusCondition(sc.Status.Conditions, v1alpha1.ConditionReady); old != nil && !expired {
			return *old
		}
		c.Reason, c.Message = v1alpha1.ReasonVaultUnavailable, served
	case sc.Spec.Suspend:
		c.Reason, c.Message = v1alpha1.ReasonSuspended, "suspended: nothing is sealed or rotated; "+served
		if o.current && !expired {
			c.Status = metav1.ConditionTrue
		}
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonSealed, served
	}
	return c
}

func reconciling(sc *v1alpha1.SealedCredential, trouble error) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionReconciling, Status: metav1.ConditionTrue, ObservedGeneration: sc.Generation,
		Reason:  v1alpha1.ReasonVaultUnavailable,
		Message: fault.Message(trouble) + "; it is tried again",
	}
	if !sc.DeletionTimestamp.IsZero() {
		c.Reason = v1alpha1.ReasonDeleting
		c.Message += "; to delete the object without its vault entry, annotate it with " + abandonAnnotation + "=true"
	}
	return c
}

func stalled(sc *v1alpha1.SealedCredential, refused *refusal) metav1.Condition {
	return metav1.Condition{
		Type: v1alpha1.ConditionStalled, Status: metav1.ConditionTrue, ObservedGeneration: sc.Generation,
		Reason: refused.reason, Message: fault.Message(refused.err),
	}
}

// nextRotation returns when the version that the vault holds is to be rotated: spec.rotation.before ahead of its end,
// by default a third of its life. The API server keeps before an hour shorter than spec.ttlDays; when the version was
// sealed with a shorter TTL than the spec now has, and the spec is refused, before may not fit, and the default holds:
// otherwise each rotation would be due the moment it is made. It is a whole second, as the status shows it.
func nextRotation(sc *v1alpha1.SealedCredential, owned *vault.Owned) time.Time {
	life := owned.ExpiresAt.Sub(owned.SealedAt)
	before := life / 3
	if r := sc.Spec.Rotation; r != nil && r.Before != nil && r.Before.Duration <= life-time.Hour {
		before = r.Before.Duration
	}
	return owned.ExpiresAt.Add(-before).Truncate(time.Second)
}

// trigger returns spec.rotation.trigger.
func trigger(sc *v1alpha1.SealedCredential) string {
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
