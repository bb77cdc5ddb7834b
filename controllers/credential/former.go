package credential

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/generate"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// formers knows which objects are gone and have left a credential in the vault.
//
// An object is identified by its UID, so one that was deleted and restored is a new object. It must
// not silently get new values while a database still has the old ones. So a new object first looks
// here for one of its name: of its tenant, of an earlier namespace of that name, or of a cluster
// that the store was moved from.
type formers struct {
	vault   *vault.Vault
	live    client.Reader // reads from the API server, not from the cache
	cluster string        // UID of the cluster
	now     func() time.Time

	// release keeps the credential of an object that is gone and was never finalized. It does nothing
	// for one that exists.
	release func(context.Context, vault.Owner) error

	mu     sync.Mutex
	read   time.Time // when byName was read; zero if it has to be read again
	byName map[types.NamespacedName]*namesakes
}

// namesakes are the objects of one name.
type namesakes struct {
	formers []vault.Former
	owners  []vault.Owner // of this cluster; all but one of them are gone
}

func (n *namesakes) copy() namesakes {
	if n == nil {
		return namesakes{}
	}
	return *n
}

// formersAge is how long a finding counts, because REST may have deleted the credential since. That
// there is none of a name counts until changed or stored is called.
const formersAge = 10 * time.Second

// of returns the previous objects with the namespace and the name of sc. It first releases those
// that went without their finalizer, which the sweeper has not found yet.
func (f *formers) of(ctx context.Context, sc *v1beta1.SealedCredential) ([]vault.Former, error) {
	name := client.ObjectKeyFromObject(sc)
	found, err := f.find(ctx, name)
	if err != nil {
		return nil, err
	}
	gone := slices.DeleteFunc(slices.Clone(found.owners), func(o vault.Owner) bool { return o.UID == string(sc.UID) })
	if len(gone) == 0 {
		return found.formers, nil
	}
	for _, owner := range gone {
		if err := f.release(ctx, owner); err != nil {
			return nil, err
		}
	}
	f.changed()
	found, err = f.find(ctx, name)
	return found.formers, err
}

func (f *formers) find(ctx context.Context, name types.NamespacedName) (namesakes, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if found := f.byName[name]; !f.read.IsZero() && (found == nil || f.now().Sub(f.read) < formersAge) {
		return found.copy(), nil
	}
	at := f.now()
	owners, all, err := f.vault.Objects(ctx, f.cluster)
	if err != nil {
		return namesakes{}, err
	}
	f.byName, f.read = make(map[types.NamespacedName]*namesakes), at
	for _, former := range all {
		n := f.named(former.Owner)
		n.formers = append(n.formers, former)
	}
	for _, owner := range owners {
		n := f.named(owner)
		n.owners = append(n.owners, owner)
	}
	return f.byName[name].copy(), nil
}

// named returns the objects with the name of o, to be changed while mu is held.
func (f *formers) named(o vault.Owner) *namesakes {
	key := types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
	if f.byName[key] == nil {
		f.byName[key] = new(namesakes)
	}
	return f.byName[key]
}

// stored notes that sc owns a credential from now on.
func (f *formers) stored(tenant authz.TenantID, sc *v1beta1.SealedCredential) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.read.IsZero() {
		return
	}
	o := vault.Owner{Object: vault.Object{Cluster: f.cluster, Namespace: sc.Namespace, Name: sc.Name}, UID: string(sc.UID), Tenant: tenant}
	n := f.named(o)
	n.owners = append(n.owners, o)
}

// changed has the previous objects read again, because an object is gone or another goes on with its
// credential.
func (f *formers) changed() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.read = time.Time{}
}

// policyName is the name of the admission policy that says who may set spec.adoptFrom, and of its
// binding.
const policyName = "latticekeep-adopt"

// guarded reports whether the API server checks who sets spec.adoptFrom. Without that check,
// whoever may make an object could have kept values written into a Secret of their choice.
func (f *formers) guarded(ctx context.Context) (bool, error) {
	policy, binding := new(unstructured.Unstructured), new(unstructured.Unstructured)
	for kind, object := range map[string]*unstructured.Unstructured{"ValidatingAdmissionPolicy": policy, "ValidatingAdmissionPolicyBinding": binding} {
		object.SetAPIVersion("admissionregistration.k8s.io/v1")
		object.SetKind(kind)
		if err := f.live.Get(ctx, client.ObjectKey{Name: policyName}, object); apierrors.IsNotFound(err) {
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

// acceptedForm returns the form of sc if its spec was accepted whole, and zero otherwise.
func acceptedForm(sc *v1beta1.SealedCredential, owned *vault.Owned) [32]byte {
	made := ""
	if sc.Status.Target != nil {
		made = sc.Status.Target.Spec
	}
	if owned == nil || !matchesSpec(owned, sc) || made != targetDigest(sc) {
		return [32]byte{}
	}
	return sealing.FormDigest(sc)
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
