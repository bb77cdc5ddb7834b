package gate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// operational is the tag of the process's own operations. Only those that a [Definition] names pass
// through the gate.
const operational = "operations"

// Contract returns the document of a version, which nobody changes.
type Contract func() (*openapi3.T, error)

// ReadContract returns the document in an OpenAPI 3.0 text, and reads the text at the first call
// only: that takes a tenth of a second, and tests start many servers.
func ReadContract(text string) Contract {
	return sync.OnceValues(func() (*openapi3.T, error) { return openapi3.NewLoader().LoadFromData([]byte(text)) })
}

// Version returns the checks of a version. It returns an error if the document is invalid, or its
// operations differ from those in the definition.
func (g *Gate) Version(d Definition) (*Version, error) {
	doc, err := d.Contract()
	if err != nil {
		return nil, fmt.Errorf("reading the contract of %s: %w", d.Name, err)
	}
	v := &Version{gate: g, name: d.Name, scheme: d.Scheme, envelope: d.Envelope, schema: d.Schema, operations: make(map[string]*operation)}
	left := maps.Clone(d.Operations)
	for path, item := range doc.Paths.Map() {
		for method, written := range item.Operations() {
			known, ok := left[written.OperationID]
			if !ok && slices.Contains(written.Tags, operational) {
				continue
			}
			if !ok {
				return nil, fmt.Errorf("reading the contract of %s: operation %s is not implemented", d.Name, written.OperationID)
			}
			delete(left, written.OperationID)
			op := &operation{Operation: known, vault: slices.Contains(written.Tags, "vault")}
			for _, p := range append(slices.Clone(item.Parameters), written.Parameters...) {
				op.parameters = append(op.parameters, p.Value)
			}
			if written.RequestBody != nil {
				schema := written.RequestBody.Value.Content.Get("application/json").Schema
				op.body, op.shape = schema.Value, shapeOf(schema)
				op.types = slices.Sorted(maps.Keys(written.RequestBody.Value.Content))
				op.required = written.RequestBody.Value.Required
			}
			v.operations[method+" "+Route(path)] = op
		}
	}
	if len(left) > 0 {
		return nil, fmt.Errorf("reading the contract of %s: it has no operation %v", d.Name, slices.Sorted(maps.Keys(left)))
	}
	if err := v.encodeShed(); err != nil {
		return nil, fmt.Errorf("encoding a refusal of %s: %w", d.Name, err)
	}
	return v, nil
}

// Route returns the gin route of a path template.
func Route(path string) string {
	parts := strings.Split(path, "/")
	for i, part := range parts {
		if name, ok := strings.CutPrefix(part, "{"); ok {
			parts[i] = ":" + strings.TrimSuffix(name, "}")
		}
	}
	return strings.Join(parts, "/")
}

// checkParameters checks query and header parameters against the contract. Each may be given at
// most once and must not be empty. Unknown query parameters are refused, so that none of them
// silently does nothing. The service itself checks IDs in the path.
func (op *operation) checkParameters(r *http.Request, query url.Values) error {
	for _, name := range slices.Sorted(maps.Keys(query)) {
		if !slices.ContainsFunc(op.parameters, func(p *openapi3.Parameter) bool { return p.In == openapi3.ParameterInQuery && p.Name == name }) {
			return BadRequest("the parameter " + quoted(name) + " is unknown")
		}
	}
	input := &openapi3filter.RequestValidationInput{
		Request: r, QueryParams: query, Options: &openapi3filter.Options{SkipSettingDefaults: true},
	}
	for _, p := range op.parameters {
		var values []string
		switch p.In {
		case openapi3.ParameterInQuery:
			values = query[p.Name]
		case openapi3.ParameterInHeader:
			values = r.Header.Values(p.Name)
		}
		if len(values) == 0 && !(p.Required && p.In == openapi3.ParameterInQuery) {
			continue
		}
		rule := ""
		if len(values) == 1 && values[0] != "" {
			err := openapi3filter.ValidateParameter(context.Background(), input, p)
			if err == nil {
				continue
			}
			var e *openapi3.SchemaError
			if errors.As(err, &e) {
				rule = e.SchemaField
			}
		}
		return BadRequest("the parameter " + p.Name + " must be given once, " + want(p.Schema.Value, rule))
	}
	return nil
}

