package controllers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/generate"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// ensureEntry makes the vault hold what the spec of sc says, when it does not.
func (r *reconciler) ensureEntry(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	switch {
	case sc.Spec.ValuesFrom != nil: // looked at each time: the Secret may have changed
		return r.importSecret(ctx, p, sc, o)
	case o.entryCurrent:
		return nil
	case sc.Spec.Sealed != nil:
		return r.openSealed(ctx, p, sc, o)
	default:
		return r.ensureGenerated(ctx, p, sc, o)
	}
}

// desired is what the vault should hold for sc, but for the values.
func (r *reconciler) desired(sc *v1alpha1.SealedCredential) vault.Desired {
	d := vault.Desired{
		Name: sc.Name, Type: sc.Spec.CredentialType, TTLDays: int(sc.Spec.TTLDays),
		SpecDigest: sealing.SpecDigest(sc), SealedAt: sealing.SealedAt(sc), Trigger: rotationTrigger(sc),
		Object: vault.Object{Cluster: r.cluster, Namespace: sc.Namespace, Name: sc.Name},
	}
	if sc.Spec.Sealed != nil {
		d.SealingKey = sc.Spec.Sealed.KeyID
	}
	return d
}

// openSealed opens the values of sc and makes them the next version of the vault entry, or its first.
func (r *reconciler) openSealed(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	if o.owned != nil {
		if err := sealing.Older(sc, o.owned.ValueSealedAt); err != nil {
			o.specRefused = &refusal{reason: v1alpha1.ReasonOlderValue, err: err}
			return nil
		}
	}
	values, err := sealing.Open(sc, func(keyID string) (*envelope.SealingKey, error) { return r.keys.SealingKey(ctx, keyID) })
	if err != nil {
		o.recordError(v1alpha1.ReasonInvalidSealed, err)
		return nil
	}
	return r.storeValues(ctx, p, sc, o, values)
}

// storeValues stores values as the next version of the vault entry, or its first. They belong to o afterwards.
func (r *reconciler) storeValues(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome, values map[string]secret.Bytes) error {
	o.setValues(values)
	if err := r.ensureFinalizer(ctx, sc); err != nil {
		return err
	}
	d := r.desired(sc)
	d.Values = values
	owned, err := r.vault.Apply(ctx, p, string(sc.UID), o.entryVersion(), d)
	r.recordStored(ctx, sc, o, owned, err)
	return nil
}

// importSecret makes the values of the Secret that sc names those of the vault entry, unless they are, and deletes the
// Secret afterwards if it should. Without the Secret, what was imported stays.
func (r *reconciler) importSecret(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	source := new(corev1.Secret)
	err := r.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: sc.Spec.ValuesFrom.SecretRef.Name}, source)
	if err != nil && !apierrors.IsNotFound(err) {
		return o.recordAPIError(fmt.Errorf("reading the Secret to import: %w", err))
	}
	// Our own target is no source: what changes there is drift.
	if err != nil || source.Annotations[v1alpha1.AnnotationOwner] == string(sc.UID) {
		return r.keepValues(ctx, p, sc, o)
	}
	defer clearData(source)
	if source.Type == corev1.SecretTypeServiceAccountToken || source.Type == corev1.SecretTypeBootstrapToken {
		o.refuseTransiently(v1alpha1.ReasonSourceUnavailable, "spec.valuesFrom: a token that Kubernetes gives a power of its own is not imported: name another Secret")
		return nil
	}
	if source.Annotations[v1alpha1.AnnotationImport] != sc.Name {
		o.refuseTransiently(v1alpha1.ReasonSourceUnavailable, "spec.valuesFrom: the Secret does not say that this object may import it: annotate the Secret with %s=%s",
			v1alpha1.AnnotationImport, sc.Name)
		return nil
	}
	values := make(map[string]secret.Bytes, len(source.Data))
	for key, value := range source.Data {
		values[key] = slices.Clone(value)
	}
	if o.entryCurrent && r.vault.Holds(p, string(sc.UID), o.owned, values) {
		o.setValues(values)
	} else if err := r.storeValues(ctx, p, sc, o, values); err != nil || o.specRefused != nil || o.err != nil {
		if o.specRefused != nil {
			o.specRefused.transient = true // another Secret may do
		}
		return err
	}
	if !sc.Spec.ValuesFrom.DeleteAfterImport || !source.DeletionTimestamp.IsZero() {
		return nil
	}
	exactly := client.Preconditions{UID: &source.UID, ResourceVersion: &source.ResourceVersion}
	if err := r.client.Delete(ctx, source, exactly); client.IgnoreNotFound(err) != nil {
		return o.recordAPIError(fmt.Errorf("deleting the imported Secret: %w", err))
	}
	r.recordEvent(ctx, sc, "Imported", "Import", "the Secret is imported and deleted")
	return nil
}

