package controllers_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// testSchema shows objects to the API server that differ from a good one in one field.
func (w *world) testSchema(t *testing.T) {
	w, ns := w.in(t)
	key, err := envelope.GenerateSealingKey(envelope.SuiteMLKEM768X25519)
	must(t, err)
	sc := w.sealed(key.Public(), sealing.Request{Namespace: ns, Name: "schema", CredentialType: "database"}, w.values("token"))
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(sc)
	must(t, err)
	delete(content, "status")
	good := &unstructured.Unstructured{Object: content}
	dryRun := func(object *unstructured.Unstructured) error {
		return w.admin.Create(t.Context(), object, client.DryRunAll)
	}
	value := map[string]any{"sealedAt": sc.Spec.Sealed.Values["token"].SealedAt.UTC().Format(time.RFC3339), "data": "AQ=="}
	many := func(n int) map[string]any {
		values := make(map[string]any)
		for i := range n {
			values[fmt.Sprint("key-", i)] = value
		}
		return values
	}
	with := func(field string, x any) map[string]any {
		changed := map[string]any{field: x}
		for k, v := range value {
			if k != field {
				changed[k] = v
			}
		}
		return map[string]any{"token": changed}
	}

	for _, c := range []struct {
		field   string // dots separate
		value   any    // nil removes it
		message string // "" means that it is accepted
	}{
		{"spec.credentialType", strings.Repeat("a", 63), ""},
		{"spec.credentialType", strings.Repeat("a", 64), "spec.credentialType"},
		{"spec.credentialType", "", "spec.credentialType"},
		{"spec.credentialType", nil, "spec.credentialType"},
		{"spec.ttlDays", int64(1), ""},
		{"spec.ttlDays", int64(3650), ""},
		{"spec.ttlDays", int64(0), "spec.ttlDays"},
		{"spec.ttlDays", int64(3651), "spec.ttlDays"},
		{"spec.ttlDays", "90", "spec.ttlDays"},
		{"spec.suspend", true, ""},
		{"spec.suspend", "yes", "spec.suspend"},
		{"spec.deletionPolicy", "Retain", ""},
		{"spec.deletionPolicy", "Orphan", "spec.deletionPolicy"},
		{"spec.sealed", nil, "spec.sealed"},
		{"spec.sealed.version", int64(2), "spec.sealed.version"},
		{"spec.sealed.suite", "MLKEM768", ""},
		{"spec.sealed.suite", "RSA", "spec.sealed.suite"},
		{"spec.sealed.keyID", strings.Repeat("A", 64), "spec.sealed.keyID"},
		{"spec.sealed.keyID", strings.Repeat("a", 63), "spec.sealed.keyID"},
		{"spec.sealed.scope", "Namespace", ""},
		{"spec.sealed.scope", "Galaxy", "spec.sealed.scope"},
		{"spec.sealed.values", map[string]any{}, "spec.sealed.values"},
		{"spec.sealed.values", many(64), ""},
		{"spec.sealed.values", many(65), "spec.sealed.values"},
		{"spec.sealed.values", map[string]any{strings.Repeat("k", 253): value}, ""},
		{"spec.sealed.values", map[string]any{strings.Repeat("k", 254): value}, "a data key has 1 to 253"},
		{"spec.sealed.values", map[string]any{"a/b": value}, "a data key has 1 to 253"},
		{"spec.sealed.values", map[string]any{"": value}, "a data key has 1 to 253"},
		{"spec.sealed.values", with("data", ""), "data"},
		{"spec.sealed.values", with("data", strings.Repeat("A", 349528)), ""},
		{"spec.sealed.values", with("data", strings.Repeat("A", 349529)), "data"},
		{"spec.sealed.values", map[string]any{
			"one": with("data", strings.Repeat("A", 200_000))["token"], "two": with("data", strings.Repeat("A", 200_000))["token"],
		}, "larger than 256 KiB"},
		{"spec.sealed.values", with("sealedAt", "2026-01-01T00:00:00+01:00"), "sealedAt"},
		{"spec.sealed.values", with("sealedAt", "2026-01-01T00:00:00.5Z"), "sealedAt"},
		{"spec.sealed.values", with("sealedAt", "2026-13-01T00:00:00Z"), "sealedAt"},
		{"spec.sealed.values", with("sealedAt", "yesterday"), "sealedAt"},
		{"spec.rotation", map[string]any{"before": "36h"}, ""},
		{"spec.rotation", map[string]any{"before": "2159h"}, ""}, // of 90 days, an hour is left
		{"spec.rotation", map[string]any{"before": "2160h"}, "an hour shorter than the TTL"},
		{"spec.rotation", map[string]any{"before": "0s"}, "more than 0"},
		{"spec.rotation", map[string]any{"before": "-1h"}, "spec.rotation.before"},
		{"spec.rotation", map[string]any{"before": "1d"}, "spec.rotation.before"},
		{"spec.rotation", map[string]any{"trigger": strings.Repeat("t", 253)}, ""},
		{"spec.rotation", map[string]any{"trigger": strings.Repeat("t", 254)}, "spec.rotation.trigger"},
	} {
		object := good.DeepCopy()
		path := strings.Split(c.field, ".")
		if c.value == nil {
			unstructured.RemoveNestedField(object.Object, path...)
		} else {
			must(t, unstructured.SetNestedField(object.Object, c.value, path...))
		}
		err := dryRun(object)
		shown := fmt.Sprint(c.value)
		shown = c.field + " = " + shown[:min(len(shown), 80)]
		switch {
		case c.message == "" && err != nil:
			t.Errorf("%s is refused: %v", shown, err)
		case c.message != "" && (!apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), c.message)):
			t.Errorf("%s: %v, want a message with %q", shown, err, c.message)
		}
	}

	created := w.create(sc.DeepCopy())
	if created.Status.ObservedGeneration != -1 || created.Spec.TTLDays != 90 || created.Spec.DeletionPolicy != v1alpha1.DeletionDelete ||
		created.Spec.Sealed.Scope != v1alpha1.ScopeStrict {
		t.Errorf("the defaults are not those of the types: %+v, observed generation %d", created.Spec, created.Status.ObservedGeneration)
	}
	created.Spec.CredentialType = "another"
	if err := w.admin.Update(t.Context(), created); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "immutable") {
		t.Errorf("changing the credential type: %v", err)
	}
	must(t, w.admin.Delete(t.Context(), created))
}
