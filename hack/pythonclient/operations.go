package main

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
)

// handwritten are the operations that keep tokens, take a whole URL, or stream events.
var handwritten = []string{"login", "refreshSession", "logout", "downloadReport", "tailAuditLog"}

// streamed are the operations whose answers are too long for memory. They write to a file.
var streamed = []string{"takeBackup", "exportAuditLog"}

// left are parameters that have no argument: with verbose, the answer is of another type.
var left = map[string]string{"getReadiness": "verbose"}

// idempotencyKey is the header that the client always sends.
const idempotencyKey = "Idempotency-Key"

type operation struct {
	*openapi3.Operation
	method, path string
	parameters   openapi3.Parameters
	schema       *openapi3.SchemaRef // request body, nil for none
	answer       answerKind
	answerType   string // schema of an answer in JSON
	answerSchema *openapi3.Schema
	isTagged     bool // the answer has an entity tag
}

type answerKind int

const (
	jsonAnswer answerKind = iota
	textAnswer
	bytesAnswer
	streamAnswer
)

// argument is an argument of a method.
type argument struct {
	name, wire string // in Python, and in the request
	kind       string // type
	in         string // path, query, header or body
	required   bool
	nullable   bool
}

func operationsOf(doc *openapi3.T, version string) (string, error) {
	var operations []*operation
	for _, path := range doc.Paths.InMatchingOrder() {
		item := doc.Paths.Value(path)
		for method, o := range item.Operations() {
			made, err := read(doc, method, path, item, o)
			if err != nil {
				return "", fmt.Errorf("operation %s: %w", o.OperationID, err)
			}
			operations = append(operations, made)
		}
	}
	// Operations of one tag stand together.
	tag := func(o *operation) int {
		return slices.IndexFunc(doc.Tags, func(t *openapi3.Tag) bool { return t.Name == o.Tags[0] })
	}
	slices.SortFunc(operations, func(a, b *operation) int {
		if d := tag(a) - tag(b); d != 0 {
			return d
		}
		return strings.Compare(a.OperationID, b.OperationID)
	})
	var body strings.Builder
	for _, o := range operations {
		if slices.Contains(handwritten, o.OperationID) {
			continue
		}
		if err := o.write(&body); err != nil {
			return "", fmt.Errorf("operation %s: %w", o.OperationID, err)
		}
	}
	text := body.String()
	var used []string
	for _, name := range slices.Sorted(maps.Keys(doc.Components.Schemas)) {
		if regexp.MustCompile(`\b` + name + `\b`).MatchString(withoutDocstrings(text)) {
			used = append(used, name)
		}
	}
	helpers := []string{"Call", "Transport"}
	for _, helper := range []string{"UNSET", "Unset", "given", "new_idempotency_key"} {
		if regexp.MustCompile(`\b` + helper + `\b`).MatchString(text) {
			helpers = append(helpers, helper)
		}
	}
	return header + fmt.Sprintf(`"""The operations of version %[1]s."""

from __future__ import annotations

%[2]s
from ._transport import %[3]s
from ._types_v%[1]s import (
    %[4]s,
)


class OperationsV%[1]s:
    """A method for each operation. The documentation of the package describes the errors."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
`, version, typingImport(text, "cast"), strings.Join(helpers, ", "), strings.Join(used, ",\n    ")) + text, nil
}

var docstrings = regexp.MustCompile(`(?s)""".*?"""`)

func withoutDocstrings(text string) string { return docstrings.ReplaceAllString(text, "") }

func read(doc *openapi3.T, method, path string, item *openapi3.PathItem, o *openapi3.Operation) (*operation, error) {
	made := &operation{Operation: o, method: method, path: path, parameters: slices.Concat(item.Parameters, o.Parameters)}
	if o.RequestBody != nil {
		made.schema = o.RequestBody.Value.Content["application/json"].Schema
		if !isRecord(made.schema.Value) {
			return nil, errors.New("the request is not an object with listed properties")
		}
	}
	for status, response := range o.Responses.Map() {
		if !strings.HasPrefix(status, "2") {
			continue
		}
		made.isTagged = made.isTagged || response.Value.Headers["ETag"] != nil
		types := slices.Sorted(maps.Keys(response.Value.Content))
		media := response.Value.Content["application/json"]
		switch {
		case slices.Contains(streamed, o.OperationID):
			made.answer = streamAnswer
		case media != nil && media.Schema != nil && media.Schema.Ref != "":
			made.answerType = strings.TrimPrefix(media.Schema.Ref, "#/components/schemas/")
			made.answerSchema = doc.Components.Schemas[made.answerType].Value
		case len(types) == 1 && (types[0] == "text/plain" || types[0] == "application/yaml"):
			made.answer = textAnswer
		case len(types) == 1 && types[0] != "application/json":
			made.answer = bytesAnswer
		default:
			if !slices.Contains(handwritten, o.OperationID) {
				return nil, fmt.Errorf("the answer has the types %v", types)
			}
		}
	}
	return made, nil
}

