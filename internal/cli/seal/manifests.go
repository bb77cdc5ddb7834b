package seal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/durable"
)

// manifests is a file of YAML or JSON documents whose sealed values are replaced. Only the bytes of
// these values change: comments, order, quotes and documents of other kinds stay as their author
// wrote them. The result is parsed and compared with the intended objects before it is written.
type manifests struct {
	path  string
	text  []byte
	docs  []manifest
	edits []edit
}

// manifest is one document.
type manifest struct {
	root *yaml.Node
	obj  *v1beta1.SealedCredential // intended content after the edits; nil for other kinds
}

// title returns the name of an object for messages.
func title(obj *v1beta1.SealedCredential) string {
	if obj.Namespace == "" {
		return obj.Name
	}
	return obj.Namespace + "/" + obj.Name
}

// edit replaces a range of bytes with text.
type edit struct {
	from, to int
	text     string
}

func readManifests(path string) (*manifests, error) {
	text, err := readInput(path, nil)
	if err != nil {
		return nil, err
	}
	docs, err := parseManifests(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &manifests{path: path, text: text, docs: docs}, nil
}

func parseManifests(text []byte) (docs []manifest, err error) {
	d := yaml.NewDecoder(bytes.NewReader(text))
	for i := 1; ; i++ {
		node := new(yaml.Node)
		err := d.Decode(node)
		if errors.Is(err, io.EOF) {
			return docs, nil
		}
		if err != nil { // the cause may quote from the document
			return nil, fmt.Errorf("document %d is not well-formed YAML or JSON", i)
		}
		if len(node.Content) != 1 || node.Content[0].Kind != yaml.MappingNode {
			docs = append(docs, manifest{})
			continue // only comments, or no object
		}
		b, err := yaml.Marshal(node)
		if err != nil {
			return nil, fmt.Errorf("document %d cannot be read", i)
		}
		obj, err := decodeSealedCredential(b)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", i, err)
		}
		docs = append(docs, manifest{node.Content[0], obj})
	}
}

// sealed returns the documents with sealed values.
func (m *manifests) sealed() (found []*manifest) {
	for i := range m.docs {
		if obj := m.docs[i].obj; obj != nil && obj.Spec.Sealed != nil {
			found = append(found, &m.docs[i])
		}
	}
	return found
}

// errLayout means that a manifest is valid but cannot be edited byte by byte.
var errLayout = errors.New("the layout of spec.sealed is not one that can be edited: write its values as plain or quoted text on one line each, without anchors")

// fieldOf returns the value of a field in a mapping.
func fieldOf(mapping *yaml.Node, name string) (*yaml.Node, error) {
	if mapping.Kind != yaml.MappingNode {
		return nil, errLayout
	}
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == name {
			return mapping.Content[i+1], nil
		}
	}
	return nil, nil
}

// at returns the node at a path below spec.sealed, and nil if it is missing.
func (d *manifest) at(path ...string) (node *yaml.Node, err error) {
	node = d.root
	for _, name := range append([]string{"spec", "sealed"}, path...) {
		if node, err = fieldOf(node, name); node == nil || err != nil {
			return nil, err
		}
	}
	return node, nil
}

// set replaces the scalar at a path below spec.sealed with a text in the same quotes.
func (m *manifests) set(d *manifest, text string, path ...string) error {
	node, err := d.at(path...)
	if err != nil {
		return err
	}
	if node == nil || node.Kind != yaml.ScalarNode {
		return errLayout
	}
	from, err := m.offset(node.Line, node.Column)
	if err != nil {
		return err
	}
	quote := ""
	switch {
	case node.Style&yaml.DoubleQuotedStyle != 0:
		quote = `"`
	case node.Style&yaml.SingleQuotedStyle != 0:
		quote = `'`
	case node.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0:
		return errLayout
	default:
		if text, err = plain(text); err != nil {
			return err
		}
	}
	written := quote + node.Value + quote
	if !bytes.HasPrefix(m.text[from:], []byte(written)) {
		return errLayout
	}
	m.edits = append(m.edits, edit{from, from + len(written), quote + text + quote})
	return nil
}

