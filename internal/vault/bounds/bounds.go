// Package bounds says what the name, the type and the values of a credential may be. The REST contract
// and the custom resource state the same bounds.
package bounds

import (
	"math"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// Bounds of a credential.
const (
	MaxValues      = 64
	MaxValuesBytes = 256 << 10 // keys and values together
	MaxNameBytes   = 255
	MaxTTLDays     = 3650
	DefaultTTLDays = 90
)

// NeverExpires stands for the days of a lifetime that does not end. No mistake in a number of days makes it.
const NeverExpires = math.MinInt32

var (
	typePattern = regexp.MustCompile(`^[a-zA-Z0-9][-._a-zA-Z0-9]{0,62}$`)
	keyPattern  = regexp.MustCompile(`^[-._a-zA-Z0-9]{1,253}$`)
)

// IsName reports whether a credential may have a name.
func IsName(name string) bool {
	return name != "" && len(name) <= MaxNameBytes && utf8.ValidString(name) && !strings.ContainsFunc(name, unicode.IsControl)
}

// CheckName returns fault.Invalid for what is no name.
func CheckName(name string) error {
	if !IsName(name) {
		return fault.New(fault.Invalid, "name must have 1 to 255 bytes of text without control characters")
	}
	return nil
}

// CheckPath refuses a new name with a segment that would mean another path elsewhere. Names of that
// kind which exist stay as they are. Error: fault.Invalid.
func CheckPath(name string) error {
	for segment := range strings.SplitSeq(name, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return fault.New(fault.Invalid, `name must be a path without empty segments, and without segments "." and ".."`)
		}
	}
	return nil
}

// CheckType returns fault.Invalid for what is no type.
func CheckType(name string) error {
	if !typePattern.MatchString(name) {
		return fault.New(fault.Invalid, "credential_type must have 1 to 63 letters, digits, '-', '.' or '_', and begin with a letter or digit")
	}
	return nil
}

// CheckTTL returns fault.Invalid for what is neither a lifetime in days nor [NeverExpires].
func CheckTTL(days int) error {
	if days != NeverExpires && (days < 1 || days > MaxTTLDays) {
		return fault.New(fault.Invalid, "ttl_days must be 1 to 3650")
	}
	return nil
}

// CheckValues returns fault.Invalid for keys and values that one credential cannot have.
func CheckValues(values map[string]secret.Bytes) error {
	invalid := func(msg string) error { return fault.New(fault.Invalid, msg) }
	if len(values) < 1 || len(values) > MaxValues {
		return invalid("values must have 1 to 64 keys")
	}
	total := 0
	for k, v := range values {
		if !keyPattern.MatchString(k) {
			return invalid("the keys of values must have 1 to 253 letters, digits, '-', '.' or '_'")
		}
		total += len(k) + len(v)
	}
	if total > MaxValuesBytes {
		return invalid("values must be at most 256 KiB in all")
	}
	return nil
}
