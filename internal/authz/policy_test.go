package authz

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func policyOf(t testing.TB, rules ...Rule) Policy {
	t.Helper()
	p, err := NewPolicy(rules)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func reading(paths ...string) (rules []Rule) {
	for _, path := range paths {
		rules = append(rules, Rule{path, []Verb{ReadPath}})
	}
	return rules
}

func TestGlobsMatchWholeSegments(t *testing.T) {
	for glob, names := range map[string]struct{ yes, no string }{
		"shop/prod/db": {"shop/prod/db", "shop/prod|shop/prod/db/a|shop/prod/dB|shop/prod/db/|/shop/prod/db"},
		"shop/*/db":    {"shop/prod/db|shop/**/db", "shop/db|shop/a/b/db|shop//db|shop/../db"},
		"*":            {"a|a b", "a/b||.|.."},
		"shop/**":      {"shop/a|shop/a/b", "shop|shop/|shopping/a|shop/./a|shop/a/..|shop//a"},
		"*/**":         {"a/b|a/b/c", "a|/b|a/"},
		"**":           {"a|a/b||.|..|a//b|/|a/../b", ""},
		"caf\u00e9/*":  {"cafe\u0301/a|caf\u00e9/a", "cafe/a"},
		"cafe\u0301/*": {"cafe\u0301/a|caf\u00e9/a", "cafe/a"},
	} {
		p := policyOf(t, reading(glob)...)
		for _, name := range strings.Split(names.yes, "|") {
			if !p.Allows(ReadPath, name) || p.Allows(WritePath, name) {
				t.Errorf("%q does not allow reading %q, or allows writing it", glob, name)
			}
		}
		for _, name := range strings.Split(names.no, "|") {
			if names.no != "" && p.Allows(ReadPath, name) {
				t.Errorf("%q allows reading %q", glob, name)
			}
		}
	}
}

func TestInvalidPoliciesNameTheRule(t *testing.T) {
	long := strings.Repeat("a/", maxSegments) + "a"
	for _, path := range []string{"", "/", "a/", "/a", "a//b", "./a", "a/..", "a*", "a/b*/c", "**/a", "a/**/b", "***", "a\nb", "\xff", strings.Repeat("a", 256), long} {
		if _, err := NewPolicy(append(reading("ok"), reading(path)...)); err == nil || !strings.HasPrefix(err.Error(), "rules[1].path ") {
			t.Errorf("%q: %v", path, err)
		}
	}
	for _, verbs := range [][]Verb{nil, {"rotate"}, {ReadPath, ""}} {
		if _, err := NewPolicy([]Rule{{"a", verbs}}); err == nil || !strings.HasPrefix(err.Error(), "rules[0].verbs ") {
			t.Errorf("%q: %v", verbs, err)
		}
	}
	if _, err := NewPolicy(reading(slices.Repeat([]string{"a"}, MaxRules+1)...)); err == nil {
		t.Error("too many rules")
	}
}

var (
	oddName  = regexp.MustCompile(`(^|/)(\.|\.\.)?(/|$)`)
	patterns = make(map[string]*regexp.Regexp)
)

// bruteForce judges by regular expressions, one for each glob.
func bruteForce(rules []Rule, v Verb, name string) bool {
	odd := oddName.MatchString(name)
	for _, r := range rules {
		if !slices.Contains(r.Verbs, v) {
			continue
		}
		if r.Path == "**" {
			return true
		}
		pattern := regexp.QuoteMeta(r.Path)
		pattern = strings.ReplaceAll(pattern, `\*\*`, `.+`)
		pattern = strings.ReplaceAll(pattern, `\*`, `[^/]+`)
		if patterns[pattern] == nil {
			patterns[pattern] = regexp.MustCompile(`^(?s:` + pattern + `)$`)
		}
		if !odd && patterns[pattern].MatchString(name) {
			return true
		}
	}
	return false
}

func randomRules(rng *rand.Rand) (rules []Rule) {
	for range rng.IntN(4) {
		var segments []string
		for range rng.IntN(4) {
			segments = append(segments, []string{"a", "b", "*"}[rng.IntN(3)])
		}
		if len(segments) == 0 || rng.IntN(3) == 0 {
			segments = append(segments, "**")
		}
		var allowed []Verb
		for _, v := range Verbs()[:2] {
			if rng.IntN(3) > 0 {
				allowed = append(allowed, v)
			}
		}
		if len(allowed) > 0 {
			rules = append(rules, Rule{strings.Join(segments, "/"), allowed})
		}
	}
	return rules
}

// allNames returns all names of up to five segments, among them one that no random glob names. Globs
// have at most three segments and "**", so no longer name is matched otherwise.
func allNames() (names []string) {
	last := []string{""}
	for range 5 {
		var next []string
		for _, before := range last {
			for _, s := range []string{"a", "b", "z"} {
				next = append(next, strings.TrimPrefix(before+"/"+s, "/"))
			}
		}
		names, last = append(names, next...), next
	}
	return append(names, "", ".", "..", "/", "a/", "/a", "a//b", "a/./b", "../a", "b/..")
}

func TestPoliciesAgreeWithABruteForceEvaluator(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	names := allNames()
	covering, not := 0, 0
	for range 300 {
		wide, narrow := randomRules(rng), randomRules(rng)
		if rng.IntN(2) == 0 {
			wide = append(wide, narrow[:rng.IntN(len(narrow)+1)]...)
		}
		p, q := policyOf(t, wide...), policyOf(t, narrow...)
		joined := Join(p, q)
		isCovered := true
		for _, name := range names {
			for _, v := range Verbs()[:3] {
				inWide, inNarrow := bruteForce(wide, v, name), bruteForce(narrow, v, name)
				if p.Allows(v, name) != inWide || joined.Allows(v, name) != (inWide || inNarrow) {
					t.Fatalf("%v: %s of %q: brute force says %v", wide, v, name, inWide)
				}
				if (Access{p, q}).Allows(v, name) != (inWide && inNarrow) {
					t.Fatalf("%v and %v: %s of %q", wide, narrow, v, name)
				}
				isCovered = isCovered && (inWide || !inNarrow)
			}
		}
		if p.Covers(q) != isCovered {
			t.Fatalf("%v covers %v: brute force says %v", wide, narrow, isCovered)
		}
		if isCovered {
			covering++
		} else {
			not++
		}
	}
	if min(covering, not) < 50 {
		t.Errorf("%d covering, %d not: both must be tried", covering, not)
	}
}

// Several globs can cover one together.
func TestGlobsCoverTogether(t *testing.T) {
	for _, one := range []struct {
		wide, narrow string
		yes          bool
	}{
		{"a/* a/*/**", "a/**", true},
		{"a/*", "a/**", false},
		{"a/*/**", "a/**", false},
		{"* */**", "**", false}, // names with empty segments
		{"**", "**", true},
		{"a/b a/c", "a/*", false},
		{"*/b", "a/b", true},
		{"a/b", "*/b", false},
		{"a/**", "a/*/c a/b/**", true},
		{"a/** b/**", "*/**", false},
	} {
		wide, narrow := policyOf(t, reading(strings.Fields(one.wide)...)...), policyOf(t, reading(strings.Fields(one.narrow)...)...)
		if wide.Covers(narrow) != one.yes {
			t.Errorf("%q covers %q: want %v", one.wide, one.narrow, one.yes)
		}
		if !(Access{}).Covers(narrow) || Nothing().Covers(narrow) || (Access{wide, Policy{}}).Covers(narrow) || !wide.Covers(Policy{}) {
			t.Error("an access covers what each of its policies does")
		}
	}
}

// Each action that vault:read or vault:write permits is one on a path, and no other is.
func TestEachActionOfTheVaultHasAVerb(t *testing.T) {
	for _, a := range Actions() {
		scope, _ := Required(a)
		_, has := verbs[a]
		if want := scope == VaultRead || scope == VaultWrite; has != want {
			t.Errorf("%s: on a path is %v, want %v", a, has, want)
		}
	}
	limited := Principal{Access: Access{policyOf(t, Rule{"a", []Verb{ListPath}})}}
	for _, a := range Actions() {
		if limited.Reaches(a, "a") != (verbs[a] == ListPath) || limited.Reaches(a, "b") || !(Principal{}).Reaches(a, "a") {
			t.Errorf("%s: wrong of a principal who may list", a)
		}
	}
}

func FuzzPolicy(f *testing.F) {
	f.Add("shop/*/db", "shop/prod/db")
	f.Add("shop/**", "shop/../db")
	f.Add("**", "//")
	f.Add("cafe\u0301/*", "caf\u00e9/x")
	f.Fuzz(func(t *testing.T, path, name string) {
		p, err := NewPolicy(reading(path))
		if err != nil {
			return
		}
		all, each := policyOf(t, reading("**")...), reading(NormalizeName(path))
		if got, want := p.Allows(ReadPath, name), bruteForce(each, ReadPath, NormalizeName(name)); got != want {
			t.Errorf("%q matches %q: %v, brute force says %v", path, name, got, want)
		}
		if !p.Covers(p) || !all.Covers(p) || all.Allows(ReadPath, name) != true {
			t.Error("a policy covers itself, and ** everything", path, name)
		}
		// A name that is a valid glob is matched as a policy of this name is covered.
		if exact, err := NewPolicy(reading(name)); err == nil && !strings.Contains(name, "*") {
			if p.Covers(exact) != p.Allows(ReadPath, name) {
				t.Errorf("%q covers %q: %v", path, name, p.Covers(exact))
			}
		}
	})
}

func BenchmarkAllows(b *testing.B) {
	var rules []Rule
	for i := range MaxRules {
		rules = append(rules, Rule{fmt.Sprintf("team%d/*/**", i), Verbs()})
	}
	p := policyOf(b, rules...)
	for b.Loop() {
		p.Allows(ReadPath, "another/prod/db")
	}
}

// The largest bindings, none of whose rules is covered by a single one: each glob is compared with all
// others at every length.
func BenchmarkCovers(b *testing.B) {
	const rules = 8 * MaxRules // of a binding
	policies := func(path func(i int) string) Policy {
		var all []Policy
		for i := range rules {
			policy, err := NewPolicy([]Rule{{path(i), Verbs()}})
			if err != nil {
				b.Fatal(err)
			}
			all = append(all, policy)
		}
		return Join(all...)
	}
	narrow := policies(func(i int) string { return fmt.Sprintf("a%d/**", i) })
	wide := policies(func(i int) string {
		switch n := rules - i; {
		case n == 1:
			return strings.Repeat("*/", maxSegments) + "**"
		case n <= maxSegments:
			return strings.Repeat("*/", n-1) + "*"
		default:
			return strings.Repeat("*/", i%maxSegments) + "z/**"
		}
	})
	for b.Loop() {
		if !(Access{wide}).Covers(narrow) {
			b.Fatal("not covered")
		}
	}
}
