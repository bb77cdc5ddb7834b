package dashboard_test

import (
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// A member acknowledges what another one was refused, with a note, and hears of what they caused.
func TestAMemberReviewsInTheBrowser(t *testing.T) {
	p := start(t)
	o := p.register("Käsekontor", "ada@example.org")
	p.verify(o)
	key, err := o.CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "nosy", Scopes: []v2.Scope{v2.ScopeVaultWrite}})
	p.must(key, err)
	nosy := p.newClient(client.WithAPIKey(key.ApiKey))
	for range 3 {
		if _, err := nosy.ListCredentials(t.Context(), nil); err == nil {
			t.Fatal("a key without vault:read lists credentials")
		}
	}
	p.must(o.InviteMember(t.Context(), v2.InviteRequest{Email: "bob@example.org", Role: v2.RoleAuditor}))
	bob := owner{p.newClient(), "bob@example.org", o.password}
	_, token, _ := strings.Cut(p.link(bob.email, "/join"), "#token=")
	p.must(bob.AcceptInvitation(t.Context(), v2.AcceptInvitationRequest{Token: token, Password: bob.password}))
	p.must(bob.Login(t.Context(), v2.LoginRequest{Email: bob.email, Password: bob.password}))

	b := p.tab()
	b.signIn(o, "/audit")
	b.sees("Nothing waits for your review")
	b.sees("3 denials that you or your API keys caused wait for another member.")
	b.accessible()

	b = p.tab()
	b.signIn(bob, "/audit")
	b.sees("3 denials wait for a review")
	b.press("Record a review: Audit log")
	b.fill("Note (optional)", "the key was given the wrong scope")
	b.press("Record the review")
	b.sees("The review is in the log")
	b.sees("Nothing waits for your review")
	b.accessible()
	acknowledged := v2.EventTypeDENIALSACKNOWLEDGED
	list, err := bob.QueryAuditLog(t.Context(), &v2.QueryAuditLogParams{EventType: &acknowledged})
	p.must(list, err)
	if len(list.Entries) != 1 || list.Entries[0].Attributes["denials"] != "3" {
		t.Fatalf("%+v", list.Entries)
	}
	note, err := bob.GetReviewNote(t.Context(), list.Entries[0].Attributes["note"])
	if p.must(note, err); note.Note != "the key was given the wrong scope" {
		t.Error(note.Note)
	}
}

// An owner approves the key that the operator made, on the page that the mail links to.
func TestAnOwnerApprovesTheOperatorsKeyInTheBrowser(t *testing.T) {
	p := start(t)
	o := p.register("Käsekontor", "ada@example.org")
	p.verify(o)
	asked, err := p.operator().CreateTenantAPIKey(t.Context(), p.tenant(o), v2.CreateAPIKeyRequest{Name: "ops", Scopes: []v2.Scope{v2.ScopeVaultRead}})
	p.must(asked, err)
	ops := p.newClient(client.WithAPIKey(asked.ApiKey))
	if _, err := ops.ListCredentials(t.Context(), nil); err == nil {
		t.Fatal("the key works before its approval")
	}
	b := p.tab()
	b.signIn(o, strings.TrimPrefix(p.link(o.email, "/settings/api-keys"), p.url))
	b.sees("waits for approval")
	b.accessible()
	b.press("Approve ops")
	b.sees("It never expires. You answer for it from now on")
	b.press("Approve")
	b.sees("The key is approved")
	b.gone("waits for approval")
	p.must(ops.ListCredentials(t.Context(), nil))
}
