package objects

import (
	"errors"
	"io"
	"regexp"
	"strings"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// MaxSize is the size of the largest object in bytes. Larger objects are not read, so that a writer
// to the bucket cannot exhaust the memory of this process.
const MaxSize = 256 << 20

// unreachable is the message for every failure outside this process. The cause, with the name of
// the bucket, goes to the log.
const unreachable = "object storage cannot be used: check that its bucket exists, and the credentials and permissions for it"

func unavailable(cause error) error { return fault.Outage(fault.ReasonObjects, unreachable, cause) }

// namePattern matches names that all stores and file systems accept unchanged: no segment is empty,
// hidden or "..".
var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*$`)

// reserved lists the endings of other files beside objects: files that are being written, and
// attributes, which another program may keep there.
var reserved = []string{temporary, ".attrs"}

const maxName = 512 // bytes

// checkName checks a name: segments of a-z, 0-9, '.', '_' and '-' that begin with a letter or
// digit, joined by '/'.
func checkName(name string) error {
	good := len(name) <= maxName && namePattern.MatchString(name)
	for segment := range strings.SplitSeq(name, "/") {
		for _, ending := range reserved {
			good = good && !strings.HasSuffix(segment, ending)
		}
	}
	if !good {
		return fault.New(fault.Invalid, "the name of the object is malformed")
	}
	return nil
}

var errTooLarge = errors.New("it is larger than 256 MiB")

// whole reads all of an object, unless it is too large.
func whole(r io.Reader, size int64) ([]byte, error) {
	if size > MaxSize {
		return nil, errTooLarge
	}
	data, err := io.ReadAll(io.LimitReader(r, MaxSize+1))
	if len(data) > MaxSize {
		return nil, errTooLarge
	}
	return data, err
}
