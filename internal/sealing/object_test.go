package sealing

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// generated returns a valid object that generates its values.
func generated() *v1beta1.SealedCredential {
	return &v1beta1.SealedCredential{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "db"},
		Spec: v1beta1.SealedCredentialSpec{
			CredentialType: "database", TTLDays: 30,
			Generate: []v1beta1.Generator{
				{Key: "password", Random: &v1beta1.Random{Length: 32, Charset: "Alphanumeric"}},
				{Key: "tls.key", KeyPair: &v1beta1.KeyPair{Algorithm: "ECDSA-P256", PublicKeyName: "tls.pub"}},
			},
			Rotation: &v1beta1.Rotation{
				Policy: v1beta1.RotationRegenerate, Before: hours(10), Overlap: hours(2), MaxValueAge: hours(1000),
			},
			Target: &v1beta1.Target{
				Name: "db-secret", Type: "Opaque", Labels: map[string]string{"example.org/a": "b"}, DeletionPolicy: v1beta1.DeletionRetain,
				Keys: []v1beta1.TargetKey{
					{To: "password", From: "password"},
					{To: "url", Template: "postgres://app:$(password)@db", Encoding: v1beta1.EncodingURL},
					{To: "public", From: "tls.pub"},
				},
			},
		},
	}
}

func hours(n int) *metav1.Duration { return &metav1.Duration{Duration: time.Duration(n) * time.Hour} }

