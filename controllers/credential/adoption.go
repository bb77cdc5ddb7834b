package credential

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/generate"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// adoptEntry lets an object that owns nothing go on with the credential of a previous one: the one
// that spec.adoptFrom names, or one that was left by an object of the same name, tenant and form.
// If there is another one of that name, whose values only the vault has, it records in o what to do
// about that. The same holds for an object that went on with a credential unasked and now has
// another form. An error means that sc itself could not be written.
func (r *reconciler) adoptEntry(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome) error {
	from, form := sc.Spec.AdoptFrom, sealing.FormDigest(sc)
	named := from != nil && from.CredentialID != ""
	bound := !o.entryMissing() && o.owned.Bound != nil
	switch {
	case o.owned != nil && named && o.owned.ID != from.CredentialID:
		o.specRefused = &refusal{reason: v1beta1.ReasonFormerValues, err: fault.New(fault.Invalid,
			"spec.adoptFrom: the object has a vault entry of its own: remove adoptFrom, or delete the object and create it with adoptFrom")}
		return nil
	case named && (o.owned == nil || bound):
		guarded, err := isAdoptionGuarded(ctx, r.targets.live)
		if err != nil {
			return o.recordAPIError(err)
		}
		if !guarded {
			o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.adoptFrom: the API server does not check who sets it: install the admission policy %s "+
				"(chart value admissionPolicies.enabled)", policyName)
			return nil
		}
		return r.adopt(ctx, p, sc, o, from.CredentialID, nil)
	case bound && !bytes.Equal(o.owned.Bound, form[:]):
		o.entryCurrent = false // so that values that the object brings are stored in place of those of the previous one
		o.previousValues = fmt.Sprintf("the vault has the values of a previous object for this one, which had the same credential type, source and target, "+
			"and nobody said that they may go elsewhere: take this change of the spec back, or set spec.adoptFrom.credentialID to %s, which needs the verb adopt. "+
			"After a rotation to new values the spec can be changed freely", o.owned.ID)
		return nil
	case o.owned != nil, from != nil:
		return nil
	}
	left, err := r.previous.of(ctx, sc)
	if err != nil {
		o.err = err
		return nil
	}
	for _, last := range left {
		if last.Tenant == p.Tenant && bytes.Equal(last.Form, form[:]) {
			if err := r.adopt(ctx, p, sc, o, last.Credential, &form); err != nil || o.owned != nil || o.err != nil {
				return err
			}
		}
	}
	if len(left) == 0 || sc.Spec.Sealed != nil {
		return nil // the manifest itself has the values
	}
	const fresh = "or set spec.adoptFrom.newValues to true to begin with new ones"
	if i := slices.IndexFunc(left, func(o vault.PreviousObject) bool { return o.Tenant == p.Tenant }); i >= 0 {
		o.previousValues = fmt.Sprintf("the vault keeps the values of a previous object of this name (%s): set spec.adoptFrom.credentialID to that id to go on with them, "+
			"which needs the verb adopt, %s", left[i].Credential, fresh)
	} else {
		o.previousValues = "the vault keeps the values of an object of this name in an earlier namespace of this name: have an administrator make this namespace part of " +
			"the tenant of that one (kubernetes.namespacesByUID; the operator's log names the tenant), " + fresh
		log.FromContext(ctx).Info("a previous namespace left values of an object of this name", "tenant", left[0].Tenant, "uid", left[0].UID)
	}
	return nil
}

// adopt lets sc go on with a credential of its tenant. form is nil when somebody asked for it, and
// otherwise the form of sc, which the values must not leave.
func (r *reconciler) adopt(ctx context.Context, p authz.Principal, sc *v1beta1.SealedCredential, o *outcome, credential string, form *[32]byte) error {
	if err := r.objects.ensureFinalizer(ctx, sc); err != nil {
		return err
	}
	owned, err := r.vault.Adopt(ctx, p, string(sc.UID), r.entries.object(sc), credential, form)
	r.previous.changed()
	switch {
	case errors.Is(err, fault.NotFound) && sc.Spec.AdoptFrom != nil:
		o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.adoptFrom.credentialID: the tenant of this namespace has no entry of this id that the object can go on with")
	case errors.Is(err, fault.NotFound):
	case err != nil:
		o.err = err
	default:
		o.owned, o.entryCurrent = owned, matchesSpec(owned, sc)
		r.entries.countChange("adopted")
		r.objects.recordEvent(ctx, sc, "Adopted", "Adopt", fmt.Sprintf("goes on with version %d of %s, which a previous object left", owned.Version, owned.ID))
	}
	return nil
}