// maxQuoted is the maximum number of characters of a name in a message.
const maxQuoted = 40

// quoted returns a name that the caller sent in a form that is safe in answers and logs: in quotes,
// with escapes for everything that is not printable, and cut to maxQuoted.
func quoted(name string) string {
	if runes := []rune(name); len(runes) > maxQuoted {
		return strconv.Quote(string(runes[:maxQuoted])) + "…"
	}
	return strconv.Quote(name)
}

// maxListed is how many permitted values a message lists. There are fewer scopes than that.
const maxListed = 20

// want describes in words what a schema accepts, so that it names the rule that was broken. rule is
// the keyword of that rule, or empty.
func want(s *openapi3.Schema, rule string) string {
	number := func(f *float64) string { return strconv.FormatFloat(*f, 'f', -1, 64) }
	switch {
	case rule == "pattern":
		return "as a string that matches " + s.Pattern
	case rule == "uniqueItems":
		return "as a list that repeats no item"
	case len(s.Enum) > 0 && len(s.Enum) <= maxListed:
		var values []string
		for _, v := range s.Enum {
			values = append(values, fmt.Sprint(v))
		}
		return "as one of " + strings.Join(values, ", ")
	case len(s.Enum) > 0:
		return "as one of the values that the contract lists"
	case s.Type.Is("integer") && s.Min != nil && s.Max != nil:
		return "as a whole number from " + number(s.Min) + " to " + number(s.Max)
	case s.Type.Is("integer") && s.Min != nil:
		return "as a whole number of at least " + number(s.Min)
	case s.Type.Is("integer"):
		return "as a whole number"
	case s.Format == "date-time":
		return "as a time such as 2006-01-02T15:04:05Z"
	case s.Format == "date":
		return "as a date such as 2006-01-02"
	case s.Type.Is("string") && s.MaxLength != nil:
		return fmt.Sprintf("as a string of %d to %d characters", s.MinLength, *s.MaxLength)
	case s.Type.Is("string") && s.MinLength > 0:
		return "as a string that is not empty"
	case s.Type.Is("string"):
		return "as a string"
	case s.Type.Is("boolean"):
		return "as true or false"
	case s.Type.Is("array") && s.MaxItems != nil:
		return fmt.Sprintf("as a list of %d to %d items", s.MinItems, *s.MaxItems)
	case s.Type.Is("array") && s.MinItems > 0:
		return fmt.Sprintf("as a list of at least %d items", s.MinItems)
	case s.Type.Is("array"):
		return "as a list"
	case s.Type.Is("object") && s.MaxProps != nil:
		return fmt.Sprintf("as an object of %d to %d fields", s.MinProps, *s.MaxProps)
	case s.Type.Is("object"):
		return "as an object"
	}
	return "as the contract says"
}

// checkBody checks a well-formed body against the operation's schema. An operation without one
// takes no body, or an object without fields, which some clients always send.
func (op *operation) checkBody(body []byte) error {
	switch {
	case len(body) == 0 && op.required:
		return BadRequest("a request body is required")
	case len(body) == 0:
		return nil
	}
	var value any
	if err := json.Unmarshal(body, &value, json.WithUnmarshalers(json.UnmarshalFromFunc(clamp))); err != nil {
		return fault.New(fault.Invalid, "the request body does not match the schema")
	}
	if op.body == nil {
		if object, ok := value.(map[string]any); ok && len(object) == 0 {
			return nil
		}
		return BadRequest("this operation takes no request body")
	}
	if op.body.VisitJSON(value, openapi3.VisitAsRequest(), openapi3.FailFast()) == nil {
		return nil
	}
	// With FailFast, which is quicker, an error has no details.
	err := op.body.VisitJSON(value, openapi3.VisitAsRequest())
	return fault.New(fault.Invalid, "the request body does not match the schema: "+op.complaint(err))
}

// clamp reads a number too large for a float64 as the largest float64, which breaks every bound.
func clamp(d *jsontext.Decoder, v *any) error {
	if d.PeekKind() != '0' {
		return errors.ErrUnsupported // use the default unmarshaling
	}
	number, err := d.ReadValue()
	if err != nil {
		return err
	}
	f, err := strconv.ParseFloat(string(number), 64)
	if err != nil {
		f = math.Copysign(math.MaxFloat64, f)
	}
	*v = f
	return nil
}