// keepValues makes the values that the vault holds follow another spec, when nothing else has them.
func (r *reconciler) keepValues(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	switch {
	case o.entryCurrent:
		return nil
	case o.owned == nil:
		o.refuseTransiently(v1alpha1.ReasonSourceUnavailable, "spec.valuesFrom: the Secret does not exist: create it, with the annotation %s=%s",
			v1alpha1.AnnotationImport, sc.Name)
		return nil
	case o.owned.Missing:
		o.refuseTransiently(v1alpha1.ReasonSourceLost, "the vault entry is gone, and so is the Secret that it was imported from: create the Secret again, with the "+
			"annotation %s=%s", v1alpha1.AnnotationImport, sc.Name)
		return nil
	}
	return r.storeNext(ctx, p, sc, o, r.desired(sc), func(former map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		if former == nil {
			return nil, errEntryLost
		}
		return cloneValues(former), nil
	})
}

// ensureGenerated makes the values that sc wants and the vault does not hold. Those that it holds stay, also when their
// generator changed: only a Regenerate makes new ones, which may be due at the same time. A vault entry that is gone is not
// silently made of new values.
func (r *reconciler) ensureGenerated(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	if o.owned != nil && regenerates(sc) && (o.owned.Trigger != rotationTrigger(sc) || rotationDue(sc, o, r.now())) {
		return r.regenerate(ctx, p, sc, o)
	}
	// The status remembers an entry that the store does not: the store was set back.
	setBack := o.owned == nil && sc.Status.CredentialID != ""
	if setBack && regenerates(sc) && sc.Status.LastTrigger != rotationTrigger(sc) {
		return r.regenerate(ctx, p, sc, o)
	}
	if setBack || o.owned != nil && o.owned.Missing {
		o.refuseTransiently(v1alpha1.ReasonSourceLost, "the vault entry is gone, and nothing else has its values: to have new ones made, set spec.rotation.policy "+
			"to Regenerate and change spec.rotation.trigger, or delete the object and create it again")
		return nil
	}
	return r.storeNext(ctx, p, sc, o, r.desired(sc), func(former map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		if former == nil && o.owned != nil {
			return nil, errEntryLost
		}
		return r.completeValues(sc.Spec.Generate, former)
	})
}

// completeValues returns a value for each data key of the generators: that of former, or a new one. A key pair is made anew
// unless former has both halves.
func (r *reconciler) completeValues(generators []v1alpha1.Generator, former map[string]secret.Bytes) (map[string]secret.Bytes, error) {
	all := sealing.Specs(generators)
	missing := slices.DeleteFunc(slices.Clone(all), func(s generate.Spec) bool {
		return !slices.ContainsFunc(generate.Names(s), func(key string) bool { _, ok := former[key]; return !ok })
	})
	values := make(map[string]secret.Bytes)
	if len(missing) > 0 {
		var err error
		if values, err = r.generateValues(missing); err != nil {
			return nil, err
		}
	}
	for _, s := range all {
		for _, key := range generate.Names(s) {
			if _, ok := values[key]; !ok {
				values[key] = slices.Clone(former[key])
			}
		}
	}
	return values, nil
}

// regenerate makes new values for sc, and leaves the former ones readable for a while if sc says so.
func (r *reconciler) regenerate(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	d := r.desired(sc)
	if overlap := sc.Spec.Rotation.Overlap; overlap != nil {
		d.Overlap = overlap.Duration
	}
	return r.storeNext(ctx, p, sc, o, d, func(map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		return r.generateValues(sealing.Specs(sc.Spec.Generate))
	})
}

// generateValues makes values. RSA keys take seconds of a core, so one object at a time has them made: the others are tried again,
// and no worker waits.
func (r *reconciler) generateValues(entries []generate.Spec) (map[string]secret.Bytes, error) {
	if generate.Heavy(entries) {
		if !r.rsaKeys.TryLock() {
			return nil, fault.New(fault.Unavailable, "RSA keys of another object are being made")
		}
		defer r.rsaKeys.Unlock()
	}
	return generate.Values(entries)
}

