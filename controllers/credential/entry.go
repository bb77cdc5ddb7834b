package credential

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/generate"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// entries stores in the vault what SealedCredentials ask for. It is the only writer of their
// entries.
//
// Each method changes the entry by compare-and-set on the version in the outcome, and records the
// result in the outcome. A method returns an error only when sc itself could not be written.
type entries struct {
	client      client.Client // deletes imported Secrets
	live        client.Reader // reads from the API server, not from the cache
	objects     *objects
	vault       *vault.Vault
	keys        *keyring.Ring
	previous    *previousObjects
	cluster     string // UID of the cluster
	countChange func(change string)
	now         func() time.Time

	rsaKeys sync.Mutex // held while RSA keys are generated
}

// ensure brings the vault entry in line with the spec of sc.
func (e *entries) ensure(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	switch {
	case sc.Spec.ValuesFrom != nil: // always: the Secret may have changed
		return e.importSecret(ctx, p, sc, o)
	case o.given != nil:
		return e.takeGiven(ctx, p, sc, o)
	case o.entryCurrent:
		return nil
	case sc.Spec.Sealed != nil:
		return e.openSealed(ctx, p, sc, o)
	default:
		return e.ensureGenerated(ctx, p, sc, o)
	}
}

// desired returns what the vault should hold for sc, without the values.
func (e *entries) desired(sc *v1beta1.SealedCredential) vault.Desired {
	d := vault.Desired{
		Name: sc.Name, Type: sc.Spec.CredentialType, TTLDays: int(sc.Spec.TTLDays),
		SpecDigest: sealing.SpecDigest(sc), Form: sealing.FormDigest(sc), SealedAt: sealing.SealedAt(sc), Trigger: rotationTrigger(sc),
		Object: e.object(sc),
	}
	if sc.Spec.Sealed != nil {
		d.SealingKey = sc.Spec.Sealed.KeyID
	}
	return d
}

func (e *entries) object(sc *v1beta1.SealedCredential) vault.Object {
	return vault.Object{Cluster: e.cluster, Namespace: sc.Namespace, Name: sc.Name}
}

// openSealed opens the sealed values of sc and stores them as the next version of the vault entry.
func (e *entries) openSealed(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	if err := sealing.Ahead(sc, e.now()); err != nil {
		o.specRefused = &refusal{reason: v1beta1.ReasonInvalidSealed, err: err}
		return nil
	}
	if o.owned != nil {
		if err := sealing.Older(sc, o.owned.ValueSealedAt); err != nil {
			o.specRefused = &refusal{reason: v1beta1.ReasonOlderValue, err: err}
			return nil
		}
	}
	values, err := sealing.Open(sc, func(keyID string) (*envelope.SealingKey, error) { return e.keys.SealingKey(ctx, keyID) })
	if err != nil {
		o.recordError(v1beta1.ReasonInvalidSealed, err)
		return nil
	}
	return e.storeValues(ctx, p, sc, o, values)
}

// storeValues stores values as the next version of the vault entry. It hands values to o, which
// zeroes them later.
func (e *entries) storeValues(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome, values map[string]secret.Bytes) error {
	o.setValues(values)
	if err := e.objects.ensureFinalizer(ctx, sc); err != nil {
		return err
	}
	if o.owned == nil {
		e.previous.stored(p.Tenant, sc)
	}
	d := e.desired(sc)
	d.Values = values
	owned, err := e.vault.Apply(ctx, p, string(sc.UID), o.entryVersion(), d)
	e.recordStored(ctx, sc, o, owned, err)
	return nil
}

