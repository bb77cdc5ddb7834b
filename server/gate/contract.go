package gate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
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

// operational is the tag of the process's own operations, which do not pass through the gate.
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
			if slices.Contains(written.Tags, operational) {
				continue
			}
			known, ok := left[written.OperationID]
			if !ok {
				return nil, fmt.Errorf("reading the contract of %s: operation %s is not implemented", d.Name, written.OperationID)
			}
			delete(left, written.OperationID)
			op := &operation{Operation: known}
			for _, p := range append(slices.Clone(item.Parameters), written.Parameters...) {
				op.parameters = append(op.parameters, p.Value)
			}
			if written.RequestBody != nil {
				schema := written.RequestBody.Value.Content.Get("application/json").Schema
				op.body, op.shape = schema.Value, shapeOf(schema)
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
// most once and must not be empty. Unknown parameters are ignored, as are unknown fields of a body.
// The service itself checks IDs in the path.
func (op *operation) checkParameters(r *http.Request, query url.Values) error {
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
		if len(values) != 1 || values[0] == "" || openapi3filter.ValidateParameter(context.Background(), input, p) != nil {
			return BadRequest("the parameter " + p.Name + " must be given once, " + want(p.Schema.Value))
		}
	}
	return nil
}

// want describes in words what a schema accepts.
func want(s *openapi3.Schema) string {
	number := func(f *float64) string { return strconv.FormatFloat(*f, 'f', -1, 64) }
	switch {
	case len(s.Enum) > 0 && len(s.Enum) <= 10:
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
	case s.Type.Is("string"):
		return "as a string"
	case s.Type.Is("boolean"):
		return "as true or false"
	case s.Type.Is("array") && s.MaxItems != nil:
		return fmt.Sprintf("as a list of %d to %d items", s.MinItems, *s.MaxItems)
	case s.Type.Is("array"):
		return "as a list"
	}
	return "as the contract says"
}

// checkBody checks a well-formed body against the operation's schema.
func (op *operation) checkBody(body []byte) error {
	switch {
	case op.body == nil:
		return nil
	case len(body) == 0 && op.required:
		return BadRequest("a request body is required")
	case len(body) == 0:
		return nil
	}
	var value any
	if err := json.Unmarshal(body, &value, json.WithUnmarshalers(json.UnmarshalFromFunc(clamp))); err != nil {
		return fault.New(fault.Invalid, "the request body does not match the schema")
	}
	err := op.body.VisitJSON(value, openapi3.VisitAsRequest(), openapi3.FailFast())
	if err == nil {
		return nil
	}
	// With FailFast, an error has no details. complaint finds the wrong field by checking field by
	// field, so that the answer shows only names from the contract.
	return fault.New(fault.Invalid, "the request body does not match the schema: "+op.complaint(value))
}

// clamp reads a number too large for a float64 as the largest float64. A field with bounds refuses
// it, and an unknown field may hold anything.
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

// complaint names the wrong field and what the contract accepts there.
func (op *operation) complaint(value any) string {
	object, ok := value.(map[string]any)
	if !ok {
		return "send an object"
	}
	for _, name := range op.body.Required {
		if _, there := object[name]; !there {
			return "the field " + name + " is missing"
		}
	}
	for _, name := range slices.Sorted(maps.Keys(op.body.Properties)) {
		field := op.body.Properties[name].Value
		given, there := object[name]
		if !there {
			continue
		}
		err := field.VisitJSON(given, openapi3.VisitAsRequest())
		var inside *openapi3.SchemaError
		if errors.As(err, &inside) && len(inside.JSONPointer()) > 0 {
			return "check what is inside " + name
		}
		if err != nil {
			return "send " + name + " " + want(field)
		}
	}
	return "check its fields"
}

// Decode decodes the checked body into v. It ignores unknown fields, and matches names
// case-sensitively.
func (call *Call) Decode(v any) error {
	if err := json.Unmarshal(call.body, v); err != nil {
		// This is a number such as 1.0, which the contract accepts as an integer, or an invalid
		// address.
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
