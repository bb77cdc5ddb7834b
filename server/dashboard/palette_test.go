package dashboard_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp/kb"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// shortcut presses Ctrl-K.
func (b *tab) shortcut() {
	b.t.Helper()
	for _, kind := range []input.DispatchKeyEventType{input.DispatchKeyEventTypeRawKeyDown, input.DispatchKeyEventTypeKeyUp} {
		ask(b, input.DispatchKeyEvent, input.DispatchKeyEventParams{Type: kind, Key: "k", Code: "KeyK", WindowsVirtualKeyCode: 75, Modifiers: 2})
	}
}

const palette = `document.querySelector('dialog[open] [role=combobox]')`

// chosen returns what a screen reader says is chosen in the palette.
func (b *tab) chosen() string {
	b.t.Helper()
	return value[string](b, palette+`.getAttribute('aria-activedescendant') === null ? '' : document.getElementById(`+palette+`.getAttribute('aria-activedescendant')).textContent.trim().replace(/\s+/g, ' ')`)
}

// Everything is found and opened by the keyboard alone.
func TestThePaletteGoesEverywhereByKeyboard(t *testing.T) {
	p := start(t)
	o := p.register("Palette Ltd", "pia@example.org")
	id := p.seal(o, "billing/stripe", "token", "token", "t", 30)
	for i := range 12 {
		p.seal(o, fmt.Sprint("queue/worker ", i), "token", "token", "t", 30)
	}
	b := p.tab()
	b.signIn(o, "/settings/profile")
	b.settled()
	if slices.ContainsFunc(b.requested(), func(r string) bool { return strings.Contains(r, "palette") }) {
		t.Error("the palette is fetched before somebody asks for it")
	}
	b.shortcut()
	b.until(palette + ` === document.activeElement`)
	if role, name := b.focused(); role != "combobox" || name != "Page, action or credential" {
		t.Errorf("the focus is at the %s %q", role, name)
	}
	b.accessible()
	if got := b.chosen(); got != "New credential, Action" {
		t.Errorf("first chosen: %q", got)
	}
	b.keys(kb.ArrowDown, kb.ArrowDown)
	if got := b.chosen(); got != "Invite member, Action" {
		t.Errorf("two further: %q", got)
	}
	b.keys(kb.ArrowUp, kb.ArrowUp, kb.ArrowUp)
	b.until(`document.querySelector('[aria-selected=true]').matches(':last-child')`) // round to the end
	b.keys(kb.Escape)
	b.until(`!document.querySelector('dialog[open]')`)

	visit := func(text, title string) {
		t.Helper()
		b.shortcut()
		b.until(palette + ` === document.activeElement`)
		b.keys(strings.Split(text, "")...)
		b.keys(kb.Enter)
		b.titled(title)
		b.until(`!document.querySelector('dialog[open]') && document.activeElement.matches('h1')`)
	}
	visit("audit", "Audit log")
	visit("new cred", "New credential")

	// Credentials are looked for after two characters and a pause, and one look is one entry.
	b.shortcut()
	b.until(palette + ` === document.activeElement`)
	from := len(b.requested())
	b.keys("s")
	value[bool](b, `new Promise(done => setTimeout(() => done(true), 600))`)
	if asked := b.calls(from); len(asked) != 0 {
		t.Errorf("after one character it asked for %q", asked)
	}
	b.keys("t", "r", "i", "p", "e")
	b.until(`document.querySelector('[role=option]')?.textContent.trim().replace(/\s+/g, ' ') === 'billing/stripe, Credential'`)
	if asked := b.calls(from); !slices.Equal(asked, []string{"GET /api/v2/vault/list?q=stripe&limit=8"}) {
		t.Errorf("it asked for %q", asked)
	}
	b.accessible()
	b.keys(kb.Enter)
	b.titled("billing/stripe")
	if at := b.path(); at != "/vault/"+id {
		t.Error(at)
	}
	b.settled()
	b.press("Search")
	b.until(palette + ` === document.activeElement`)
	b.fill("Page, action or credential", "worker")
	b.until(`document.querySelectorAll('[role=option]').length === 8`)
	b.fill("Page, action or credential", "nothing has this")
	b.sees("Nothing found")
	if got := b.chosen(); got != "" {
		t.Errorf("of nothing %q is chosen", got)
	}
	b.keys(kb.Enter) // does nothing
	stop := b.answer("GET", "/api/v2/vault/list*", reply{status: 503, body: `{"success": false, "error": {"code": 503, "message": "x", "request_id": "req_x", "timestamp": "2026-11-21T10:00:00Z"}}`})
	b.fill("Page, action or credential", "audit")
	b.sees("Credentials could not be looked for")
	stop()
	b.press("Close")
	b.until(`!document.querySelector('dialog[open]') && document.activeElement.matches('.finder')`)

	// What the page offers is there too, and the focus comes back to its button.
	b.titled("billing/stripe")
	b.shortcut()
	b.until(palette + ` === document.activeElement`)
	b.keys(strings.Split("rename", "")...)
	if got := b.chosen(); got != "Rename, On this page" {
		t.Errorf("to rename %q is chosen", got)
	}
	b.keys(kb.Enter)
	b.until(`document.activeElement.labels?.[0].innerText === 'New name'`)
	b.keys(kb.Escape)
	b.until(`!document.querySelector('dialog[open]') && document.activeElement.innerText === 'Rename'`)

	// In another dialog it stays shut.
	b.press("Delete")
	b.sees("Delete this credential?")
	b.shortcut()
	value[bool](b, `new Promise(done => setTimeout(() => done(true), 200))`)
	if n := value[int](b, `document.querySelectorAll('dialog[open]').length`); n != 1 {
		t.Errorf("%d dialogs", n)
	}
	b.keys(kb.Escape)
}

