package dashboard_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// join makes a user of the owner's organisation, with a client that acts as it.
func (p *program) join(o owner, email string, role v2.Role) owner {
	p.t.Helper()
	ctx := p.t.Context()
	p.must(o.InviteMember(ctx, v2.InviteRequest{Email: email, Role: role}))
	_, token, _ := strings.Cut(p.link(email, "/join"), "#token=")
	m := owner{p.newClient(), email, "another quite long password"}
	p.must(m.AcceptInvitation(ctx, v2.AcceptInvitationRequest{Token: token, Password: m.password}))
	p.must(m.Login(ctx, v2.LoginRequest{Email: email, Password: m.password}))
	return m
}

// A policy is made, tested, bound and narrowed, and what the page says is what the service does.
func TestPoliciesAreMadeBoundAndTested(t *testing.T) {
	p := start(t)
	o := p.register("Policies", "petra@example.org")
	p.verify(o)
	member := p.join(o, "bob@example.org", v2.RoleMember)
	for _, name := range []string{"shop/prod/db", "shop/test/db", "office/printer"} {
		p.seal(o, name, "database", "password", "pine", 30)
	}
	b := p.tab()
	b.signIn(o, "/settings/policies")
	b.sees("No policies yet")
	b.sees("Nobody has a policy")

	b.press("Create a policy")
	b.fill("Name", "shop")
	b.fill("Path", "shop/**")
	b.accessible()
	b.press("Create")
	b.sees("The policy is created")
	b.sees("shop/**")

	b.choose("Who is it", "bob@example.org")
	b.fill("On the path", "office/printer")
	b.press("Check")
	b.sees("No policy limits it")

	b.press("Bind policies")
	b.choose("Who", "bob@example.org")
	b.click("checkbox", "shop")
	b.press("Who would lose what")
	b.sees("What was done since")
	b.press("Bind")
	b.sees("The policies are bound")
	list, err := member.ListCredentials(t.Context(), nil)
	if err != nil || len(list.Credentials) != 2 {
		t.Errorf("with the policy bob sees %d credentials (%v), want the 2 of the shop", len(list.Credentials), err)
	}
	b.press("Check") // what was entered stays
	b.sees("No policy that is bound allows this verb on this path.")
	b.fill("On the path", "shop/prod/db")
	b.gone("No policy that is bound")
	b.press("Check")
	b.sees("A policy that is bound allows it.")

	// What bob did lately is what bob would lose.
	for _, c := range list.Credentials {
		p.must(member.UnsealCredential(t.Context(), c.CredentialId))
	}
	b.press("Change shop")
	b.fill("Path", "shop/prod/*")
	b.press("Who would lose what")
	b.sees("1 loss")
	b.sees("read shop/test/db")
	b.accessible()
	b.fill("Path", "shop/*/db")
	b.gone("1 loss") // it was said of another change
	b.press("Who would lose what")
	b.sees("What was done since")
	b.fill("Path", "shop/prod/*")
	b.press("Change")
	b.sees("The policy is changed")
	if list, err = member.ListCredentials(t.Context(), nil); err != nil || len(list.Credentials) != 1 {
		t.Errorf("with the narrower policy bob sees %d credentials (%v), want 1", len(list.Credentials), err)
	}
	b.press("Delete shop")
	b.sees("cannot be deleted as long as somebody has it")
	b.press("Close")
	b.press("Unbind bob@example.org")
	b.sees("may do on all paths")
	b.press("Unbind")
	b.sees("The binding is gone")
	if list, err = member.ListCredentials(t.Context(), nil); err != nil || len(list.Credentials) != 3 {
		t.Errorf("without a policy bob sees %d credentials (%v), want 3", len(list.Credentials), err)
	}
	b.press("Delete shop")
	b.press("Delete")
	b.sees("No policies yet")
	b.accessible()
}

// Policies can be made and bound without a mouse, and a rule that goes leaves the focus in the dialog.
func TestPoliciesByTheKeyboard(t *testing.T) {
	p := start(t)
	o := p.register("Policies", "petra@example.org")
	p.verify(o)
	b := p.tab()
	b.signIn(o, "/settings/policies")
	b.sees("No policies yet")
	b.activate("button", "Create a policy")
	b.enter("textbox", "Name", "by keyboard")
	b.enter("textbox", "Path", "shop/**")
	b.tabTo("checkbox", "write")
	b.keys(" ")
	b.activate("button", "Add a rule")
	b.until(`document.activeElement.closest('[aria-label="Rule 2"]') && document.activeElement.matches('input')`)
	b.activate("button", "Remove rule 2")
	b.until(`document.activeElement.closest('[aria-label="Rule 1"]')`)
	b.activate("button", "Create")
	b.sees("The policy is created")
	b.sees("list, read, write")
}

