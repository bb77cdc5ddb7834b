package email

import (
	"errors"
	"strings"
	"testing"
	"unicode"

	"github.com/latticekeep/latticekeep/internal/fault"
)

func TestAnAddressHasOneSpelling(t *testing.T) {
	for in, want := range map[string]string{
		"name@example.com":             "name@example.com",
		" Name@Example.COM\n":          "name@example.com",
		"ｎａｍｅ@ｅｘａｍｐｌｅ．ｃｏｍ":             "name@example.com", // full width
		"\u00a0name@example.com\u3000": "name@example.com", // spaces of other scripts
		"name@EXAMPLE。com":             "name@example.com", // ideographic full stop
		"first.last+tag@example.com":   "first.last+tag@example.com",
		"JÖRG@example.com":             "jörg@example.com",
		"jo\u0308rg@example.com":       "jörg@example.com", // decomposed
		"name@bücher.example":          "name@xn--bcher-kva.example",
		"name@BU\u0308CHER.example":    "name@xn--bcher-kva.example",
		"name@xn--bcher-kva.example":   "name@xn--bcher-kva.example",
		"name@localhost":               "name@localhost",
	} {
		if got, err := Canonical(in); err != nil || got != want {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
}

func TestWhatIsNoAddressIsRefused(t *testing.T) {
	for _, bad := range []string{
		"", " ", "@", "name", "name@", "@example.com", "a@b@example.com", "a＠b@example.com", "na me@example.com", "name@exa mple.com",
		"name\x00@example.com", "name@example.com\x00", "name\r\nbcc:x@example.com", "name@example.com\r\nbcc", ".name@example.com",
		"name.@example.com", "na..me@example.com", `"name"@example.com`, "a,b@example.com", "<name@example.com>", "name(x)@example.com",
		"name@[127.0.0.1]", "name@example.com.", "name@.example.com", "name@exa_mple.com", "name@-example.com", "\xffname@example.com",
		"na\u200dme@example.com", "na\u202eme@example.com", strings.Repeat("a", 65) + "@example.com",
		"name@" + strings.Repeat("a", 64) + ".com", "name@" + strings.Repeat("a.", 130) + "com", strings.Repeat("a", 1<<20),
	} {
		if got, err := Canonical(bad); !errors.Is(err, fault.Invalid) || got != "" {
			t.Errorf("%.40q became %q, %v", bad, got, err)
		}
	}
}

func FuzzCanonical(f *testing.F) {
	f.Fuzz(func(t *testing.T, in string) {
		got, err := Canonical(in)
		if err != nil {
			if got != "" || !errors.Is(err, fault.Invalid) {
				t.Fatalf("%q, %v", got, err)
			}
			return
		}
		if again, err := Canonical(got); err != nil || again != got {
			t.Fatalf("%q became %q and then %q, %v", in, got, again, err)
		}
		if len(got) > maxAddress || strings.Count(got, "@") != 1 || strings.ContainsFunc(got, func(r rune) bool {
			return unicode.IsControl(r) || unicode.IsSpace(r) || unicode.IsUpper(r)
		}) {
			t.Fatalf("%q", got)
		}
		if upper, err := Canonical(" " + strings.ToUpper(got) + " "); err == nil && isASCII(got) && upper != got {
			t.Fatalf("%q and %q are two accounts", got, upper)
		}
	})
}

func isASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r > unicode.MaxASCII })
}