// Dialogs open from any page, and the address asks for them once.
func TestThePaletteOpensDialogs(t *testing.T) {
	p := start(t)
	o := p.register("Dialogs", "dora@example.org")
	p.verify(o)
	p.must(o.CreatePolicy(t.Context(), v2.PolicyRequest{Name: "all", Rules: []v2.PolicyRuleRequest{{Path: "**", Verbs: []v2.PathVerb{v2.PathVerbRead}}}}))
	b := p.tab()
	b.signIn(o, "/")
	do := func(action string) {
		t.Helper()
		b.shortcut()
		b.until(palette + ` === document.activeElement`)
		b.fill("Page, action or credential", action)
		if got := b.chosen(); got != action+", Action" {
			t.Fatalf("for %q %q is chosen", action, got)
		}
		b.keys(kb.Enter)
	}
	for _, d := range []struct{ action, title, page string }{
		{"Create an API key", "Create an API key", "/settings/api-keys"}, {"Invite member", "Invite member", "/settings/members"},
		{"Create a policy", "Create a policy", "/settings/policies"}, {"Bind policies", "Bind policies", "/settings/policies"},
		{"Create a group", "Create a group", "/settings/groups"}, {"Create a webhook", "Create a webhook", "/settings/webhooks"},
		{"Create a rule of the history", "Create a rule", "/settings/rules"}, {"Create a named key", "Create a key", "/keys"},
		{"Export entries", "Export entries", "/audit"}, {"Record a review", "Review: Audit log", "/audit"},
	} {
		do(d.action)
		b.until(fmt.Sprintf(`document.querySelector('dialog[open] h2')?.innerText === %s && document.querySelector('dialog[open]').contains(document.activeElement)`, quoted(d.title)))
		b.until(fmt.Sprintf(`location.pathname + location.search === %s`, quoted(d.page)))
		b.settled()
		b.keys(kb.Escape)
		b.until(`!document.querySelector('dialog[open]')`)
	}
	b.open("/settings/api-keys?do=create")
	b.sees("Which program it is for")
	b.open(b.path())
	b.settled()
	b.gone("Which program it is for")

	do("Dark colours")
	b.until(`document.documentElement.dataset.theme === 'dark' && document.querySelector('.themes [aria-label="Dark colours"]').ariaPressed === 'true'`)
	do("Sign out")
	b.titled("Sign in")
}

// Somebody with less is offered less, and the vault is not asked for who may not read it.
func TestThePaletteOffersWhatOneMayDo(t *testing.T) {
	p := start(t)
	o := p.register("Roles Ltd", "rosa@example.org")
	p.verify(o)
	p.seal(o, "audit-canary", "token", "token", "t", 30)
	p.must(o.InviteMember(t.Context(), v2.InviteRequest{Email: "aki@example.org", Role: v2.RoleAuditor}))
	_, token, _ := strings.Cut(p.link("aki@example.org", "/join"), "#token=")
	auditor := owner{p.newClient(), "aki@example.org", "another quite long password"}
	p.must(auditor.AcceptInvitation(t.Context(), v2.AcceptInvitationRequest{Token: token, Password: auditor.password}))
	b := p.tab()
	b.size(390, 844)
	b.signIn(auditor, "/audit")
	b.settled()
	b.press("Search")
	b.until(palette + ` === document.activeElement`)
	b.narrow()
	b.accessible()
	all := value[string](b, `[...document.querySelectorAll('[role=option]')].map(o => o.textContent.trim().replace(/\s+/g, ' ')).join('\n')`)
	for _, not := range []string{"New credential", "Create an API key", "Invite member", "Create a named key", "Create a policy", "Seal in the browser", "Vault", "Members"} {
		if strings.Contains(all, not) {
			t.Errorf("an auditor is offered %s", not)
		}
	}
	if !strings.Contains(all, "Audit log, Page") || !strings.Contains(all, "Denied attempts, Action") || !strings.Contains(all, "Sign out, Action") {
		t.Errorf("an auditor is offered %q", all)
	}
	b.open("/settings/members?do=invite") // the address opens no dialog either
	b.settled()
	b.gone("E-mail address")
	b.open("/audit")
	b.settled()
	b.press("Search")
	from := len(b.requested())
	b.fill("Page, action or credential", "audit")
	value[bool](b, `new Promise(done => setTimeout(() => done(true), 600))`)
	if asked := b.calls(from); len(asked) != 0 {
		t.Errorf("it asked for %q", asked)
	}
	b.script(`[...document.querySelectorAll('[role=option]')].find(o => o.textContent === 'Audit log, Page').click()`)
	b.until(`!document.querySelector('dialog[open]')`)
}
