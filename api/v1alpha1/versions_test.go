package v1alpha1_test

import (
	"bytes"
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

// Both versions have one schema, so nothing is lost between them. One is stored, and the other warns.
func TestTheVersionsHaveOneSchema(t *testing.T) {
	text, err := os.ReadFile("../../config/crd/bases/latticekeep.dev_sealedcredentials.yaml")
	must(t, err)
	var crd struct {
		Spec struct {
			Conversion any
			Versions   []map[string]any
		}
	}
	must(t, yaml.Unmarshal(text, &crd))
	if len(crd.Spec.Versions) != 2 || crd.Spec.Conversion != nil {
		t.Fatalf("%d versions, conversion %v: two are served, and None converts between them", len(crd.Spec.Versions), crd.Spec.Conversion)
	}
	before, now := crd.Spec.Versions[0], crd.Spec.Versions[1]
	if before["name"] != "v1alpha1" || before["served"] != true || before["storage"] != false || before["deprecated"] != true ||
		!strings.Contains(before["deprecationWarning"].(string), v1beta1.GroupVersion.String()) {
		t.Error("v1alpha1 is not served, deprecated and unstored, with a warning that names its successor")
	}
	if now["name"] != "v1beta1" || now["served"] != true || now["storage"] != true || now["deprecated"] != nil {
		t.Error("v1beta1 is not the served and stored version")
	}
	for _, v := range crd.Spec.Versions {
		for _, name := range []string{"name", "storage", "deprecated", "deprecationWarning"} {
			delete(v, name)
		}
	}
	if !reflect.DeepEqual(before, now) {
		t.Error("schema, columns or subresources of the versions differ: what is on the type of v1beta1 belongs on that of v1alpha1 too")
	}
}

// spec has every field that can stand beside the source of values.
func spec(source func(*v1beta1.SealedCredentialSpec)) v1beta1.SealedCredentialSpec {
	hours := func(n int) *metav1.Duration { return &metav1.Duration{Duration: time.Duration(n) * time.Hour} }
	s := v1beta1.SealedCredentialSpec{
		CredentialType: "database", TTLDays: 30, Suspend: true, DeletionPolicy: v1beta1.DeletionRetain,
		Rotation: &v1beta1.Rotation{Policy: v1beta1.RotationReencrypt, Before: hours(48), Trigger: "2026-11", MaxValueAge: hours(720)},
		Target: &v1beta1.Target{
			Name: "other", Type: "kubernetes.io/basic-auth", Labels: map[string]string{"team": "payments"}, Annotations: map[string]string{"example.com/a": "b"},
			Keys: []v1beta1.TargetKey{{To: "password", From: "password"}, {To: "url", Template: "x-${password}", Encoding: v1beta1.EncodingURL}}, DeletionPolicy: v1beta1.DeletionRetain, Immutable: true,
		},
	}
	source(&s)
	return s
}

func objects() map[string]v1beta1.SealedCredentialSpec {
	return map[string]v1beta1.SealedCredentialSpec{
		"sealed": spec(func(s *v1beta1.SealedCredentialSpec) {
			at := metav1.NewTime(time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC))
			s.Sealed = &v1beta1.Sealed{Version: 1, Suite: "MLKEM768", KeyID: strings.Repeat("ab", 32), Scope: v1beta1.ScopeNamespace,
				Values: map[string]v1beta1.SealedValue{"password": {SealedAt: at, Data: "AQID"}}, AllowOlder: true}
		}),
		"imported": spec(func(s *v1beta1.SealedCredentialSpec) {
			s.AdoptFrom = &v1beta1.AdoptFrom{NewValues: true}
			s.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "legacy"}, DeleteAfterImport: true}
		}),
		"generated": spec(func(s *v1beta1.SealedCredentialSpec) {
			s.Generate = []v1beta1.Generator{{Key: "password", Random: &v1beta1.Random{Length: 40, Charset: "Alphanumeric"}},
				{Key: "pair", KeyPair: &v1beta1.KeyPair{Algorithm: "Ed25519", PublicKeyName: "public"}}}
			s.AdoptFrom = &v1beta1.AdoptFrom{CredentialID: "cred_" + strings.Repeat("a", 26)}
			s.Rotation.Policy, s.Rotation.Overlap = v1beta1.RotationRegenerate, &metav1.Duration{Duration: time.Hour}
		}),
	}
}

// status has every field.
func status() v1beta1.SealedCredentialStatus {
	var s v1beta1.SealedCredentialStatus
	fill(reflect.ValueOf(&s).Elem())
	s.Audit.Hash = strings.Repeat("ab", 32)
	s.Conditions = []metav1.Condition{{Type: v1beta1.ConditionReady, Status: metav1.ConditionTrue, ObservedGeneration: 1, Reason: v1beta1.ReasonSealed, Message: "x",
		LastTransitionTime: *s.SealedAt}}
	return s
}

// fill sets every field of a value to something.
func fill(v reflect.Value) {
	if _, ok := v.Interface().(metav1.Time); ok {
		v.Set(reflect.ValueOf(metav1.NewTime(time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC))))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.String:
		v.SetString("x")
	case reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Bool:
		v.SetBool(true)
	default:
		panic(v.Type().String())
	}
}

