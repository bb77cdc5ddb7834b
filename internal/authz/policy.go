package authz

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// Verb is what a policy allows on a path.
type Verb string

// The verbs. None includes another one.
const (
	ListPath   Verb = "list"   // see that it exists, with its metadata and history
	ReadPath   Verb = "read"   // read its values
	WritePath  Verb = "write"  // make it, give it new values, encrypt it again
	DeletePath Verb = "delete" // delete it for good
)

// Verbs returns every verb.
func Verbs() []Verb { return []Verb{ListPath, ReadPath, WritePath, DeletePath} }

// Rule allows verbs on the paths that a glob matches.
type Rule struct {
	Path  string `json:"path"`
	Verbs []Verb `json:"verbs"`
}

// Bounds of a policy. They also bound the work of [Policy.Covers].
const (
	MaxRules     = 50
	MaxGlobBytes = 255
	maxSegments  = 16 // segments of a glob
)

// Policy is what is allowed on which paths. The zero value allows nothing.
type Policy struct{ globs map[Verb][]glob }

// NewPolicy returns the policy that allows what any of the rules allows. The error says which rule is
// wrong, and why.
func NewPolicy(rules []Rule) (Policy, error) {
	p := Policy{make(map[Verb][]glob)}
	if len(rules) > MaxRules {
		return Policy{}, fmt.Errorf("rules must be at most %d", MaxRules)
	}
	for i, r := range rules {
		g, err := parseGlob(r.Path)
		if err != nil {
			return Policy{}, fmt.Errorf("rules[%d].path %w", i, err)
		}
		if len(r.Verbs) == 0 {
			return Policy{}, fmt.Errorf("rules[%d].verbs must have at least one of list, read, write and delete", i)
		}
		for _, v := range r.Verbs {
			if !slices.Contains(Verbs(), v) {
				return Policy{}, fmt.Errorf("rules[%d].verbs must be of list, read, write and delete", i)
			}
			p.globs[v] = append(p.globs[v], g)
		}
	}
	return p, nil
}

// Join returns the policy that allows what any of the policies allows.
func Join(policies ...Policy) Policy {
	all := Policy{make(map[Verb][]glob)}
	for _, p := range policies {
		for v, globs := range p.globs {
			all.globs[v] = append(all.globs[v], globs...)
		}
	}
	return all
}

// Allows reports whether the policy allows v on the path of that name.
func (p Policy) Allows(v Verb, name string) bool {
	globs := p.globs[v]
	if len(globs) == 0 {
		return false
	}
	name = NormalizeName(name)
	plain := isPlain(name)
	return slices.ContainsFunc(globs, func(g glob) bool { return g.matches(name, plain) })
}

// Covers reports whether p allows everything that narrower allows. It is exact for names of any
// length.
func (p Policy) Covers(narrower Policy) bool {
	for v, globs := range narrower.globs {
		if slices.ContainsFunc(globs, func(g glob) bool { return !covered(g, p.globs[v]) }) {
			return false
		}
	}
	return true
}

// Access is what a principal may do on which paths: whatever each of the policies allows. The zero
// value allows everything on all paths.
type Access []Policy

// Nothing is the access of a principal who may do nothing on any path.
func Nothing() Access { return Access{Policy{}} }

// IsLimited reports whether a policy limits the access.
func (a Access) IsLimited() bool { return len(a) > 0 }

// Allows reports whether each policy allows v on the path of that name.
func (a Access) Allows(v Verb, name string) bool {
	return !slices.ContainsFunc(a, func(p Policy) bool { return !p.Allows(v, name) })
}

// Covers reports whether the access allows everything that p allows.
func (a Access) Covers(p Policy) bool {
	return !slices.ContainsFunc(a, func(of Policy) bool { return !of.Covers(p) })
}

// NormalizeName returns the one form in which names and globs are compared: Unicode's form C. The
// bytes of two names in this form agree if and only if they are one path.
func NormalizeName(name string) string { return norm.NFC.String(name) }

// glob is a pattern of paths. A segment matches the same segment, or any one if it is "*". With deep,
// one or more segments follow.
type glob struct {
	segments []string
	deep     bool
}

