package sealing

import (
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/fault"
)

func TestThePolicyNamesEveryFieldThatItDoesNotAllow(t *testing.T) {
	sealed := seal(t, mustGenerate(t), request()) // 30 days, database, Strict
	defaulted := sealed.DeepCopy()
	defaulted.Spec.TTLDays, defaulted.Spec.Sealed.Scope = 0, ""
	wide := sealed.DeepCopy()
	wide.Spec.Sealed.Scope = v1beta1.ScopeCluster
	generated := sealed.DeepCopy()
	generated.Spec.Sealed = nil
	generated.Spec.Generate = []v1beta1.Generator{{Key: "k", Random: &v1beta1.Random{}}}
	strict := Policy{Scopes: []v1beta1.Scope{v1beta1.ScopeStrict, v1beta1.ScopeNamespace}}
	for _, tc := range []struct {
		name   string
		policy Policy
		obj    *v1beta1.SealedCredential
		want   []string
	}{
		{"nothing is forbidden", Policy{}, wide, nil},
		{"on the lower bound", Policy{MinTTLDays: 30, MaxTTLDays: 30}, sealed, nil},
		{"too short", Policy{MinTTLDays: 31}, sealed, []string{"spec.ttlDays: is 30", "at least 31"}},
		{"too long", Policy{MaxTTLDays: 29}, sealed, []string{"spec.ttlDays: is 30", "at most 29"}},
		{"the default counts", Policy{MaxTTLDays: 89}, defaulted, []string{"spec.ttlDays: is 90"}},
		{"a type", Policy{Types: []string{"api-key", "database"}}, sealed, nil},
		{"another type", Policy{Types: []string{"api-key", "tls"}}, sealed, []string{"spec.credentialType", "api-key, tls"}},
		{"a scope", strict, sealed, nil},
		{"the default scope", strict, defaulted, nil},
		{"another scope", strict, wide, []string{"spec.sealed.scope", "Strict, Namespace", "latticekeep seal"}},
		{"no sealed values have no scope", Policy{Scopes: []v1beta1.Scope{v1beta1.ScopeNamespace}}, generated, nil},
		{"everything", Policy{MinTTLDays: 60, Types: []string{"tls"}, Scopes: strict.Scopes}, wide,
			[]string{"spec.ttlDays", "spec.credentialType", "spec.sealed.scope"}},
	} {
		err := tc.policy.Check(tc.obj)
		if tc.want == nil {
			if err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
			continue
		}
		if fault.Of(err) != fault.Invalid || err == nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		for _, want := range tc.want {
			if !strings.Contains(fault.Message(err), want) {
				t.Errorf("%s: %q does not say %q", tc.name, fault.Message(err), want)
			}
		}
	}
}
