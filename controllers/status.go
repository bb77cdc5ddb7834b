package controllers

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// outcome is what one reconcile observed of an object. Together with the object and the time it decides the status.
type outcome struct {
	owned        *vault.Owned // what the vault holds for the object; nil for nothing
	entryKnown   bool         // owned is what the vault answered, not the lack of an answer
	entryCurrent bool         // owned holds what the spec says
	specRefused  *refusal     // why the spec cannot be applied as it is written
	err          error        // why something could not be done just now: it is tried again

	target          *v1alpha1.TargetStatus  // what the target Secret was seen to be; nil when it was not looked at
	targetRefused   *refusal                // why the target Secret cannot be what the spec says
	values          map[string]secret.Bytes // values of owned, if already opened
	targetDropped   bool                    // a former target was let go
	targetUnwritten bool                    // the trouble is that the target Secret could not be written
	targetDrifted   bool                    // the target Secret is not what it was, and is left alone
}

// refusal is a mistake of an object's author. It stands until the object changes, or the world around it does.
type refusal struct {
	reason    string
	err       error // its fault.Message goes into the condition
	transient bool  // something beside the object may mend it, which nobody tells the operator
}

// recordError records why the spec could not be applied: as its author's mistake, or as trouble that passes.
func (o *outcome) recordError(reason string, err error) {
	if fault.Of(err) == fault.Invalid {
		o.specRefused = &refusal{reason: reason, err: err}
	} else {
		o.err = err
	}
}

// recordAPIError records that the API server could not be asked about something beside the object, or did not take it. That it changed
// meanwhile, or that its namespace is terminating, is no trouble, and returned.
func (o *outcome) recordAPIError(err error) error {
	if err == nil || apierrors.IsConflict(err) || errors.Is(err, errTerminating) {
		return err
	}
	o.err = fault.Wrap(fault.Unavailable, "the API server does not answer as it should", apiError{err})
	return nil
}

// refuseTransiently records a mistake that something beside the object may mend.
func (o *outcome) refuseTransiently(reason, format string, args ...any) {
	o.specRefused = &refusal{reason: reason, err: fault.New(fault.Invalid, fmt.Sprintf(format, args...)), transient: true}
}

// setValues keeps values until the end of the reconcile.
func (o *outcome) setValues(values map[string]secret.Bytes) {
	o.zeroValues()
	o.values = values
}

// zeroValues overwrites the values.
func (o *outcome) zeroValues() {
	for _, value := range o.values {
		value.Zero()
	}
	o.values = nil
}

// entryVersion is that of the vault entry, 0 for none.
func (o *outcome) entryVersion() uint64 {
	if o.owned == nil {
		return 0
	}
	return o.owned.Version
}

