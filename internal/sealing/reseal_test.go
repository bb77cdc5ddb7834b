package sealing

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

func TestResealedValuesAreTheSameUnderTheSameHeader(t *testing.T) {
	for _, suites := range [][2]envelope.Suite{
		{envelope.SuiteMLKEM768X25519, envelope.SuiteMLKEM768X25519},
		{envelope.SuiteMLKEM768, envelope.SuiteMLKEM768X25519},
	} {
		from, err := envelope.GenerateSealingKey(suites[0])
		if err != nil {
			t.Fatal(err)
		}
		to, err := envelope.GenerateSealingKey(suites[1])
		if err != nil {
			t.Fatal(err)
		}
		for _, scope := range []v1beta1.Scope{"", v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster} {
			r := request()
			r.Scope = scope
			r.Values["empty"] = nil
			obj := seal(t, from, r)
			obj.Spec.Sealed.Scope = scope // may be empty or explicit
			obj.Spec.Sealed.AllowOlder = true
			before := obj.DeepCopy()
			again, err := Reseal(obj, only(from), to.Public())
			if err != nil {
				t.Fatalf("%v %s: %v", suites, scope, err)
			}
			if !reflect.DeepEqual(obj, before) {
				t.Fatal("the object that was given is changed")
			}
			if again.KeyID != to.Public().ID() || again.Suite != v1beta1.Suite(suites[1]) || again.Version != 1 || !again.AllowOlder ||
				again.Scope != scopeOf(before.Spec.Sealed) || len(again.Values) != 3 {
				t.Fatalf("%s: %+v", scope, again)
			}
			for k, v := range before.Spec.Sealed.Values {
				if !again.Values[k].SealedAt.Time.Equal(v.SealedAt.Time) || again.Values[k].Data == v.Data {
					t.Fatalf("%s: sealed at %s", k, again.Values[k].SealedAt)
				}
			}
			obj.Spec.Sealed = again
			values, err := Open(obj, only(to))
			if err != nil || string(values["password"]) != canary || string(values["username"]) != "app" || len(values["empty"]) != 0 {
				t.Fatalf("%s: %v", scope, err)
			}
			if _, err := Open(obj, only(from)); err == nil {
				t.Fatal("they open with the former key")
			}
		}
	}
}

