package sealing

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const canary = "tr0ub4dor-and-3"

func request() Request {
	return Request{
		Namespace: "shop", Name: "db", CredentialType: "database", TTLDays: 30,
		Values: map[string]secret.Bytes{"username": secret.Bytes("app"), "password": secret.Bytes(canary)},
	}
}

func seal(t testing.TB, key *envelope.SealingKey, r Request) *v1beta1.SealedCredential {
	t.Helper()
	obj, err := Seal(key.Public(), r, goldenTime.Add(123*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	return obj
}

// only returns a lookup that knows one key.
func only(key *envelope.SealingKey) func(string) (*envelope.SealingKey, error) {
	return func(id string) (*envelope.SealingKey, error) {
		if id != key.Public().ID() {
			return nil, fault.New(fault.NotFound, "no such sealing key")
		}
		return key, nil
	}
}

func manifest(t testing.TB, b []byte) *v1beta1.SealedCredential {
	t.Helper()
	obj := new(v1beta1.SealedCredential)
	if err := yaml.UnmarshalStrict(b, obj); err != nil {
		t.Fatal(err)
	}
	return obj
}

func TestGoldenManifestOpens(t *testing.T) {
	_, key := goldenKeys(t)
	obj := manifest(t, golden(t, "manifest.yaml"))
	if problems := Validate(obj, Expect{Namespace: "shop", Name: "db", Scope: v1beta1.ScopeStrict, Key: key.Public()}); problems != nil {
		t.Fatal(problems)
	}
	values, err := Open(obj, only(key))
	if err != nil {
		t.Fatal(err)
	}
	if len(values) != 2 || string(values["username"]) != "app" || string(values["password"]) != canary {
		t.Fatal("other values")
	}
	const spec, sealed = "d6ce70727419b4aa60c587340384f3854d071bcb215c561d01d834b00346ffcd", "103f7b353418c8e7583a28d1de1f9f8be5761dd500c66fcf68989f3a459c6482"
	if got := fmt.Sprintf("%x", SpecDigest(obj)); got != spec {
		t.Errorf("spec digest %s, not %s", got, spec)
	}
	if got := fmt.Sprintf("%x", sealedDigest(obj.Spec.Sealed)); got != sealed {
		t.Errorf("digest of the sealed values %s, not %s", got, sealed)
	}
	// It was written in v1alpha1. Values are not bound to the version, and a file that moves to another makes no new version of the entry.
	moved := manifest(t, bytes.Replace(golden(t, "manifest.yaml"), []byte("latticekeep.dev/v1alpha1"), []byte(v1beta1.GroupVersion.String()), 1))
	if again, err := Open(moved, only(key)); err != nil || string(again["password"]) != canary || moved.APIVersion == obj.APIVersion || SpecDigest(moved) != SpecDigest(obj) {
		t.Errorf("in another version of the API: %v", err)
	}
}

func TestSealedManifestOpens(t *testing.T) {
	for _, suite := range []envelope.Suite{envelope.SuiteMLKEM768X25519, envelope.SuiteMLKEM768} {
		key, err := envelope.GenerateSealingKey(suite)
		if err != nil {
			t.Fatal(err)
		}
		for _, scope := range []v1beta1.Scope{"", v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster} {
			r := request()
			r.Scope = scope
			r.Values["empty"] = nil
			obj := seal(t, key, r)
			b, err := yaml.Marshal(obj)
			if err != nil {
				t.Fatal(err)
			}
			for _, unwanted := range []string{canary, "status", "creationTimestamp"} {
				if strings.Contains(string(b), unwanted) {
					t.Fatalf("the manifest contains %s:\n%s", unwanted, b)
				}
			}
			obj = manifest(t, b)
			for k, at := range SealedAt(obj) {
				if !at.Equal(goldenTime) {
					t.Fatalf("%s sealed at %s", k, at)
				}
			}
			if problems := Validate(obj, Expect{Key: key.Public()}); problems != nil {
				t.Fatal(problems)
			}
			values, err := Open(obj, only(key))
			if err != nil {
				t.Fatalf("%s %s: %v", suite, scope, err)
			}
			if len(values) != 3 || string(values["password"]) != canary || len(values["empty"]) != 0 {
				t.Fatalf("%s %s: other values", suite, scope)
			}
		}
	}
}

func TestValuesMoveOnlyAsFarAsTheirScope(t *testing.T) {
	key := mustGenerate(t)
	for _, tc := range []struct {
		scope           v1beta1.Scope
		namespace, name string
		opens           bool
	}{
		{v1beta1.ScopeStrict, "shop", "db", true},
		{v1beta1.ScopeStrict, "shop", "other", false},
		{v1beta1.ScopeStrict, "other", "db", false},
		{v1beta1.ScopeNamespace, "shop", "other", true},
		{v1beta1.ScopeNamespace, "other", "db", false},
		{v1beta1.ScopeCluster, "other", "other", true},
	} {
		r := request()
		r.Scope = tc.scope
		obj := seal(t, key, r)
		obj.Namespace, obj.Name = tc.namespace, tc.name
		_, err := Open(obj, only(key))
		if tc.opens != (err == nil) {
			t.Errorf("%s in %s/%s: %v", tc.scope, tc.namespace, tc.name, err)
		}
		for _, claimed := range []v1beta1.Scope{"", v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster} {
			obj.Spec.Sealed.Scope = claimed
			if scopeOf(obj.Spec.Sealed) == tc.scope {
				continue
			}
			if _, err := Open(obj, only(key)); fault.Of(err) != fault.Invalid {
				t.Errorf("%s claimed as %s: %v", tc.scope, claimed, err)
			}
		}
	}
}

func TestLabelsAndAnnotationsHaveNoInfluence(t *testing.T) {
	key := mustGenerate(t)
	obj := seal(t, key, request())
	obj.Annotations = map[string]string{"sealedsecrets.bitnami.com/cluster-wide": "true", "example.org/namespace": "shop", v1beta1.AnnotationAbandon: "true", v1beta1.AnnotationSync: "1"}
	obj.Labels = map[string]string{"latticekeep.dev/name": "db"}
	if _, err := Open(obj, only(key)); err != nil {
		t.Fatal(err)
	}
	if w := Warnings(obj); len(w) != 0 {
		t.Errorf("warnings of what has a meaning, or is of others: %v", w)
	}
	for name := range strings.FieldsSeq("scope restart-on cluster-wide owner") {
		obj.Annotations["latticekeep.dev/"+name] = "Cluster"
	}
	if w := Warnings(obj); len(w) != 3 || w[0].Path != "metadata.annotations" || !strings.Contains(w[0].Message, `"latticekeep.dev/cluster-wide" has no meaning`) ||
		!strings.Contains(w[0].Message, v1beta1.AnnotationAbandon) {
		t.Errorf("warnings: %v", w)
	}
	if problems := Validate(obj, Expect{}); len(problems) != 0 {
		t.Errorf("refused for its annotations: %v", problems)
	}
	if _, err := Open(obj, only(key)); err != nil {
		t.Fatal(err)
	}
	obj.Namespace = "other"
	if _, err := Open(obj, only(key)); fault.Of(err) != fault.Invalid {
		t.Fatalf("moved with annotations: %v", err)
	}
}

// badManifests returns changes of a sealed manifest with the messages for the author. Where the
// checks find nothing, only opening fails.
func badManifests(t testing.TB) map[string]struct {
	change  func(*v1beta1.SealedCredential)
	want    string
	offline bool
} {
	foreign := seal(t, mustGenerate(t), request())
	type bad = struct {
		change  func(*v1beta1.SealedCredential)
		want    string
		offline bool
	}
	value := func(f func(*v1beta1.SealedValue)) func(*v1beta1.SealedCredential) {
		return func(o *v1beta1.SealedCredential) {
			v := o.Spec.Sealed.Values["password"]
			f(&v)
			o.Spec.Sealed.Values["password"] = v
		}
	}
	blob := func(f func([]byte) []byte) func(*v1beta1.SealedCredential) {
		return value(func(v *v1beta1.SealedValue) {
			b, err := base64.StdEncoding.DecodeString(v.Data)
			if err != nil {
				t.Fatal(err)
			}
			v.Data = base64.StdEncoding.EncodeToString(f(b))
		})
	}
	sealed := func(f func(*v1beta1.Sealed)) func(*v1beta1.SealedCredential) {
		return func(o *v1beta1.SealedCredential) { f(o.Spec.Sealed) }
	}
	const noOpen = "spec.sealed.values[password]: does not open here"
	return map[string]bad{
		"other name":      {func(o *v1beta1.SealedCredential) { o.Name = "cache" }, "does not open here: either it was sealed for another namespace, name, scope", false},
		"other namespace": {func(o *v1beta1.SealedCredential) { o.Namespace = "bank" }, noOpen, false},
		"other type":      {func(o *v1beta1.SealedCredential) { o.Spec.CredentialType = "api-key" }, noOpen, false},
		"widened scope":   {sealed(func(s *v1beta1.Sealed) { s.Scope = v1beta1.ScopeCluster }), "another scope, credential type", false},
		"foreign value":   {value(func(v *v1beta1.SealedValue) { *v = foreign.Spec.Sealed.Values["password"] }), noOpen, false},
		"other time":      {value(func(v *v1beta1.SealedValue) { v.SealedAt.Time = v.SealedAt.Add(time.Second) }), noOpen, false},
		"flipped bit":     {blob(func(b []byte) []byte { b[len(b)-1] ^= 1; return b }), noOpen, false},
		"flipped kem bit": {blob(func(b []byte) []byte { b[100] ^= 1; return b }), noOpen, false},
		"trailing byte":   {blob(func(b []byte) []byte { return append(b, 0) }), noOpen, false},
		"swapped values": {sealed(func(s *v1beta1.Sealed) {
			s.Values["username"], s.Values["password"] = s.Values["password"], s.Values["username"]
		}), noOpen, false},
		"unknown key":        {sealed(func(s *v1beta1.Sealed) { s.KeyID = foreign.Spec.Sealed.KeyID }), "no such sealing key", false},
		"other suite":        {sealed(func(s *v1beta1.Sealed) { s.Suite = "MLKEM768" }), "spec.sealed.suite", false},
		"cut":                {blob(func(b []byte) []byte { return b[:1000] }), "it was cut", true},
		"one byte short":     {blob(func(b []byte) []byte { return b[:1+1120+15] }), "it was cut", true},
		"empty blob":         {blob(func([]byte) []byte { return nil }), "version", true},
		"blob version":       {blob(func(b []byte) []byte { b[0] = 2; return b }), "version", true},
		"not base64":         {value(func(v *v1beta1.SealedValue) { v.Data = canary }), "not standard base64", true},
		"base64url":          {value(func(v *v1beta1.SealedValue) { v.Data = "__" + v.Data[2:] }), "not standard base64", true},
		"line break":         {value(func(v *v1beta1.SealedValue) { v.Data = v.Data[:4] + "\n" + v.Data[4:] }), "not standard base64", true},
		"no padding":         {value(func(v *v1beta1.SealedValue) { v.Data = "AQE" }), "not standard base64", true},
		"loose padding":      {value(func(v *v1beta1.SealedValue) { v.Data = "AQF=" }), "not standard base64", true},
		"unknown suite":      {sealed(func(s *v1beta1.Sealed) { s.Suite = "RSA" }), "spec.sealed.suite", true},
		"unknown scope":      {sealed(func(s *v1beta1.Sealed) { s.Scope = "Everywhere" }), "spec.sealed.scope", true},
		"format version":     {sealed(func(s *v1beta1.Sealed) { s.Version = 2 }), "spec.sealed.version", true},
		"short key id":       {sealed(func(s *v1beta1.Sealed) { s.KeyID = s.KeyID[1:] }), "spec.sealed.keyID", true},
		"upper-case key id":  {sealed(func(s *v1beta1.Sealed) { s.KeyID = strings.Repeat("A", 64) }), "spec.sealed.keyID", true},
		"no values":          {sealed(func(s *v1beta1.Sealed) { s.Values = nil }), "has 0 values", true},
		"data key":           {sealed(func(s *v1beta1.Sealed) { s.Values["pass word"] = s.Values["password"] }), "a data key is not", true},
		"empty data key":     {sealed(func(s *v1beta1.Sealed) { s.Values[""] = s.Values["password"] }), "a data key is not", true},
		"long data key":      {sealed(func(s *v1beta1.Sealed) { s.Values[strings.Repeat("k", 254)] = s.Values["password"] }), "a data key is not", true},
		"no time":            {value(func(v *v1beta1.SealedValue) { v.SealedAt = metav1.Time{} }), "sealedAt: is missing", true},
		"fraction of second": {value(func(v *v1beta1.SealedValue) { v.SealedAt.Time = v.SealedAt.Add(1) }), "whole seconds", true},
		"no type":            {func(o *v1beta1.SealedCredential) { o.Spec.CredentialType = "" }, "spec.credentialType", true},
		"odd type":           {func(o *v1beta1.SealedCredential) { o.Spec.CredentialType = "a/b" }, "spec.credentialType", true},
		"long type":          {func(o *v1beta1.SealedCredential) { o.Spec.CredentialType = strings.Repeat("t", 64) }, "spec.credentialType", true},
		"ttl":                {func(o *v1beta1.SealedCredential) { o.Spec.TTLDays = 3651 }, "spec.ttlDays", true},
		"negative ttl":       {func(o *v1beta1.SealedCredential) { o.Spec.TTLDays = -1 }, "spec.ttlDays", true},
		"deletion policy":    {func(o *v1beta1.SealedCredential) { o.Spec.DeletionPolicy = "Orphan" }, "spec.deletionPolicy", true},
		"no name":            {func(o *v1beta1.SealedCredential) { o.Name = "" }, "metadata.name", true},
		"bad namespace":      {func(o *v1beta1.SealedCredential) { o.Namespace = "Shop" }, "metadata.namespace", true},
		"rotation as long as the TTL": {func(o *v1beta1.SealedCredential) {
			o.Spec.Rotation = &v1beta1.Rotation{Before: &metav1.Duration{Duration: 30 * 24 * time.Hour}}
		}, "spec.rotation.before", true},
		"rotation at the end": {func(o *v1beta1.SealedCredential) {
			o.Spec.Rotation = &v1beta1.Rotation{Before: &metav1.Duration{}}
		}, "spec.rotation.before", true},
		"long trigger": {func(o *v1beta1.SealedCredential) {
			o.Spec.Rotation = &v1beta1.Rotation{Trigger: strings.Repeat("x", 254)}
		}, "spec.rotation.trigger", true},
		"too many values": {sealed(func(s *v1beta1.Sealed) {
			for i := range 64 {
				s.Values[fmt.Sprint("k", i)] = s.Values["password"]
			}
		}), "has 66 values", true},
		"too large": {sealed(func(s *v1beta1.Sealed) {
			big := base64.StdEncoding.EncodeToString(append([]byte{1}, make([]byte, 131_072)...))
			for _, k := range []string{"a", "b"} {
				s.Values[k] = v1beta1.SealedValue{SealedAt: s.Values["password"].SealedAt, Data: big}
			}
		}), "larger than 256 KiB", true},
	}
}

func TestBadManifestNamesTheMistake(t *testing.T) {
	key := mustGenerate(t)
	for name, tc := range badManifests(t) {
		t.Run(name, func(t *testing.T) {
			obj := seal(t, key, request())
			data := obj.Spec.Sealed.Values["password"].Data
			tc.change(obj)
			problems := Validate(obj, Expect{})
			if tc.offline != (len(problems) > 0) {
				t.Errorf("offline: %v", problems)
			}
			values, err := Open(obj, only(key))
			if err == nil {
				t.Fatalf("opened %d values", len(values))
			}
			if fault.Of(err) != fault.Invalid || values != nil {
				t.Fatalf("kind %d with %d values", fault.Of(err), len(values))
			}
			msg := fault.Message(err)
			if !strings.Contains(msg, tc.want) {
				t.Fatalf("%q does not say %q", msg, tc.want)
			}
			if strings.Contains(msg, canary) || strings.Contains(msg, data[:8]) || strings.Contains(msg, "pass word") || len(msg) > 2000 {
				t.Fatalf("the message quotes a value, or is long: %q", msg)
			}
		})
	}
}

func TestManyMistakesAreOneShortMessage(t *testing.T) {
	key := mustGenerate(t)
	obj := seal(t, key, request())
	for k, v := range obj.Spec.Sealed.Values {
		v.Data, v.SealedAt = "!", metav1.Time{}
		obj.Spec.Sealed.Values[k] = v
	}
	_, err := Open(obj, only(key))
	if msg := fault.Message(err); !strings.HasSuffix(msg, "and 1 more like these") {
		t.Fatal(msg)
	}
}

func TestInfrastructureTroubleIsNotTheAuthorsMistake(t *testing.T) {
	obj := seal(t, mustGenerate(t), request())
	down := fault.New(fault.Unavailable, "the store cannot be read")
	_, err := Open(obj, func(string) (*envelope.SealingKey, error) { return nil, down })
	if fault.Of(err) != fault.Unavailable || !errors.Is(err, down) {
		t.Fatal(err)
	}
}

func TestOlderValuesNeedPermission(t *testing.T) {
	obj := seal(t, mustGenerate(t), request())
	if err := Older(obj, nil); err != nil {
		t.Fatalf("nothing accepted yet: %v", err)
	}
	accepted := SealedAt(obj)
	if err := Older(obj, accepted); err != nil {
		t.Fatalf("the same values: %v", err)
	}
	accepted["password"] = accepted["password"].Add(time.Second)
	err := Older(obj, accepted)
	if msg := fault.Message(err); fault.Of(err) != fault.Invalid || !strings.Contains(msg, "values[password]") || !strings.Contains(msg, "allowOlder") || strings.Contains(msg, "username") {
		t.Fatal(err)
	}
	obj.Spec.Sealed.AllowOlder = true
	if err := Older(obj, accepted); err != nil {
		t.Fatalf("allowed: %v", err)
	}
}

// A value of the future would keep out the correct ones after it.
func TestAValueOfTheFutureIsRefused(t *testing.T) {
	obj := seal(t, mustGenerate(t), request())
	at := obj.Spec.Sealed.Values["password"].SealedAt.Time
	for now, ahead := range map[time.Time]bool{at.Add(-MaxAhead): false, at.Add(-MaxAhead - time.Second): true, at.Add(time.Hour): false} {
		err := Ahead(obj, now)
		if msg := fault.Message(err); (err != nil) != ahead || ahead && !strings.Contains(msg, "values[password].sealedAt: is "+at.UTC().Format(time.RFC3339)) {
			t.Errorf("%v before: %v", at.Sub(now), err)
		}
		if found := Validate(obj, Expect{Now: now}); (len(found) > 0) != ahead {
			t.Errorf("%v before: %v", at.Sub(now), found)
		}
	}
	if found := Validate(obj, Expect{}); len(found) > 0 {
		t.Error("without a time:", found)
	}
}

func TestSealRefusesWhatTheAPIServerWould(t *testing.T) {
	key := mustGenerate(t)
	for name, tc := range map[string]struct {
		change func(*Request)
		want   string
	}{
		"no namespace":                {func(r *Request) { r.Namespace = "" }, "namespace is missing"},
		"no namespace for scope":      {func(r *Request) { r.Namespace, r.Scope = "", v1beta1.ScopeNamespace }, "namespace is missing"},
		"no name":                     {func(r *Request) { r.Name = "" }, "metadata.name"},
		"bad name":                    {func(r *Request) { r.Name = "DB" }, "metadata.name"},
		"no type":                     {func(r *Request) { r.CredentialType = "" }, "spec.credentialType"},
		"ttl":                         {func(r *Request) { r.TTLDays = 4000 }, "spec.ttlDays"},
		"scope":                       {func(r *Request) { r.Scope = "Wide" }, "scope"},
		"no values":                   {func(r *Request) { r.Values = nil }, "has 0 values"},
		"data key":                    {func(r *Request) { r.Values["a/b"] = nil }, "data key"},
		"larger than a manifest":      {func(r *Request) { r.Values["big"] = make([]byte, 256<<10) }, "256 KiB"},
		"larger than anything we run": {func(r *Request) { r.Values["big"] = make([]byte, 17<<20) }, "bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			r := request()
			tc.change(&r)
			if _, err := Seal(key.Public(), r, goldenTime); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("%v does not say %q", err, tc.want)
			}
		})
	}
}