// importSecret stores the values of the Secret that sc names, unless the vault already holds them,
// and then deletes the Secret if sc says so. If the Secret is gone, the imported values stay.
func (e *entries) importSecret(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	source := new(corev1.Secret)
	err := e.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: sc.Spec.ValuesFrom.SecretRef.Name}, source)
	if err != nil && !apierrors.IsNotFound(err) {
		return o.recordAPIError(fmt.Errorf("reading the Secret to import: %w", err))
	}
	// The target of sc is not a source: a change there is drift.
	if err != nil || source.Annotations[v1beta1.AnnotationOwner] == string(sc.UID) {
		return e.keepValues(ctx, p, sc, o)
	}
	defer clearData(source)
	if source.Type == corev1.SecretTypeServiceAccountToken || source.Type == corev1.SecretTypeBootstrapToken {
		o.refuseTransiently(v1beta1.ReasonSourceUnavailable, "spec.valuesFrom: a token that Kubernetes gives a power of its own is not imported: name another Secret")
		return nil
	}
	if source.Annotations[v1beta1.AnnotationImport] != sc.Name {
		o.refuseTransiently(v1beta1.ReasonSourceUnavailable, "spec.valuesFrom: the Secret does not say that this object may import it: annotate the Secret with %s=%s",
			v1beta1.AnnotationImport, sc.Name)
		return nil
	}
	values := make(map[string]secret.Bytes, len(source.Data))
	for key, value := range source.Data {
		values[key] = slices.Clone(value)
	}
	if o.entryCurrent && e.vault.Holds(p, string(sc.UID), o.owned, values) {
		o.setValues(values)
	} else if err := e.storeValues(ctx, p, sc, o, values); err != nil || o.specRefused != nil || o.err != nil {
		if o.specRefused != nil {
			o.specRefused.transient = true // another Secret may be accepted
		}
		return err
	}
	if !sc.Spec.ValuesFrom.DeleteAfterImport || !source.DeletionTimestamp.IsZero() {
		return nil
	}
	exactly := client.Preconditions{UID: &source.UID, ResourceVersion: &source.ResourceVersion}
	if err := e.client.Delete(ctx, source, exactly); client.IgnoreNotFound(err) != nil {
		return o.recordAPIError(fmt.Errorf("deleting the imported Secret: %w", err))
	}
	e.objects.recordEvent(ctx, sc, "Imported", "Import", "the Secret is imported and deleted")
	return nil
}

// keepValues stores the vault's values again under a changed spec, because the source Secret is
// gone.
func (e *entries) keepValues(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	switch {
	case o.entryCurrent:
		return nil
	case o.previousValues != "":
		o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.valuesFrom: the Secret does not exist, and %s", o.previousValues)
		return nil
	case o.owned == nil:
		o.refuseTransiently(v1beta1.ReasonSourceUnavailable, "spec.valuesFrom: the Secret does not exist: create it, with the annotation %s=%s",
			v1beta1.AnnotationImport, sc.Name)
		return nil
	case o.owned.Missing:
		o.refuseTransiently(v1beta1.ReasonSourceLost, "the vault entry is gone, and so is the Secret that it was imported from: create the Secret again, with the "+
			"annotation %s=%s", v1beta1.AnnotationImport, sc.Name)
		return nil
	}
	return e.storeNext(ctx, p, sc, o, e.desired(sc), func(previous map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		if previous == nil {
			return nil, errEntryLost
		}
		return cloneValues(previous), nil
	})
}

// ensureGenerated generates the values of sc that the vault does not hold. Existing values stay,
// even if their generator has changed. Only the policy Regenerate replaces them, and
// ensureGenerated does that if it is due. It replaces a lost entry only if the author asks for new
// values.
func (e *entries) ensureGenerated(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	if o.owned != nil && regenerates(sc) && (o.owned.Trigger != rotationTrigger(sc) || rotationDue(sc, o, e.now())) {
		return e.regenerate(ctx, p, sc, o)
	}
	// The status names an entry that the store does not have, so the store was restored from a
	// backup.
	setBack := o.owned == nil && sc.Status.CredentialID != ""
	if setBack && regenerates(sc) && sc.Status.LastTrigger != rotationTrigger(sc) {
		return e.regenerate(ctx, p, sc, o)
	}
	if setBack || o.owned != nil && o.owned.Missing {
		o.refuseTransiently(v1beta1.ReasonSourceLost, "the vault entry is gone, and nothing else has its values: to have new ones made, set spec.rotation.policy "+
			"to Regenerate and change spec.rotation.trigger, or delete the object and create it again")
		return nil
	}
	return e.storeNext(ctx, p, sc, o, e.desired(sc), func(previous map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		if previous == nil && o.owned != nil {
			return nil, errEntryLost
		}
		return e.completeValues(sc.Spec.Generate, previous)
	})
}

