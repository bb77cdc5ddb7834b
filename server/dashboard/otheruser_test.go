package dashboard_test

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"testing"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
)

// become signs somebody else in behind the back of the page.
func (b *tab) become(o owner) {
	b.t.Helper()
	login := fmt.Sprintf(`fetch('/api/v2/auth/login', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify({email: %s, password: %s})}).then(r => r.status)`,
		quoted(o.email), quoted(o.password))
	if status := value[int](b, login); status != http.StatusOK {
		b.t.Fatalf("signing in: %d", status)
	}
}

// hasNothing fails the test if somebody has a credential.
func (o owner) hasNothing(t *testing.T) {
	t.Helper()
	if list, err := o.ListCredentials(t.Context(), nil); err != nil || len(list.Credentials) != 0 {
		t.Error("what one user began went out in the name of another:", list, err)
	}
}

// Whatever way somebody else comes to be signed in, nothing of who was there before is sent as theirs, or stays on the screen.
func TestNothingIsDoneInTheNameOfSomebodyElse(t *testing.T) {
	p := start(t)
	first, second := p.register("First & Co", "first@example.org"), p.register("Second & Co", "second@example.org")
	begin := func() *tab {
		b := p.tab()
		b.signIn(first, "/vault/new")
		b.fillCredential("for the first", "key", "value")
		return b
	}
	after := func(b *tab) {
		t.Helper()
		b.titled("Overview")
		b.sees("Second & Co")
		b.gone("First & Co")
		second.hasNothing(t)
		first.hasNothing(t)
		sent := slices.DeleteFunc(b.requested(), func(r string) bool { return r != "POST "+p.url+"/api/v2/vault/seal" })
		if len(sent) > 1 { // whether it arrives before the page is left is chance
			t.Errorf("what was begun was sent %d times", len(sent))
		}
	}

	b := begin() // in the dialog
	p.endSessions(first)
	b.press("Create")
	b.sees("Your session has ended")
	b.script(`document.querySelector('dialog input[readonly]').readOnly = false`)
	b.fill("E-mail address", second.email)
	b.fill("Password", second.password)
	b.press("Sign in")
	after(b)

	b = begin() // elsewhere, while the page asks whose session it is
	p.endSessions(first)
	b.become(second)
	stop := b.answer(http.MethodPost, "/api/v2/vault/seal", refusal(http.StatusUnauthorized, "of before"))
	b.press("Create")
	b.titled("Overview")
	stop()
	b.open("/")
	after(b)

	b = begin() // in another tab
	b.become(second)
	b.script(`new BroadcastChannel('latticekeep-user').postMessage('usr_of_another_tab')`)
	after(b)
}

// Signing out in one tab empties the others too.
func TestSigningOutIsForAllTabs(t *testing.T) {
	p := start(t)
	o := p.register("Tabs", "tara@example.org")
	b := p.tab()
	b.signIn(o, "/vault")
	b.script(`new BroadcastChannel('latticekeep-user').onmessage = e => { document.cookie = 'heard=' + e.data }`)
	b.press("Sign out")
	b.titled("Sign in")
	b.until(`document.cookie.includes('heard=null')`)

	b = p.tab()
	b.signIn(o, "/vault")
	b.script(`(() => { window.stale = true; new BroadcastChannel('latticekeep-user').postMessage(null) })()`)
	b.until(`window.stale === undefined`)
}

// The token of a mailed link is taken out of the address also where the page is open already.
func TestATokenDoesNotStayInTheAddress(t *testing.T) {
	b := start(t).tab()
	for path, button := range map[string]string{"/verify": "Verify my address", "/reset": "Change my password", "/join": "Join"} {
		b.open(path)
		b.gone(button)
		b.script(`location.hash = '#token=of-a-test'`)
		b.sees(button)
		b.until(`location.hash === ''`)
	}
}

// An address to go on to after signing in leads to a page of the dashboard, whatever it is.
func TestTheWayBackStaysHere(t *testing.T) {
	p := start(t)
	o := p.register("Ways", "wanda@example.org")
	for next, sees := range map[string]string{
		"/.//elsewhere.example/x": "", "//elsewhere.example": "", "/\\elsewhere.example": "", "javascript:alert(1)": "", "/%2e//elsewhere.example": "",
		"/settings/constructor": "There is no such part of the settings", "/settings/__proto__": "There is no such part of the settings",
	} {
		b := p.tab()
		b.open("/sign-in?next=" + url.QueryEscape(next))
		b.fill("E-mail address", o.email)
		b.fill("Password", o.password)
		b.press("Sign in")
		if sees == "" {
			b.titled("Overview")
			continue
		}
		b.sees(sees)
	}
}

// An entry that holds is not one that was asked for.
func TestAnotherEntryThanTheOneAskedForIsNotShown(t *testing.T) {
	p := start(t)
	o := p.register("Other", "otto@example.org")
	b := p.tab()
	b.signIn(o, "/")
	entry := value[string](b, `fetch('/api/v2/audit/logs?limit=1').then(r => r.json()).then(a => JSON.stringify(a.entries[0]))`)
	defer b.answer(http.MethodGet, "/api/v2/audit/entries/4711", reply{status: http.StatusOK, body: `{"success":true,"entry":` + entry + `}`})()
	b.open("/audit/4711")
	b.sees("another entry than the one")
	b.gone("What can be proven")
}

// That an entry follows one of another organisation says nothing of what was before it in its own.
func TestALinkToAnotherOrganisationsEntryProvesNothing(t *testing.T) {
	h := newHistory(t)
	h.record(ownTenant, audit.CredentialSealed, nil)
	h.record(foreignTenant, audit.CredentialSealed, nil)
	h.record(ownTenant, audit.CredentialSealed, nil)
	own, foreign := h.entries(ownTenant), h.entries(foreignTenant)
	byAge := func(a, b audit.Entry) int { return int(b.Sequence) - int(a.Sequence) }
	slices.SortFunc(own, byAge)
	slices.SortFunc(foreign, byAge)
	newest, before := own[slices.IndexFunc(own, func(e audit.Entry) bool { return e.EventType == audit.CredentialSealed })], foreign[slices.IndexFunc(foreign, func(e audit.Entry) bool { return e.EventType == audit.CredentialSealed })]
	if newest.Sequence != before.Sequence+1 {
		t.Fatalf("entry %d is not before %d", before.Sequence, newest.Sequence)
	}
	type given struct {
		Entry     audit.Entry       `json:"entry"`
		Previous  audit.Entry       `json:"previous"`
		PublicKey v2.AuditPublicKey `json:"publicKey"`
	}
	previous := own[slices.IndexFunc(own, func(e audit.Entry) bool { return e.TenantSequence == newest.TenantSequence-1 })]
	got := newBench(t).call("../lib/log.js", `async (m, a) => {
		const code = await import(document.querySelector('link').getAttribute('href').replace('/icon.svg', '/crypto/log.js'));
		const checks = await m.checkEntry({code, publicKey: a.publicKey, checkpoint: {sequence: 0}}, a.entry, a.previous);
		return checks.find(c => c.part === 'link').kind;
	}`, given{newest, previous, h.publicKey()}, given{newest, before, h.publicKey()})
	for i, want := range []string{`"good"`, `"bad"`} {
		if string(got[i].Value) != want {
			t.Errorf("link %d is %s (%s), want %s", i, got[i].Value, got[i].Refused, want)
		}
	}
}