// plain returns a text as a YAML scalar, without quotes where YAML allows that.
func plain(text string) (string, error) {
	b, err := yaml.Marshal(text)
	if err != nil {
		return "", fmt.Errorf("writing a text as YAML: %w", err)
	}
	return strings.TrimSuffix(string(b), "\n"), nil
}

// add adds a value to spec.sealed.values after the last one. Every value must be on lines of its
// own.
func (m *manifests) add(d *manifest, key string, v v1beta1.SealedValue) error {
	values, err := d.at("values")
	if err != nil {
		return err
	}
	if values == nil || values.Kind != yaml.MappingNode || len(values.Content) < 2 {
		return errLayout
	}
	at := v.SealedAt.UTC().Format("2006-01-02T15:04:05Z")
	first, last := values.Content[0], values.Content[len(values.Content)-1]
	flow := fmt.Sprintf(`{"sealedAt": %q, "data": %q}`, at, v.Data)
	if values.Style&yaml.FlowStyle != 0 {
		from, err := m.offset(first.Line, first.Column)
		m.edits = append(m.edits, edit{from, from, fmt.Sprintf("%q: %s, ", key, flow)})
		return err
	}
	name, err := plain(key)
	if err != nil {
		return err
	}
	newline := "\n"
	if bytes.Contains(m.text, []byte("\r\n")) {
		newline = "\r\n"
	}
	indent := strings.Repeat(" ", first.Column-1)
	if last.Style&yaml.FlowStyle != 0 || last.Kind != yaml.MappingNode || len(last.Content) == 0 {
		from, err := m.offset(first.Line, 1)
		m.edits = append(m.edits, edit{from, from, indent + name + ": " + flow + newline})
		return err
	}
	inner := strings.Repeat(" ", max(last.Content[0].Column-1, first.Column))
	text := indent + name + ":" + newline + inner + fmt.Sprintf("sealedAt: %q", at) + newline + inner + "data: " + v.Data + newline
	from, err := m.offset(lastLine(last)+1, 1)
	if from > 0 && m.text[from-1] != '\n' { // the file ends here without a line break
		text = newline + strings.TrimSuffix(text, newline)
	}
	m.edits = append(m.edits, edit{from, from, text})
	return err
}

// lastLine returns the line on which the last scalar below a node begins.
func lastLine(node *yaml.Node) int {
	line := node.Line
	for _, child := range node.Content {
		line = max(line, lastLine(child))
	}
	return line
}

// offset converts a line and a column, which count from 1, to a byte offset. For the line after the
// last one it returns the end of the text.
func (m *manifests) offset(line, column int) (int, error) {
	at := 0
	for ; line > 1; line-- {
		end := bytes.IndexByte(m.text[at:], '\n')
		if end < 0 {
			if line == 2 && column == 1 {
				return len(m.text), nil
			}
			return 0, errLayout
		}
		at += end + 1
	}
	for ; column > 1; column-- {
		_, size := utf8.DecodeRune(m.text[at:])
		if size == 0 {
			return 0, errLayout
		}
		at += size
	}
	return at, nil
}

// write replaces the file if there are edits. It first checks that every document of the result
// reads as intended.
func (m *manifests) write() error {
	if len(m.edits) == 0 {
		return nil
	}
	slices.SortStableFunc(m.edits, func(a, b edit) int { return a.from - b.from })
	var text []byte
	end := 0
	for _, e := range m.edits {
		if e.from < end {
			return fmt.Errorf("%s: %w", m.path, errLayout)
		}
		text = append(append(text, m.text[end:e.from]...), e.text...)
		end = e.to
	}
	text = append(text, m.text[end:]...)
	got, err := parseManifests(text)
	if err != nil || !slices.EqualFunc(got, m.docs, func(a, b manifest) bool { return equality.Semantic.DeepEqual(a.obj, b.obj) }) {
		return fmt.Errorf("%s: %w", m.path, errLayout)
	}
	return durable.Replace(m.path, text)
}

// scopeOf returns the scope, or the API server's default.
func scopeOf(sealed *v1beta1.Sealed) v1beta1.Scope {
	if sealed.Scope == "" {
		return v1beta1.ScopeStrict
	}
	return sealed.Scope
}
