package record

import (
	"crypto/sha3"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/internal/frame"
)

// EntityTag returns the entity tag of a version of a credential (RFC 9110 §8.8.3), in quotes. It
// depends on id and version only, and is no secret.
func EntityTag(id string, version uint64) string {
	h := sha3.New256()
	frame.Write(h, "latticekeep/entity-tag/v1", []byte(id), frame.Uint64(version))
	return `"` + hex.EncodeToString(h.Sum(nil)[:16]) + `"`
}

// Condition is the value of If-Match (RFC 9110 §13.1.1): entity tags of versions that a change may
// start from, or "*" for any. The zero value is no condition.
type Condition string

// Holds reports whether the condition allows a change of that version. A weak tag never matches.
func (c Condition) Holds(id string, version uint64) bool {
	if c == "" || c == "*" {
		return true
	}
	current := EntityTag(id, version) // once, so that the work does not depend on how many tags there are
	for tag := range strings.SplitSeq(string(c), ",") {
		if strings.Trim(tag, " \t") == current {
			return true
		}
	}
	return false
}

// Names reports whether the condition, as the value of If-None-Match, names that version (RFC 9110
// §13.1.2). A weak tag names it, too: a proxy that compresses the answer makes the tag weak.
func (c Condition) Names(id string, version uint64) bool {
	current, found := EntityTag(id, version), c == "*"
	for tag := range strings.SplitSeq(string(c), ",") {
		found = found || strings.TrimPrefix(strings.Trim(tag, " \t"), "W/") == current
	}
	return found
}

// AllHold reports whether all conditions hold.
func AllHold(conditions []Condition, id string, version uint64) bool {
	return !slices.ContainsFunc(conditions, func(c Condition) bool { return !c.Holds(id, version) })
}