// takeGiven stores the values that the target Secret of sc was handed over with, and generates only
// those that it lacks.
func (e *entries) takeGiven(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	defer o.zeroGiven()
	if o.entryCurrent && e.vault.Holds(p, string(sc.UID), o.owned, o.given) {
		return nil
	}
	return e.storeNext(ctx, p, sc, o, e.desired(sc), func(previous map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		all := maps.Clone(previous)
		if all == nil {
			all = make(map[string]secret.Bytes)
		}
		maps.Copy(all, o.given)
		return e.completeValues(sc.Spec.Generate, all)
	})
}

// completeValues returns a value for each data key of the generators: the previous value, or a new
// one. It generates a key pair unless previous has both halves.
func (e *entries) completeValues(generators []v1beta1.Generator, previous map[string]secret.Bytes) (map[string]secret.Bytes, error) {
	all := sealing.Specs(generators)
	missing := slices.DeleteFunc(slices.Clone(all), func(s generate.Spec) bool {
		return !slices.ContainsFunc(generate.Names(s), func(key string) bool { _, ok := previous[key]; return !ok })
	})
	values := make(map[string]secret.Bytes)
	if len(missing) > 0 {
		var err error
		if values, err = e.generateValues(missing); err != nil {
			return nil, err
		}
	}
	for _, s := range all {
		for _, key := range generate.Names(s) {
			if _, ok := values[key]; !ok {
				values[key] = slices.Clone(previous[key])
			}
		}
	}
	return values, nil
}

// regenerate generates new values for sc. The previous values stay readable for the overlap that sc
// sets.
func (e *entries) regenerate(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	d := e.desired(sc)
	if overlap := sc.Spec.Rotation.Overlap; overlap != nil {
		d.Overlap = overlap.Duration
	}
	return e.storeNext(ctx, p, sc, o, d, func(map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		return e.generateValues(sealing.Specs(sc.Spec.Generate))
	})
}

// generateValues generates values. RSA keys take seconds of CPU time, so it generates them for one
// object at a time. It returns fault.Unavailable for the other objects, which are retried, so no
// worker waits.
func (e *entries) generateValues(specs []generate.Spec) (map[string]secret.Bytes, error) {
	if generate.Heavy(specs) {
		if !e.rsaKeys.TryLock() {
			return nil, fault.New(fault.Unavailable, "RSA keys of another object are being generated")
		}
		defer e.rsaKeys.Unlock()
	}
	return generate.Values(specs)
}

// errEntryLost means that the vault entry is gone or damaged, but its values are needed.
var errEntryLost = fault.New(fault.NotFound, "the vault entry is gone")

// restore stores the values from the object's source again after the vault entry was lost or
// damaged.
func (e *entries) restore(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	o.zeroValues()
	o.owned.Missing, o.entryCurrent, o.err = true, false, nil
	if o.specRefused != nil {
		return nil
	}
	return e.ensure(ctx, p, sc, o)
}