// A webhook is made, and what becomes of its deliveries is seen: a receiver whose certificate nobody knows gets nothing.
func TestWebhooksAndTheirDeliveries(t *testing.T) {
	receiver := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(receiver.Close)
	host := strings.TrimPrefix(receiver.URL, "https://")
	p := start(t)
	o := p.register("Webhooks", "willy@example.org")
	b := p.tab()
	b.signIn(o, "/settings/webhooks")
	b.sees("No webhooks yet")
	b.press("Create a webhook")
	b.fill("URL", "http://"+host)
	b.press("Create")
	b.sees("Check what you entered.")
	b.fill("URL", receiver.URL+"/token-of-the-path")
	b.fill("Description (optional)", "on call")
	b.press("Create")
	b.sees("It is shown this once")
	secret := value[string](b, `document.querySelector('[data-testid=webhook-secret]').textContent`)
	if !strings.HasPrefix(secret, "whsec_") {
		t.Errorf("the secret is %q", secret)
	}
	b.accessible()
	b.press("I have stored it")
	b.gone(secret)
	if left := value[string](b, `document.documentElement.outerHTML`); strings.Contains(left, secret) || strings.Contains(left, "token-of-the-path") {
		t.Error("the page still has the secret or the path of the URL")
	}
	b.press("Send a test event to " + host)
	b.sees("The test event is on its way")
	b.follow("Deliveries to " + host)
	b.sees("Deliveries to " + host)
	b.until(loadsAgain(`document.querySelector('main').innerText.includes('The certificate or the version of TLS is not accepted.')`))
	b.sees("waiting")
	b.until(loadsAgain(`document.querySelector('td[data-title="Next attempt"] time') && document.querySelector('td[data-title="Attempts"]').innerText !== '0'`))
	b.accessible()

	// It becomes a dead letter by age, which is sent again by hand.
	p.advance(77 * time.Hour)
	b.until(loadsAgain(`document.querySelector('main').innerText.includes('dead letter')`))
	all, err := o.ListWebhooks(t.Context())
	if err != nil || len(all.Webhooks) != 1 {
		t.Fatal(all, err)
	}
	sent, err := o.ListDeliveries(t.Context(), all.Webhooks[0].WebhookId)
	if err != nil || len(sent.Deliveries) != 1 || sent.Deliveries[0].State != v2.DeliveryStateDead {
		t.Fatal(sent, err)
	}
	b.press("Send again: " + sent.Deliveries[0].DeliveryId)
	b.sees("The event is sent again")
	b.gone("dead letter")
	b.press("Delete the webhook to " + host)
	b.sees("is told nothing any more")
	b.press("Delete")
	b.sees("No webhooks yet")
	if all, err = o.ListWebhooks(t.Context()); err != nil || len(all.Webhooks) != 0 {
		t.Error(all, err)
	}
}

// loadsAgain is a condition that comes true only after the list was loaded again.
func loadsAgain(condition string) string {
	return `(` + condition + `) || ([...document.querySelectorAll('main button')].find(x => x.innerText === 'Load again' && !document.querySelector('[aria-busy=true]'))?.click(), false)`
}

// Who does not administer the organisation sees nothing of its administration, and no link to it.
func TestSettingsOfTheOrganisationAreForAdmins(t *testing.T) {
	p := start(t)
	o := p.register("Members", "mia@example.org")
	p.verify(o)
	member := p.join(o, "bob@example.org", v2.RoleMember)
	b := p.tab()
	b.signIn(member, "/settings")
	b.sees("What you may do")
	if links := value[[]string](b, `[...document.querySelectorAll('nav[aria-label=Settings] a')].map(a => a.pathname)`); strings.Join(links, " ") != "/settings/profile /settings/password /settings/sessions /settings/plan" {
		t.Errorf("the settings of a member lead to %q", links)
	}
	before := len(b.requested())
	for _, part := range []string{"api-keys", "members", "policies", "groups", "webhooks", "rules"} {
		b.open("/settings/" + part)
		b.sees("Your role does not allow this")
	}
	for _, asked := range b.requested()[before:] {
		if strings.Contains(asked, "/api/v2/") && !strings.HasSuffix(asked, "/auth/me") {
			t.Errorf("the page of a member asked for %s", asked)
		}
	}
}