// complaint names the wrong field and the rule of the contract that it breaks. It shows a name that
// is not in the contract only if the name itself is what is wrong, and never a value.
func (op *operation) complaint(err error) string {
	var e *openapi3.SchemaError
	if !errors.As(err, &e) {
		return "check its fields"
	}
	field := fieldName(op.body, e.JSONPointer())
	switch e.SchemaField {
	case "required":
		return "the field " + field + " is missing"
	case "properties":
		object, _ := e.Value.(map[string]any)
		for _, name := range slices.Sorted(maps.Keys(object)) {
			switch {
			case e.Schema.Properties[name] != nil:
			case field == "":
				return "the field " + quoted(name) + " is unknown"
			default:
				return "the field " + quoted(name) + " in " + field + " is unknown"
			}
		}
	}
	return "send " + cmp.Or(field, "the body") + " " + want(e.Schema, e.SchemaField)
}

// fieldName returns the name of the field of a schema at the end of a path, such as items[2].data.
// All members of an object without properties, whose names the caller chooses, are called [*].
func fieldName(s *openapi3.Schema, path []string) string {
	var name strings.Builder
	for _, step := range path {
		switch {
		case s.Properties[step] != nil:
			if name.Len() > 0 {
				name.WriteByte('.')
			}
			name.WriteString(step)
			s = s.Properties[step].Value
		case s.Items != nil:
			name.WriteString("[" + step + "]") // the validator counted
			s = s.Items.Value
		case s.AdditionalProperties.Schema != nil:
			name.WriteString("[*]")
			s = s.AdditionalProperties.Schema.Value
		}
	}
	return name.String()
}

// Decode decodes the checked body into v. It matches names case-sensitively.
func (call *Call) Decode(v any) error {
	if err := json.Unmarshal(call.body, v, json.WithUnmarshalers(json.UnmarshalFromFunc(decodeWhole))); err != nil {
		// This is a fraction that a float64 does not distinguish from a whole number, or an invalid
		// address. Only the first name of the path is sure to be in the contract.
		var semantic *json.SemanticError
		if errors.As(err, &semantic) {
			for field := range semantic.JSONPointer.Tokens() {
				return fault.New(fault.Invalid, "the request body does not match the schema: check the type of "+field)
			}
		}
		return fault.New(fault.Invalid, "the request body does not match the schema")
	}
	return nil
}

// decodeWhole decodes a whole number in any spelling: 30.0 and 3e1 are 30, as in JSON Schema.
func decodeWhole(d *jsontext.Decoder, v any) error {
	target := reflect.ValueOf(v).Elem()
	if d.PeekKind() != '0' || !target.CanInt() {
		return errors.ErrUnsupported // use the default unmarshaling
	}
	number, err := d.ReadValue()
	if err != nil {
		return err
	}
	n, ok := wholeNumber(string(number))
	if !ok || target.OverflowInt(n) {
		return errors.New("decoding a number: not a whole number, or too large")
	}
	target.SetInt(n)
	return nil
}

// wholeNumber returns the value of a JSON number that is whole. It calculates with the digits,
// because a float64 would round.
func wholeNumber(number string) (n int64, ok bool) {
	mantissa, power, _ := strings.Cut(strings.ToLower(number), "e")
	digits, fraction, _ := strings.Cut(mantissa, ".")
	digits, negative := strings.CutPrefix(digits, "-")
	shift, err := strconv.Atoi(cmp.Or(power, "0"))
	significant := strings.TrimRight(digits+fraction, "0")
	if strings.TrimLeft(significant, "0") == "" {
		return 0, true
	}
	const most = 19 // digits of an int64
	zeros := len(digits) + shift - len(significant)
	if err != nil || zeros < 0 || len(digits)+shift > most {
		return 0, false
	}
	text := significant + strings.Repeat("0", zeros)
	if negative {
		text = "-" + text
	}
	n, err = strconv.ParseInt(text, 10, 64)
	return n, err == nil
}