// errEntryLost says that a vault entry, whose values are needed, is gone or damaged.
var errEntryLost = fault.New(fault.NotFound, "the vault entry is gone")

// restoreEntry has the values of a vault entry that is gone or damaged come from the object's source once more.
func (r *reconciler) restoreEntry(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	o.zeroValues()
	o.owned.Missing, o.entryCurrent, o.err = true, false, nil
	if o.specRefused != nil {
		return nil
	}
	return r.ensureEntry(ctx, p, sc, o)
}

// storeNext stores what values makes of the former values as the next version of the vault entry, or its first.
func (r *reconciler) storeNext(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome, d vault.Desired,
	values func(former map[string]secret.Bytes) (map[string]secret.Bytes, error)) error {
	if err := r.ensureFinalizer(ctx, sc); err != nil {
		return err
	}
	var made map[string]secret.Bytes
	owned, err := r.vault.Generate(ctx, p, string(sc.UID), o.entryVersion(), d, func(former map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		all, err := values(former)
		if err == nil {
			made = cloneValues(all) // the vault zeroes those that it is given
		}
		return all, err
	})
	if errors.Is(err, errEntryLost) {
		return r.restoreEntry(ctx, p, sc, o)
	}
	o.setValues(made)
	r.recordStored(ctx, sc, o, owned, err)
	return nil
}

// recordStored notes in o what became of a change of the vault entry, and tells of it.
func (r *reconciler) recordStored(ctx context.Context, sc *v1alpha1.SealedCredential, o *outcome, owned *vault.Owned, err error) {
	if err != nil {
		o.zeroValues()
		o.recordError(v1alpha1.ReasonInvalidSpec, err)
		return
	}
	reason, note := "Sealed", "sealed into the vault as version %d"
	if former := o.owned; former != nil {
		switch {
		case former.Missing:
			reason, note = "Recreated", "the vault entry was gone and is sealed again as version %d"
		case former.ValuesChangedAt.Equal(owned.ValuesChangedAt):
			reason, note = "Reencrypted", "the same values are sealed again as version %d"
		default:
			reason, note = "Rotated", "new values are sealed as version %d"
		}
	}
	o.owned, o.entryCurrent = owned, true
	r.counters.countChange(strings.ToLower(reason))
	r.recordEvent(ctx, sc, reason, "Seal", fmt.Sprintf(note, owned.Version))
}

// triggerOwed is the trigger of a version that was only encrypted anew when it should have had new values. It is not that of the
// spec, so these are made as soon as the spec is accepted.
const triggerOwed = "latticekeep.dev/owed"

// rotate makes the next version of the vault entry as the rotation policy of sc says. When the entry turns out to be
// damaged, its values come from the object's source once more.
func (r *reconciler) rotate(ctx context.Context, p authz.Principal, sc *v1alpha1.SealedCredential, o *outcome) error {
	// What an object that is refused now would make is not made: its last good version goes on.
	if regenerates(sc) && o.specRefused == nil {
		return r.regenerate(ctx, p, sc, o)
	}
	honoured := rotationTrigger(sc)
	if regenerates(sc) {
		honoured = triggerOwed
	}
	owned, err := r.vault.Reencrypt(ctx, p, string(sc.UID), o.owned.Version, honoured)
	switch {
	case errors.Is(err, fault.NotFound):
		return r.restoreEntry(ctx, p, sc, o)
	case err != nil:
		o.err = err
	default:
		current := o.entryCurrent
		r.recordStored(ctx, sc, o, owned, nil)
		o.entryCurrent = current
	}
	return nil
}

// regenerates reports whether a rotation of sc makes new values.
func regenerates(sc *v1alpha1.SealedCredential) bool {
	return sc.Spec.Rotation != nil && sc.Spec.Rotation.Policy == v1alpha1.RotationRegenerate && len(sc.Spec.Generate) > 0
}

func cloneValues(values map[string]secret.Bytes) map[string]secret.Bytes {
	c := make(map[string]secret.Bytes, len(values))
	for key, value := range values {
		c[key] = slices.Clone(value)
	}
	return c
}

// clearData overwrites the values of a Secret that was read.
func clearData(s *corev1.Secret) {
	for _, value := range s.Data {
		clear(value)
	}
}
