package server

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/legacy"

	"github.com/latticekeep/latticekeep/api/openapi"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server/gate"
	v1 "github.com/latticekeep/latticekeep/server/v1"
	v2 "github.com/latticekeep/latticekeep/server/v2"
)

// contract is a transport that fails the test when an exchange is not as the
// contract says: a status or header that is not listed, a body of another
// schema, or a request that was answered well although the contract forbids it.
type contract struct {
	t      testing.TB
	v1, v2 document
	next   http.RoundTripper
}

// document is the contract of one version.
type document struct {
	*openapi3.T
	router routers.Router
}

func newContract(t testing.TB) *contract {
	t.Helper()
	load := func(text string) document {
		t.Helper()
		doc, err := openapi3.NewLoader().LoadFromData([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		router, err := legacy.NewRouter(doc) // validates the document, examples included
		if err != nil {
			t.Fatal(err)
		}
		return document{doc, router}
	}
	return &contract{t, load(openapi.V1()), load(openapi.V2()), &http.Transport{}}
}

// of returns the document that a path belongs to.
func (c *contract) of(path string) document {
	if strings.HasPrefix(path, "/v1/") {
		return c.v1
	}
	return c.v2
}

// outside are the pages for people, which are in no contract: the reference and the
// dashboard.
func outside(path string) bool {
	first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return slices.Contains([]string{"docs", "assets", "", "vault", "crypto", "keys", "compliance", "audit", "cluster", "settings",
		"sign-in", "register", "verify", "forgot", "reset", "join"}, first)
}

// CloseIdleConnections is what [http.Client.CloseIdleConnections] calls.
func (c *contract) CloseIdleConnections() { c.next.(*http.Transport).CloseIdleConnections() }

func (c *contract) RoundTrip(r *http.Request) (*http.Response, error) {
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
	c.check(r, resp.StatusCode, resp.Header, got)
	return resp, nil
}

func (c *contract) check(r *http.Request, status int, header http.Header, body []byte) {
	c.t.Helper()
	name := r.Method + " " + r.URL.Path
	for _, want := range []string{"X-Request-ID", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"} {
		if header.Get(want) == "" {
			c.t.Errorf("%s: no %s", name, want)
		}
	}
	if (header.Get("Retry-After") != "") != (status == http.StatusTooManyRequests) {
		c.t.Errorf("%s: answered %d with Retry-After %q", name, status, header.Get("Retry-After"))
	}
	if outside(r.URL.Path) && status < 400 {
		return
	}
	doc := c.of(r.URL.Path)
	route, params, err := doc.router.FindRoute(r)
	// This router overlooks slashes at the end and an id that is missing, and
	// compares paths without their escapes.
	escaped := r.URL.EscapedPath() != r.URL.Path
	missing := err == nil && slices.Contains(slices.Collect(maps.Values(params)), "")
	if err != nil || escaped || missing || strings.HasSuffix(r.URL.Path, "/") {
		if !escaped && status != http.StatusNotFound && status != http.StatusMethodNotAllowed {
			c.t.Errorf("%s: status %d and not in the contract", name, status)
		}
		if status < 400 {
			return
		}
		var value any
		if err := json.Unmarshal(body, &value); err != nil {
			c.t.Errorf("%s: body %q: %v", name, body, err)
		} else if err := doc.Components.Schemas["Error"].Value.VisitJSON(value); err != nil {
			c.t.Errorf("%s: %v", name, err)
		}
		return
	}
	in := &openapi3filter.RequestValidationInput{
		Request: r, PathParams: params, Route: route,
		Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc},
	}
	if status < 300 {
		if err := openapi3filter.ValidateRequest(context.Background(), in); err != nil {
			c.t.Errorf("%s: answered %d although the contract forbids it: %v", name, status, err)
		}
	}
	out := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: in, Status: status, Header: header,
		Options: &openapi3filter.Options{IncludeResponseStatus: true},
	}
	out.SetBodyBytes(body)
	if err := openapi3filter.ValidateResponse(context.Background(), out); err != nil {
		c.t.Errorf("%s: answered %d: %v", name, status, err)
	}
}