// status returns the status that sc should have at time now. It reads the former status for what the vault does not
// tell or cannot tell now, and for since when a condition has held.
func (o *outcome) status(sc *v1alpha1.SealedCredential, now time.Time) v1alpha1.SealedCredentialStatus {
	former := sc.Status.DeepCopy()
	s := v1alpha1.SealedCredentialStatus{ObservedGeneration: former.ObservedGeneration, Target: former.Target}
	switch {
	case !o.entryKnown:
		s = *former
		s.Conditions = nil
	case o.owned == nil: // what there was is remembered: a store that was set back does not know it
		s.CredentialID, s.LastTrigger = former.CredentialID, former.LastTrigger
	default:
		s.CredentialID = o.owned.ID
		s.Version = int64(o.owned.Version)
		s.LastTrigger = o.owned.Trigger
		s.Audit = former.Audit // the vault knows no audit hash of a missing entry
		s.SealingKeyID = o.owned.SealingKey
		if !o.owned.Missing {
			s.Audit = &v1alpha1.AuditReference{Sequence: int64(o.owned.Audit.Sequence), Hash: o.owned.Audit.Hash}
			s.SealedAt, s.ExpiresAt = seconds(o.owned.SealedAt), seconds(o.owned.ExpiresAt)
			s.ValuesChangedAt = seconds(o.owned.ValuesChangedAt)
			if f := o.owned.Previous; f != nil && now.Before(f.Until) {
				s.Previous = &v1alpha1.Previous{Version: int64(f.Version), ReadableUntil: *seconds(f.Until)}
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
	// A spec that could not be tried has not been observed: whoever waits for it goes on waiting.
	if o.specRefused != nil || o.err == nil {
		s.ObservedGeneration = sc.Generation
	}

	add := func(c metav1.Condition) {
		c.LastTransitionTime = *seconds(now)
		if old := meta.FindStatusCondition(former.Conditions, c.Type); old != nil && old.Status == c.Status {
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
	if c, ok := o.valuesStaleCondition(sc, former, now); ok {
		add(c)
	}
	add(o.expiringCondition(sc, s, now))
	return s
}

// readyCondition returns the Ready condition that goes with the other fields of s: true while the vault serves what the spec
// says.
func (o *outcome) readyCondition(sc *v1alpha1.SealedCredential, s v1alpha1.SealedCredentialStatus, now time.Time) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, ObservedGeneration: sc.Generation}
	expired := s.ExpiresAt != nil && !now.Before(s.ExpiresAt.Time)
	served := "nothing is served"
	if s.ExpiresAt != nil && !expired {
		served = fmt.Sprintf("version %d is served until %s", s.Version, s.ExpiresAt.UTC().Format(time.RFC3339))
	}
	switch {
	case o.specRefused != nil:
		c.Reason, c.Message = o.specRefused.reason, fault.Message(o.specRefused.err)+"; "+served
	case o.targetUnwritten:
		c.Reason, c.Message = v1alpha1.ReasonPending, "the target Secret could not be written yet; in the vault "+served
	case o.err != nil:
		// Nothing is known to have changed, except that time has passed.
		if old := meta.FindStatusCondition(sc.Status.Conditions, v1alpha1.ConditionReady); old != nil && !expired {
			return *old
		}
		c.Reason, c.Message = v1alpha1.ReasonVaultUnavailable, served
	case o.targetRefused != nil:
		c.Reason, c.Message = o.targetRefused.reason, fault.Message(o.targetRefused.err)+"; in the vault "+served
	case sc.Spec.Suspend:
		c.Reason, c.Message = v1alpha1.ReasonSuspended, "suspended: nothing is sealed or rotated; "+served
		if o.entryCurrent && !expired {
			c.Status = metav1.ConditionTrue
		}
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonSealed, served
	}
	return c
}

// targetSyncedCondition returns the condition that says whether the target Secret holds the version that the vault holds.
func (o *outcome) targetSyncedCondition(sc *v1alpha1.SealedCredential, s v1alpha1.SealedCredentialStatus) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionTargetSynced, Status: metav1.ConditionFalse, ObservedGeneration: sc.Generation}
	t := s.Target
	holds := "the Secret does not exist yet"
	if t != nil {
		holds = fmt.Sprintf("the Secret holds version %d", t.Version)
	}
	switch {
	case o.targetRefused != nil:
		c.Reason, c.Message = o.targetRefused.reason, fault.Message(o.targetRefused.err)
	case o.targetUnwritten:
		c.Reason, c.Message = v1alpha1.ReasonPending, "the Secret could not be written yet"
	case o.targetDrifted:
		c.Reason, c.Message = v1alpha1.ReasonPending, "the Secret is gone or was changed, and is left alone while the object is suspended"
	case t != nil && t.Name == targetName(sc) && s.Audit != nil && t.Audit == s.Audit.Hash &&
		(t.Spec == targetDigest(sc) || sc.Spec.Suspend || o.specRefused != nil || o.err != nil):
		// It holds the values; what else the spec says of it may wait.
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonSynced, holds
	default:
		c.Reason, c.Message = v1alpha1.ReasonPending, holds
	}
	return c
}

// valuesStaleCondition returns the condition that says whether the values are older than spec.rotation.maxValueAge, if there is one.
func (o *outcome) valuesStaleCondition(sc *v1alpha1.SealedCredential, former *v1alpha1.SealedCredentialStatus, now time.Time) (metav1.Condition, bool) {
	c := metav1.Condition{Type: v1alpha1.ConditionValuesStale, Status: metav1.ConditionFalse, ObservedGeneration: sc.Generation}
	if sc.Spec.Rotation == nil || sc.Spec.Rotation.MaxValueAge == nil {
		return c, false
	}
	if !o.entryKnown {
		if old := meta.FindStatusCondition(former.Conditions, c.Type); old != nil {
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
		c.Reason, c.Message = v1alpha1.ReasonWithinMaxAge, fmt.Sprintf("the oldest value is of %s", day)
	} else {
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonTooOld
		c.Message = fmt.Sprintf("the oldest value is of %s, which is longer ago than spec.rotation.maxValueAge: renew it where it is used, and seal the new value", day)
	}
	return c, true
}

// staleAt returns when the oldest value is older than spec.rotation.maxValueAge; nil for never.
func (o *outcome) staleAt(sc *v1alpha1.SealedCredential) *metav1.Time {
	if sc.Spec.Rotation == nil || sc.Spec.Rotation.MaxValueAge == nil || o.entryMissing() {
		return nil
	}
	return seconds(o.oldestValue(sc).Add(sc.Spec.Rotation.MaxValueAge.Duration))
}

// oldestValue returns when the oldest of the values that the vault holds was made, as far as that is known: sealed values
// say when they were sealed.
func (o *outcome) oldestValue(sc *v1alpha1.SealedCredential) time.Time {
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

// overdueAfter is how late a rotation may be before that is told.
const overdueAfter = time.Hour

// overdueAt returns when a rotation that has not happened is told to be late; nil for never.
func (o *outcome) overdueAt(sc *v1alpha1.SealedCredential) *metav1.Time {
	if o.entryMissing() {
		return nil
	}
	return seconds(nextRotation(sc, o.owned).Add(overdueAfter))
}

// expiringCondition returns the condition that says whether the entry is about to end, or has ended, because it was not rotated in
// time.
func (o *outcome) expiringCondition(sc *v1alpha1.SealedCredential, s v1alpha1.SealedCredentialStatus, now time.Time) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionExpiring, Status: metav1.ConditionFalse, ObservedGeneration: sc.Generation,
		Reason: v1alpha1.ReasonOnSchedule, Message: "nothing is about to expire",
	}
	at := o.overdueAt(sc)
	if !o.entryKnown { // the vault does not answer, and time passes
		if t := s.NextRotationTime; t != nil {
			at = seconds(t.Add(overdueAfter))
		}
	}
	const remedy = "see the other conditions for what keeps it from being rotated"
	switch {
	case s.ExpiresAt != nil && !now.Before(s.ExpiresAt.Time):
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonExpired
		c.Message = fmt.Sprintf("the entry ended at %s, and nothing is served: %s", s.ExpiresAt.UTC().Format(time.RFC3339), remedy)
	case at != nil && s.ExpiresAt != nil && !now.Before(at.Time):
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonRotationOverdue
		c.Message = fmt.Sprintf("the rotation is late, and the entry ends at %s: %s", s.ExpiresAt.UTC().Format(time.RFC3339), remedy)
	}
	return c
}

func reconcilingCondition(sc *v1alpha1.SealedCredential, trouble error) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionReconciling, Status: metav1.ConditionTrue, ObservedGeneration: sc.Generation,
		Reason:  v1alpha1.ReasonVaultUnavailable,
		Message: fault.Message(trouble) + "; the operator retries",
	}
	if errors.As(trouble, new(apiError)) {
		c.Reason = v1alpha1.ReasonPending
	}
	if !sc.DeletionTimestamp.IsZero() {
		c.Reason = v1alpha1.ReasonDeleting
		c.Message += "; to delete the object without its vault entry, annotate it with " + v1alpha1.AnnotationAbandon + "=true"
	}
	return c
}

func stalledCondition(sc *v1alpha1.SealedCredential, refused *refusal) metav1.Condition {
	return metav1.Condition{
		Type: v1alpha1.ConditionStalled, Status: metav1.ConditionTrue, ObservedGeneration: sc.Generation,
		Reason: refused.reason, Message: fault.Message(refused.err),
	}
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
