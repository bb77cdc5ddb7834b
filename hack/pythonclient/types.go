package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
)

// typesWriter writes the types of one contract. The schema of an object becomes a TypedDict, any
// other an alias.
type typesWriter struct {
	text   strings.Builder
	inline []inlineType // objects inside of others, still to be written
}

type inlineType struct {
	name   string
	schema *openapi3.Schema
}

func typesOf(doc *openapi3.T, version string) (string, error) {
	w := &typesWriter{}
	var aliases, objects []string
	for _, name := range slices.Sorted(maps.Keys(doc.Components.Schemas)) {
		if isRecord(doc.Components.Schemas[name].Value) {
			objects = append(objects, name)
		} else {
			aliases = append(aliases, name)
		}
	}
	for _, name := range aliases {
		schema := doc.Components.Schemas[name]
		if len(schema.Value.Enum) == 0 && schema.Value.Items != nil && schema.Value.Items.Ref != "" {
			return "", fmt.Errorf("schema %s: an alias must not refer to a type that may come after it", name)
		}
		t, err := w.typeOf("", "", &openapi3.SchemaRef{Value: schema.Value})
		if err != nil {
			return "", fmt.Errorf("schema %s: %w", name, err)
		}
		if members, isLiteral := strings.CutPrefix(t, "Literal["); isLiteral {
			t = "Literal[" + brackets(strings.Split(strings.TrimSuffix(members, "]"), ", "), 4, 0) + "]"
		}
		fmt.Fprintf(&w.text, "%s = %s\n", name, t)
		if doc := docstring(schema.Value.Description, 0); doc != "" {
			w.text.WriteString(doc)
		}
		w.text.WriteString("\n")
	}
	for _, name := range objects {
		if err := w.writeObject(name, doc.Components.Schemas[name].Value); err != nil {
			return "", fmt.Errorf("schema %s: %w", name, err)
		}
	}
	for len(w.inline) > 0 {
		next := w.inline[0]
		w.inline = w.inline[1:]
		if err := w.writeObject(next.name, next.schema); err != nil {
			return "", fmt.Errorf("schema %s: %w", next.name, err)
		}
	}
	body := w.text.String()
	top := fmt.Sprintf("%s\"\"\"Requests and answers of version %s.\"\"\"\n\nfrom __future__ import annotations\n\n", header, version)
	return top + typingImport(body, "TypedDict") + "\n" + strings.TrimRight(body, "\n") + "\n", nil
}

// isRecord reports whether a schema is that of an object with listed properties.
func isRecord(s *openapi3.Schema) bool {
	return s.Type.Is(openapi3.TypeObject) && len(s.Properties) > 0
}

// writeObject writes a TypedDict. Python 3.9 has no NotRequired, so required keys stand in a base
// of their own, and keys that are keywords of Python in another one.
func (w *typesWriter) writeObject(name string, s *openapi3.Schema) error {
	var required, optional, keyword []string
	for _, property := range slices.Sorted(maps.Keys(s.Properties)) {
		switch isRequired := slices.Contains(s.Required, property); {
		case slices.Contains(keywords, property):
			keyword = append(keyword, property)
		case isRequired:
			required = append(required, property)
		default:
			optional = append(optional, property)
		}
	}
	var bases []string
	for _, property := range keyword {
		t, err := w.typeOf(name, property, s.Properties[property])
		if err != nil {
			return err
		}
		base := "_" + name + pascal(property)
		fmt.Fprintf(&w.text, "%s = TypedDict(\"%s\", {%q: %q}, total=%s)\n\n\n", base, base, property, t, python(slices.Contains(s.Required, property)))
		bases = append(bases, base)
	}
	if len(optional) > 0 && len(required) > 0 {
		base := "_" + name + "Required"
		fmt.Fprintf(&w.text, "class %s(TypedDict):\n", base)
		if err := w.writeKeys(name, s, required); err != nil {
			return err
		}
		w.text.WriteString("\n\n")
		bases, required = append(bases, base), nil
	}
	total := ""
	if len(optional) > 0 {
		total = ", total=False"
	}
	if len(bases) == 0 {
		bases = []string{"TypedDict"}
	}
	fmt.Fprintf(&w.text, "class %s(%s%s):\n", name, strings.Join(bases, ", "), total)
	w.text.WriteString(docstring(s.Description, 4))
	keys := append(required, optional...)
	if len(keys) == 0 && docstring(s.Description, 4) == "" {
		w.text.WriteString("    pass\n")
	}
	if err := w.writeKeys(name, s, keys); err != nil {
		return err
	}
	w.text.WriteString("\n\n")
	return nil
}

func (w *typesWriter) writeKeys(name string, s *openapi3.Schema, keys []string) error {
	for _, key := range keys {
		t, err := w.typeOf(name, key, s.Properties[key])
		if err != nil {
			return fmt.Errorf("property %s: %w", key, err)
		}
		fmt.Fprintf(&w.text, "    %s: %s\n", key, t)
		if s.Properties[key].Ref == "" {
			w.text.WriteString(docstring(s.Properties[key].Value.Description, 4))
		}
	}
	return nil
}

// typeOf returns the Python type of a schema. parent and property name an object inside of another,
// which gets a type of its own.
func (w *typesWriter) typeOf(parent, property string, ref *openapi3.SchemaRef) (string, error) {
	t, err := w.plainTypeOf(parent, property, ref)
	if err == nil && ref.Value.Nullable {
		t = "Optional[" + t + "]"
	}
	return t, err
}

func (w *typesWriter) plainTypeOf(parent, property string, ref *openapi3.SchemaRef) (string, error) {
	s := ref.Value
	switch {
	case ref.Ref != "":
		return strings.TrimPrefix(ref.Ref, "#/components/schemas/"), nil
	case len(s.OneOf)+len(s.AnyOf)+len(s.AllOf) > 0 || s.Not != nil:
		return "", fmt.Errorf("it is composed, which this generator does not know")
	case len(s.Enum) > 0:
		var all []string
		for _, value := range s.Enum {
			all = append(all, python(value))
		}
		return "Literal[" + strings.Join(all, ", ") + "]", nil
	case s.Type.Is(openapi3.TypeString):
		return "str", nil
	case s.Type.Is(openapi3.TypeInteger):
		return "int", nil
	case s.Type.Is(openapi3.TypeNumber):
		return "float", nil
	case s.Type.Is(openapi3.TypeBoolean):
		return "bool", nil
	case s.Type.Is(openapi3.TypeArray):
		item, err := w.typeOf(parent, property, s.Items)
		return "List[" + item + "]", err
	case isRecord(s) && parent != "":
		name := parent + pascal(property)
		w.inline = append(w.inline, inlineType{name, s})
		return name, nil
	case s.Type.Is(openapi3.TypeObject) && s.AdditionalProperties.Schema != nil:
		value, err := w.typeOf(parent, property, s.AdditionalProperties.Schema)
		return "Dict[str, " + value + "]", err
	case s.Type.Is(openapi3.TypeObject) && !isRecord(s):
		return "Dict[str, Any]", nil
	}
	return "", fmt.Errorf("it has the type %v, which this generator does not know", s.Type)
}