func TestRoutesAndContractNameTheSameEndpoints(t *testing.T) {
	var served, written []string
	for _, r := range assemble(t).server.engine.Routes() {
		if !outside(r.Path) {
			served = append(served, r.Method+" "+r.Path)
		}
	}
	both := newContract(t)
	for _, doc := range []document{both.v1, both.v2} {
		for path, item := range doc.Paths.Map() {
			for method := range item.Operations() {
				written = append(written, method+" "+gate.Route(path))
			}
		}
	}
	slices.Sort(served)
	slices.Sort(written)
	if !slices.Equal(served, written) {
		t.Errorf("served:\n%s\nwritten:\n%s", strings.Join(served, "\n"), strings.Join(written, "\n"))
	}
}

func TestContractListsTheEventTypesOfTheCode(t *testing.T) {
	both := newContract(t)
	for _, doc := range []document{both.v1, both.v2} {
		var written []audit.EventType
		for _, v := range doc.Components.Schemas["EventType"].Value.Enum {
			written = append(written, audit.EventType(v.(string)))
		}
		if !slices.Equal(written, audit.EventTypes()) {
			t.Errorf("written %v, in the code %v", written, audit.EventTypes())
		}
	}
}

// What an operation takes of its caller is written in the contract and decided
// by authz: the two must agree.
func TestContractStatesTheScopeOfEveryOperation(t *testing.T) {
	both := newContract(t)
	for doc, operations := range map[*openapi3.T]map[string]gate.Operation{both.v1.T: v1.Operations(), both.v2.T: v2.Operations()} {
		for path, item := range doc.Paths.Map() {
			for method, op := range item.Operations() {
				if slices.Contains(op.Tags, "operations") {
					continue
				}
				known := operations[op.OperationID]
				scope, user := authz.Required(known.Action)
				written, _ := op.Extensions["x-scope"].(string)
				writtenUser, _ := op.Extensions["x-user-only"].(bool)
				if written != string(scope) || writtenUser != user {
					t.Errorf("%s %s: the contract says %q, only users: %v; the code %q, %v", method, path, written, writtenUser, scope, user)
				}
				security := doc.Security
				if op.Security != nil {
					security = *op.Security
				}
				if (len(security) == 0) != (known.Auth == gate.Public) && op.OperationID != "refreshSession" {
					t.Errorf("%s %s: public in one of contract and code", method, path)
				}
			}
		}
	}
}

func TestEveryEndpointListsItsFailures(t *testing.T) {
	both := newContract(t)
	for name, doc := range map[string]*openapi3.T{"v1": both.v1.T, "v2": both.v2.T} {
		for path, item := range doc.Paths.Map() {
			for method, op := range item.Operations() {
				if slices.Contains(op.Tags, "operations") {
					continue
				}
				want := []string{"400", "413", "415", "429", "500", "503"}
				if op.Security == nil { // not switched off
					want = append(want, "401", "403")
				}
				if op.RequestBody != nil && name == "v2" {
					want = append(want, "422")
				}
				for _, status := range want {
					if op.Responses.Value(status) == nil {
						t.Errorf("%s %s does not list %s", method, path, status)
					}
				}
			}
		}
	}
}

func TestTheContractsAreServed(t *testing.T) {
	s := newService(t)
	for path, file := range map[string]string{"/v1/openapi.yaml": "../api/openapi/v1.yaml", "/api/v2/openapi.yaml": "../api/openapi/v2.yaml"} {
		r := s.call(request{method: "GET", path: path})
		onDisk, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if r.status != http.StatusOK || !bytes.Equal(r.body, onDisk) {
			t.Errorf("%s: status %d, %d bytes", path, r.status, len(r.body))
		}
	}
}
