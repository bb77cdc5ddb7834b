package listing

import (
	"strings"
	"testing"
	"unicode"
)

func TestSimpleFolding(t *testing.T) {
	for r := range rune(0x20000) {
		one, other := string(r), string(unicode.SimpleFold(r))
		if fold(one) != fold(other) || !strings.EqualFold(fold(one), one) {
			t.Errorf("%U is folded to %q", r, fold(one))
		}
	}
	for a, b := range map[string]string{"ſK": "s\u212a", "Σσ": "ςΣ", "ẞ": "ß", "Ǆ": "ǅ"} {
		if fold(a) != fold(b) {
			t.Errorf("%q and %q", a, b)
		}
	}
}
