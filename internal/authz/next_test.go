package authz

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// Whoever goes from one answer of Next to the following name finds what is allowed, all of it, and
// looks at nothing that it could have skipped by the first segments alone.
func TestNextSkipsNoAllowedName(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	segments := []string{"a", "b", "a-", "a0", "é", "ab", "*"}
	pick := func(n int) string { return segments[r.IntN(n)] }
	for range 3000 {
		var access Access
		for range 1 + r.IntN(2) {
			var rules []Rule
			for range r.IntN(4) {
				var path []string
				for range 1 + r.IntN(3) {
					path = append(path, pick(len(segments)))
				}
				if r.IntN(3) == 0 {
					path[len(path)-1] = "**"
				}
				rules = append(rules, Rule{strings.Join(path, "/"), []Verb{ListPath}})
			}
			p, err := NewPolicy(rules)
			if err != nil {
				t.Fatal(err)
			}
			access = append(access, p)
		}
		var names []string
		for range 40 {
			var path []string
			for range 1 + r.IntN(4) {
				path = append(path, pick(len(segments)-1))
			}
			if r.IntN(10) == 0 {
				path = append(path, "")
			}
			names = append(names, strings.Join(path, "/"))
		}
		slices.Sort(names)
		names = slices.Compact(names)
		var want, got []string
		for _, n := range names {
			if access.Allows(ListPath, n) {
				want = append(want, n)
			}
		}
		for from := ""; ; {
			next, ok := access.Next(ListPath, from)
			if !ok {
				break
			}
			if next < from {
				t.Fatalf("%v: Next(%q) goes back to %q", access, from, next)
			}
			i, _ := slices.BinarySearch(names, next)
			if i == len(names) {
				break
			}
			if access.Allows(ListPath, names[i]) {
				got = append(got, names[i])
			}
			from = names[i] + "\x00"
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%v of %q: found %q, want %q", access, names, got, want)
		}
	}
}

// One team's names cost another team nothing, and a "*" costs one look for each segment in its place.
func TestNextLooksAtFewNames(t *testing.T) {
	var names []string
	for _, team := range []string{"a", "b", "c", "d"} {
		for _, name := range []string{"1", "2", "3", "4", "5", "6", "7", "8", "9", "db", "x", "y", "z"} {
			names = append(names, team+"/"+name)
		}
	}
	for path, most := range map[string]int{"b/db": 1, "b/**": 14, "*/db": 8, "none/**": 1, "*/none": 8, "z": 0, "a/*": 14} {
		p, err := NewPolicy([]Rule{{path, []Verb{ListPath}}})
		if err != nil {
			t.Fatal(err)
		}
		looks := 0
		for from := ""; ; looks++ {
			next, ok := Access{p}.Next(ListPath, from)
			i, _ := slices.BinarySearch(names, next)
			if !ok || i == len(names) {
				break
			}
			from = names[i] + "\x00"
		}
		if looks > most {
			t.Errorf("%s: %d looks, want at most %d", path, looks, most)
		}
	}
}
