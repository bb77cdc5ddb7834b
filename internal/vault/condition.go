package vault

import (
	"crypto/sha3"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// ErrCondition refuses a change whose [Condition] does not hold. Only a caller that may unseal the
// credential gets it.
var ErrCondition = fault.New(fault.Conflict, "the credential is not the version that If-Match names: read it again, and repeat the change on what it is now")

// reasonCondition is the reason in the entry of a change whose condition does not hold.
const reasonCondition = "condition_failed"

// entityTag returns the entity tag of a version of a credential (RFC 9110 §8.8.3), in quotes. It
// depends on id and version only, and is no secret.
func entityTag(id string, version uint64) string {
	h := sha3.New256()
	frame.Write(h, "latticekeep/entity-tag/v1", []byte(id), frame.Uint64(version))
	return `"` + hex.EncodeToString(h.Sum(nil)[:16]) + `"`
}

// EntityTag returns the entity tag of the version that c describes.
func (c Credential) EntityTag() string { return entityTag(c.ID, c.Version) }

// Condition is the value of If-Match (RFC 9110 §13.1.1): entity tags of versions that a change may
// start from, or "*" for any. The zero value is no condition.
type Condition string

// holds reports whether the condition allows a change of that version. A weak tag never matches.
func (c Condition) holds(id string, version uint64) bool {
	if c == "" || c == "*" {
		return true
	}
	current := entityTag(id, version) // once, so that the work does not depend on how many tags there are
	for tag := range strings.SplitSeq(string(c), ",") {
		if strings.Trim(tag, " \t") == current {
			return true
		}
	}
	return false
}

// allHold reports whether all conditions hold.
func allHold(conditions []Condition, id string, version uint64) bool {
	return !slices.ContainsFunc(conditions, func(c Condition) bool { return !c.holds(id, version) })
}

// mayRead reports whether p could unseal a credential that exists for it.
func mayRead(p authz.Principal) bool { return p.May(authz.UnsealCredential) }

func mayReadAt(p authz.Principal, name string) bool {
	return mayRead(p) && p.Reaches(authz.UnsealCredential, name)
}

// failCondition makes e the entry of a change whose condition does not hold, and returns the answer.
// Without the right to unseal the credential, that is the answer for a credential that is not there.
// readable says that p could unseal the credential itself.
func failCondition(readable bool, e *audit.Event) error {
	e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reasonCondition}
	if readable {
		return ErrCondition
	}
	return errDenied
}
