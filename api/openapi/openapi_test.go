package openapi_test

import (
	"context"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/latticekeep/latticekeep/api/openapi"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

// documents are all versions, by the prefix of their paths.
func documents(t *testing.T) map[string]*openapi3.T {
	t.Helper()
	docs := make(map[string]*openapi3.T)
	for prefix, text := range map[string]string{"/v1/": openapi.V1(), "/api/v2/": openapi.V2()} {
		doc, err := openapi3.NewLoader().LoadFromData([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		docs[prefix] = doc
	}
	return docs
}

// operation is one of a document, with what holds for it.
type operation struct {
	*openapi3.Operation
	name     string // method and path
	path     string
	security openapi3.SecurityRequirements
}

func (o operation) public() bool { return len(o.security) == 0 }

func (o operation) operational() bool { return slices.Contains(o.Tags, "operations") }

// success returns the status and the response of the one success.
func (o operation) success() (status string, r *openapi3.Response) {
	for code, response := range o.Responses.Map() {
		if code < "300" {
			status, r = code, response.Value
		}
	}
	return status, r
}

func operations(doc *openapi3.T) []operation {
	var all []operation
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			security := doc.Security
			if op.Security != nil {
				security = *op.Security
			}
			all = append(all, operation{op, method + " " + path, path, security})
		}
	}
	return all
}

func TestDocumentsAndExamplesAreValid(t *testing.T) {
	for prefix, doc := range documents(t) {
		if err := doc.Validate(context.Background(), openapi3.EnableExamplesValidation()); err != nil {
			t.Errorf("%s: %v", prefix, err)
		}
	}
}

func TestEveryOperationIsDescribed(t *testing.T) {
	for prefix, doc := range documents(t) {
		ids := make(map[string]bool)
		for _, op := range operations(doc) {
			if !op.operational() && !strings.HasPrefix(op.path, prefix) {
				t.Errorf("%s is not below %s", op.name, prefix)
			}
			if op.OperationID == "" || ids[op.OperationID] {
				t.Errorf("%s: operation id %q is missing or taken", op.name, op.OperationID)
			}
			ids[op.OperationID] = true
			if op.Summary == "" || len(op.Tags) != 1 || doc.Tags.Get(op.Tags[0]) == nil {
				t.Errorf("%s: no summary, or not one tag that the document lists: %v", op.name, op.Tags)
			}
			if _, r := op.success(); r == nil {
				t.Errorf("%s has no success", op.name)
			} else if body := r.Content.Get("application/json"); body != nil && body.Schema != nil && body.Example == nil {
				t.Errorf("%s: its success has no example", op.name)
			}
			if op.RequestBody != nil && op.RequestBody.Value.Content.Get("application/json").Example == nil {
				t.Errorf("%s: its request has no example", op.name)
			}
		}
	}
}

func TestEveryOperationListsItsFailures(t *testing.T) {
	for prefix, doc := range documents(t) {
		v2 := prefix == "/api/v2/"
		for _, op := range operations(doc) {
			if op.operational() {
				continue
			}
			want := []string{"400", "413", "415", "429", "500", "503"}
			if !op.public() {
				want = append(want, "401", "403")
			}
			if op.RequestBody != nil && v2 {
				want = append(want, "422")
			}
			for _, status := range want {
				if op.Responses.Value(status) == nil {
					t.Errorf("%s does not list %s", op.name, status)
				}
			}
			// An id in the path may be unknown; in the vault that must not show.
			vault := slices.Contains(op.Tags, "vault")
			if strings.Contains(op.path, "{") && (op.Responses.Value("404") == nil) != vault {
				t.Errorf("%s: 404 is for an id that is not there, outside the vault", op.name)
			}
			for status := range op.Responses.Map() {
				if status == "default" || (status == "409" || status == "422") && !v2 {
					t.Errorf("%s lists %s", op.name, status)
				}
			}
		}
	}
}

// The gate answers every response with these, so that callers can rely on them
// without a look at the status.
func TestEveryResponseHasItsHeaders(t *testing.T) {
	for _, doc := range documents(t) {
		for _, op := range operations(doc) {
			for status, r := range op.Responses.Map() {
				want := []string{"X-Request-ID", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"}
				switch status {
				case "429":
					want = append(want, "Retry-After")
				case "401":
					want = append(want, "WWW-Authenticate")
				}
				for _, name := range want {
					if h := r.Value.Headers[name]; h == nil || !h.Value.Required {
						t.Errorf("%s, %s: no required header %s", op.name, status, name)
					}
				}
				if _, there := r.Value.Headers["Retry-After"]; there && status != "429" {
					t.Errorf("%s, %s: Retry-After is for 429 alone", op.name, status)
				}
			}
		}
	}
}

func TestEveryErrorIsTheOneEnvelopeOfItsVersion(t *testing.T) {
	for _, doc := range documents(t) {
		for _, op := range operations(doc) {
			for status, r := range op.Responses.Map() {
				if status < "400" {
					continue
				}
				body := r.Value.Content.Get("application/json")
				if body.Schema.Ref != "#/components/schemas/Error" {
					t.Errorf("%s, %s: the body is %s", op.name, status, body.Schema.Ref)
				}
				detail := body.Example.(map[string]any)["error"].(map[string]any)
				if code, ok := detail["code"].(float64); !ok || status != strconv.Itoa(int(code)) {
					t.Errorf("%s, %s: the example says %v", op.name, status, detail["code"])
				}
			}
		}
	}
}

// Success is a field of every body of version 2 but the one that is signed as
// it is, and of none of version 1.
func TestSuccessIsAFieldOfVersion2(t *testing.T) {
	for prefix, doc := range documents(t) {
		for _, op := range operations(doc) {
			_, r := op.success()
			body := r.Content.Get("application/json")
			if body == nil || body.Schema == nil { // a file, with nothing beside it
				continue
			}
			answer := body.Schema.Value
			success := answer.Properties["success"]
			want := prefix == "/api/v2/" && op.OperationID != "getSealingKey"
			if (success != nil) != want || slices.Contains(answer.Required, "success") != want ||
				want && !reflect.DeepEqual(success.Value.Enum, []any{true}) {
				t.Errorf("%s: success is %v", op.name, success)
			}
		}
	}
}

// A field that nobody reads would silently do nothing.
func TestRequestsTakeNoUnknownFields(t *testing.T) {
	for _, doc := range documents(t) {
		for _, op := range operations(doc) {
			if op.RequestBody == nil {
				continue
			}
			ref := op.RequestBody.Value.Content.Get("application/json").Schema
			if ref.Ref == "" {
				t.Errorf("%s: its request has no name", op.name)
			}
			for place, object := range objectsIn(op.OperationID, ref.Value) {
				if object.AdditionalProperties.Schema == nil && !closed(object) {
					t.Errorf("%s takes unknown fields", place)
				}
			}
		}
	}
}

// A later release may add fields to an answer, and clients that were generated from this contract
// must take them. The sealed values of a manifest are a format with a version number of its own.
func TestAnswersMayGainFields(t *testing.T) {
	for _, doc := range documents(t) {
		for _, op := range operations(doc) {
			for status, r := range op.Responses.Map() {
				body := r.Value.Content.Get("application/json")
				if body == nil || body.Schema == nil {
					continue
				}
				for place, object := range objectsIn(op.OperationID+" "+status, body.Schema.Value) {
					if sealed := doc.Components.Schemas["SealedValues"]; sealed != nil &&
						(object == sealed.Value || object == sealed.Value.Properties["values"].Value.AdditionalProperties.Schema.Value) {
						continue
					}
					if closed(object) {
						t.Errorf("%s cannot gain a field", place)
					}
				}
			}
		}
	}
}

func closed(s *openapi3.Schema) bool {
	return s.AdditionalProperties.Has != nil && !*s.AdditionalProperties.Has
}

// objectsIn returns all objects of a schema by their place.
func objectsIn(place string, s *openapi3.Schema) map[string]*openapi3.Schema {
	all := make(map[string]*openapi3.Schema)
	if s.Type.Is("object") {
		all[place] = s
	}
	for name, property := range s.Properties {
		maps.Copy(all, objectsIn(place+"."+name, property.Value))
	}
	if s.Items != nil {
		maps.Copy(all, objectsIn(place+"[]", s.Items.Value))
	}
	if others := s.AdditionalProperties.Schema; others != nil {
		maps.Copy(all, objectsIn(place+"[*]", others.Value))
	}
	return all
}

// A client posts the answers of encrypt and sign back as they are. So the request takes each of their
// fields, also one that a later release adds.
func TestAnswersThatArePostedBackFitTheRequest(t *testing.T) {
	docs := documents(t)
	for _, c := range []struct{ prefix, answer, request string }{
		{"/v1/", "EncryptAnswer", "DecryptRequest"},
		{"/api/v2/", "EncryptAnswer", "DecryptRequest"}, {"/api/v2/", "EncryptedData", "DecryptRequest"},
		{"/api/v2/", "SignAnswer", "VerifyRequest"}, {"/api/v2/", "Signatures", "VerifyRequest"},
		{"/api/v2/", "TenantLimits", "LimitTenantRequest"},
	} {
		schemas := docs[c.prefix].Components.Schemas
		for name, field := range schemas[c.answer].Value.Properties {
			if taken := schemas[c.request].Value.Properties[name]; taken == nil || !taken.Value.Type.Is((*field.Value.Type)[0]) {
				t.Errorf("%s: %s does not take %s of %s", c.prefix, c.request, name, c.answer)
			}
		}
	}
}

func TestScopesAndRolesAreThoseOfTheCode(t *testing.T) {
	docs := documents(t)
	scopes := authz.Scopes()
	for _, doc := range docs {
		for _, op := range operations(doc) {
			scope, scoped := op.Extensions["x-scope"].(string)
			_, users := op.Extensions["x-user-only"].(bool)
			if scoped && !slices.Contains(scopes, authz.Scope(scope)) {
				t.Errorf("%s takes the scope %q, which there is not", op.name, scope)
			}
			if (scoped || users) && op.public() {
				t.Errorf("%s: scope %q, users alone: %v, public: %v", op.name, scope, users, op.public())
			}
			if keys := slices.ContainsFunc(op.security, func(r openapi3.SecurityRequirement) bool { return r["apiKey"] != nil }); keys && users {
				t.Errorf("%s is for users alone and takes API keys", op.name)
			}
		}
	}
	var want []any
	for _, s := range scopes {
		want = append(want, string(s))
	}
	if got := docs["/api/v2/"].Components.Schemas["Scope"].Value.Enum; !slices.Equal(got, want) {
		t.Errorf("scopes %v, in the code %v", got, want)
	}
	want = nil
	for _, r := range authz.Roles() {
		want = append(want, string(r))
	}
	if got := docs["/api/v2/"].Components.Schemas["Role"].Value.Enum; !slices.Equal(got, want) {
		t.Errorf("roles %v, in the code %v", got, want)
	}
}

// Extensions are invisible in most renderings of the document, so the description says the same.
func TestDescriptionsSayWhatExtensionsMean(t *testing.T) {
	for _, doc := range documents(t) {
		for _, op := range operations(doc) {
			scope, scoped := op.Extensions["x-scope"].(string)
			_, users := op.Extensions["x-user-only"].(bool)
			_, repeatable := op.Extensions["x-repeatable"].(bool)
			for sentence, holds := range map[string]bool{
				"Scope: `" + scope + "`.":                           scoped,
				"No scope is needed.":                               !scoped && !op.public() && op.OperationID != "refreshSession",
				"No authentication is needed.":                      op.public(),
				"For users alone: no API key is accepted.":          users,
				"It may be repeated after an answer that was lost.": repeatable,
			} {
				if strings.Contains(op.Description, sentence) != holds {
					t.Errorf("%s: its description says %q: %v, want %v", op.name, sentence, !holds, holds)
				}
			}
		}
	}
}

// uncategorized are the event types in no category: they change nothing that is kept, and tell no plaintext. A
// new type is here or in a category.
var uncategorized = []audit.EventType{
	audit.SealingKeyListed, audit.ManifestResealed, audit.ManifestChecked, audit.BackupTaken, audit.KMSKeyListed, audit.TenantListed, audit.APIKeyListed,
	audit.CredentialListed, audit.KeyListed, audit.DataEncrypted, audit.DataRewrapped, audit.DataSigned, audit.DataVerified, audit.PublicKeyRead,
	audit.UserSignedIn, audit.UserSignedOut, audit.AccountRead, audit.SessionRefreshed, audit.SessionListed, audit.MemberListed, audit.HistoryRuleListed,
	audit.WebhookListed, audit.WebhookSent, audit.WebhookFailed, audit.SettingsRead, audit.PolicyListed, audit.GroupListed, audit.AccessChecked,
	audit.AuditRead, audit.ProofRead, audit.AuditExported, audit.LogArchived, audit.AnchorStarted, audit.MetricsRead,
	audit.ComplianceAssessed, audit.ComplianceScored, audit.ComplianceHistoryRead, audit.ComplianceReported, audit.InventoryRead, audit.NodeLogRecorded, audit.RateLimited, audit.AccessRefused,
}

func TestEveryEventTypeHasItsCategoryOrNone(t *testing.T) {
	var listed, want []string
	for _, e := range documents(t)["/api/v2/"].Components.Schemas["EventType"].Value.Enum {
		want = append(want, e.(string))
	}
	for _, e := range slices.Concat(audit.Changes.Types(), audit.Secrets.Types(), uncategorized) {
		listed = append(listed, string(e))
	}
	slices.Sort(listed)
	slices.Sort(want)
	if !slices.Equal(listed, want) {
		t.Errorf("categories have %v, the contract %v", listed, want)
	}
}

// What both versions have, they say in the same words.
func TestVersionsShareTheirCommonSchemas(t *testing.T) {
	docs := documents(t)
	v1, v2 := docs["/v1/"].Components.Schemas, docs["/api/v2/"].Components.Schemas
	for _, name := range []string{"RequestID", "Plaintext", "Algorithm", "EventType", "AuditEntry", "AuditReference", "Hash"} {
		one, err1 := v1[name].Value.MarshalJSON()
		two, err2 := v2[name].Value.MarshalJSON()
		if err1 != nil || err2 != nil || string(one) != string(two) {
			t.Errorf("%s differs: %s and %s", name, one, two)
		}
	}
}

func TestNoComponentIsUnused(t *testing.T) {
	for prefix, text := range map[string]string{"/v1/": openapi.V1(), "/api/v2/": openapi.V2()} {
		c := documents(t)[prefix].Components
		for kind, names := range map[string][]string{
			"schemas": slices.Collect(maps.Keys(c.Schemas)), "responses": slices.Collect(maps.Keys(c.Responses)),
			"headers": slices.Collect(maps.Keys(c.Headers)), "parameters": slices.Collect(maps.Keys(c.Parameters)),
		} {
			for _, name := range names {
				if !strings.Contains(text, "'#/components/"+kind+"/"+name+"'") {
					t.Errorf("%s: nothing refers to %s/%s", prefix, kind, name)
				}
			}
		}
	}
}
