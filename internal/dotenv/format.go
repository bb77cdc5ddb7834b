package dotenv

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/secret"
)

// bare matches what no reader needs quotes for.
var bare = regexp.MustCompile(`^[-+._:/,@%a-zA-Z0-9]+$`)

// Format returns a file with the values, sorted by name. [Parse], a POSIX shell and the usual
// libraries read it alike: so a value is refused that needs escapes, since some libraries know none and
// would read what follows as other variables. In single quotes a backslash is one for all of them, unless
// a quote or a second one follows: python-dotenv and others take those for escapes. The caller owns and zeroes the file. A name or a value
// that no such file can hold is an error, which has the name only.
func Format(values map[string]secret.Bytes) (secret.Bytes, error) {
	size := 0
	for key, value := range values {
		size += len(key) + 2*len(value) + len("=''\n")
	}
	file := make(secret.Bytes, 0, size) // never grows, so nothing is left behind
	for _, key := range slices.Sorted(maps.Keys(values)) {
		value := values[key]
		var err error
		switch {
		case !name.MatchString(key):
			err = fmt.Errorf("%q is no name for a .env file: it begins with a letter or _", key)
		case !utf8.Valid(value) || bytes.IndexByte(value, 0) >= 0:
			err = fmt.Errorf("the value of %s is not text, and a .env file holds no other", key)
		case bytes.IndexByte(value, '\'') >= 0 && bytes.ContainsAny(value, "\\\"$`"):
			err = fmt.Errorf("the value of %s has ' beside one of \\ \" $ `, which readers of .env files read in different ways: use latticekeep run, or -o json", key)
		case bytes.HasSuffix(value, []byte(`\`)) || bytes.Contains(value, []byte(`\\`)):
			err = fmt.Errorf("the value of %s has two backslashes in a row or one at its end, which readers of .env files read in different ways: use latticekeep run, or -o json", key)
		}
		if err != nil {
			file.Zero()
			return nil, err
		}
		file = append(append(file, key...), '=')
		switch {
		case bare.Match(value):
			file = append(file, value...)
		case bytes.IndexByte(value, '\'') < 0:
			file = append(append(append(file, '\''), value...), '\'')
		default:
			file = append(append(append(file, '"'), value...), '"')
		}
		file = append(file, '\n')
	}
	return file, nil
}