// parseGlob reads a glob. The error continues a sentence that begins with the name of the field.
func parseGlob(text string) (g glob, err error) {
	if text == "" || len(text) > MaxGlobBytes || !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
		return g, fmt.Errorf("must have 1 to %d bytes of text without control characters", MaxGlobBytes)
	}
	segments := strings.Split(NormalizeName(text), "/")
	if segments[len(segments)-1] == "**" {
		g.deep, segments = true, segments[:len(segments)-1]
	}
	for _, s := range segments {
		switch {
		case s == "", s == ".", s == "..":
			return glob{}, fmt.Errorf(`must have no empty segment, and none that is "." or ".."`)
		case s != "*" && strings.Contains(s, "*"):
			return glob{}, fmt.Errorf(`has "*" only as a whole segment, and "**" only as the last one`)
		}
	}
	if len(segments) > maxSegments {
		return glob{}, fmt.Errorf("must have at most %d segments", maxSegments)
	}
	g.segments = segments
	return g, nil
}

// isAll reports whether the glob is "**", which also matches the names that are not plain.
func (g glob) isAll() bool { return g.deep && len(g.segments) == 0 }

// isPlain reports whether no segment of a name is empty, "." or "..".
func isPlain(name string) bool {
	for rest, more := name, true; more; {
		var s string
		if s, rest, more = strings.Cut(rest, "/"); s == "" || s == "." || s == ".." {
			return false
		}
	}
	return true
}

// matches reports whether the glob matches a normal name. plain is the result of isPlain.
func (g glob) matches(name string, plain bool) bool {
	if g.isAll() {
		return true
	}
	if !plain {
		return false
	}
	rest, more := name, true
	for _, want := range g.segments {
		var s string
		if !more {
			return false
		}
		if s, rest, more = strings.Cut(rest, "/"); want != "*" && s != want {
			return false
		}
	}
	return more == g.deep
}

// matchesSegments is matches for the segments of a plain name.
func (g glob) matchesSegments(name []string) bool {
	if len(name) < len(g.segments) || g.deep == (len(name) == len(g.segments)) {
		return false
	}
	for i, want := range g.segments {
		if want != "*" && want != name[i] {
			return false
		}
	}
	return true
}

// Glob is a pattern of paths that is no part of a policy.
type Glob struct{ glob }

// ParseGlob reads a glob. The error continues a sentence that begins with the name of the field.
func ParseGlob(text string) (Glob, error) {
	g, err := parseGlob(text)
	return Glob{g}, err
}

// Matches reports whether the glob matches the path of that name.
func (g Glob) Matches(name string) bool {
	name = NormalizeName(name)
	return g.matches(name, isPlain(name))
}

// IsNarrower reports which of two globs that match one name is the more specific one: the one that has,
// at the first segment in which they differ, a segment rather than "*", and either rather than "**".
func (g Glob) IsNarrower(than Glob) bool {
	for i, s := range g.segments {
		if i == len(than.segments) {
			return true
		}
		if other := than.segments[i]; s != other {
			return other == "*"
		}
	}
	return false
}

// fresh is a segment that no glob has: none has a control character.
const fresh = "\x00"

// covered reports whether the globs match together every name that g matches. They are finitely many
// and segments are not, so a "*" is covered only where a segment is that none of them names. It is
// enough to look at such names of every length up to one more than the longest of the globs: all
// longer ones match the same of them.
func covered(g glob, by []glob) bool {
	if slices.ContainsFunc(by, glob.isAll) {
		return true
	}
	if g.isAll() {
		return false // nothing else matches the names that are not plain
	}
	example := make([]string, len(g.segments), len(g.segments)+maxSegments+2)
	longest := len(g.segments)
	for i, s := range g.segments {
		if example[i] = s; s == "*" {
			example[i] = fresh
		}
	}
	if g.deep {
		for _, b := range by {
			longest = max(longest, len(b.segments))
		}
		example, longest = append(example, fresh), longest+1
	}
	for ; len(example) <= longest; example = append(example, fresh) {
		if !slices.ContainsFunc(by, func(b glob) bool { return b.matchesSegments(example) }) {
			return false
		}
	}
	return true
}
