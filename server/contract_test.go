package server_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server/gate"
	v1 "github.com/latticekeep/latticekeep/server/v1"
	v2 "github.com/latticekeep/latticekeep/server/v2"
	"github.com/latticekeep/latticekeep/test/servertest"
)

func TestRoutesAndContractNameTheSameEndpoints(t *testing.T) {
	var served, written []string
	for _, r := range assemble(t).Server.Engine().Routes() {
		if !servertest.IsPage(r.Path) {
			served = append(served, r.Method+" "+r.Path)
		}
	}
	both := servertest.NewContract(t)
	for _, doc := range []servertest.Document{both.V1, both.V2} {
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
	both := servertest.NewContract(t)
	for _, doc := range []servertest.Document{both.V1, both.V2} {
		var written []audit.EventType
		for _, v := range doc.Components.Schemas["EventType"].Value.Enum {
			written = append(written, audit.EventType(v.(string)))
		}
		if declared := eventTypes(t); !slices.Equal(written, declared) {
			t.Errorf("written %v, in the code %v", written, declared)
		}
	}
}

// eventTypes reads the constants of type EventType from the code, in their order.
func eventTypes(t *testing.T) (all []audit.EventType) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "../internal/audit/event.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, decl := range file.Decls {
		constants, ok := decl.(*ast.GenDecl)
		if !ok || constants.Tok != token.CONST {
			continue
		}
		for _, spec := range constants.Specs {
			c := spec.(*ast.ValueSpec)
			if kind, ok := c.Type.(*ast.Ident); !ok || kind.Name != "EventType" {
				continue
			}
			value, err := strconv.Unquote(c.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, audit.EventType(value))
		}
	}
	return all
}

// A new event needs a decision: its success goes on while the disk is full, or is refused.
func TestEachEventIsAChangeOrServedOnAFullDisk(t *testing.T) {
	served := []audit.EventType{
		// reads
		audit.SealingKeyListed, audit.ManifestResealed, audit.ManifestChecked, audit.BackupTaken, audit.KMSKeyListed, audit.TenantListed, audit.APIKeyListed,
		audit.HistoryRuleListed, audit.WebhookListed, audit.SettingsRead, audit.PolicyListed, audit.GroupListed, audit.AccessChecked, audit.CredentialListed, audit.CredentialUnsealed, audit.KeyListed, audit.DataEncrypted, audit.DataDecrypted, audit.DataRewrapped, audit.DataSigned, audit.DataVerified,
		audit.PublicKeyRead, audit.AccountRead, audit.SessionListed, audit.MemberListed, audit.AuditRead, audit.ProofRead, audit.AuditExported, audit.MetricsRead,
		audit.ComplianceAssessed, audit.ComplianceScored, audit.ComplianceHistoryRead, audit.ComplianceReported, audit.InventoryRead,
		// removals, and the sign-ins that they need
		audit.SealingKeyRetired, audit.APIKeyRevoked, audit.APIKeySuspended, audit.CredentialVersionEnded, audit.CredentialDeleted, audit.CredentialReleased,
		audit.HistoryRuleChanged, audit.WebhookDeleted, audit.WebhookFailed, audit.PolicyDeleted, audit.PolicyUnbound, audit.GroupDeleted, audit.NamesErased, audit.UserSignedIn, audit.SessionRefreshed, audit.UserSignedOut, audit.SessionEnded, audit.MemberRemoved, audit.InvitationRevoked, audit.ReviewNoteErased,
		// what the service does by itself, and what repairs it
		audit.LogArchived, audit.AnchorStarted, audit.AnchorRefused, audit.RollbackAccepted, audit.StateCommitted, audit.StateRowsAccepted, audit.StateRowsRemoved,
		audit.RateLimited, audit.AccessRefused,
	}
	for _, e := range eventTypes(t) {
		if e.IsChange() == slices.Contains(served, e) {
			t.Errorf("%s: a change is %v", e, e.IsChange())
		}
	}
}

// What an operation takes of its caller is written in the contract and decided
// by authz: the two must agree.
func TestContractStatesTheScopeOfEveryOperation(t *testing.T) {
	both := servertest.NewContract(t)
	for doc, operations := range map[*openapi3.T]map[string]gate.Operation{both.V1.T: v1.Operations(), both.V2.T: v2.Operations()} {
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
	both := servertest.NewContract(t)
	for name, doc := range map[string]*openapi3.T{"v1": both.V1.T, "v2": both.V2.T} {
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
		r := s.Call(servertest.Request{Method: "GET", Path: path})
		onDisk, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if r.Status != http.StatusOK || !bytes.Equal(r.Body, onDisk) {
			t.Errorf("%s: status %d, %d bytes", path, r.Status, len(r.Body))
		}
	}
}
