package gate

import (
	"bytes"
	"errors"
	"io"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"unicode/utf8"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/go-json-experiment/json/jsontext"
)

// shape is a simple schema that checks a body in one pass, without keeping any part of it. It
// supports what most operations need: objects, strings, whole numbers, booleans and lists. It accepts
// only what [checkJSON] and [operation.checkBody] accept. They decide about every body that a shape does
// not accept.
type shape struct {
	object   bool
	required []string
	fields   map[string]*shape
	others   *shape // shape of all other fields; nil: there are none
	most     int    // maximum number of fields

	list         *shape
	fewest, long int // minimum (items, characters or fields), maximum (items or bytes)
	words        []string
	pattern      *regexp.Regexp

	boolean     bool // the shape is true or false
	whole       bool // the shape is a whole number
	least, last float64
}

const unbounded = 1 << 30

// shapeOf returns the shape of a schema, or nil if the schema has rules that a shape does not
// support.
func shapeOf(ref *openapi3.SchemaRef) *shape {
	if ref == nil || ref.Value == nil || ref.Value.Type == nil {
		return nil
	}
	s := *ref.Value
	kind := s.Type
	of := &shape{most: unbounded, long: unbounded}
	most := func(to *int, n *uint64) {
		if n != nil {
			*to = int(min(*n, unbounded))
		}
	}
	switch {
	case kind.Is(openapi3.TypeObject):
		of.object, of.required, of.fields = true, s.Required, make(map[string]*shape)
		of.fewest = int(min(s.MinProps, unbounded))
		most(&of.most, s.MaxProps)
		for name, field := range s.Properties {
			if of.fields[name] = shapeOf(field); of.fields[name] == nil {
				return nil
			}
		}
		if a := s.AdditionalProperties; a.Schema != nil {
			if of.others = shapeOf(a.Schema); of.others == nil {
				return nil
			}
		} else if a.Has == nil || *a.Has {
			return nil
		}
		s.Required, s.Properties, s.MinProps, s.MaxProps, s.AdditionalProperties = nil, nil, 0, nil, openapi3.AdditionalProperties{}
	case kind.Is(openapi3.TypeArray):
		if of.list = shapeOf(s.Items); of.list == nil {
			return nil
		}
		of.fewest = int(min(s.MinItems, unbounded))
		most(&of.long, s.MaxItems)
		s.Items, s.MinItems, s.MaxItems = nil, 0, nil
	case kind.Is(openapi3.TypeString):
		of.fewest = int(min(s.MinLength, unbounded))
		most(&of.long, s.MaxLength)
		for _, word := range s.Enum {
			text, ok := word.(string)
			if !ok {
				return nil
			}
			of.words = append(of.words, text)
		}
		if s.Pattern != "" {
			var err error
			if of.pattern, err = regexp.Compile(s.Pattern); err != nil {
				return nil
			}
		}
		s.MinLength, s.MaxLength, s.Enum, s.Pattern = 0, nil, nil, ""
	case kind.Is(openapi3.TypeInteger):
		of.whole, of.least, of.last = true, math.Inf(-1), math.Inf(1)
		if s.Min != nil {
			of.least = *s.Min
		}
		if s.Max != nil {
			of.last = *s.Max
		}
		s.Min, s.Max, s.Format = nil, nil, ""
	case kind.Is(openapi3.TypeBoolean):
		of.boolean = true
	default:
		return nil
	}
	s.Type, s.Title, s.Description, s.Default, s.Example, s.Extensions, s.Origin = nil, "", "", nil, nil, nil, nil
	if !reflect.DeepEqual(s, openapi3.Schema{}) {
		return nil
	}
	return of
}

// decoders are reused to read bodies. None of them keeps a body.
var decoders = sync.Pool{New: func() any { return jsontext.NewDecoder(bytes.NewReader(nil)) }}

// holds reports whether body is one well-formed JSON value that matches the shape.
func (s *shape) holds(body []byte) bool {
	if s == nil {
		return false
	}
	d := decoders.Get().(*jsontext.Decoder)
	defer decoders.Put(d)
	defer d.Reset(bytes.NewReader(nil))
	d.Reset(bytes.NewBuffer(body))
	if !s.read(d, 1) {
		return false
	}
	_, err := d.ReadToken()
	return errors.Is(err, io.EOF)
}

func (s *shape) read(d *jsontext.Decoder, depth int) bool {
	switch {
	case depth > maxDepth:
		return false
	case s.object:
		return d.PeekKind() == '{' && s.readObject(d, depth)
	case s.list != nil:
		return d.PeekKind() == '[' && s.readList(d, depth)
	}
	raw, err := d.ReadValue()
	switch {
	case err != nil:
		return false
	case s.whole:
		return s.holdsNumber(raw)
	case s.boolean:
		return raw.Kind() == 't' || raw.Kind() == 'f'
	}
	return s.holdsText(raw)
}

func (s *shape) readObject(d *jsontext.Decoder, depth int) bool {
	if _, err := d.ReadToken(); err != nil {
		return false
	}
	n, needed := 0, 0
	for d.PeekKind() != '}' {
		token, err := d.ReadToken()
		if err != nil || token.Kind() != '"' {
			return false
		}
		name := token.String()
		field, known := s.fields[name]
		if !known {
			field = s.others
		}
		if slices.Contains(s.required, name) {
			needed++ // the decoder rejects duplicate names
		}
		n++
		if field == nil || !field.read(d, depth+1) {
			return false
		}
	}
	_, err := d.ReadToken()
	return err == nil && needed == len(s.required) && n >= s.fewest && n <= s.most
}

func (s *shape) readList(d *jsontext.Decoder, depth int) bool {
	if _, err := d.ReadToken(); err != nil {
		return false
	}
	n := 0
	for d.PeekKind() != ']' {
		if !s.list.read(d, depth+1) {
			return false
		}
		n++
	}
	_, err := d.ReadToken()
	return err == nil && n >= s.fewest && n <= s.long
}

// holdsNumber accepts only numbers that consist of at most 15 digits, which a float64 represents
// exactly.
func (s *shape) holdsNumber(raw jsontext.Value) bool {
	if len(raw) > 15 {
		return false
	}
	n, err := strconv.ParseUint(string(raw), 10, 64)
	return err == nil && float64(n) >= s.least && float64(n) <= s.last
}

// holdsText checks a string in its JSON form. A string with escapes is shorter than its JSON form,
// so holdsText accepts one only if no minimum above 1, list of words or pattern applies.
func (s *shape) holdsText(raw jsontext.Value) bool {
	if len(raw) < 2 || raw.Kind() != '"' {
		return false
	}
	text := raw[1 : len(raw)-1]
	if len(text) > s.long {
		return false // bytes; the full check counts characters
	}
	if bytes.IndexByte(text, '\\') >= 0 {
		return s.fewest <= 1 && s.words == nil && s.pattern == nil
	}
	return (len(text) >= s.fewest && (s.fewest <= 1 || utf8.RuneCount(text) >= s.fewest)) &&
		(s.words == nil || slices.Contains(s.words, string(text))) &&
		(s.pattern == nil || s.pattern.Match(text))
}
