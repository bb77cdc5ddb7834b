package dashboard_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// hands do what a user does, and count it: each press of a button, link, box or key and each choice is a step. What is typed is none.
type hands struct {
	*tab
	steps int
}

func (h *hands) press(name string)  { h.t.Helper(); h.steps++; h.tab.press(name) }
func (h *hands) follow(name string) { h.t.Helper(); h.steps++; h.tab.follow(name) }
func (h *hands) click(role, name string) {
	h.t.Helper()
	h.steps++
	h.tab.click(role, name)
}

func (h *hands) choose(label, option string) {
	h.t.Helper()
	h.steps++
	h.tab.choose(label, option)
}

// find goes to a page or a credential by the palette: one key to open it, one to go.
func (h *hands) find(text, title string) {
	h.t.Helper()
	h.steps += 2
	h.shortcut()
	h.until(palette + ` === document.activeElement`)
	h.keys(strings.Split(text, "")...)
	h.until(`[...document.querySelectorAll('dialog[open] [role=option]')].some(o => o.getAttribute('aria-selected') === 'true' && o.textContent.includes(` + quoted(title) + `))`)
	h.keys(kb.Enter)
	h.titled(title)
}

// Ten things that people come for, each from the overview, in the steps that docs/evidence/dashboard.md says.
func TestTenTasksTakeFewSteps(t *testing.T) {
	p := start(t)
	o := p.register("Ten tasks", "tim@example.org")
	p.verify(o)
	p.must(o.PutHistoryRule(t.Context(), v2.HistoryRuleRequest{Path: "**", VersionsKept: 5}))
	db := p.seal(o, "shop/prod/db", "database", "password", "one", 20)
	p.must(o.ReplaceCredential(t.Context(), db, v2.ReplaceRequest{Values: map[string]string{"password": "two"}}))
	p.must(o.UnsealCredential(t.Context(), db))
	p.must(o.CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "old deployer", Scopes: []v2.Scope{v2.ScopeVaultRead}}))
	p.must(o.InviteMember(t.Context(), v2.InviteRequest{Email: "zoe@example.org", Role: v2.RoleLimited}))
	_, token, _ := strings.Cut(p.link("zoe@example.org", "/join"), "#token=")
	p.must(p.newClient().AcceptInvitation(t.Context(), v2.AcceptInvitationRequest{Token: token, Password: o.password}))
	log, err := o.QueryAuditLog(t.Context(), &v2.QueryAuditLogParams{ResourceId: &db})
	p.must(log, err)
	entry := log.Entries[len(log.Entries)-1].Sequence

	b := p.tab()
	b.signIn(o, "/")
	for _, task := range []struct {
		what  string
		steps int
		do    func(h *hands)
	}{
		{"find who has read a credential", 3, func(h *hands) {
			h.find("shop/prod/db", "shop/prod/db")
			h.press("Look it up")
			h.sees("tim@example.org")
		}},
		{"give somebody read on one path", 10, func(h *hands) {
			h.find("policies", "Policies")
			h.press("Create a policy")
			h.fill("Name", "the database")
			h.fill("Path", "shop/prod/db")
			h.press("Create")
			h.until(`!document.querySelector('dialog[open]')`)
			h.sees("the database")
			h.press("Bind policies")
			h.choose("Who", "zoe@example.org")
			h.click("checkbox", "the database")
			h.press("Who would lose what")
			h.press("Bind")
			h.gone("Bind policies to")
			h.sees("zoe@example.org")
			h.steps++ // the dialog is read
		}},
		{"prove an entry to an auditor", 4, func(h *hands) {
			h.find("audit", "Audit log")
			h.open(fmt.Sprint("/audit/", entry)) // the auditor has the number
			h.press("Verify in this browser")
			h.sees("This entry is what was written")
			h.press("Download")
		}},
		{"rotate a password", 5, func(h *hands) {
			h.find("shop/prod/db", "shop/prod/db")
			h.press("Edit values")
			h.fill("Value", "three")
			h.press("Review changes")
			h.press("Save as version 3")
			h.sees("Saved as version 3")
		}},
		{"undo a change", 4, func(h *hands) {
			h.find("shop/prod/db", "shop/prod/db")
			h.press("Restore version 2")
			h.press("Restore")
			h.sees("Restored as version 4")
		}},
		{"find what expires within 30 days", 2, func(h *hands) {
			h.follow("Vault")
			h.choose("Expires", "Within 30 days")
			h.sees("1 credential")
		}},
		{"find what nobody reads", 2, func(h *hands) {
			h.follow("Vault")
			h.choose("Sort by", "Longest unused")
			h.sees("1 credential")
		}},
		{"revoke an API key", 3, func(h *hands) {
			h.follow("Settings")
			h.press("Revoke old deployer")
			h.press("Revoke")
			h.sees("The key is revoked")
		}},
		{"hand out a report", 5, func(h *hands) {
			h.follow("Compliance")
			h.follow("Report for an auditor")
			h.settled()
			h.press("Preview")
			h.sees("What it will contain")
			h.settled()
			h.press("Make the PDF report")
			h.follow("Download PDF")
		}},
		{"export the denials", 4, func(h *hands) {
			h.follow("Audit")
			h.follow("Denied")
			h.press("Export")
			h.press("CSV")
		}},
	} {
		h := &hands{tab: b}
		h.open("/")
		h.settled()
		task.do(h)
		t.Logf("%s: %d steps", task.what, h.steps)
		if h.steps > task.steps {
			t.Errorf("%s takes %d steps, at most %d", task.what, h.steps, task.steps)
		}
	}
	b.takeErrors()
}
