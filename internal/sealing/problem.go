package sealing

import (
	"fmt"
	"strings"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// Problem is one mistake in a manifest.
type Problem struct {
	Path    string // the field, such as spec.sealed.keyID
	Message string // mistake and remedy
}

func (p Problem) String() string { return p.Path + ": " + p.Message }

// report collects problems.
type report []Problem

func (r *report) add(path, format string, args ...any) {
	*r = append(*r, Problem{path, fmt.Sprintf(format, args...)})
}

// isDataKey reports whether k matches the schema's pattern for the keys of spec.sealed.values.
func isDataKey(k string) bool {
	for _, c := range []byte(k) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
		default:
			return false
		}
	}
	return 1 <= len(k) && len(k) <= v1beta1.MaxDataKeyBytes
}

// invalid joins problems into one error, or returns nil when there are none. It shows only a few,
// because the message ends up in a condition.
func invalid(problems []Problem) error {
	const shown = 3
	if len(problems) == 0 {
		return nil
	}
	var text []string
	for _, p := range problems[:min(shown, len(problems))] {
		text = append(text, p.String())
	}
	if more := len(problems) - shown; more > 0 {
		text = append(text, fmt.Sprintf("and %d more like these", more))
	}
	return fault.New(fault.Invalid, strings.Join(text, "; "))
}

// scopeOf returns the scope with the API server's default applied. A manifest that was not applied
// yet may lack it.
func scopeOf(sealed *v1beta1.Sealed) v1beta1.Scope {
	if sealed.Scope == "" {
		return v1beta1.ScopeStrict
	}
	return sealed.Scope
}