// Sessions are told apart by device and address, and the plan has its numbers.
func TestSessionsAndThePlanAreDescribed(t *testing.T) {
	p := start(t)
	o := p.register("Sessions", "sven@example.org")
	b := p.tab()
	b.signIn(o, "/settings/sessions")
	b.sees("Chrome on Linux")
	b.sees("127.0.0.1")
	b.sees("latticekeep-go")
	b.accessible()
	b.press("Sign out all others")
	b.sees("All other sessions are signed out")
	b.gone("latticekeep-go")
	b.open("/settings/plan")
	b.sees("1,000 requests a minute as for everybody")
	b.sees("5,000 requests a minute as for everybody")
	limit := 1234
	p.must(p.operator().SetTenantLimits(t.Context(), p.tenantOf(b), v2.LimitTenantRequest{V2: &limit}))
	b.open("/settings/plan")
	b.sees("1,234 requests a minute set for your organisation")
	b.sees("1,000 requests a minute as for everybody")
}

// tenantOf returns the id of the organisation that a tab is signed in to.
func (p *program) tenantOf(b *tab) string {
	return value[string](b, `fetch('/api/v2/auth/me').then(r => r.json()).then(a => a.tenant.tenant_id)`)
}

// A group gives its members what its policies allow, and takes it away again.
func TestGroupsAddPaths(t *testing.T) {
	p := start(t)
	o := p.register("Groups", "greta@example.org")
	p.verify(o)
	member := p.join(o, "bob@example.org", v2.RoleLimited)
	credential := p.seal(o, "shop/db", "database", "password", "pine", 30)
	ctx := t.Context()
	policy, err := o.CreatePolicy(ctx, v2.PolicyRequest{Name: "shop", Rules: []v2.PolicyRuleRequest{{Path: "shop/**", Verbs: []v2.PathVerb{v2.PathVerbList, v2.PathVerbRead}}}})
	if err != nil {
		t.Fatal(err)
	}
	b := p.tab()
	b.signIn(o, "/settings/groups")
	b.sees("No groups yet")
	b.press("Create a group")
	b.fill("Name", "shop developers")
	b.press("Create")
	b.sees("The group is created")
	groups, err := o.ListGroups(ctx)
	if err != nil || len(groups.Groups) != 1 {
		t.Fatal(groups, err)
	}
	p.must(o.BindPolicies(ctx, groups.Groups[0].GroupId, v2.BindingRequest{Policies: []string{policy.Policy.PolicyId}}))
	b.press("Members of shop developers")
	b.choose("Who", "bob@example.org")
	b.press("Add")
	b.sees("The member is added")
	b.sees("1 member")
	b.choose("Kind", "ServiceAccount")
	b.fill("Namespace", "shop")
	b.fill("ServiceAccount", "app")
	b.press("Add")
	b.sees("2 members")
	b.sees("shop/app")
	b.accessible()
	p.must(member.UnsealCredential(ctx, credential))
	b.press("Remove bob@example.org")
	b.press("Who would lose what")
	b.sees("1 loss")
	b.sees("read shop/db")
	b.accessible()
	b.press("Remove the member")
	b.sees("The member is removed")
	if _, err := member.UnsealCredential(ctx, credential); !errors.Is(err, client.ErrForbidden) {
		t.Errorf("outside the group: %v", err)
	}
	b.sees("shop developers: 1 member") // the dialog shows who is left, and is another one
	b.press("Close")
	b.press("Rename shop developers")
	b.fill("Name", "shop")
	b.press("Rename")
	b.sees("The group is renamed")
	b.press("Delete shop")
	b.sees("The 1 member of shop loses")
	b.press("Delete")
	b.sees("No groups yet")
	b.accessible()
}

