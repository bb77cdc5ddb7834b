package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Load reads the YAML file at path, then the variables in environ (as [os.Environ] returns them)
// whose names begin with LATTICEKEEP_, then flags by key. A later source overrides an earlier one.
// An unknown key or variable is an error, as is a combination that is not allowed. The error is an
// [*Error] with all of them, unless the file cannot be read at all.
func Load(path string, environ []string, flags map[string]string) (Config, error) {
	s := Default()
	text, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("reading the configuration: %w", err)
	}
	faults, err := s.readYAML(text)
	if err != nil {
		return Config{}, fmt.Errorf("reading the configuration %s: %w", path, err)
	}
	from := linesOf(text)
	faults = append(faults, s.readEnvironment(environ, from)...)
	for _, k := range s.keys() {
		if value, ok := flags[k.name]; ok {
			from[k.name] = "a flag"
			if err := k.set(value); err != nil {
				faults = append(faults, err)
			}
		}
	}
	if faults = append(faults, s.locate(s.check(), from, faults)...); len(faults) > 0 {
		return Config{}, &Error{path, faults}
	}
	return s, nil
}

// Error says what is wrong in a configuration.
type Error struct {
	Path   string
	Faults []error // each with the line, the variable or the key
}

// Error implements error.
func (e *Error) Error() string {
	texts := make([]string, len(e.Faults))
	for i, f := range e.Faults {
		texts[i] = f.Error()
	}
	return fmt.Sprintf("the configuration %s cannot be used:\n%s", e.Path, strings.Join(texts, "\n"))
}

// linesOf returns where each key of a YAML document stands, as "line 9".
func linesOf(text []byte) map[string]string {
	from := make(map[string]string)
	var walk func(n *yaml.Node, path string)
	walk = func(n *yaml.Node, path string) {
		for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
			name := strings.TrimPrefix(path+"."+n.Content[i].Value, ".")
			from[name] = fmt.Sprintf("line %d", n.Content[i].Line)
			walk(n.Content[i+1], name)
		}
	}
	var document yaml.Node
	if yaml.Unmarshal(text, &document) == nil && len(document.Content) > 0 {
		walk(document.Content[0], "")
	}
	return from
}

// locate splits the faults of [Config.check], each of which begins with its key, and says where the
// value comes from. It drops those of values that could not be read: they have a fault already.
func (s *Config) locate(err error, from map[string]string, known []error) (all []error) {
	if joined, ok := err.(interface{ Unwrap() []error }); ok && err != nil {
		for _, e := range joined.Unwrap() {
			all = append(all, s.locate(e, from, known)...)
		}
		return all
	}
	if err == nil {
		return nil
	}
	place := ""
	for _, k := range s.keys() {
		if rest, ok := strings.CutPrefix(err.Error(), k.name); ok && strings.IndexAny(rest, ": ") == 0 {
			place = from[k.name]
		}
	}
	switch {
	case place == "":
		return []error{err}
	case slices.ContainsFunc(known, func(e error) bool { return strings.HasPrefix(e.Error(), place+":") }):
		return nil
	}
	return []error{fmt.Errorf("%s: %w", place, err)}
}

var wrongDuration = regexp.MustCompile(`cannot unmarshal !!\w+ (.+) into time\.Duration`)

var unknownField = regexp.MustCompile(`field (\S+) not found in type \S+`)

// readYAML reads the document. It returns the keys and values that it does not take, each with its
// line, and an error for a text that is no such document.
func (s *Config) readYAML(text []byte) (faults []error, err error) {
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	err = d.Decode(s)
	if errors.Is(err, io.EOF) {
		return nil, nil // empty file: the environment may have all settings
	}
	if wrong := new(yaml.TypeError); errors.As(err, &wrong) {
		for _, text := range wrong.Errors {
			text = unknownField.ReplaceAllString(text, "there is no key $1 here")
			faults = append(faults, errors.New(wrongDuration.ReplaceAllString(text, "$1 is not a duration: give one such as 30s, 5m or 24h")))
		}
	} else if err != nil {
		return nil, inLine(text, err)
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("it holds more than one document: keep the first")
	}
	return faults, nil
}