// storeNext stores the next version with the values that next makes from the previous ones.
func (e *entries) storeNext(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome, d vault.Desired,
	next func(previous map[string]secret.Bytes) (map[string]secret.Bytes, error)) error {
	if err := e.objects.ensureFinalizer(ctx, sc); err != nil {
		return err
	}
	if o.owned == nil {
		e.previous.stored(p.Tenant, sc)
	}
	var made map[string]secret.Bytes
	owned, err := e.vault.Generate(ctx, p, string(sc.UID), o.entryVersion(), d, func(previous map[string]secret.Bytes) (map[string]secret.Bytes, error) {
		all, err := next(previous)
		if err == nil {
			made = cloneValues(all) // the vault zeroes the values it receives
		}
		return all, err
	})
	if errors.Is(err, errEntryLost) {
		return e.restore(ctx, p, sc, o)
	}
	o.setValues(made)
	e.recordStored(ctx, sc, o, owned, err)
	return nil
}

// recordStored records the result of a change to the vault entry in o, in the metrics and in an
// event.
func (e *entries) recordStored(ctx context.Context, sc *v1beta1.SealedCredential, o *outcome, owned *vault.Owned, err error) {
	if err != nil {
		o.zeroValues()
		o.recordError(v1beta1.ReasonInvalidSpec, err)
		return
	}
	reason, note := "Sealed", "sealed into the vault as version %d"
	if previous := o.owned; previous != nil {
		switch {
		case previous.Missing:
			reason, note = "Recreated", "the vault entry was gone and is sealed again as version %d"
		case previous.ValuesChangedAt.Equal(owned.ValuesChangedAt):
			reason, note = "Reencrypted", "the same values are sealed again as version %d"
		default:
			reason, note = "Rotated", "new values are sealed as version %d"
		}
	}
	o.owned, o.entryCurrent = owned, true
	e.countChange(strings.ToLower(reason))
	e.objects.recordEvent(ctx, sc, reason, "Seal", fmt.Sprintf(note, owned.Version))
}

// rotationDue reports whether the vault's version must be rotated, because its time has come or the
// trigger has changed. A refused spec or an error of the API server must not let the last good
// version expire. With the policy Regenerate and a refused spec, the rotation waits until half of
// the rotation lead is left.
func rotationDue(sc *v1beta1.SealedCredential, o *outcome, now time.Time) bool {
	switch {
	case o.entryMissing(), o.err != nil && !errors.As(o.err, new(apiError)):
		return false
	case o.specRefused != nil && regenerates(sc):
		return !now.Before(o.owned.ExpiresAt.Add(-rotationLead(sc, o.owned) / 2))
	}
	return o.owned.Trigger != rotationTrigger(sc) || !now.Before(nextRotation(sc, o.owned))
}

// rotate stores the next version of the vault entry as the rotation policy of sc says. If the entry
// is damaged, rotate restores its values from the object's source.
func (e *entries) rotate(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	// A refused spec generates nothing: the last good version continues.
	if regenerates(sc) && o.specRefused == nil {
		return e.regenerate(ctx, p, sc, o)
	}
	honoured := rotationTrigger(sc)
	if regenerates(sc) {
		honoured = triggerOwed
	}
	owned, err := e.vault.Reencrypt(ctx, p, string(sc.UID), o.owned.Version, honoured)
	switch {
	case errors.Is(err, fault.NotFound):
		return e.restore(ctx, p, sc, o)
	case err != nil:
		o.err = err
	default:
		current := o.entryCurrent
		e.recordStored(ctx, sc, o, owned, nil)
		o.entryCurrent = current
	}
	return nil
}

func cloneValues(values map[string]secret.Bytes) map[string]secret.Bytes {
	c := make(map[string]secret.Bytes, len(values))
	for key, value := range values {
		c[key] = slices.Clone(value)
	}
	return c
}

// principalFor returns the principal that acts for an object in its tenant.
func principalFor(ctx context.Context, tenant authz.TenantID, object types.UID) authz.Principal {
	return authz.Principal{
		Tenant: tenant, Kind: authz.Operator, ID: string(object),
		Scopes:    []authz.Scope{authz.VaultRead, authz.VaultWrite},
		RequestID: string(controller.ReconcileIDFromContext(ctx)), // log lines have the same id
	}
}