// adoptSecret looks at the Secret where a new object that generates its values is to have its
// target. That Secret may hold the only copy of values that something uses. If its owner handed it
// over, its values become those of the object. If it still carries the mark of a previous object,
// the object is refused.
func (r *reconciler) adoptSecret(ctx context.Context, sc *v1beta1.SealedCredential, o *outcome, holds func(map[string]secret.Bytes) bool) error {
	last := r.targets.lastKnown(sc)
	switch {
	case len(sc.Spec.Generate) == 0, sc.Spec.Target == nil, last != nil && last.Name == targetName(sc):
		return nil
	case o.owned != nil && o.previousValues != "":
		return nil // the values that the Secret lacks would be those that must not go there
	}
	is := new(corev1.Secret)
	err := r.targets.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: targetName(sc)}, is)
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("reading the Secret in the target's place: %w", err)
	}
	defer clearData(is)
	owner, adopt := is.Annotations[v1beta1.AnnotationOwner], is.Annotations[v1beta1.AnnotationAdopt] == sc.Name
	isPrevious := owner != "" && owner != string(sc.UID)
	inherited := o.owned != nil && isPrevious && owner == o.owned.AdoptedFrom // it comes with the entry
	switch {
	case owner == string(sc.UID), !isPrevious && !adopt, inherited && !adopt && !isAhead(sc, is, o.owned, holds):
		return nil // a Secret of somebody else is a conflict of the target, once there are values for it
	case !adopt && inherited:
		o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.target: the Secret %s holds other values than version %d in the vault, and they may be newer: "+
			"annotate it with %s=%s to go on with them, or delete it to go on with those in the vault", is.Name, o.owned.Version, v1beta1.AnnotationAdopt, sc.Name)
		return nil
	case !adopt && o.previousValues != "":
		o.refuseTransiently(v1beta1.ReasonFormerValues, "%s; or annotate the Secret %s with %s=%s to go on with its values", o.previousValues, is.Name, v1beta1.AnnotationAdopt, sc.Name)
		return nil
	case !adopt:
		o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.target: the Secret %s holds the values of a previous object: annotate it with %s=%s to go on with them, "+
			"or delete it", is.Name, v1beta1.AnnotationAdopt, sc.Name)
		return nil
	}
	given, missing, half := valuesOf(sc, is)
	if isPrevious && len(missing) > 0 || half {
		o.refuseTransiently(v1beta1.ReasonFormerValues, "spec.target: the Secret %s holds values to go on with, but not %s by itself: "+
			"give spec.target.keys an entry with from for each, and the Secret such a key, or delete the Secret", is.Name, strings.Join(missing, ", "))
		return nil
	}
	if len(given) > 0 {
		o.given = given
	}
	return nil
}

// policyName is the name of the admission policy that says who may set spec.adoptFrom, and of its
// binding.
const policyName = "latticekeep-adopt"

// isAdoptionGuarded reports whether the API server checks who sets spec.adoptFrom. Without that
// check, whoever may make an object could have kept values written into a Secret of their choice.
func isAdoptionGuarded(ctx context.Context, live client.Reader) (bool, error) {
	policy, binding := new(unstructured.Unstructured), new(unstructured.Unstructured)
	for kind, object := range map[string]*unstructured.Unstructured{"ValidatingAdmissionPolicy": policy, "ValidatingAdmissionPolicyBinding": binding} {
		object.SetAPIVersion("admissionregistration.k8s.io/v1")
		object.SetKind(kind)
		if err := live.Get(ctx, client.ObjectKey{Name: policyName}, object); apierrors.IsNotFound(err) {
			return false, nil
		} else if err != nil {
			return false, apiError{fmt.Errorf("looking for the policy of spec.adoptFrom: %w", err)}
		}
	}
	failure, _, _ := unstructured.NestedString(policy.Object, "spec", "failurePolicy")
	bound, _, _ := unstructured.NestedString(binding.Object, "spec", "policyName")
	actions, _, _ := unstructured.NestedStringSlice(binding.Object, "spec", "validationActions")
	_, narrowed, _ := unstructured.NestedMap(binding.Object, "spec", "matchResources")
	return failure == "Fail" && bound == policyName && slices.Contains(actions, "Deny") && !narrowed, nil
}

// isAhead reports whether a Secret may hold newer values than the vault, such as when the vault's
// backup is older than that of the cluster.
func isAhead(sc *v1beta1.SealedCredential, is *corev1.Secret, owned *vault.Owned, holds func(map[string]secret.Bytes) bool) bool {
	version, err := strconv.ParseUint(is.Annotations[v1beta1.AnnotationVersion], 10, 64)
	if err == nil && version != owned.Version {
		return version > owned.Version
	}
	values, missing, _ := valuesOf(sc, is)
	defer func() {
		for _, value := range values {
			value.Zero()
		}
	}()
	return len(missing) == 0 && !holds(values)
}

// valuesOf returns the generated values that a Secret holds, as the keys of the target name them,
// and the data keys of those that it lacks. half reports whether it lacks one half of a key pair.
func valuesOf(sc *v1beta1.SealedCredential, is *corev1.Secret) (values map[string]secret.Bytes, missing []string, half bool) {
	at := func(name string) string {
		i := slices.IndexFunc(sc.Spec.Target.Keys, func(k v1beta1.TargetKey) bool { return k.From == name })
		if i < 0 {
			return ""
		}
		return sc.Spec.Target.Keys[i].To
	}
	values = make(map[string]secret.Bytes)
	for _, s := range sealing.Specs(sc.Spec.Generate) {
		names, before := generate.Names(s), len(missing)
		for _, name := range names {
			key := name
			if len(sc.Spec.Target.Keys) > 0 {
				key = at(name)
			}
			if value, ok := is.Data[key]; ok && len(value) > 0 {
				values[name] = slices.Clone(value)
			} else {
				missing = append(missing, name)
			}
		}
		half = half || len(missing) > before && len(missing) < before+len(names)
	}
	return values, missing, half
}
