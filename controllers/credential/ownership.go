package credential

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/csaupgrade"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// Labels and annotations of a target Secret are shared with others: what belongs to whom stands in
// its managedFields. A server-side apply changes what the operator applied before and leaves the
// rest. The data and the owner references are the operator's alone. apply removes what others put
// there, so it first takes that over.

// apply makes the Secret that was read equal to want, and sets want's UID and resourceVersion. It
// fails with a conflict if the Secret has changed since it was read.
func (t *targets) apply(ctx context.Context, is, want *corev1.Secret) error {
	fields, changed, err := takeOverFields(is)
	if err != nil {
		return err
	}
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	m.Namespace, m.Name, m.ResourceVersion = is.Namespace, is.Name, is.ResourceVersion
	if changed {
		// Replacing the resourceVersion lets the API server answer with a conflict if it is another.
		patch, err := json.Marshal([]map[string]any{
			{"op": "replace", "path": "/metadata/resourceVersion", "value": is.ResourceVersion},
			{"op": "add", "path": "/metadata/managedFields", "value": fields},
		})
		if err != nil {
			return err
		}
		if err := t.client.Patch(ctx, m, client.RawPatch(types.JSONPatchType, patch), client.FieldOwner(v1beta1.OperatorName)); err != nil {
			return fmt.Errorf("taking over the fields of the target Secret: %w", err)
		}
	}
	want.TypeMeta = metav1.TypeMeta{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Secret"}
	want.UID, want.ResourceVersion = is.UID, m.ResourceVersion
	patch, err := json.Marshal(want)
	if err != nil {
		return err
	}
	defer clear(patch)
	err = t.client.Patch(ctx, m, client.RawPatch(types.ApplyPatchType, patch), client.ForceOwnership, client.FieldOwner(v1beta1.OperatorName))
	if err != nil {
		return fmt.Errorf("applying the target Secret: %w", err)
	}
	want.ResourceVersion = m.ResourceVersion
	return nil
}

// takeOverFields returns the managedFields that the Secret must have before it is applied, and
// whether it has others. Fields that the operator created or updated count as applied. So do all
// data and owner references, whoever wrote them, and nobody else has a share in them.
func takeOverFields(is *corev1.Secret) (fields []metav1.ManagedFieldsEntry, changed bool, err error) {
	m := &metav1.PartialObjectMetadata{}
	m.ManagedFields = is.DeepCopy().ManagedFields
	if err := csaupgrade.UpgradeManagedFields(m, sets.New(v1beta1.OperatorName), v1beta1.OperatorName); err != nil {
		return nil, false, fmt.Errorf("reading who manages the target Secret: %w", err)
	}
	changed = !apiequality.Semantic.DeepEqual(m.ManagedFields, is.ManagedFields)
	alone := fieldpath.NewSet(fieldpath.MakePathOrDie("data"), fieldpath.MakePathOrDie("metadata", "ownerReferences"))
	all := fieldpath.NewSet()
	for key := range is.Data {
		all.Insert(fieldpath.MakePathOrDie("data", key))
	}
	for _, owner := range is.OwnerReferences {
		all.Insert(fieldpath.MakePathOrDie("metadata", "ownerReferences", fieldpath.KeyByFields("uid", string(owner.UID))))
	}
	hasOurs := false
	for _, entry := range m.ManagedFields {
		was, err := fieldsOf(entry)
		if err != nil {
			return nil, false, fmt.Errorf("reading who manages the target Secret: %w", err)
		}
		now := was.RecursiveDifference(alone)
		if isApplied(entry) {
			hasOurs, now = true, now.Union(all)
		}
		if now.Empty() {
			changed = true
			continue
		}
		if !now.Leaves().Equals(was.Leaves()) {
			changed = true
			if err := setFields(&entry, now); err != nil {
				return nil, false, err
			}
		}
		fields = append(fields, entry)
	}
	changed = changed || !hasOurs
	if !hasOurs {
		entry := metav1.ManagedFieldsEntry{
			Manager: v1beta1.OperatorName, Operation: metav1.ManagedFieldsOperationApply, APIVersion: "v1", FieldsType: "FieldsV1", FieldsV1: new(metav1.FieldsV1),
		}
		if err := setFields(&entry, all); err != nil {
			return nil, false, err
		}
		fields = append(fields, entry)
	}
	return fields, changed, nil
}

// isApplied reports whether the entry has what the operator applied.
func isApplied(entry metav1.ManagedFieldsEntry) bool {
	return entry.Manager == v1beta1.OperatorName && entry.Operation == metav1.ManagedFieldsOperationApply && entry.Subresource == ""
}

// ownFields returns what the operator wrote to the Secret, by apply or otherwise. Fields that it
// cannot read are nobody's.
func ownFields(is *corev1.Secret) *fieldpath.Set {
	own := fieldpath.NewSet()
	for _, entry := range is.ManagedFields {
		if entry.Manager != v1beta1.OperatorName || entry.Subresource != "" {
			continue
		}
		if fields, err := fieldsOf(entry); err == nil {
			own = own.Union(fields)
		}
	}
	return own
}

func fieldsOf(entry metav1.ManagedFieldsEntry) (*fieldpath.Set, error) {
	set := fieldpath.NewSet()
	if entry.FieldsV1 == nil {
		return set, nil
	}
	return set, set.FromJSON(entry.FieldsV1.GetRawReader())
}

func setFields(entry *metav1.ManagedFieldsEntry, fields *fieldpath.Set) error {
	raw, err := fields.ToJSON()
	if err != nil {
		return err
	}
	entry.FieldsV1.SetRawBytes(raw)
	return nil
}