// Whatever is wrong with values that do not open, the error is the same.
func TestValuesThatDoNotOpenAreNotResealed(t *testing.T) {
	from, to := mustGenerate(t), mustGenerate(t)
	for name, tc := range badManifests(t) {
		obj := seal(t, from, request())
		tc.change(obj)
		again, err := Reseal(obj, only(from), to.Public())
		switch {
		case again != nil || err == nil:
			t.Errorf("%s: resealed", name)
		case tc.offline && fault.Of(err) != fault.Invalid:
			t.Errorf("%s: %v", name, err)
		case !tc.offline && err != ErrDoesNotOpen: //nolint:errorlint // the same, not one like it
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTroubleOnTheWayIsNoVerdict(t *testing.T) {
	from, to := mustGenerate(t), mustGenerate(t)
	down := fault.New(fault.Unavailable, "the store cannot be read")
	_, err := Reseal(seal(t, from, request()), func(string) (*envelope.SealingKey, error) { return nil, down }, to.Public())
	if fault.Of(err) != fault.Unavailable || errors.Is(err, ErrDoesNotOpen) {
		t.Fatal(err)
	}
	obj := seal(t, from, request())
	obj.Spec.Sealed = nil
	if _, err := Reseal(obj, only(from), to.Public()); fault.Of(err) != fault.Invalid {
		t.Fatal(err)
	}
}

// Annotations, labels, templates, unknown fields and anything else in a manifest never decide what
// resealed values are bound to.
func TestNothingBesideTheSealedValuesChangesTheirScope(t *testing.T) {
	t.Parallel()
	from, to := mustGenerate(t), mustGenerate(t)
	const seed = 20261121
	random := rand.New(rand.NewPCG(seed, seed))
	scopes := []v1beta1.Scope{v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster}
	base := make(map[v1beta1.Scope][]byte)
	for _, scope := range scopes {
		r := request()
		r.Scope, r.Values = scope, map[string]secret.Bytes{"password": secret.Bytes(canary)}
		b, err := yaml.Marshal(seal(t, from, r))
		if err != nil {
			t.Fatal(err)
		}
		base[scope] = b
	}
	cases, done := 10_000, 0
	if testing.Short() {
		cases = 500
	}
	for i := range cases {
		scope := scopes[i%len(scopes)]
		b := decorate(t, random, base[scope])
		obj := new(v1beta1.SealedCredential)
		if err := yaml.Unmarshal(b, obj); err != nil { // unknown fields are dropped, as by a lenient reader
			t.Fatalf("case %d: %v\n%s", i, err, b)
		}
		again, err := Reseal(obj, only(from), to.Public())
		if fault.Of(err) == fault.Invalid && err != nil && !errors.Is(err, ErrDoesNotOpen) {
			continue // for example, a label of the target that is refused
		}
		if err != nil {
			t.Fatalf("case %d (seed %d): %v\n%s", i, seed, err, b)
		}
		done++
		if again.Scope != scope {
			t.Fatalf("case %d (seed %d): scope %s, not %s\n%s", i, seed, again.Scope, scope, b)
		}
		// The answer names what is bound: the new values open exactly where the previous ones did.
		place := [][2]string{{"shop", "db"}, {"shop", "other"}, {"other", "db"}}[random.IntN(3)]
		header := envelope.Header{
			Suite: envelope.Suite(again.Suite), KeyID: again.KeyID, Scope: envelope.Scope(scope),
			Namespace: place[0], Name: place[1], CredentialType: "database",
		}
		plaintext, err := openValue(to, header, "password", again.Values["password"])
		if opens := err == nil && string(plaintext) == canary; opens != reaches(scope, place) {
			t.Fatalf("case %d (seed %d): %s opens in %v: %v\n%s", i, seed, scope, place, opens, b)
		}
	}
	if done < cases/2 {
		t.Fatalf("only %d of %d cases were resealed", done, cases)
	}
}

func reaches(scope v1beta1.Scope, place [2]string) bool {
	switch scope {
	case v1beta1.ScopeStrict:
		return place == [2]string{"shop", "db"}
	case v1beta1.ScopeNamespace:
		return place[0] == "shop"
	default:
		return true
	}
}

// decorate adds fields to a manifest that must not have any influence. Some of them look as if they
// had.
func decorate(t *testing.T, random *rand.Rand, manifest []byte) []byte {
	t.Helper()
	var tree map[string]any
	if err := yaml.Unmarshal(manifest, &tree); err != nil {
		t.Fatal(err)
	}
	pick := func(of ...string) string { return of[random.IntN(len(of))] }
	word := func() string {
		return pick("scope", "Scope", "cluster-wide", "namespace-wide", "namespace", "name", "keyID", "true", "Cluster", "Namespace", "*", "", "x-"+fmt.Sprint(random.Uint32()))
	}
	some := func() map[string]any {
		all := make(map[string]any)
		for range random.IntN(4) {
			all[pick("", "sealedsecrets.bitnami.com/", "example.org/", "sealed.latticekeep.dev/", v1beta1.AnnotationPrefix)+word()] = word()
		}
		return all
	}
	metadata, spec := tree["metadata"].(map[string]any), tree["spec"].(map[string]any)
	sealed := spec["sealed"].(map[string]any)
	metadata["annotations"], metadata["labels"] = some(), some()
	for _, into := range []map[string]any{tree, metadata, spec, sealed, sealed["values"].(map[string]any)["password"].(map[string]any)} {
		if random.IntN(3) == 0 {
			into["unknown-"+word()] = pick("Cluster", "true", "")
		}
	}
	if random.IntN(2) == 0 {
		spec["template"] = map[string]any{"metadata": map[string]any{"annotations": some(), "namespace": word()}, "scope": "Cluster"}
	}
	if random.IntN(2) == 0 {
		spec["target"] = map[string]any{
			"labels": map[string]any{"scope": word()}, "annotations": map[string]any{"example.org/scope": word()},
			"keys": []any{map[string]any{"to": "url", "template": "$(password)" + word()}},
		}
	}
	spec["deletionPolicy"] = pick("Delete", "Retain")
	sealed["allowOlder"] = random.IntN(2) == 0
	metadata["generateName"], metadata["uid"] = word(), word()
	metadata["ownerReferences"] = []any{map[string]any{"apiVersion": "v1", "kind": "Namespace", "name": word(), "uid": word()}}
	b, err := yaml.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func FuzzReseal(f *testing.F) {
	f.Add(golden(f, "manifest.yaml"))
	_, key := goldenKeys(f)
	to, err := envelope.GenerateSealingKey(envelope.SuiteMLKEM768X25519)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var obj v1beta1.SealedCredential
		if yaml.Unmarshal(b, &obj) != nil {
			return
		}
		scope := v1beta1.ScopeStrict
		if obj.Spec.Sealed != nil && obj.Spec.Sealed.Scope != "" {
			scope = obj.Spec.Sealed.Scope
		}
		again, err := Reseal(&obj, only(key), to.Public())
		switch {
		case err == nil && again.Scope != scope:
			t.Fatalf("scope %s became %s", scope, again.Scope)
		case err != nil && !errors.Is(err, ErrDoesNotOpen) && fault.Of(err) != fault.Invalid:
			t.Fatal(err)
		}
	})
}

func TestAValueKeepsItsTimeWhateverTheZone(t *testing.T) {
	from, to := mustGenerate(t), mustGenerate(t)
	obj := seal(t, from, request())
	v := obj.Spec.Sealed.Values["password"]
	v.SealedAt.Time = v.SealedAt.In(time.FixedZone("elsewhere", 3600))
	obj.Spec.Sealed.Values["password"] = v
	again, err := Reseal(obj, only(from), to.Public())
	if err != nil {
		t.Fatal(err)
	}
	obj.Spec.Sealed = again
	if _, err := Open(obj, only(to)); err != nil || strings.Contains(fmt.Sprint(again.Values["password"].SealedAt), "elsewhere") {
		t.Fatal(err)
	}
}