// inLine returns an error of YAML's syntax with the line where it begins. The parser leaves the line out
// of some: it is the first one up to which the text has the same error.
func inLine(text []byte, err error) error {
	said := strings.TrimPrefix(err.Error(), "yaml: ")
	if strings.HasPrefix(said, "line ") {
		return errors.New(said)
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	for n := range lines {
		if part := yaml.Unmarshal(bytes.Join(lines[:n+1], nil), new(any)); part != nil && part.Error() == err.Error() {
			return fmt.Errorf("line %d: %s", n+1, said)
		}
	}
	return errors.New(said)
}

const variablePrefix = "LATTICEKEEP_"

// otherVariables belong to other commands. A shell may have set them.
var otherVariables = []string{IdentityVariable, APIKeyVariable, "LATTICEKEEP_URL", "LATTICEKEEP_PROFILE"}

// serviceLink matches the variables that Kubernetes sets in every pod of a namespace for a Service
// whose name begins with latticekeep.
var serviceLink = regexp.MustCompile(`_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$`)

// readEnvironment sets what the variables say, and notes in from that it comes from them.
func (s *Config) readEnvironment(environ []string, from map[string]string) (faults []error) {
	known := make(map[string]key)
	for _, k := range s.keys() {
		known[k.variable] = k
	}
	for _, pair := range environ {
		name, value, _ := strings.Cut(pair, "=")
		if !strings.HasPrefix(name, variablePrefix) || slices.Contains(otherVariables, name) || serviceLink.MatchString(name) {
			continue
		}
		k, ok := known[name]
		if !ok {
			faults = append(faults, fmt.Errorf("reading the environment: no configuration key belongs to the variable %s: unset it, or correct its name", name))
			continue
		}
		from[k.name] = name
		if err := k.set(value); err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", name, err))
		}
	}
	return faults
}

// key is one setting, by its full name.
type key struct {
	name     string // such as kms.cacheTTL
	variable string // LATTICEKEEP_KMS_CACHE_TTL
	value    reflect.Value
}

// keys returns every setting of s. Setting one changes s.
func (s *Config) keys() []key {
	var all []key
	var walk func(v reflect.Value, path string)
	walk = func(v reflect.Value, path string) {
		if v.Kind() != reflect.Struct {
			all = append(all, key{path, Variable(path), v})
			return
		}
		for i := range v.NumField() {
			name := v.Type().Field(i).Tag.Get("yaml")
			if path != "" {
				name = path + "." + name
			}
			walk(v.Field(i), name)
		}
	}
	walk(reflect.ValueOf(s).Elem(), "")
	return all
}

// Variable returns the environment variable of a setting, such as LATTICEKEEP_KMS_CACHE_TTL for
// kms.cacheTTL.
func Variable(name string) string {
	name = abbreviation.ReplaceAllString(camelHump.ReplaceAllString(name, "${1}_$2"), "${1}_$2")
	return variablePrefix + strings.ToUpper(strings.ReplaceAll(name, ".", "_"))
}

// set parses a value from a variable or a flag. A list is separated by commas, and a map is written
// as name=value pairs separated by commas.
func (k key) set(text string) error {
	switch v := k.value.Addr().Interface().(type) {
	case *bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%s is true or false", k.name)
		}
		*v = b
	case *int:
		n, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("%s is a whole number", k.name)
		}
		*v = n
	case *float64:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("%s is a number", k.name)
		}
		*v = f
	case *time.Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%s is a time such as 5m", k.name)
		}
		*v = d
	case *[]string:
		*v = fields(text)
	case *map[string]string:
		m := make(map[string]string)
		for _, pair := range fields(text) {
			name, value, ok := strings.Cut(pair, "=")
			if !ok {
				return fmt.Errorf("%s is a list such as name=value,name=value", k.name)
			}
			m[strings.TrimSpace(name)] = strings.TrimSpace(value)
		}
		*v = m
	default: // any string type
		k.value.SetString(text)
	}
	return nil
}

func fields(text string) (list []string) {
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			list = append(list, item)
		}
	}
	return list
}
