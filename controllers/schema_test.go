package controllers_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
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
	strict := client.WithFieldValidation(w.admin, metav1.FieldValidationStrict)
	dryRun := func(object *unstructured.Unstructured) error {
		return strict.Create(t.Context(), object, client.DryRunAll)
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

	one := func(entry map[string]any) []any { return []any{entry} }
	random := func(field string, x any) []any {
		return one(map[string]any{"key": "a", "random": map[string]any{field: x}})
	}
	generators := func(n int) (list []any) {
		for i := range n {
			list = append(list, map[string]any{"key": fmt.Sprint("key-", i), "random": map[string]any{}})
		}
		return list
	}
	rsaKeyPairs := func(n int) (list []any) {
		for i := range n {
			list = append(list, map[string]any{"key": fmt.Sprint("rsa-", i), "keyPair": map[string]any{"algorithm": []string{"RSA-3072", "RSA-4096"}[i%2]}})
		}
		return list
	}
	targetKeys := func(n int) (list []any) {
		for i := range n {
			list = append(list, map[string]any{"to": fmt.Sprint("key-", i), "from": "token"})
		}
		return list
	}
	texts := func(n, length int) map[string]any {
		all := make(map[string]any)
		for i := range n {
			all[fmt.Sprint("example.com/a", i)] = strings.Repeat("x", length)
		}
		return all
	}
	secretRef := func(name string) map[string]any { return map[string]any{"secretRef": map[string]any{"name": name}} }
	deleting := secretRef("plain")
	deleting["deleteAfterImport"] = true
	bases := map[string]map[string]any{ // what there is instead of spec.sealed
		"imported":  {"valuesFrom": secretRef("plain")},
		"deleted":   {"valuesFrom": deleting},
		"itself":    {"valuesFrom": secretRef("schema"), "target": map[string]any{}},
		"generated": {"generate": generators(1)},
	}

	for _, c := range []struct {
		field   string // dots separate; what is before the first is the object that differs, if it is none of its fields
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
		{"spec.sealed", nil, "exactly one of sealed, valuesFrom and generate"},
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
		{"metadata.name", strings.Repeat("n", 253), ""},
		{"metadata.name", strings.Repeat("n", 254), "metadata.name"},
		{"spec.valuesFrom", secretRef("plain"), "exactly one of sealed, valuesFrom and generate"},
		{"spec.generate", generators(1), "exactly one of sealed, valuesFrom and generate"},
		{"spec.rotation", map[string]any{"policy": "Regenerate"}, "Regenerate needs generate"},
		{"spec.rotation", map[string]any{"policy": "Reencrypt", "overlap": "1h"}, "rotation.overlap needs rotation.policy Regenerate"},
		{"spec.rotation", map[string]any{"overlap": "1h"}, "rotation.overlap needs rotation.policy Regenerate"},
		{"spec.rotation", map[string]any{"policy": "Never"}, "spec.rotation.policy"},
		{"spec.rotation", map[string]any{"maxValueAge": "99999h"}, ""},
		{"spec.rotation", map[string]any{"maxValueAge": "100000h"}, "spec.rotation.maxValueAge"},
		{"spec.rotation", map[string]any{"maxValueAge": "1.5h"}, "spec.rotation.maxValueAge"},
		{"spec.target", map[string]any{}, ""},
		{"spec.target.name", strings.Repeat("n", 253), ""},
		{"spec.target.name", strings.Repeat("n", 254), "spec.target.name"},
		{"spec.target.name", "", "spec.target.name"},
		{"spec.target.name", "other/app", "spec.target.name"},
		{"spec.target.name", "../app", "spec.target.name"},
		{"spec.target.namespace", "other", "unknown field"},
		{"spec.target.type", "kubernetes.io/tls", ""},
		{"spec.target.type", "kubernetes.io/dockerconfigjson", ""},
		{"spec.target.type", "kubernetes.io/basic-auth", ""},
		{"spec.target.type", "kubernetes.io/ssh-auth", ""},
		{"spec.target.type", "kubernetes.io/service-account-token", "spec.target.type"},
		{"spec.target.type", "bootstrap.kubernetes.io/token", "spec.target.type"},
		{"spec.target.type", "kubernetes.io/dockercfg", "spec.target.type"},
		{"spec.target.deletionPolicy", "Retain", ""},
		{"spec.target.deletionPolicy", "Orphan", "spec.target.deletionPolicy"},
		{"spec.target.labels", texts(32, 63), ""},
		{"spec.target.labels", texts(33, 1), "spec.target.labels"},
		{"spec.target.labels", texts(1, 64), "a label has at most 63"},
		{"spec.target.annotations", texts(32, 4096), ""},
		{"spec.target.annotations", texts(33, 1), "spec.target.annotations"},
		{"spec.target.annotations", texts(1, 4097), "an annotation has at most 4096"},
		{"spec.target.labels", map[string]any{strings.Repeat("l", 317): ""}, ""},
		{"spec.target.labels", map[string]any{strings.Repeat("l", 318): ""}, "a label has at most 63"},
		{"spec.target.labels", map[string]any{"example.com/a": "b", "latticekeep.dev.example.com/a": "b"}, ""},
		{"spec.target.labels", map[string]any{"kubernetes.io/a": "b"}, "no prefix of kubernetes.io"},
		{"spec.target.labels", map[string]any{"app.kubernetes.io/part-of": "b", "helm.sh/chart": "c"}, ""},
		{"spec.target.labels", map[string]any{"app.kubernetes.io/managed-by": "b"}, "no prefix of kubernetes.io"},
		{"spec.target.labels", map[string]any{"x.app.kubernetes.io/a": "b"}, "no prefix of kubernetes.io"},
		{"spec.target.labels", map[string]any{"k8s.io/a": "b"}, "no prefix of kubernetes.io"},
		{"spec.target.labels", map[string]any{"latticekeep.dev/a": "b"}, "no prefix of kubernetes.io"},
		{"spec.target.annotations", map[string]any{"kubernetes.io/service-account.name": "b"}, "no prefix of kubernetes.io"},
		{"spec.target.annotations", map[string]any{"x.k8s.io/a": "b"}, "no prefix of kubernetes.io"},
		{"spec.target.annotations", map[string]any{"latticekeep.dev/owner": "b"}, "no prefix of kubernetes.io"},
		{"spec.target.annotations", map[string]any{"x.latticekeep.dev/owner": "b"}, "no prefix of kubernetes.io"},
		{"spec.target.keys", targetKeys(64), ""},
		{"spec.target.keys", targetKeys(65), "spec.target.keys"},
		{"spec.target.keys", []any{}, "spec.target.keys"},
		{"spec.target.keys", one(map[string]any{"to": "a"}), "exactly one of from and template"},
		{"spec.target.keys", one(map[string]any{"to": "a", "from": "b", "template": "c"}), "exactly one of from and template"},
		{"spec.target.keys", one(map[string]any{"from": "b"}), "spec.target.keys[0].to"},
		{"spec.target.keys", one(map[string]any{"to": "a", "from": "b", "encoding": "URL"}), "encoding is for a template"},
		{"spec.target.keys", one(map[string]any{"to": "a", "template": "b", "encoding": "JSON"}), ""},
		{"spec.target.keys", one(map[string]any{"to": "a", "template": "b", "encoding": "HTML"}), "spec.target.keys[0].encoding"},
		{"spec.target.keys", one(map[string]any{"to": "a", "template": strings.Repeat("é", 4096)}), ""},
		{"spec.target.keys", one(map[string]any{"to": "a", "template": strings.Repeat("t", 4097)}), "spec.target.keys[0].template"},
		{"spec.target.keys", one(map[string]any{"to": strings.Repeat("t", 253), "from": strings.Repeat("f", 253)}), ""},
		{"spec.target.keys", one(map[string]any{"to": strings.Repeat("t", 254), "from": "b"}), "spec.target.keys[0].to"},
		{"spec.target.keys", one(map[string]any{"to": "a", "from": strings.Repeat("f", 254)}), "spec.target.keys[0].from"},
		{"spec.target.keys", one(map[string]any{"to": "a/b", "from": "b"}), "spec.target.keys[0].to"},
		{"spec.target.keys", []any{map[string]any{"to": "a", "from": "b"}, map[string]any{"to": "a", "from": "c"}}, "Duplicate"},
		{"imported.spec.valuesFrom", secretRef(strings.Repeat("n", 253)), ""},
		{"imported.spec.valuesFrom", secretRef(strings.Repeat("n", 254)), "secretRef.name"},
		{"imported.spec.valuesFrom", secretRef(""), "secretRef.name"},
		{"imported.spec.valuesFrom", secretRef("other/plain"), "secretRef.name"},
		{"imported.spec.valuesFrom", map[string]any{}, "secretRef"},
		{"imported.spec.valuesFrom.secretRef.namespace", "other", "unknown field"},
		{"imported.spec.rotation", map[string]any{"policy": "Regenerate"}, "Regenerate needs generate"},
		{"imported.spec.valuesFrom.deleteAfterImport", true, ""},
		{"imported.spec.target", map[string]any{"name": "plain"}, ""},
		{"deleted.spec.target", map[string]any{"name": "another"}, ""},
		{"deleted.spec.target", map[string]any{"name": "plain"}, "would delete the target"},
		{"deleted.spec.target", map[string]any{}, ""},
		{"deleted.spec.valuesFrom.secretRef.name", "schema", ""}, // there is no target
		{"itself.spec.valuesFrom.deleteAfterImport", true, "would delete the target"},
		{"generated.spec.generate", generators(64), ""},
		{"generated.spec.generate", generators(65), "spec.generate"},
		{"generated.spec.generate", []any{}, "spec.generate"},
		{"generated.spec.generate", append(generators(1), generators(1)...), "Duplicate"},
		{"generated.spec.generate", one(map[string]any{"key": "a"}), "exactly one of random and keyPair"},
		{"generated.spec.generate", one(map[string]any{"key": "a", "random": map[string]any{}, "keyPair": map[string]any{"algorithm": "Ed25519"}}), "exactly one of random and keyPair"},
		{"generated.spec.generate", one(map[string]any{"random": map[string]any{}}), "spec.generate[0].key"},
		{"generated.spec.generate", random("length", int64(16)), ""},
		{"generated.spec.generate", random("length", int64(4096)), ""},
		{"generated.spec.generate", random("length", int64(15)), "spec.generate[0].random.length"},
		{"generated.spec.generate", random("length", int64(4097)), "spec.generate[0].random.length"},
		{"generated.spec.generate", random("charset", "ASCII"), ""},
		{"generated.spec.generate", random("charset", "Emoji"), "spec.generate[0].random.charset"},
		{"generated.spec.generate", one(map[string]any{"key": "a", "keyPair": map[string]any{"algorithm": "ML-DSA-65", "publicKeyName": "b"}}), ""},
		{"generated.spec.generate", one(map[string]any{"key": "a", "keyPair": map[string]any{"algorithm": "RSA-1024"}}), "spec.generate[0].keyPair.algorithm"},
		{"generated.spec.generate", one(map[string]any{"key": "a", "keyPair": map[string]any{}}), "spec.generate[0].keyPair.algorithm"},
		{"generated.spec.generate", rsaKeyPairs(2), ""},
		{"generated.spec.generate", append(rsaKeyPairs(2), generators(2)...), ""},
		{"generated.spec.generate", rsaKeyPairs(3), "at most 2 RSA key pairs"},
		{"generated.spec.generate", one(map[string]any{"key": strings.Repeat("k", 254), "random": map[string]any{}}), "spec.generate[0].key"},
		{"generated.spec.generate", one(map[string]any{"key": "a b", "random": map[string]any{}}), "spec.generate[0].key"},
		{"generated.spec.rotation", map[string]any{"policy": "Regenerate"}, ""},
		{"generated.spec.rotation", map[string]any{"policy": "Regenerate", "overlap": "2160h"}, ""},
		{"generated.spec.rotation", map[string]any{"policy": "Regenerate", "overlap": "2160h1s"}, "no longer than the TTL"},
	} {
		field, object := c.field, good.DeepCopy()
		if base, rest, ok := strings.Cut(field, ".spec."); ok {
			field = "spec." + rest
			unstructured.RemoveNestedField(object.Object, "spec", "sealed")
			for k, v := range bases[base] {
				must(t, unstructured.SetNestedField(object.Object, v, "spec", k))
			}
		}
		path := strings.Split(field, ".")
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
	w.testSchemaOfUpdates(t, good, bases)

	created := w.create(sc.DeepCopy())
	if created.Status.ObservedGeneration != -1 || created.Spec.TTLDays != 90 || created.Spec.DeletionPolicy != v1beta1.DeletionDelete ||
		created.Spec.Sealed.Scope != v1beta1.ScopeStrict {
		t.Errorf("the defaults are not those of the types: %+v, observed generation %d", created.Spec, created.Status.ObservedGeneration)
	}
	created.Spec.CredentialType = "another"
	if err := w.admin.Update(t.Context(), created); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "immutable") {
		t.Errorf("changing the credential type: %v", err)
	}
	must(t, w.admin.Delete(t.Context(), created))
}