// note records every field below path, and whether it has a value.
func note(v reflect.Value, path string, set map[string]bool) {
	set[path] = set[path] || !v.IsZero()
	t := v.Type()
	switch {
	case t.PkgPath() != "" && !strings.HasSuffix(t.PkgPath(), "/api/v1beta1"): // a time or a duration
	case t.Kind() == reflect.Struct:
		for i := range t.NumField() {
			note(v.Field(i), path+"."+t.Field(i).Name, set)
		}
	case t.Kind() == reflect.Pointer && v.IsNil(), t.Kind() == reflect.Slice && v.Len() == 0, t.Kind() == reflect.Map && v.Len() == 0:
		note(reflect.Zero(t.Elem()), path, set)
	case t.Kind() == reflect.Pointer:
		note(v.Elem(), path, set)
	case t.Kind() == reflect.Slice:
		for i := range v.Len() {
			note(v.Index(i), path, set)
		}
	case t.Kind() == reflect.Map:
		for _, k := range v.MapKeys() {
			note(v.MapIndex(k), path, set)
		}
	}
}

func TestTheObjectsOfTheRoundTripHaveEveryField(t *testing.T) {
	set := make(map[string]bool)
	for _, s := range objects() {
		note(reflect.ValueOf(s), "Spec", set)
	}
	note(reflect.ValueOf(status()), "Status", set)
	for path, given := range set {
		if !given {
			t.Errorf("%s is in none: add it to one of the objects", path)
		}
	}
}

// cluster is a real API server.
type cluster struct {
	t     *testing.T
	plane *kubetest.ControlPlane
}

// kubectl returns what it writes to its outputs.
func (c cluster) kubectl(input any, args ...string) (stdout, stderr string) {
	c.t.Helper()
	text, err := json.Marshal(input)
	must(c.t, err)
	var out, said strings.Builder
	cmd := c.plane.Kubectl(c.t.Context(), args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(text), &out, &said
	if err := cmd.Run(); err != nil {
		c.t.Fatalf("kubectl %s: %v: %s", strings.Join(args, " "), err, &said)
	}
	return out.String(), said.String()
}

// read returns an object as the API server shows it in a version.
func read[T any](c cluster, version, name string) (object T) {
	c.t.Helper()
	text, _ := c.kubectl(nil, "get", "sealedcredentials."+version+".latticekeep.dev", name, "-o", "json")
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	must(c.t, d.Decode(&object))
	return object
}

// An object is the same in both versions, whichever it is written in.
func TestAnObjectIsTheSameInBothVersions(t *testing.T) {
	c := cluster{t, kubetest.ForTest(t)}
	for name, spec := range objects() {
		before := v1alpha1.SealedCredential{
			TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: v1beta1.KindSealedCredential},
			ObjectMeta: metav1.ObjectMeta{Name: name + "-alpha", Labels: map[string]string{"team": "payments"}, Finalizers: []string{"example.org/x"}},
			Spec:       spec,
		}
		if _, said := c.kubectl(before, "create", "-f", "-"); !strings.Contains(said, "deprecated: write apiVersion latticekeep.dev/v1beta1") {
			t.Errorf("no warning of the deprecated version: %q", said)
		}
		now := *before.Current()
		now.Name = name + "-beta"
		if _, said := c.kubectl(now, "create", "-f", "-"); said != "" {
			t.Errorf("a warning of the current version: %q", said)
		}
		for _, name := range []string{before.Name, now.Name} {
			want := read[v1beta1.SealedCredential](c, "v1beta1", name)
			if !equality.Semantic.DeepEqual(want.Spec, spec) || want.Labels["team"] != "payments" || len(want.Finalizers) != 1 {
				t.Errorf("%s is not what was written: %+v", name, want)
			}
			want.Status = status()
			version := map[bool]string{true: "v1alpha1", false: "v1beta1"}[name == now.Name] // each by the other
			want.APIVersion = "latticekeep.dev/" + version
			c.kubectl(want, "replace", "--subresource=status", "-f", "-")
			alpha, beta := read[v1alpha1.SealedCredential](c, "v1alpha1", name), read[v1beta1.SealedCredential](c, "v1beta1", name)
			if !equality.Semantic.DeepEqual(beta.Spec, spec) || !equality.Semantic.DeepEqual(beta.Status, status()) {
				t.Errorf("%s has lost something by a status of %s: %+v", name, version, beta)
			}
			for i := range alpha.ManagedFields { // the one place that names the version a writer used
				alpha.ManagedFields[i].APIVersion, beta.ManagedFields[i].APIVersion = "", ""
			}
			if alpha.APIVersion != "latticekeep.dev/v1alpha1" || !equality.Semantic.DeepEqual(*alpha.Current(), beta) {
				t.Errorf("%s differs between the versions:\n%+v\n%+v", name, alpha, beta)
			}
		}
	}
}

// A team changes the apiVersion of a file in git and nothing else. Server-side apply still knows whose each field is: what the file no longer
// has is removed.
func TestAFileMovesToTheNewVersion(t *testing.T) {
	c := cluster{t, kubetest.ForTest(t)}
	file := v1alpha1.SealedCredential{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: v1beta1.KindSealedCredential},
		ObjectMeta: metav1.ObjectMeta{Name: "db"}, Spec: objects()["generated"],
	}
	c.kubectl(file, "apply", "--server-side", "--field-manager=git", "-f", "-")
	was := read[v1beta1.SealedCredential](c, "v1beta1", "db")
	moved := file.Current()
	c.kubectl(moved, "apply", "--server-side", "--field-manager=git", "-f", "-")
	if is := read[v1beta1.SealedCredential](c, "v1beta1", "db"); is.Generation != was.Generation {
		t.Errorf("another apiVersion alone is a change of the spec: generation %d, then %d", was.Generation, is.Generation)
	}
	moved.Spec.Suspend, moved.Spec.Target.Annotations = false, nil
	c.kubectl(moved, "apply", "--server-side", "--field-manager=git", "-f", "-")
	if is := read[v1beta1.SealedCredential](c, "v1beta1", "db"); is.Spec.Suspend || is.Spec.Target.Annotations != nil || is.UID != was.UID {
		t.Errorf("fields that the file no longer has are still there: %+v", is.Spec)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
