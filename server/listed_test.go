package server_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/latticekeep/latticekeep/test/servertest"
)

// listed is an operation as its contract lists it, with the request that the
// contract gives as an example.
type listed struct {
	id, method, path string // "v2 sealCredential"; the path is a template
	schemaStatus     int    // of a body that is not of its schema
	parameters       []*openapi3.Parameter
	schema           *openapi3.Schema // nil when there is no body
	required         bool             // the body
	example          any              // the body
	scope            string
	user, public     bool
	most             int // bytes of a body
}

// listedOperations returns the operations of both contracts that the gate keeps.
func listedOperations(t testing.TB) []listed {
	t.Helper()
	var all []listed
	both := servertest.NewContract(t)
	for version, doc := range map[string]servertest.Document{"v1": both.V1, "v2": both.V2} {
		for path, item := range doc.Paths.Map() {
			for method, op := range item.Operations() {
				if slices.Contains(op.Tags, "operations") {
					continue
				}
				o := listed{id: version + " " + op.OperationID, method: method, path: path, schemaStatus: http.StatusUnprocessableEntity}
				if version == "v1" {
					o.schemaStatus = http.StatusBadRequest
				}
				o.scope, _ = op.Extensions["x-scope"].(string)
				o.user, _ = op.Extensions["x-user-only"].(bool)
				o.public = op.Security != nil && len(*op.Security) == 0
				if o.most = 1 << 20; o.public || o.id == "v2 refreshSession" || o.id == "v2 logout" { // strangers get in
					o.most = 16 << 10
				}
				for _, p := range append(slices.Clone(item.Parameters), op.Parameters...) {
					o.parameters = append(o.parameters, p.Value)
				}
				if op.RequestBody != nil {
					content := op.RequestBody.Value.Content.Get("application/json")
					o.schema, o.example, o.required = content.Schema.Value, content.Example, op.RequestBody.Value.Required
				}
				all = append(all, o)
			}
		}
	}
	slices.SortFunc(all, func(a, b listed) int { return strings.Compare(a.id, b.id) })
	if len(all) < 50 {
		t.Fatalf("%d operations in both contracts", len(all))
	}
	return all
}

// chosen reports whether a test sends a case to an operation, by the places of both in their tables.
// It chooses all, except under -short: then an operation gets every eighth case, and each case goes
// to other operations.
func chosen(operation, number int) bool { return !testing.Short() || (operation+number)%8 == 0 }

// pathExample returns an id that is well-formed and of nothing.
func (o listed) pathExample() (string, bool) {
	for _, p := range o.parameters {
		if p.In == openapi3.ParameterInPath {
			return fmt.Sprint(p.Example), true
		}
	}
	return "", false
}

// to returns the path with an escaped id.
func (o listed) to(id string) string {
	before, rest, ok := strings.Cut(strings.NewReplacer("{index}", "0", "{delivery_id}", "x").Replace(o.path), "{")
	if !ok {
		return o.path
	}
	_, after, _ := strings.Cut(rest, "}")
	return before + id + strings.Replace(after, "{subject}", "usr_mfrggzdfmztwq2lknnwg23tpoa", 1)
}
