package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"
)

const (
	crdFile    = "config/crd/bases/latticekeep.dev_sealedcredentials.yaml"
	valuesFile = "charts/latticekeep/values.yaml"
)

// node is a value in a YAML file and keeps the order of the file. It is nil for an absent value.
type node struct{ *yaml.Node }

func readYAML(file string) (node, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return node{}, err
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return node{}, fmt.Errorf("reading %s: %w", file, err)
	}
	return node{document.Content[0]}, nil
}

// at follows a path of keys through mappings.
func (n node) at(path ...string) node {
	for _, key := range path {
		next := node{}
		n.each(func(k *yaml.Node, v node) {
			if k.Value == key {
				next = v
			}
		})
		n = next
	}
	return n
}

// each calls f for every key and value of a mapping.
func (n node) each(f func(key *yaml.Node, value node)) {
	if n.Node == nil || n.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i < len(n.Content); i += 2 {
		f(n.Content[i], node{n.Content[i+1]})
	}
}

func (n node) text() string {
	if n.Node == nil {
		return ""
	}
	return n.Value
}

// list returns the scalars of a sequence.
func (n node) list() (all []string) {
	if n.Node != nil {
		for _, c := range n.Content {
			all = append(all, c.Value)
		}
	}
	return all
}

// json returns a value as one line of JSON.
func (n node) json() string {
	if n.Node == nil {
		return ""
	}
	if n.Kind == yaml.ScalarNode {
		return n.Value
	}
	var v any
	if err := n.Decode(&v); err != nil {
		return n.Value
	}
	text, err := json.Marshal(v)
	if err != nil {
		return n.Value
	}
	return string(text)
}

// customResource lists every field of the SealedCredential.
func customResource() (string, error) {
	crd, err := readYAML(crdFile)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	var stored node
	for _, version := range crd.at("spec", "versions").Content {
		if (node{version}).at("storage").text() == "true" {
			stored = node{version}
		}
	}
	schema := stored.at("schema", "openAPIV3Schema")
	b.WriteString("`apiVersion: latticekeep.dev/" + stored.at("name").text() + "`, `kind: SealedCredential`, short name `" +
		strings.Join(crd.at("spec", "names", "shortNames").list(), "`, `") + "`. Version v1alpha1 has the\n" +
		"same fields, is deprecated and still accepted.\n" +
		"[Seal for git](../guides/sealing-for-git.md) shows how to use it, and [Status](status.md) explains conditions and events.\n")
	for _, part := range []string{"spec", "status"} {
		b.WriteString("\n## " + part + "\n\n| field | type | what it is |\n| --- | --- | --- |\n")
		fields(&b, part, schema.at("properties", part))
	}
	return b.String(), nil
}

// fields writes a row for each property of an object, then the rows of that property's own
// properties.
func fields(b *strings.Builder, path string, object node) {
	required := make(map[string]bool)
	for _, name := range object.at("required").list() {
		required[name] = true
	}
	object.at("properties").each(func(key *yaml.Node, field node) {
		name, kind := path+"."+key.Value, field.at("type").text()
		inner := field
		switch items, values := field.at("items"), field.at("additionalProperties"); {
		case items.Node != nil:
			inner, kind, name = items, "list of "+items.at("type").text(), name+"[]"
		case values.Node != nil:
			inner, kind = values, "map of "+values.at("type").text()
		}
		if format := field.at("format").text(); format != "" && kind == "string" {
			kind = format
		}
		b.WriteString(row(code(name), kind, sentence(key.Value, field.at("description").text())+properties(field, required[key.Value])))
		if values := field.at("additionalProperties"); values.Node != nil {
			name += ".*"
		}
		fields(b, name, inner)
	})
}

// sentence returns a description that begins with the name of its field, without the name where
// that reads better.
func sentence(name, description string) string {
	description = strings.Join(strings.Fields(description), " ")
	for _, verb := range []string{" is ", " are ", ": "} {
		if rest, ok := strings.CutPrefix(description, name+verb); ok && rest != "" && !strings.HasPrefix(rest, "what ") {
			return strings.ToUpper(rest[:1]) + rest[1:]
		}
	}
	return description
}

// properties describes the other constraints that the schema has for a field.
func properties(field node, required bool) string {
	text := ""
	if required {
		text += " Required."
	}
	if values := field.at("enum").list(); len(values) > 0 {
		text += " One of `" + strings.Join(values, "`, `") + "`."
	}
	if value := field.at("default"); value.Node != nil {
		text += " Default `" + value.json() + "`."
	}
	for _, bound := range []struct{ key, word string }{{"minimum", "At least"}, {"maximum", "At most"}} {
		if value := field.at(bound.key).text(); value != "" {
			text += fmt.Sprintf(" %s %s.", bound.word, value)
		}
	}
	return text
}

// chart lists every value of the chart. values.yaml describes each one with a comment of the form
// "# -- text".
func chart() (string, error) {
	values, err := readYAML(valuesFile)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("Below `config` stand the settings of the program, under the names of [Configuration](configuration.md). The chart decides\n" +
		"addresses, paths and certificates itself. It refuses unknown values. [Install with Helm](../guides/install.md) says what to\ndecide first.\n\n" +
		"| value | default | what it is |\n| --- | --- | --- |\n")
	describeValues(&b, "", values)
	return b.String(), nil
}

func describeValues(b *strings.Builder, path string, values node) {
	values.each(func(key *yaml.Node, value node) {
		name := strings.TrimPrefix(path+"."+key.Value, ".")
		text, described := description(key.HeadComment)
		if !described {
			describeValues(b, name, value)
			return
		}
		b.WriteString(row(code(name), code(value.json()), text))
	})
}

// description returns the text after "# -- " in a comment.
func description(comment string) (string, bool) {
	_, text, ok := strings.Cut(comment, "# -- ")
	return strings.ReplaceAll(text, "\n#", "\n"), ok
}

// api lists every operation of both versions.
func api() (string, error) {
	var b strings.Builder
	b.WriteString("The contracts have every schema, status and example: [v1.yaml](../../api/openapi/v1.yaml) and\n[v2.yaml](../../api/openapi/v2.yaml). A server serves them at " +
		"`/v1/openapi.yaml` and `/api/v2/openapi.yaml`, and shows them at\n`/docs`. See [What the interface decides](interface.md) for what they leave open.\n")
	for _, version := range []string{"v2", "v1"} {
		contract, err := readYAML("api/openapi/" + version + ".yaml")
		if err != nil {
			return "", err
		}
		b.WriteString("\n## Version " + strings.TrimPrefix(version, "v") + "\n")
		for _, tag := range contract.at("tags").Content {
			name := node{tag}.at("name").text()
			b.WriteString("\n### " + version + " " + name + "\n\n" + node{tag}.at("description").text() + "\n\n| operation | what it does | scope |\n| --- | --- | --- |\n")
			operations(&b, contract, name)
		}
	}
	return b.String(), nil
}

func operations(b *strings.Builder, contract node, tag string) {
	contract.at("paths").each(func(path *yaml.Node, item node) {
		item.each(func(method *yaml.Node, operation node) {
			if tags := operation.at("tags").list(); len(tags) == 0 || tags[0] != tag {
				return
			}
			scope := code(operation.at("x-scope").text())
			if operation.at("x-user-only").text() == "true" {
				scope = strings.TrimSpace(scope + " users only")
			}
			b.WriteString(row(code(strings.ToUpper(method.Value)+" "+path.Value), operation.at("summary").text(), scope))
		})
	})
}