// arguments returns the arguments of the method, those of the path first.
func (o *operation) arguments() ([]argument, error) {
	var all []argument
	w := &typesWriter{}
	for _, p := range o.parameters {
		if left[o.OperationID] == p.Value.Name {
			continue
		}
		kind, err := w.typeOf("", "", p.Value.Schema)
		if err != nil {
			return nil, fmt.Errorf("parameter %s: %w", p.Value.Name, err)
		}
		all = append(all, argument{argumentName(p.Value.Name), p.Value.Name, kind, p.Value.In, p.Value.Required, false})
	}
	if o.schema != nil {
		s := o.schema.Value
		names := slices.Sorted(maps.Keys(s.Properties))
		slices.SortStableFunc(names, func(a, b string) int {
			return compareBool(slices.Contains(s.Required, b), slices.Contains(s.Required, a))
		})
		for _, name := range names {
			kind, err := w.typeOf(strings.TrimPrefix(o.schema.Ref, "#/components/schemas/"), name, s.Properties[name])
			if err != nil {
				return nil, fmt.Errorf("property %s: %w", name, err)
			}
			all = append(all, argument{argumentName(name), name, kind, "body", slices.Contains(s.Required, name), s.Properties[name].Value.Nullable})
		}
	}
	seen := map[string]bool{}
	for _, a := range all {
		if seen[a.name] {
			return nil, fmt.Errorf("two parameters or properties are called %s", a.name)
		}
		seen[a.name] = true
	}
	return all, nil
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

func argumentName(wire string) string {
	name := snake(wire)
	if slices.Contains(keywords, name) {
		return name + "_"
	}
	return name
}

// signature returns how an argument is declared.
func (a argument) signature() string {
	switch {
	case a.required:
		return a.name + ": " + a.kind
	case a.nullable:
		return a.name + ": Union[" + a.kind + ", Unset] = UNSET"
	}
	return a.name + ": Optional[" + a.kind + "] = None"
}

func in(arguments []argument, place string) (all []argument) {
	for _, a := range arguments {
		if a.in == place {
			all = append(all, a)
		}
	}
	return all
}

func (o *operation) write(b *strings.Builder) error {
	arguments, err := o.arguments()
	if err != nil {
		return err
	}
	name := snake(o.OperationID)
	call := o.call(arguments)
	switch {
	case o.answer == streamAnswer:
		o.writeMethod(b, name, append([]argument{{name: "out", kind: "BinaryIO", in: "path", required: true}}, arguments...), "int",
			"Writes the answer to `out` as it arrives, and returns the number of bytes.", call+"return self._transport.copy(call, out)")
	case o.answer == textAnswer:
		o.writeMethod(b, name, arguments, "str", "", call+"return self._transport.text(call)")
	case o.answer == bytesAnswer:
		o.writeMethod(b, name, arguments, "bytes", "", call+"return self._transport.raw(call)")
	case o.isTagged:
		o.writeMethod(b, name, arguments, o.answerType, "", "return self."+name+"_with_etag("+forward(arguments, "", 8)+")[0]")
		o.writeMethod(b, name+"_with_etag", arguments, "Tuple["+o.answerType+", str]",
			"Returns the entity tag as well, for `if_match`.",
			call+"answer, etag = self._transport.tagged(call)\n        return cast("+o.answerType+", answer), etag")
	default:
		o.writeMethod(b, name, arguments, o.answerType, "", call+"return cast("+o.answerType+", self._transport.json(call))")
	}
	return o.writeIterator(b, name, arguments)
}

// writeIterator writes a method that follows the cursors of a list.
func (o *operation) writeIterator(b *strings.Builder, name string, arguments []argument) error {
	cursor := slices.IndexFunc(arguments, func(a argument) bool { return a.wire == "cursor" })
	if cursor < 0 || o.answerSchema == nil || o.answerSchema.Properties["next_cursor"] == nil {
		return nil
	}
	var lists []string
	for _, property := range slices.Sorted(maps.Keys(o.answerSchema.Properties)) {
		if o.answerSchema.Properties[property].Value.Type.Is(openapi3.TypeArray) {
			lists = append(lists, property)
		}
	}
	if o.method == http.MethodGet && len(lists) > 1 {
		if own := slices.DeleteFunc(slices.Clone(lists), func(l string) bool { return !strings.HasSuffix(name, l) }); len(own) == 1 {
			lists = own
		}
	}
	if len(lists) != 1 {
		return fmt.Errorf("the answer has a cursor and the lists %v: it is not clear which of them goes on", lists)
	}
	item, err := (&typesWriter{}).typeOf("", "", o.answerSchema.Properties[lists[0]].Value.Items)
	if err != nil {
		return err
	}
	rest := slices.Delete(slices.Clone(arguments), cursor, cursor+1)
	_, what, _ := strings.Cut(name, "_")
	fmt.Fprintf(b, `
    def iterate_%s(%s) -> Iterator[%s]:
        """Yield the %s of all pages of `+"`%s`"+`."""
        cursor = None
        while True:
            page = self.%s(%s)
            yield from page["%s"]
            cursor = page.get("next_cursor")
            if not cursor:
                return
`, what, signature(rest), item, lists[0], name, name, forward(rest, "cursor=cursor", 12), lists[0])
	return nil
}

// forward returns the arguments of a call of a method with the same arguments.
func forward(arguments []argument, more string, indent int) string {
	var all []string
	for _, a := range arguments {
		if a.in == "path" {
			all = append(all, a.name)
		} else {
			all = append(all, a.name+"="+a.name)
		}
	}
	if more != "" {
		all = append(all, more)
	}
	return brackets(all, indent+4, indent)
}

func signature(arguments []argument) string {
	all := []string{"self"}
	for _, a := range in(arguments, "path") {
		all = append(all, a.signature())
	}
	if len(in(arguments, "path")) < len(arguments) {
		all = append(all, "*")
	}
	for _, a := range arguments {
		if a.in != "path" && a.required {
			all = append(all, a.signature())
		}
	}
	for _, a := range arguments {
		if a.in != "path" && !a.required {
			all = append(all, a.signature())
		}
	}
	return brackets(all, 8, 4)
}

func (o *operation) writeMethod(b *strings.Builder, name string, arguments []argument, answer, more, body string) {
	fmt.Fprintf(b, "\n    def %s(%s) -> %s:\n", name, signature(arguments), answer)
	b.WriteString(o.docstring(more))
	fmt.Fprintf(b, "        %s\n", body)
}

// docstring returns the summary, the first paragraph, and who may call the operation.
func (o *operation) docstring(more string) string {
	summary := strings.TrimSpace(o.Summary)
	if !strings.HasSuffix(summary, "?") {
		summary += "."
	}
	lines := wrap(summary, 8)
	paragraphs := strings.Split(strings.TrimSpace(o.Description), "\n\n")
	add := func(text string) {
		if text = strings.TrimSpace(text); text != "" {
			lines = append(append(lines, ""), wrap(text, 8)...)
		}
	}
	isAccess := func(text string) bool {
		return strings.HasPrefix(text, "Scope:") || strings.HasPrefix(text, "No scope") || strings.HasPrefix(text, "No authentication")
	}
	if !isAccess(paragraphs[0]) {
		add(paragraphs[0])
	}
	add(more)
	for _, p := range paragraphs {
		if isAccess(p) {
			add(p)
		}
	}
	return quoted(lines, 8)
}

// call returns the statement that makes the call.
func (o *operation) call(arguments []argument) string {
	items := []string{strconv.Quote(o.method), strconv.Quote(o.path)}
	if ids := in(arguments, "path"); len(ids) > 0 {
		var all []string
		for _, id := range ids {
			all = append(all, id.name)
		}
		items = append(items, "ids=("+strings.Join(all, ", ")+",)")
	}
	for _, place := range []string{"query", "header", "body"} {
		field := strings.Replace(place, "header", "headers", 1)
		if fields := in(arguments, place); len(fields) > 0 {
			items = append(items, field+"="+object(fields))
		} else if place == "body" && o.schema != nil {
			items = append(items, "body={}")
		}
	}
	if o.Extensions["x-repeatable"] == true {
		items = append(items, "repeatable=True")
	}
	if o.Security != nil && len(*o.Security) == 0 {
		items = append(items, "anonymous=True")
	}
	if isProbe := !strings.HasPrefix(o.path, "/api/") && !strings.HasPrefix(o.path, "/v1/"); isProbe {
		items = append(items, "probe=True")
	}
	if o.answer == streamAnswer {
		items = append(items, "lasting=True")
	}
	return "call = Call(" + brackets(items, 12, 8) + ")\n        "
}

// object returns an expression for the fields of the query, the headers or the body.
func object(fields []argument) string {
	var required, optional, nullable []string
	for _, f := range fields {
		entry := strconv.Quote(f.wire) + ": " + f.name
		switch {
		case f.wire == idempotencyKey:
			required = append(required, entry+" or new_idempotency_key()")
		case f.required:
			required = append(required, entry)
		case f.nullable:
			nullable = append(nullable, entry)
		default:
			optional = append(optional, entry)
		}
	}
	if len(optional) > 0 {
		given := "given({" + brackets(optional, 16, 12) + "})"
		if len(required) == 0 && len(nullable) == 0 {
			return given
		}
		required = append(required, "**"+given)
	}
	if len(nullable) > 0 {
		required = append(required, "**given({"+brackets(nullable, 16, 12)+"}, UNSET)")
	}
	return "{" + brackets(required, 16, 12) + "}"
}