func TestEverySourceIsChecked(t *testing.T) {
	if problems := Validate(generated(), Expect{Namespace: "shop", Name: "db", Scope: v1beta1.ScopeStrict}); problems != nil {
		t.Fatal(problems)
	}
	imported := generated()
	imported.Spec.Generate, imported.Spec.Rotation = nil, nil
	imported.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "old"}, DeleteAfterImport: true}
	imported.Spec.Target.Keys = append(imported.Spec.Target.Keys, v1beta1.TargetKey{To: "more", From: "whatever-is-in-it"})
	if problems := Validate(imported, Expect{}); problems != nil {
		t.Fatal(problems)
	}
	type object = v1beta1.SealedCredential
	target := func(f func(*v1beta1.Target)) func(*object) { return func(o *object) { f(o.Spec.Target) } }
	key := func(k v1beta1.TargetKey) func(*object) {
		return target(func(t *v1beta1.Target) { t.Keys = []v1beta1.TargetKey{k} })
	}
	made := func(g ...v1beta1.Generator) func(*object) {
		return func(o *object) { o.Spec.Generate, o.Spec.Target = g, nil }
	}
	rotation := func(r v1beta1.Rotation) func(*object) { return func(o *object) { o.Spec.Rotation = &r } }
	from := func(v v1beta1.ValuesFrom) func(*object) {
		return func(o *object) { o.Spec.Generate, o.Spec.Rotation, o.Spec.ValuesFrom = nil, nil, &v }
	}
	random := func(key string) v1beta1.Generator {
		return v1beta1.Generator{Key: key, Random: &v1beta1.Random{}}
	}
	pair := func(algorithm v1beta1.KeyPairAlgorithm, key, public string) v1beta1.Generator {
		return v1beta1.Generator{Key: key, KeyPair: &v1beta1.KeyPair{Algorithm: algorithm, PublicKeyName: public}}
	}
	many := func(n int, generator func(i int) v1beta1.Generator) (all []v1beta1.Generator) {
		for i := range n {
			all = append(all, generator(i))
		}
		return all
	}
	manyLabels := make(map[string]string)
	for i := range 33 {
		manyLabels[fmt.Sprint("l", i)] = ""
	}
	for name, tc := range map[string]struct {
		change  func(*object)
		path    string
		message string
	}{
		"no source": {func(o *object) { o.Spec.Generate, o.Spec.Rotation, o.Spec.Target = nil, nil, nil }, "spec", "has 0 sources"},
		"two sources": {func(o *object) {
			o.Spec.ValuesFrom = &v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "s"}}
		}, "spec", "has 2 sources"},
		"empty generate":    {made([]v1beta1.Generator{}...), "spec.generate", "has 0 entries"},
		"import of nothing": {from(v1beta1.ValuesFrom{}), "spec.valuesFrom.secretRef.name", "not the name of a Secret"},
		"import from afar":  {from(v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "other/s"}}), "spec.valuesFrom.secretRef.name", "not the name of a Secret"},
		"import of the target": {
			from(v1beta1.ValuesFrom{SecretRef: v1beta1.SecretReference{Name: "db-secret"}, DeleteAfterImport: true}), "spec.valuesFrom.deleteAfterImport", "name another Secret",
		},
		"too many entries":     {made(many(65, func(i int) v1beta1.Generator { return random(fmt.Sprint("k", i)) })...), "spec.generate", "has 65 entries"},
		"neither of two":       {made(v1beta1.Generator{Key: "k"}), "spec.generate[0]", "exactly one of random and keyPair"},
		"both of two":          {made(v1beta1.Generator{Key: "k", Random: &v1beta1.Random{}, KeyPair: &v1beta1.KeyPair{Algorithm: "Ed25519"}}), "spec.generate[0]", "exactly one"},
		"short":                {made(v1beta1.Generator{Key: "k", Random: &v1beta1.Random{Length: 15}}), "spec.generate[0].random.length", "is 15"},
		"long":                 {made(v1beta1.Generator{Key: "k", Random: &v1beta1.Random{Length: 4097}}), "spec.generate[0].random.length", "is 4097"},
		"charset":              {made(v1beta1.Generator{Key: "k", Random: &v1beta1.Random{Charset: "Emoji"}}), "spec.generate[0].random.charset", "Alphanumeric"},
		"algorithm":            {made(pair("RSA-1024", "k", "")), "spec.generate[0].keyPair.algorithm", "give it Ed25519"},
		"many RSA":             {made(many(3, func(i int) v1beta1.Generator { return pair("RSA-4096", fmt.Sprint("k", i), "") })...), "spec.generate", "at most 2"},
		"data key":             {made(random("a/b")), "spec.generate[0].key", "1 to 253 letters"},
		"twice":                {made(random("a"), random("a")), "spec.generate[1].key", "the data key a is"},
		"public key of one":    {made(pair("Ed25519", "a", ""), random("a.pub")), "spec.generate[1].key", "the data key a.pub is"},
		"both halves":          {made(pair("Ed25519", "a", "a")), "spec.generate[0].keyPair.publicKeyName", "the data key a is"},
		"public key too long":  {made(pair("Ed25519", strings.Repeat("a", 250), "")), "spec.generate[0].keyPair.publicKeyName", "1 to 253 letters"},
		"rotation policy":      {rotation(v1beta1.Rotation{Policy: "Renew"}), "spec.rotation.policy", "neither"},
		"overlap of nothing":   {rotation(v1beta1.Rotation{Overlap: hours(1)}), "spec.rotation.overlap", "needs rotation.policy Regenerate"},
		"overlap over the TTL": {rotation(v1beta1.Rotation{Policy: v1beta1.RotationRegenerate, Overlap: hours(30*24 + 1)}), "spec.rotation.overlap", "longer than the TTL"},
		"negative age":         {rotation(v1beta1.Rotation{MaxValueAge: hours(-1)}), "spec.rotation.maxValueAge", "negative"},
		"half a second":        {rotation(v1beta1.Rotation{MaxValueAge: &metav1.Duration{Duration: time.Second / 2}}), "spec.rotation.maxValueAge", "whole seconds"},
		"target name":          {target(func(t *v1beta1.Target) { t.Name = "DB" }), "spec.target.name", "not the name of a Secret"},
		"target type":          {target(func(t *v1beta1.Target) { t.Type = "kubernetes.io/service-account-token" }), "spec.target.type", "none of"},
		"target deletion":      {target(func(t *v1beta1.Target) { t.DeletionPolicy = "Orphan" }), "spec.target.deletionPolicy", "neither"},
		"label of ours":        {target(func(t *v1beta1.Target) { t.Labels = map[string]string{"latticekeep.dev/owner": ""} }), "spec.target.labels", "prefix"},
		"label of theirs":      {target(func(t *v1beta1.Target) { t.Labels = map[string]string{"x.app.kubernetes.io/name": ""} }), "spec.target.labels", "prefix"},
		"annotation of ours":   {target(func(t *v1beta1.Target) { t.Annotations = map[string]string{"x.k8s.io/a": ""} }), "spec.target.annotations", "prefix"},
		"long label":           {target(func(t *v1beta1.Target) { t.Labels = map[string]string{"a": strings.Repeat("x", 64)} }), "spec.target.labels", "at most 63"},
		"many labels":          {target(func(t *v1beta1.Target) { t.Labels = manyLabels }), "spec.target.labels", "has 33 entries"},
		"no keys":              {target(func(t *v1beta1.Target) { t.Keys = []v1beta1.TargetKey{} }), "spec.target.keys", "has 0 keys"},
		"key name":             {key(v1beta1.TargetKey{To: "a b", From: "password"}), "spec.target.keys[0].to", "is not 1 to"},
		"same key":             {target(func(t *v1beta1.Target) { t.Keys[1].To = "password" }), "spec.target.keys[1].to", "another entry"},
		"nothing in it":        {key(v1beta1.TargetKey{To: "a"}), "spec.target.keys[0]", "exactly one of from and template"},
		"two in it":            {key(v1beta1.TargetKey{To: "a", From: "password", Template: "x"}), "spec.target.keys[0]", "exactly one of from and template"},
		"odd from":             {key(v1beta1.TargetKey{To: "a", From: "a/b"}), "spec.target.keys[0].from", "is not 1 to"},
		"encoding of nothing":  {key(v1beta1.TargetKey{To: "a", From: "password", Encoding: v1beta1.EncodingURL}), "spec.target.keys[0].encoding", "is for a template"},
		"encoding":             {key(v1beta1.TargetKey{To: "a", Template: "x", Encoding: "XML"}), "spec.target.keys[0].encoding", "none of"},
		"long template":        {key(v1beta1.TargetKey{To: "a", Template: strings.Repeat("x", 4097)}), "spec.target.keys[0].template", "longer than 4096"},
		"broken template":      {key(v1beta1.TargetKey{To: "a", Template: "$(password"}), "spec.target.keys[0].template", "$("},
		"not JSON":             {key(v1beta1.TargetKey{To: "a", Template: "$(password)", Encoding: v1beta1.EncodingJSON}), "spec.target.keys[0].template", "JSON"},
		"missing value":        {key(v1beta1.TargetKey{To: "a", From: "pasword"}), "spec.target.keys[0]", "no value with the data key pasword"},
		"missing in template":  {key(v1beta1.TargetKey{To: "a", Template: "$(password)$(pasword)"}), "spec.target.keys[0].template", "no value with the data key pasword"},
	} {
		obj := generated()
		tc.change(obj)
		found := false
		problems := Validate(obj, Expect{})
		for _, p := range problems {
			found = found || p.Path == tc.path && strings.Contains(p.Message, tc.message)
		}
		if !found {
			t.Errorf("%s: %v; want %s: %s", name, problems, tc.path, tc.message)
		}
	}
}
