package compliance

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"
)

// Catalogue holds a framework's controls and the probes for each. It is one YAML file:
//
//	framework: soc2
//	name: SOC 2
//	version: TSC 2017 (rev. 2022)
//	limits: What the catalogue does not look at.
//	controls:
//	  - id: CC6.1
//	    title: Access to protected information, and its encryption
//	    related: [AC-3, SC-12]     # NIST SP 800-53 rev. 5
//	    weight: 2                  # over 0 up to 10; 1 when absent
//	    profile: 20x               # optional: part of the framework that contains the control
//	    probes: [keys_wrapped]     # or, in its place, manual: true
//
// The titles are our own.
type Catalogue struct {
	Framework Framework
	Name      string
	Version   string
	Limits    string
	Controls  []Control

	Digest string // SHA-256 of the file, lower-case hex
}

// Control is one control of a catalogue. It either has probes or is manual.
type Control struct {
	ID      string
	Title   string
	Profile string
	Related []string
	Weight  float64
	Probes  []string
}

//go:embed catalogues/*.yaml
var embedded embed.FS

// LoadCatalogues returns the catalogues of all frameworks, which nobody changes. If dir is not empty,
// a file of the same name in dir replaces the embedded one. An error names the file and the line.
func LoadCatalogues(dir string) (map[Framework]*Catalogue, error) {
	found, err := loadEmbedded()
	if err != nil {
		return nil, err
	}
	all := maps.Clone(found)
	if dir == "" {
		return all, nil
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("reading the directory of catalogues: %w", err)
	}
	for _, file := range files {
		name := file.Name()
		if strings.HasPrefix(name, ".") { // hidden entries, as in the mount of a ConfigMap
			continue
		}
		path, f := filepath.Join(dir, name), Framework(strings.TrimSuffix(name, ".yaml"))
		if !slices.Contains(Frameworks(), f) || !strings.HasSuffix(name, ".yaml") {
			return nil, fmt.Errorf("%s: no framework has a catalogue of this name", path)
		}
		if all[f], err = loadCatalogue(f, path, os.ReadFile); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// loadEmbedded reads the embedded catalogues once: a start loads them twice, and tests start many
// servers.
var loadEmbedded = sync.OnceValues(func() (map[Framework]*Catalogue, error) {
	all := make(map[Framework]*Catalogue)
	for _, f := range Frameworks() {
		var err error
		if all[f], err = loadCatalogue(f, "catalogues/"+string(f)+".yaml", embedded.ReadFile); err != nil {
			return nil, err
		}
	}
	return all, nil
})

func loadCatalogue(f Framework, path string, read func(string) ([]byte, error)) (*Catalogue, error) {
	b, err := read(path)
	if err != nil {
		return nil, fmt.Errorf("reading a catalogue: %w", err)
	}
	c, err := ParseCatalogue(path, b)
	if err != nil {
		return nil, err
	}
	if c.Framework != f {
		return nil, fmt.Errorf("%s:1: the catalogue is of another framework than its name says", path)
	}
	return c, nil
}

// maxCatalogue bounds the size of a file, in bytes.
const maxCatalogue = 1 << 20

// ParseCatalogue parses the catalogue in a file. An error names the path, the line and the problem.
func ParseCatalogue(path string, content []byte) (*Catalogue, error) {
	if len(content) > maxCatalogue {
		return nil, fmt.Errorf("%s:1: a catalogue has at most 1 MiB", path)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(content, &doc); err != nil {
		return nil, fmt.Errorf("%s:%s", path, yamlError(err))
	}
	if len(doc.Content) != 1 {
		return nil, fmt.Errorf("%s:1: the file is empty", path)
	}
	p := parser{path: path}
	sum := sha256.Sum256(content)
	c := &Catalogue{Digest: hex.EncodeToString(sum[:])}
	root := doc.Content[0]
	fields := p.mapping(root, "framework", "name", "version", "limits", "controls")
	c.Framework = Framework(p.text(root, fields, "framework"))
	if n := fields["framework"]; n != nil && !slices.Contains(Frameworks(), c.Framework) {
		p.fail(n, "there is no such framework")
	}
	c.Name, c.Version, c.Limits = p.text(root, fields, "name"), p.text(root, fields, "version"), p.text(root, fields, "limits")
	seen := make(map[string]bool)
	for _, n := range p.sequence(root, fields, "controls") {
		control := p.control(n)
		if seen[control.ID] {
			p.fail(n, "the id is that of an earlier control")
		}
		seen[control.ID] = true
		c.Controls = append(c.Controls, control)
	}
	if p.err != nil {
		return nil, p.err
	}
	return c, nil
}

var yamlLine = regexp.MustCompile(`line (\d+): (.*)`)

// yamlError returns the decoder's error in the form "line: problem".
func yamlError(err error) string {
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		return m[1] + ": " + m[2]
	}
	return "1: " + strings.TrimPrefix(err.Error(), "yaml: ")
}

// parser keeps the first error.
type parser struct {
	path string
	err  error
}

func (p *parser) fail(n *yaml.Node, what string) {
	if p.err == nil {
		p.err = fmt.Errorf("%s:%d: %w", p.path, n.Line, errors.New(what))
	}
}

// mapping returns the values of a mapping by key. Only the known keys are allowed.
func (p *parser) mapping(n *yaml.Node, known ...string) map[string]*yaml.Node {
	fields := make(map[string]*yaml.Node)
	if n.Kind != yaml.MappingNode {
		p.fail(n, "here belongs a mapping with the keys "+strings.Join(known, ", "))
		return fields
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		switch _, twice := fields[key.Value]; {
		case key.Kind != yaml.ScalarNode || !slices.Contains(known, key.Value):
			p.fail(key, "unknown key: the keys here are "+strings.Join(known, ", "))
		case twice:
			p.fail(key, "the key is here twice")
		}
		fields[key.Value] = n.Content[i+1]
	}
	return fields
}

// text returns a required string.
func (p *parser) text(parent *yaml.Node, fields map[string]*yaml.Node, key string) string {
	n := fields[key]
	switch {
	case n == nil:
		p.fail(parent, key+" is missing")
		return ""
	case n.Kind != yaml.ScalarNode || n.Tag == "!!null" || strings.TrimSpace(n.Value) == "":
		p.fail(n, key+" is not a text")
		return ""
	}
	return strings.TrimSpace(n.Value)
}

// sequence returns the elements of a sequence that is required and not empty.
func (p *parser) sequence(parent *yaml.Node, fields map[string]*yaml.Node, key string) []*yaml.Node {
	n := fields[key]
	switch {
	case n == nil:
		p.fail(parent, key+" is missing")
		return nil
	case n.Kind != yaml.SequenceNode || len(n.Content) == 0:
		p.fail(n, key+" is not a list with elements")
		return nil
	}
	return n.Content
}

var hubControl = regexp.MustCompile(`^[A-Z]{2}-[1-9][0-9]?(\([1-9][0-9]?\))?$`)

const maxWeight = 10

func (p *parser) control(n *yaml.Node) Control {
	fields := p.mapping(n, "id", "title", "related", "weight", "profile", "probes", "manual")
	c := Control{ID: p.text(n, fields, "id"), Title: p.text(n, fields, "title"), Weight: 1}
	for _, r := range p.sequence(n, fields, "related") {
		if r.Kind != yaml.ScalarNode || !hubControl.MatchString(r.Value) {
			p.fail(r, "it is not the id of a control of NIST SP 800-53, such as AC-2 or AC-2(4)")
		}
		c.Related = append(c.Related, r.Value)
	}
	if fields["profile"] != nil {
		c.Profile = p.text(n, fields, "profile")
	}
	if w := fields["weight"]; w != nil {
		var err error
		if c.Weight, err = strconv.ParseFloat(w.Value, 64); w.Kind != yaml.ScalarNode || err != nil || !(c.Weight > 0 && c.Weight <= maxWeight) {
			p.fail(w, "weight is not a number over 0 up to 10")
		}
	}
	if m := fields["manual"]; m != nil {
		if m.Value != "true" {
			p.fail(m, "manual is true, or absent")
		}
		if fields["probes"] != nil {
			p.fail(fields["probes"], "a control has probes or is manual, not both")
		}
		return c
	}
	if fields["probes"] == nil {
		p.fail(n, "the control has neither probes nor manual: true")
		return c
	}
	for _, name := range p.sequence(n, fields, "probes") {
		switch {
		case name.Kind != yaml.ScalarNode || ProbeOf(name.Value) == nil:
			p.fail(name, "there is no such probe")
		case slices.Contains(c.Probes, name.Value):
			p.fail(name, "the probe is here twice")
		}
		c.Probes = append(c.Probes, name.Value)
	}
	return c
}

// Profiles returns the profiles of the controls, in the order of the catalogue, or nil when no
// control has one.
func (c *Catalogue) Profiles() (profiles []string) {
	for _, control := range c.Controls {
		if control.Profile != "" && !slices.Contains(profiles, control.Profile) {
			profiles = append(profiles, control.Profile)
		}
	}
	return profiles
}

// Probes holds all probes, in the order of the documentation.
var Probes = slices.Concat(credentialProbes, accessProbes, reviewProbes, recordProbes, StateProbes)

// ProbeOf returns the probe with this name, or nil.
func ProbeOf(name string) *Probe {
	for i := range Probes {
		if Probes[i].Name == name {
			return &Probes[i]
		}
	}
	return nil
}
