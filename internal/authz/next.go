package authz

import "strings"

// Next returns where the paths that the access allows v on may go on: none lies between from and the
// answer, in the order of the bytes of normal names. ok is false when none follows. So whoever reads an
// ordered index of names skips what is not allowed, without a look at it.
func (a Access) Next(v Verb, from string) (next string, ok bool) {
	next = from
	for _, p := range a {
		at, ok := p.next(v, from)
		if !ok {
			return "", false
		}
		next = max(next, at)
	}
	return next, true
}

// next is [Access.Next] for one policy: the first of what its globs say.
func (p Policy) next(v Verb, from string) (next string, ok bool) {
	for _, g := range p.globs[v] {
		if at, follows := g.next(from); follows && (!ok || at < next) {
			next, ok = at, true
		}
	}
	return next, ok
}

// next returns the least text from which on a normal name may match: from, or a later one.
func (g glob) next(from string) (next string, ok bool) {
	// The names behind all that begin with the last segment that a "*" has matched, and a "/".
	skip, skips := "", false
	at := 0 // segments before it match
	for i, want := range g.segments {
		rest := from[at:]
		end := g.deep || i < len(g.segments)-1 // a "/" follows the segment
		if want == "*" {
			length := strings.IndexByte(rest, '/')
			if length < 0 {
				return from, true // a name that goes on here may match
			}
			skip, skips = from[:at+length]+after, true
			if !end {
				return skip, true
			}
			at += length + 1
			continue
		}
		if end {
			want += "/"
		}
		switch {
		case rest < want:
			return from[:at] + g.literal(i), true
		case end && strings.HasPrefix(rest, want):
			at += len(want)
		case rest == want:
			return from, true
		default:
			return skip, skips
		}
	}
	return from, true
}

// literal returns the text of the segments from i up to the next "*" or the end.
func (g glob) literal(i int) (text string) {
	for ; i < len(g.segments) && g.segments[i] != "*"; i++ {
		if text += g.segments[i]; g.deep || i < len(g.segments)-1 {
			text += "/"
		}
	}
	return text
}

// after is the byte that follows "/".
const after = string('/' + 1)