// API keys have their policies and their makers by name, and many of them are found by text.
func TestAPIKeysAreFound(t *testing.T) {
	p := start(t)
	o := p.register("Keys", "kim@example.org")
	p.verify(o)
	ctx := t.Context()
	policy, err := o.CreatePolicy(ctx, v2.PolicyRequest{Name: "printers only", Rules: []v2.PolicyRuleRequest{{Path: "office/**", Verbs: []v2.PathVerb{v2.PathVerbRead}}}})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 12 {
		k, err := o.CreateAPIKey(ctx, v2.CreateAPIKeyRequest{Name: fmt.Sprintf("worker-%02d", i), Scopes: []v2.Scope{v2.ScopeVaultRead}})
		if err != nil {
			t.Fatal(err)
		}
		if i == 7 {
			p.must(o.BindPolicies(ctx, k.KeyId, v2.BindingRequest{Policies: []string{policy.Policy.PolicyId}}))
		}
	}
	b := p.tab()
	b.signIn(o, "/settings/api-keys")
	b.sees("worker-11")
	b.sees("by kim@example.org")
	b.fill("Find an API key", "PRINTERS")
	b.gone("worker-11")
	b.sees("worker-07")
	b.sees("printers only")
	b.accessible()
	b.fill("Find an API key", "nothing like this")
	b.sees("None of 12 lines contains this text.")
	b.fill("Find an API key", "worker-03")
	b.press("Revoke worker-03")
	b.press("Revoke")
	b.sees("The key is revoked")
}

// Rules of the organisation are made, changed and taken away.
func TestRulesOfTheOrganisation(t *testing.T) {
	p := start(t)
	o := p.register("Rules", "rita@example.org")
	p.verify(o)
	ctx := t.Context()
	id := p.seal(o, "shop/db", "database", "password", "one", 30)
	b := p.tab()
	b.signIn(o, "/settings/rules")
	b.sees("No rules yet")
	b.press("Create a rule")
	b.fill("Path", "shop/**")
	b.fill("Earlier versions kept", "2")
	b.accessible()
	b.press("Create")
	b.sees("The rule is created")
	p.must(o.ReplaceCredential(ctx, id, v2.ReplaceRequest{Values: map[string]string{"password": "two"}}))
	b.press("Change the rule of shop/**")
	b.fill("Earlier versions kept", "0")
	b.sees("Versions beyond this number are erased at once.")
	b.press("Change")
	b.sees("The rule is changed")
	b.press("Remove the rule of shop/**")
	b.press("Remove")
	b.sees("No rules yet")

	b.fill("Add a path", "ci/**")
	b.press("Add")
	b.sees("The path is added")
	b.fill("Days for which past names are kept", "30")
	b.sees("are told no more at once")
	b.press("Save")
	b.sees("The setting is saved")
	settings, err := o.GetSettings(ctx)
	if err != nil || len(settings.NeverExpiresPaths) != 1 || settings.NeverExpiresPaths[0] != "ci/**" || settings.NamesKeptDays != 30 {
		t.Errorf("%+v, %v", settings, err)
	}
	b.accessible()
	b.press("Take away ci/**")
	b.sees("None: every credential expires.")
}

// On a phone the parts of the settings are one row, in which the one that is open is in sight; an address is not broken within its words.
func TestTheSettingsFitAPhone(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("Narrow", "marianne.lindqvist@nordwind.example")
	p.verify(o)
	p.must(o.CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "forever", Scopes: []v2.Scope{v2.ScopeVaultRead}}))
	b := p.tab()
	b.signIn(o, "/settings/api-keys")
	lines := value[[]string](b, `(() => {
		const name = document.querySelector('td.words bdi'), range = document.createRange(), lines = [];
		for (const text of name.childNodes) if (text.data) { range.selectNodeContents(text); lines.push(text.data + ' ' + range.getClientRects().length); }
		return lines;
	})()`)
	if !slices.Equal(lines, []string{"marianne.lindqvist@ 1", "nordwind.example 1"}) {
		t.Errorf("the address has the lines %q", lines)
	}
	b.size(390, 844)
	for _, part := range []string{"api-keys", "plan"} {
		b.open("/settings/" + part)
		b.settled()
		b.until(`(() => {
			const nav = document.querySelector('.tabs').getBoundingClientRect(), open = document.querySelector('.tabs [aria-current]').getBoundingClientRect();
			return open.left >= nav.left && open.right <= nav.right && nav.height < 1.5 * open.height;
		})()`)
		b.narrow()
	}
}
