// Package delivery makes files of credentials, for pods and services that read files: for the CSI provider
// and for the agent.
//
// A [Plan] says which files there are, and [Plan.Render] makes them of the values: all, or none. A [Server]
// reads the values over REST with the caller's token or API key. Its errors say what to do about a refusal. The package has
// no right of its own, writes nothing, and quotes no value in an error.
package delivery

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/latticekeep/latticekeep/internal/compose"
	"github.com/latticekeep/latticekeep/internal/dotenv"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
)

const (
	maxEntries = 64
	maxPath    = 1024    // bytes
	maxPart    = 255     // bytes between slashes
	maxContent = 1 << 20 // bytes of all files

	// A text decoded takes a hundred times its size, before its entries can be counted.
	maxText   = 64 << 10
	maxReason = 200 // bytes of what is wrong with it
)

// Plan says which files are made of which credentials. It is safe for concurrent use.
type Plan struct {
	entries []entry
}

// entry makes a file, or a folder with a file for each value.
type entry struct {
	label      string // place in the plan, such as files[0]
	path       string
	mode       fs.FileMode
	credential string

	key      string // the file is the value with this key
	template *compose.Template
	encoding compose.Encoding
	env      bool // the file has all values, as lines of a .env file
}

// listed is an entry as it is written.
type listed struct {
	Path       string           `yaml:"path"`
	Mode       string           `yaml:"mode"`
	Credential string           `yaml:"credential"`
	Key        string           `yaml:"key"`
	Template   string           `yaml:"template"`
	Encoding   compose.Encoding `yaml:"encoding"`
	Format     string           `yaml:"format"`
}

// Parse reads a plan: a list in YAML, whose entries have
//
//	path        of the file, relative; without key, template and format, of a folder with a file for each value
//	credential  name of the credential
//	key         the file is the value with this key
//	template    the file is this text with the values put in, see package compose
//	encoding    of the values in the template: Text, URL or JSON
//	format      env: the file is a .env file of all values
//	mode        of the file, in octal; default defaultMode
//
// Errors are fault.Invalid, and name the entry, the field and the remedy.
func Parse(text string, defaultMode fs.FileMode) (Plan, error) {
	if len(text) > maxText {
		return Plan{}, invalid("the list of files has %d bytes; give it at most %d", len(text), maxText)
	}
	var list []listed
	d := yaml.NewDecoder(strings.NewReader(text)) // takes a name such as on or no as it is written
	d.KnownFields(true)
	if err := d.Decode(&list); err != nil && !errors.Is(err, io.EOF) {
		reason := strings.TrimPrefix(err.Error(), "yaml: ")
		return Plan{}, invalid("the list of files is not YAML of this form: %.*s", maxReason, reason)
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return Plan{}, invalid("the list of files must be one document of YAML: remove the line ---")
	}
	switch {
	case len(list) == 0:
		return Plan{}, invalid("the list of files is empty: give it entries with path and credential")
	case len(list) > maxEntries:
		return Plan{}, invalid("the list of files has %d entries; give it at most %d", len(list), maxEntries)
	}
	var p Plan
	paths := make(map[string]string)
	for i, l := range list {
		e, err := l.parse(fmt.Sprintf("files[%d]", i), defaultMode)
		if err != nil {
			return Plan{}, err
		}
		for other, label := range paths {
			if other == e.path || strings.HasPrefix(other, e.path+"/") || strings.HasPrefix(e.path, other+"/") {
				return Plan{}, invalid("%s.path: %s and the path of %s cannot both be there: give them different folders or names", e.label, e.path, label)
			}
		}
		paths[e.path] = e.label
		p.entries = append(p.entries, e)
	}
	return p, nil
}

func (l listed) parse(label string, defaultMode fs.FileMode) (entry, error) {
	e := entry{label: label, path: l.Path, mode: defaultMode, credential: l.Credential, key: l.Key, encoding: l.Encoding}
	if err := checkPath(l.Path); err != nil {
		return e, invalid("%s.path: %v", label, err)
	}
	if err := bounds.CheckName(l.Credential); err != nil {
		return e, invalid("%s.credential: %s", label, fault.Message(err))
	}
	if l.Mode != "" {
		mode, err := strconv.ParseUint(l.Mode, 8, 32)
		if err != nil || mode > 0o777 || mode&0o400 == 0 {
			return e, invalid("%s.mode: write three octal digits that let the owner read, such as 0440", label)
		}
		e.mode = fs.FileMode(mode)
	}
	given := 0
	for _, field := range []string{l.Key, l.Template, l.Format} {
		if field != "" {
			given++
		}
	}
	switch {
	case given > 1:
		return e, invalid("%s: key, template and format exclude each other: give one of them, or none for a folder with all values", label)
	case l.Encoding != "" && l.Template == "":
		return e, invalid("%s.encoding: only a template has one; leave it out", label)
	case l.Format != "" && l.Format != "env":
		return e, invalid("%s.format: there is only env", label)
	case l.Key != "" && !bounds.IsName(l.Key):
		return e, invalid("%s.key: no value has such a key", label)
	case l.Template != "":
		t, err := compose.Parse(l.Template)
		if err == nil {
			err = t.Check(l.Encoding)
		}
		if err != nil {
			return e, invalid("%s.template: %s", label, fault.Message(err))
		}
		e.template = &t
	}
	e.env = l.Format == "env"
	return e, nil
}

