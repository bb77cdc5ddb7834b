package v2

import (
	"bytes"
	"encoding/base64"
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// checkContentType accepts application/json, in UTF-8 if it names a charset.
func checkContentType(h http.Header) error {
	refused := &refusal{http.StatusUnsupportedMediaType, "send the body as application/json"}
	values := h.Values("Content-Type")
	if len(values) != 1 {
		return refused
	}
	mediaType, params, err := mime.ParseMediaType(values[0])
	if err != nil || mediaType != "application/json" {
		return refused
	}
	charset, named := params["charset"]
	if named && !strings.EqualFold(charset, "utf-8") {
		return refused
	}
	return nil
}

// maxDepth bounds the nesting of a body, far above what any endpoint takes.
const maxDepth = 32

// checkJSON reports whether body is one well-formed JSON value (RFC 8259) and
// interoperable (RFC 7493): UTF-8, no lone surrogates, no duplicate names.
func checkJSON(body []byte) error {
	malformed := &refusal{http.StatusBadRequest, "the request body is not well-formed JSON"}
	d := jsontext.NewDecoder(bytes.NewBuffer(body))
	for {
		if _, err := d.ReadToken(); err != nil {
			return malformed
		}
		if d.StackDepth() > maxDepth {
			return &refusal{http.StatusBadRequest, "the request body is nested too deeply"}
		}
		if d.StackDepth() == 0 {
			break
		}
	}
	if _, err := d.ReadToken(); err != io.EOF {
		return malformed
	}
	return nil
}

// decode fills v, a pointer to a struct, from a body that passed checkJSON.
// Unknown fields are ignored and names match case-sensitively. A null is of
// another type than anything an endpoint takes. An error names at most one of
// v's own fields: what failed inside it is the caller's.
func decode(body []byte, v any) error {
	if len(body) == 0 {
		return &refusal{http.StatusBadRequest, "a request body is required"}
	}
	err := json.Unmarshal(body, v, json.WithUnmarshalers(json.UnmarshalFromFunc(refuseNull)))
	if err == nil {
		return nil
	}
	var semantic *json.SemanticError
	if errors.As(err, &semantic) {
		for field := range semantic.JSONPointer.Tokens() {
			return fault.New(fault.Invalid, "the request body does not match the schema: check the type of "+field)
		}
	}
	return fault.New(fault.Invalid, "the request body does not match the schema")
}

var errWrongType = errors.New("wrong type")

func refuseNull(d *jsontext.Decoder, _ any) error {
	if d.PeekKind() == 'n' {
		return errWrongType
	}
	return errors.ErrUnsupported // leaves the value to the ordinary rules
}

// text is a secret string on its way in or out. It goes between bytes that can
// be overwritten and JSON without a Go string in between.
type text secret.Bytes

// UnmarshalJSONFrom implements [json.UnmarshalerFrom].
func (t *text) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	quoted, err := d.ReadValue()
	if err != nil {
		return err
	}
	if quoted.Kind() != '"' {
		return errWrongType
	}
	*t, err = jsontext.AppendUnquote(make([]byte, 0, len(quoted)), quoted)
	return err
}

// MarshalJSONTo implements [json.MarshalerTo].
func (t text) MarshalJSONTo(e *jsontext.Encoder) error {
	quoted, err := jsontext.AppendQuote(make([]byte, 0, len(t)+2), t)
	defer clear(quoted)
	if err != nil {
		return err
	}
	return e.WriteValue(quoted)
}

// binary is [text] in base64, for bytes that are no text.
type binary secret.Bytes

// MarshalJSONTo implements [json.MarshalerTo].
func (b binary) MarshalJSONTo(e *jsontext.Encoder) error {
	encoded := base64.StdEncoding.AppendEncode(nil, b)
	defer clear(encoded)
	return text(encoded).MarshalJSONTo(e)
}
