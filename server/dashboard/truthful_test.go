package dashboard_test

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/security"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/api/openapi"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// A dialog is in the middle of the window, whatever it was opened from.
func TestDialogsAreInTheMiddle(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("Middle", "middle@example.org")
	id := p.seal(o, "db", "database", "password", "s3cret", 90)
	b := p.tab()
	b.signIn(o, "/")
	for _, from := range []struct{ page, press string }{
		{"/vault/" + id, "Delete"}, {"/vault/" + id, "Re-encrypt"}, {"/settings/api-keys", "Create an API key"}, {"/settings/members", "Invite member"}, {"/keys", "Create a key"},
	} {
		b.open(from.page)
		b.settled()
		b.press(from.press)
		b.until(`document.querySelector('dialog[open]')`)
		off := value[float64](b, `(() => { const r = document.querySelector('dialog[open]').getBoundingClientRect(); return Math.abs(r.top - (innerHeight - r.bottom)) + Math.abs(r.left - (innerWidth - r.right)); })()`)
		if off > 2 {
			t.Errorf("%s, %s: the dialog is %.0f pixels off the middle", from.page, from.press, off)
		}
	}
}

// A password that is wrong ends no session: one message says what happened.
func TestAWrongPasswordHasOneMessage(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("One message", "one@example.org")
	b := p.tab()
	b.open("/sign-in")
	b.titled("Sign in")
	b.fill("E-mail address", o.email)
	b.fill("Password", "not the password")
	b.press("Sign in")
	b.sees("Not signed in")
	if said := value[string](b, `document.querySelector('.trouble').innerText.trim()`); strings.Contains(said, "Signed out") || strings.Contains(said, "Server message") || strings.Contains(said, "\n") ||
		!strings.Contains(said, "do not belong together") {
		t.Errorf("the page says %q", said)
	}
	b.open("/verify#token=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")
	b.titled("Verify your address")
	b.press("Verify my address")
	b.sees("The link does not work")
	b.gone("Signed out")
}

// The dashboard speaks of TLS only where it was loaded with TLS.
func TestTLSIsNamedOnlyWhereThereIsTLS(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("Transport", "transport@example.org")
	to, err := url.Parse(p.url)
	if err != nil {
		t.Fatal(err)
	}
	encrypted := httptest.NewUnstartedServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(to)
		if r.In.Header.Get("Origin") != "" {
			r.Out.Header.Set("Origin", p.url) // the program knows itself by this URL
		}
	}})
	encrypted.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError) // of connections from before the certificate was accepted
	encrypted.StartTLS()
	t.Cleanup(encrypted.Close)
	for origin, named := range map[string]bool{p.url: false, encrypted.URL: true} {
		b := newTab(t, origin)
		ask(b, security.SetIgnoreCertificateErrors, security.SetIgnoreCertificateErrorsParams{Ignore: true})
		b.signIn(o, "/vault/new")
		for path, sentence := range map[string]string{"/vault/new": "The values go to the server", "/crypto": "It goes to the server"} {
			b.open(path)
			b.settled()
			b.sees(sentence)
			if text := value[string](b, `document.body.innerText`); strings.Contains(text, sentence+" over TLS") != named || !named && strings.Contains(text, "TLS") {
				t.Errorf("%s%s: TLS is named: %v", origin, path, !named)
			}
		}
	}
}

