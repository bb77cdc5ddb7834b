package client

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
)

// mark stands before a path parameter that would not survive the generated
// code: it resolves its path against the base URL, which takes "." and ".." for
// steps in the tree (RFC 3986 §5.2.4), so that the call would arrive at another
// endpoint. unmark takes it away again.
const mark = "\x00"

// segment returns what to give the generated code for a path parameter.
func segment(value string) string {
	if value == "" || value == "." || value == ".." || strings.HasPrefix(value, mark) {
		return mark + value
	}
	return value
}

// unmark gives a request the path parameters that segment was given, dots
// percent-encoded. Error: one is empty.
func unmark(_ context.Context, r *http.Request) error {
	segments := strings.Split(r.URL.EscapedPath(), "/")
	for i, s := range segments {
		value, marked := strings.CutPrefix(s, url.PathEscape(mark))
		switch {
		case !marked:
		case value == "":
			return fmt.Errorf("making the request: the id or name is empty: %w", ErrInvalid)
		default:
			segments[i] = strings.ReplaceAll(value, ".", "%2E")
		}
	}
	escaped := strings.Join(segments, "/")
	path, err := url.PathUnescape(escaped)
	if err != nil {
		return fmt.Errorf("making the request: %w", err)
	}
	r.URL.Path, r.URL.RawPath = path, escaped
	return nil
}
