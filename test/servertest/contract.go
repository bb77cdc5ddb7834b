package servertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/legacy"

	"github.com/latticekeep/latticekeep/api/openapi"
)

// Contract is a transport that fails the test when an exchange violates the contract: an unlisted
// status or header, a body with another schema, or success for a forbidden request.
type Contract struct {
	T      testing.TB
	V1, V2 Document
	next   http.RoundTripper
}

// Document is the contract of one version.
type Document struct {
	*openapi3.T
	Router routers.Router
}

// NewContract returns a transport for the contracts of both versions.
func NewContract(t testing.TB) *Contract {
	t.Helper()
	v1, err1 := loadV1()
	v2, err2 := loadV2()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return &Contract{t, v1, v2, &http.Transport{}}
}

// All tests share the documents, which nothing changes: loading them takes longer than most tests.
var (
	loadV1 = sync.OnceValues(func() (Document, error) { return load(openapi.V1()) })
	loadV2 = sync.OnceValues(func() (Document, error) { return load(openapi.V2()) })
)

func load(text string) (Document, error) {
	doc, err := openapi3.NewLoader().LoadFromData([]byte(text))
	if err != nil {
		return Document{}, err
	}
	for _, schema := range doc.Components.Schemas {
		forbidUnlisted(schema.Value)
	}
	doc.Servers = nil                    // the router would look for the one of "/", and tests serve elsewhere
	router, err := legacy.NewRouter(doc) // validates the document, examples included
	return Document{doc, router}, err
}

// forbidUnlisted forbids fields that a schema does not list. The contract allows them in answers, so
// that a later release may add some, but this release must list what it answers.
func forbidUnlisted(s *openapi3.Schema) {
	if s.Type.Is(openapi3.TypeObject) && s.Properties != nil && s.AdditionalProperties.Schema == nil {
		s.AdditionalProperties.Has = new(bool)
	}
	for _, property := range s.Properties {
		forbidUnlisted(property.Value)
	}
	if s.Items != nil {
		forbidUnlisted(s.Items.Value)
	}
}

// DocumentOf returns the document that a path belongs to.
func (c *Contract) DocumentOf(path string) Document {
	if strings.HasPrefix(path, "/v1/") {
		return c.V1
	}
	return c.V2
}

// IsPage reports whether a path is a page of the reference or the dashboard. Pages are in no
// contract.
func IsPage(path string) bool {
	first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return slices.Contains([]string{"docs", "assets", "favicon.ico", "", "vault", "crypto", "keys", "compliance", "audit", "cluster", "settings",
		"sign-in", "register", "verify", "forgot", "reset", "join"}, first)
}

// CloseIdleConnections lets [http.Client.CloseIdleConnections] reach the transport.
func (c *Contract) CloseIdleConnections() { c.next.(*http.Transport).CloseIdleConnections() }

// RoundTrip sends a request and checks the exchange.
func (c *Contract) RoundTrip(r *http.Request) (*http.Response, error) {
	var sent []byte
	if r.Body != nil {
		var err error
		if sent, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
		r.Body = io.NopCloser(bytes.NewReader(sent))
	}
	resp, err := c.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	got, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil {
		return nil, err
	}
	resp.Body = io.NopCloser(bytes.NewReader(got))
	r.Body = io.NopCloser(bytes.NewReader(sent))
	c.Check(r, resp.StatusCode, resp.Header, got)
	return resp, nil
}

// Check checks one exchange.
func (c *Contract) Check(r *http.Request, status int, header http.Header, body []byte) {
	c.T.Helper()
	name := r.Method + " " + r.URL.Path
	for _, want := range []string{"X-Request-ID", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"} {
		if header.Get(want) == "" {
			c.T.Errorf("%s: no %s", name, want)
		}
	}
	if (header.Get("Retry-After") != "") != (status == http.StatusTooManyRequests) {
		c.T.Errorf("%s: answered %d with Retry-After %q", name, status, header.Get("Retry-After"))
	}
	if IsPage(r.URL.Path) && status < 400 {
		return
	}
	doc := c.DocumentOf(r.URL.Path)
	route, params, err := doc.Router.FindRoute(r)
	// This router ignores slashes at the end and missing ids, and compares paths without their
	// escapes.
	escaped := r.URL.EscapedPath() != r.URL.Path
	missing := err == nil && slices.Contains(slices.Collect(maps.Values(params)), "")
	if err != nil || escaped || missing || strings.HasSuffix(r.URL.Path, "/") {
		if !escaped && !slices.Contains([]int{http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusTooManyRequests}, status) {
			c.T.Errorf("%s: status %d and not in the contract", name, status)
		}
		if status < 400 {
			return
		}
		var value any
		if err := json.Unmarshal(body, &value); err != nil {
			c.T.Errorf("%s: body %q: %v", name, body, err)
		} else if err := doc.Components.Schemas["Error"].Value.VisitJSON(value); err != nil {
			c.T.Errorf("%s: %v", name, err)
		}
		return
	}
	in := &openapi3filter.RequestValidationInput{
		Request: r, PathParams: params, Route: route,
		Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc},
	}
	if status < 300 {
		if err := openapi3filter.ValidateRequest(context.Background(), in); err != nil {
			c.T.Errorf("%s: answered %d although the contract forbids it: %v", name, status, err)
		}
	}
	out := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: in, Status: status, Header: header,
		Options: &openapi3filter.Options{IncludeResponseStatus: true},
	}
	out.SetBodyBytes(body)
	if err := openapi3filter.ValidateResponse(context.Background(), out); err != nil {
		c.T.Errorf("%s: answered %d: %v", name, status, err)
	}
}