func TestClusterScopeNeedsNoNamespace(t *testing.T) {
	key := mustGenerate(t)
	r := request()
	r.Namespace, r.Scope = "", v1beta1.ScopeCluster
	obj := seal(t, key, r)
	obj.Namespace = "anywhere"
	if _, err := Open(obj, only(key)); err != nil {
		t.Fatal(err)
	}
}

func TestValidateHoldsAManifestAgainstWhatItIsFor(t *testing.T) {
	key := mustGenerate(t)
	obj := seal(t, key, request())
	other := mustGenerate(t).Public()
	for _, tc := range []struct {
		want Expect
		path string
	}{
		{Expect{}, ""},
		{Expect{Namespace: "shop", Name: "db", Scope: v1beta1.ScopeStrict, Key: key.Public()}, ""},
		{Expect{Namespace: "bank"}, "metadata.namespace"},
		{Expect{Name: "cache"}, "metadata.name"},
		{Expect{Scope: v1beta1.ScopeNamespace}, "spec.sealed.scope"},
		{Expect{Key: other}, "spec.sealed.keyID"},
	} {
		problems := Validate(obj, tc.want)
		if tc.path == "" && problems == nil {
			continue
		}
		if len(problems) != 1 || problems[0].Path != tc.path {
			t.Errorf("%+v: %v, not %q", tc.want, problems, tc.path)
		}
	}
	obj.Namespace = ""
	if problems := Validate(obj, Expect{Namespace: "bank"}); problems != nil {
		t.Errorf("a manifest without a namespace goes where it is applied: %v", problems)
	}
	obj.Spec.Sealed.Suite = "MLKEM768"
	if problems := Validate(obj, Expect{Key: key.Public()}); len(problems) != 1 || problems[0].Path != "spec.sealed.suite" {
		t.Error(problems)
	}
}

