// Package compose puts secret values into text: a URL, a configuration file, or the
// dockerconfigjson of a pull secret.
//
// A template is text in which $(key) stands for the value of a data key. A data key has 1 to 253
// letters, digits, '-', '_' or '.'. $$( stands for the text $( and for no value. Every other $ is
// itself, so a $ right before a value must be part of that value. There are no functions,
// conditions or defaults: a reader can see what a template makes, and rendering takes time linear
// in its result.
//
// Values are escaped as the [Encoding] of the template says, so no value changes the structure of
// the text around it. In a JSON template every $(key) must be inside a string. This is checked
// without any value.
//
// The package is pure. A result is made in one buffer of its final size, so no copy of a secret
// stays behind. Every error is a [fault.Invalid] that names the place and the remedy. It may name
// data keys and never quotes a value.
package compose

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// Encoding says how a value is escaped in the text.
type Encoding string

// These are the encodings. The empty one means Text.
const (
	Text Encoding = "Text" // no escaping
	URL  Encoding = "URL"  // all except unreserved characters percent-encoded (RFC 3986 §2.3)
	JSON Encoding = "JSON" // escaped for the inside of a JSON string (RFC 8259 §7)
)

const (
	maxTemplate = 16 << 10  // bytes
	maxResult   = 256 << 10 // bytes
)

// Template is a parsed template. It is safe for concurrent use. The zero value renders an empty
// text.
type Template struct {
	parts []part
}

// part is text, followed by the value of key unless key is empty.
type part struct {
	text, key string
}

var placeholder = regexp.MustCompile(`^\$\(([-._a-zA-Z0-9]{1,253})\)`)

// Parse parses a template.
func Parse(template string) (Template, error) {
	if len(template) > maxTemplate {
		return Template{}, invalid("the template has %d bytes; give it at most %d", len(template), maxTemplate)
	}
	if !utf8.ValidString(template) {
		return Template{}, invalid("the template is not UTF-8 text")
	}
	var t Template
	var text strings.Builder
	for at := 0; at < len(template); {
		rest := template[at:]
		switch {
		case strings.HasPrefix(rest, "$$("):
			text.WriteString("$(")
			at += len("$$(")
		case strings.HasPrefix(rest, "$("):
			found := placeholder.FindStringSubmatch(rest)
			if found == nil {
				return Template{}, invalid("the template has no data key and ) after the $( at byte %d; write $(key) for a value, "+
					"and $$( for the text $(", at)
			}
			t.parts = append(t.parts, part{text.String(), found[1]})
			text.Reset()
			at += len(found[0])
		default:
			text.WriteByte(rest[0])
			at++
		}
	}
	t.parts = append(t.parts, part{text: text.String()})
	return t, nil
}

// Keys returns the data keys whose values t needs, sorted and without duplicates.
func (t Template) Keys() []string {
	keys := make(map[string]bool)
	for _, p := range t.parts {
		if p.key != "" {
			keys[p.key] = true
		}
	}
	return slices.Sorted(maps.Keys(keys))
}

// Check reports whether t fits e, whatever the values are.
func (t Template) Check(e Encoding) error {
	switch e {
	case "", Text, URL:
		return nil
	case JSON:
	default:
		return invalid("the encoding is none of Text, URL and JSON")
	}
	// An x in place of every value is valid only inside a string and not after a backslash, because
	// no literal, number or escape sequence contains an x. At these places an escaped value is as
	// valid as an x, so the result is valid JSON too.
	var probe []byte
	for _, p := range t.parts {
		probe = append(probe, p.text...)
		if p.key != "" {
			probe = append(probe, 'x')
		}
	}
	if !json.Valid(probe) {
		return invalid("the template is not JSON with every $(key) inside of a string; write \"$(key)\" with its quotation marks")
	}
	return nil
}

// Render returns t with the values put in. The caller owns the result and zeroes it.
func (t Template) Render(values map[string]secret.Bytes, e Encoding) (secret.Bytes, error) {
	if err := t.Check(e); err != nil {
		return nil, err
	}
	size := 0
	for _, p := range t.parts {
		size += len(p.text)
		if p.key != "" {
			value, ok := values[p.key]
			if !ok {
				return nil, invalid("the template needs the data key %s, and there is no such value; add it, or correct $(%s)", p.key, p.key)
			}
			if e == JSON && !utf8.Valid(value) {
				return nil, invalid("the value of the data key %s is not UTF-8 text, and cannot be put into JSON", p.key)
			}
			for _, b := range value {
				size += len(e.escape(b))
				if size > maxResult {
					break
				}
			}
		}
		if size > maxResult {
			return nil, invalid("the rendered template has more than %d bytes; use shorter values, or fewer of them", maxResult)
		}
	}

	out := make(secret.Bytes, 0, size)
	for _, p := range t.parts {
		out = append(out, p.text...)
		if p.key != "" {
			for _, b := range values[p.key] {
				out = append(out, e.escape(b)...)
			}
		}
	}
	return out, nil
}

// escape returns the text for one byte of a value. JSON values are UTF-8, and every byte of a
// longer sequence stands for itself.
func (e Encoding) escape(b byte) string { return escapes[e][b] }

// escapes holds the text for every byte, so escaping copies no secret.
var escapes = func() map[Encoding]*[256]string {
	var text, url, json [256]string
	for i := range 256 {
		b := byte(i)
		text[i] = string([]byte{b})
		url[i], json[i] = text[i], text[i]
		if !unreserved(b) {
			url[i] = fmt.Sprintf("%%%02X", b)
		}
		switch {
		case b == '"' || b == '\\':
			json[i] = `\` + text[i]
		case b < ' ':
			json[i] = fmt.Sprintf(`\u%04x`, b)
		}
	}
	return map[Encoding]*[256]string{"": &text, Text: &text, URL: &url, JSON: &json}
}()

// unreserved reports whether b is an unreserved character of RFC 3986 §2.3.
func unreserved(b byte) bool {
	return 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z' || '0' <= b && b <= '9' || strings.IndexByte("-._~", b) >= 0
}

func invalid(format string, args ...any) error {
	return fault.New(fault.Invalid, fmt.Sprintf(format, args...))
}