// checkPath checks that a path stays in its folder on every system that a pod may have.
func checkPath(path string) error {
	switch {
	case !fs.ValidPath(path) || path == "." || len(path) > maxPath || strings.ContainsFunc(path, func(r rune) bool { return r < ' ' || r == '\\' || r == 0x7f }):
		return fmt.Errorf("write a relative path such as db/password, without .., an empty part or a control character, of at most %d bytes", maxPath)
	case slices.ContainsFunc(strings.Split(path, "/"), func(part string) bool { return len(part) > maxPart }):
		return fmt.Errorf("a part of it has more than %d bytes, which no file system takes; shorten it", maxPart)
	case strings.HasPrefix(path, ".."):
		return fmt.Errorf("a name that begins with .. is one that the kubelet uses itself; choose another")
	}
	return nil
}

// Credentials returns the names of the credentials that the plan needs, sorted.
func (p Plan) Credentials() []string {
	names := make(map[string]bool)
	for _, e := range p.entries {
		names[e.credential] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// File is a file to be written.
type File struct {
	Path    string // relative, with slashes
	Mode    fs.FileMode
	Content secret.Bytes
}

// Zero overwrites the contents of files.
func Zero(files []File) {
	for _, f := range files {
		f.Content.Zero()
	}
}

// Render makes all files of the values of each credential, sorted by path. The caller owns them and
// overwrites them with [Zero]. Errors are fault.Invalid, and name the entry and the data key.
func (p Plan) Render(values map[string]map[string]secret.Bytes) (files []File, err error) {
	defer func() {
		if err != nil {
			Zero(files)
			files = nil
		}
	}()
	size := 0
	for _, e := range p.entries {
		made, err := e.render(values[e.credential])
		files = append(files, made...)
		if err != nil {
			return files, err
		}
		for _, f := range made {
			size += len(f.Content)
		}
		if size > maxContent {
			return files, invalid("the files up to %s have %d bytes; leave out some of them: there is room for %d", e.label, size, maxContent)
		}
	}
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return files, nil
}

// render makes the files of an entry. What it made before an error is returned, too.
func (e entry) render(values map[string]secret.Bytes) (files []File, err error) {
	file := func(path string, content secret.Bytes) {
		files = append(files, File{Path: path, Mode: e.mode, Content: content})
	}
	switch {
	case e.key != "":
		value, ok := values[e.key]
		if !ok {
			return nil, invalid("%s.key: the credential %s has no value %s; it has %s", e.label, e.credential, e.key, keysOf(values))
		}
		file(e.path, slices.Clone(value))
	case e.template != nil:
		text, err := e.template.Render(values, e.encoding)
		if err != nil {
			return nil, invalid("%s.template: with the credential %s: %s", e.label, e.credential, fault.Message(err))
		}
		file(e.path, text)
	case e.env:
		text, err := dotenv.Format(values)
		if err != nil {
			return nil, invalid("%s.format: the credential %s: %v", e.label, e.credential, err)
		}
		file(e.path, text)
	default:
		for key, value := range values {
			if !isFileName(key) {
				return files, invalid("%s: the key %q of the credential %s is no name of a file: give it an entry with key, and a path of your choice", e.label, key, e.credential)
			}
			file(e.path+"/"+key, slices.Clone(value))
		}
	}
	return files, nil
}

// keysOf lists the keys of values, without the values.
func keysOf(values map[string]secret.Bytes) string {
	if len(values) == 0 {
		return "none"
	}
	return strings.Join(slices.Sorted(maps.Keys(values)), ", ")
}

func isFileName(key string) bool { return checkPath(key) == nil && !strings.Contains(key, "/") }

func invalid(format string, args ...any) error {
	return fault.New(fault.Invalid, fmt.Sprintf(format, args...))
}
