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
	visit("token", "API keys") // an API key is one
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
	from := len(b.requested())
	b.press("Search")
	b.until(palette + ` === document.activeElement`)
	b.narrow()
	b.accessible()
	all := value[string](b, `[...document.querySelectorAll('[role=option]')].map(o => o.textContent.trim().replace(/\s+/g, ' ')).join('\n')`)
	for _, not := range []string{"New credential", "Create an API key", "Invite member", "Vault", "Members"} {
		if strings.Contains(all, not) {
			t.Errorf("an auditor is offered %s", not)
		}
	}
	if !strings.Contains(all, "Audit log, Page") || !strings.Contains(all, "Denied attempts, Action") {
		t.Errorf("an auditor is offered %q", all)
	}
	b.fill("Page, action or credential", "audit")
	value[bool](b, `new Promise(done => setTimeout(() => done(true), 600))`)
	if asked := b.calls(from); len(asked) != 0 {
		t.Errorf("it asked for %q", asked)
	}
	b.script(`[...document.querySelectorAll('[role=option]')].find(o => o.textContent === 'Audit log, Page').click()`)
	b.until(`!document.querySelector('dialog[open]')`)
}