func TestAnEmptyValueIsTheSmallestSealedValue(t *testing.T) {
	for _, suite := range []envelope.Suite{envelope.SuiteMLKEM768X25519, envelope.SuiteMLKEM768} {
		key, err := envelope.GenerateSealingKey(suite)
		if err != nil {
			t.Fatal(err)
		}
		r := request()
		r.Values = map[string]secret.Bytes{"empty": nil}
		data, err := decode(seal(t, key, r).Spec.Sealed.Values["empty"].Data)
		if err != nil {
			t.Fatal(err)
		}
		if len(data) != smallestValue(suite) || data[0] != valueVersion {
			t.Errorf("%s: %d bytes, not %d", suite, len(data), smallestValue(suite))
		}
	}
}

func FuzzManifest(f *testing.F) {
	f.Add(golden(f, "manifest.yaml"))
	_, key := goldenKeys(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		var obj v1beta1.SealedCredential
		if yaml.UnmarshalStrict(b, &obj) != nil {
			return
		}
		problems := Validate(&obj, Expect{})
		SpecDigest(&obj)
		values, err := Open(&obj, only(key))
		switch {
		case err == nil && len(problems) > 0:
			t.Fatalf("opened in spite of %v", problems)
		case err == nil && !slices.Equal(slices.Sorted(maps.Keys(values)), slices.Sorted(maps.Keys(obj.Spec.Sealed.Values))):
			t.Fatal("other keys than the manifest's")
		case err != nil && fault.Of(err) != fault.Invalid:
			t.Fatalf("not the author's mistake: %v", err)
		}
	})
}
