// Package profile keeps what latticekeep login has stored: for each profile the URL of a server and
// an API key, in a file of its own that only its user can read.
//
// A profile is a whole: its key belongs to its URL and is never sent to another. The package checks
// neither; it reads and writes.
package profile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/latticekeep/latticekeep/internal/durable"
)

// Profile is a server and the API key for it.
type Profile struct {
	URL    string `json:"url"` // without a slash at its end
	APIKey string `json:"api_key"`
}

// Default is the profile of somebody who names none, and Variable the environment variable that
// names another.
const (
	Default  = "default"
	Variable = "LATTICEKEEP_PROFILE"
)

// ErrName is the error for a name that no profile can have.
var ErrName = errors.New("the name of a profile has 1 to 63 letters, digits, '-', '_' or '.', and begins with a letter or digit")

var names = regexp.MustCompile(`^[a-zA-Z0-9][-._a-zA-Z0-9]{0,62}$`)

// Load returns a profile. Without one of this name the error is an fs.ErrNotExist.
func Load(name string) (Profile, error) {
	path, err := pathOf(name)
	if err != nil {
		return Profile{}, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return Profile{}, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return Profile{}, fmt.Errorf("others can read or change %s, which holds an API key: make it your own with chmod 600, or log in again with a new key", path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return Profile{}, err
	}
	defer clear(text)
	var p Profile
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if d.Decode(&p) != nil || p.URL == "" || p.APIKey == "" { // the decoder's words may quote the key
		return Profile{}, fmt.Errorf("%s is not a profile: run latticekeep login again", path)
	}
	return p, nil
}

// Save stores a profile in place of one of this name, and returns the path of its file. The file is
// complete or untouched, whatever happens meanwhile.
func Save(name string, p Profile) (string, error) {
	path, err := pathOf(name)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", err
	}
	text, err := json.Marshal(p)
	if err != nil {
		return "", err
	}
	defer clear(text)
	return path, durable.Write(path, append(text, '\n'))
}

// Remove deletes a profile. Without one of this name the error is an fs.ErrNotExist.
func Remove(name string) error {
	path, err := pathOf(name)
	if err != nil {
		return err
	}
	return os.Remove(path)
}

func pathOf(name string) (string, error) {
	if !names.MatchString(name) {
		return "", ErrName
	}
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("finding your folder of settings: %w", err)
	}
	return filepath.Join(dir, "latticekeep", "profiles", name+".json"), nil
}