// testSchemaOfUpdates changes objects into one another: what an object is about is fixed when it is made.
func (w *world) testSchemaOfUpdates(t *testing.T, sealed *unstructured.Unstructured, bases map[string]map[string]any) {
	spec := func(base string, more ...any) map[string]any {
		s := map[string]any{"credentialType": "database"}
		if base == "sealed" {
			s["sealed"] = sealed.Object["spec"].(map[string]any)["sealed"]
		}
		for k, v := range bases[base] {
			s[k] = v
		}
		for i := 0; i < len(more); i += 2 {
			s[more[i].(string)] = more[i+1]
		}
		return s
	}
	named := func(name string) map[string]any { return map[string]any{"name": name} }
	for i, c := range []struct {
		from, to map[string]any
		message  string
	}{
		{spec("imported"), spec("sealed"), ""},
		{spec("imported"), spec("generated"), "the kind of source is fixed"},
		{spec("sealed"), spec("imported"), "the kind of source is fixed"},
		{spec("sealed"), spec("generated"), "the kind of source is fixed"},
		{spec("generated"), spec("sealed"), "the kind of source is fixed"},
		{spec("generated"), spec("imported"), "the kind of source is fixed"},
		{spec("generated"), spec("generated", "generate", []any{map[string]any{"key": "b", "random": map[string]any{}}}), ""},
		{spec("sealed"), spec("sealed", "credentialType", "another"), "immutable"},
		{spec("sealed"), spec("sealed", "ttlDays", int64(1)), ""},
		{spec("sealed"), spec("sealed", "target", named("a")), ""},
		{spec("sealed", "target", named("a")), spec("sealed"), ""},
		{spec("sealed", "target", named("a")), spec("sealed", "target", named("b")), "target.name is immutable"},
		{spec("sealed", "target", named("a")), spec("sealed", "target", map[string]any{}), "target.name is immutable"},
		{spec("sealed", "target", map[string]any{}), spec("sealed", "target", named("schema")), "target.name is immutable"},
		{spec("sealed", "target", named("a")), spec("sealed", "target", map[string]any{"name": "a", "type": "kubernetes.io/tls", "deletionPolicy": "Retain"}), ""},
		{spec("deleted"), spec("deleted", "target", named("plain")), "would delete the target"},
	} {
		object := sealed.DeepCopy()
		object.SetName(fmt.Sprint("update-", i))
		object.Object["spec"] = runtime.DeepCopyJSON(c.from)
		must(t, w.admin.Create(t.Context(), object))
		object.Object["spec"] = runtime.DeepCopyJSON(c.to)
		err := w.admin.Update(t.Context(), object, client.DryRunAll)
		switch {
		case c.message == "" && err != nil:
			t.Errorf("update %d is refused: %v", i, err)
		case c.message != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), c.message)):
			t.Errorf("update %d: %v, want a message with %q", i, err, c.message)
		}
		must(t, w.admin.Delete(t.Context(), object))
	}
}