// A browser gets a page for an address that does not exist, signed in or not, and a program the
// error of the interface.
func TestAnAddressThatDoesNotExistHasAPage(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("Nowhere", "nowhere@example.org")
	b := p.tab()
	for _, path := range []string{"/nowhere-at-all", "/vault/a/b", "/assets/none/none.js"} {
		b.open(path)
		b.titled("This page does not exist")
		if status := value[int](b, `performance.getEntriesByType('navigation')[0].responseStatus`); status != http.StatusNotFound {
			t.Errorf("%s: status %d", path, status)
		}
		b.takeErrors() // the browser's own, of the 404
	}
	b.accessible()
	b.signIn(o, "/vault")
	b.open("/nowhere-at-all")
	b.titled("This page does not exist")
	b.takeErrors()
	b.follow("Go to the overview")
	b.titled("Overview")
	const browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
	for _, c := range []struct{ method, path, accept, contentType string }{
		{"GET", "/nowhere", browser, "text/html"},
		{"GET", "/nowhere", "*/*", "application/json"},
		{"GET", "/nowhere", "", "application/json"},
		{"POST", "/nowhere", browser, "application/json"},
		{"GET", "/api", browser, "application/json"},
		{"GET", "/api/v2/nowhere", browser, "application/json"},
		{"GET", "/v1/nowhere", browser, "application/json"},
	} {
		r, err := http.NewRequestWithContext(t.Context(), c.method, p.url+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Accept", c.accept)
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if got := answer.Header.Get("Content-Type"); answer.StatusCode != http.StatusNotFound || !strings.HasPrefix(got, c.contentType) || answer.Header.Get("X-Request-Id") == "" {
			t.Errorf("%+v: %d %s", c, answer.StatusCode, got)
		}
	}
	icon, err := http.Get(p.url + "/favicon.ico")
	if err != nil {
		t.Fatal(err)
	}
	icon.Body.Close()
	if icon.StatusCode != http.StatusOK || icon.Header.Get("Content-Type") != "image/x-icon" {
		t.Errorf("/favicon.ico: %d %s", icon.StatusCode, icon.Header.Get("Content-Type"))
	}
	if size := value[int](b, `(async () => { const i = new Image(); i.src = '/favicon.ico'; await i.decode(); return i.naturalWidth; })()`); size != 32 {
		t.Errorf("the icon is %d pixels wide", size)
	}
}

// A denied event reads as an attempt, not as if it had happened.
func TestDeniedEventsReadAsAttempts(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("Attempts", "attempts@example.org")
	p.verify(o)
	id := p.seal(o, "db", "database", "password", "s3cret", 90)
	made, err := o.CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "reader", Scopes: []v2.Scope{v2.ScopeAuditRead}})
	if err != nil {
		t.Fatal(err)
	}
	p.must(o.UnsealCredential(t.Context(), id))
	if _, err := p.newClient(client.WithAPIKey(made.ApiKey)).UnsealCredential(t.Context(), id); err == nil {
		t.Fatal("it was not denied")
	}
	b := p.tab()
	b.signIn(o, "/audit?event_type=CREDENTIAL_UNSEALED")
	rows := value[[]string](b, `[...document.querySelectorAll('tbody tr')].map(r => r.innerText.replace(/\s+/g, ' '))`)
	denied := func(r string) bool { return strings.Contains(r, "Read credential") && strings.Contains(r, "denied") }
	done := func(r string) bool {
		return strings.Contains(r, "Credential read") && strings.Contains(r, "success")
	}
	if len(rows) != 2 || !slices.ContainsFunc(rows, denied) || !slices.ContainsFunc(rows, done) {
		t.Errorf("the audit page says %q", rows)
	}
	b.follow("Read credential")
	b.until(`document.querySelector('h2')?.innerText === 'Read credential'`)
	b.gone("Credential read")

	// Every type of the contract has words for an attempt.
	var contract struct {
		Components struct {
			Schemas map[string]struct{ Enum []string }
		}
	}
	if err := yaml.Unmarshal([]byte(openapi.V2()), &contract); err != nil {
		t.Fatal(err)
	}
	types := contract.Components.Schemas["EventType"].Enum
	if len(types) < 70 {
		t.Fatal(types)
	}
	script := value[string](b, `new URL('lib/words.js', document.querySelector('script[src]').src).href`)
	for _, e := range types {
		pair := value[[]string](b, fmt.Sprintf(`import(%s).then(f => [f.words(%[2]s), f.attempt(%[2]s)])`, quoted(script), quoted(e)))
		nobodyTries := slices.Contains([]string{"ACCESS_REFUSED", "ANCHOR_REFUSED", "RATE_LIMITED", "WEBHOOK_FAILED"}, e)
		if same := pair[0] == pair[1]; same != nobodyTries {
			t.Errorf("%s: done %q, attempted %q", e, pair[0], pair[1])
		}
	}
}
