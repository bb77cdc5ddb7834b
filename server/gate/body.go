package gate

import (
	"bytes"
	"encoding/base64"
	"errors"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// The limits of a request body, in bytes. A public operation has no known caller, and takes at most
// an address and a password.
const (
	maxBody       = 1 << 20
	maxPublicBody = 16 << 10
	smallBody     = 16 << 10 // a smaller body takes little memory and is parsed without waiting
)

// checkContentType accepts the media types of the operation, in UTF-8 if the header names a charset.
func (op *operation) checkContentType(h http.Header) error {
	refused := &refusal{http.StatusUnsupportedMediaType, "send the body as " + strings.Join(op.mediaTypes(), " or ")}
	values := h.Values("Content-Type")
	if len(values) != 1 {
		return refused
	}
	mediaType, params, err := mime.ParseMediaType(values[0])
	if err != nil || !slices.Contains(op.mediaTypes(), mediaType) {
		return refused
	}
	charset, named := params["charset"]
	if named && !strings.EqualFold(charset, "utf-8") {
		return refused
	}
	return nil
}

// mediaTypes returns the media types of a body of the operation, all of which are JSON.
func (op *operation) mediaTypes() []string {
	if len(op.types) == 0 {
		return []string{"application/json"}
	}
	return op.types
}

// maxDepth is the maximum nesting of a body, far more than any endpoint needs.
const maxDepth = 32

// checkJSON returns an error unless body is one well-formed JSON value (RFC 8259) that is
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
	if _, err := d.ReadToken(); !errors.Is(err, io.EOF) {
		return malformed
	}
	return nil
}

// DefaultLimit is the default number of items on a page.
const DefaultLimit = 20

// Value returns the value of an optional field or parameter, or the zero value if it is absent.
func Value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// NonZero returns v as an optional field, or nil for the zero value, so that the answer leaves it out.
func NonZero[T comparable](v T) *T {
	var none T
	if v == none {
		return nil
	}
	return &v
}

var strictBase64 = base64.StdEncoding.Strict()

// DecodeBase64 decodes canonical base64 only (RFC 4648 §3.5): without line breaks or nonzero spare
// bits. It returns no bytes with an error.
func DecodeBase64(s string) ([]byte, error) {
	b, err := strictBase64.DecodeString(s)
	if err != nil || base64.StdEncoding.EncodedLen(len(b)) != len(s) { // the decoder ignores only line breaks
		return nil, errors.New("decoding base64: not canonical")
	}
	return b, nil
}
