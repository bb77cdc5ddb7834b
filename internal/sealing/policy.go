package sealing

import (
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// Policy says what a deployment allows in well-formed objects. A zero field allows everything, and
// so does the zero Policy.
type Policy struct {
	MinTTLDays, MaxTTLDays int             // bounds of spec.ttlDays
	Types                  []string        // allowed values of spec.credentialType
	Scopes                 []v1beta1.Scope // allowed values of spec.sealed.scope
}

// Check returns a [fault.Invalid] that names every field of obj that the policy does not allow, or
// nil. It uses only information that the object's author has.
func (p Policy) Check(obj *v1beta1.SealedCredential) error {
	var found report
	days := int(ttlDays(&obj.Spec))
	if p.MinTTLDays > 0 && days < p.MinTTLDays {
		found.add("spec.ttlDays", "is %d; the policy of this deployment wants at least %d", days, p.MinTTLDays)
	}
	if p.MaxTTLDays > 0 && days > p.MaxTTLDays {
		found.add("spec.ttlDays", "is %d; the policy of this deployment allows at most %d", days, p.MaxTTLDays)
	}
	if len(p.Types) > 0 && !slices.Contains(p.Types, obj.Spec.CredentialType) {
		found.add("spec.credentialType", "the policy of this deployment allows only %s", strings.Join(p.Types, ", "))
	}
	if sealed := obj.Spec.Sealed; sealed != nil && len(p.Scopes) > 0 && !slices.Contains(p.Scopes, scopeOf(sealed)) {
		allowed := make([]string, len(p.Scopes))
		for i, s := range p.Scopes {
			allowed[i] = string(s)
		}
		found.add("spec.sealed.scope", "the policy of this deployment allows only %s; seal the values again with --scope (latticekeep seal)",
			strings.Join(allowed, ", "))
	}
	return invalid(found)
}

// ttlDays returns the TTL with the API server's default applied.
func ttlDays(spec *v1beta1.SealedCredentialSpec) int32 {
	if spec.TTLDays == 0 {
		return v1beta1.DefaultTTLDays
	}
	return spec.TTLDays
}
