package dashboard_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/security"
	"github.com/chromedp/chromedp"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/config"
)

// stranger is a page of another origin, though of the same site, so that the browser sends it the cookies.
func stranger(t *testing.T, body string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = io.WriteString(w, `<!doctype html><title>elsewhere</title><link rel="icon" href="data:,">`+body)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// elsewhere opens a page of another origin. What it asks for is not the dashboard's doing.
func (b *tab) elsewhere(url string) {
	b.t.Helper()
	b.run(chromedp.Navigate(url))
}

// forget drops what the tab has said, of a test that knows of it.
func (b *tab) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.violations, b.errors, b.requests = nil, nil, nil
}

// A page of another origin has the browser send the cookies, and changes nothing.
func TestOtherOriginsChangeNothing(t *testing.T) {
	p := start(t)
	o := p.register("Forgery", "finn@example.org")
	id := p.seal(o, "target", "api_key", "key", "value", 30)
	b := p.tab()
	b.signIn(o, "/")
	t.Cleanup(b.forget)

	bodies := map[string]string{
		"/api/v2/vault/seal":           `{"name":"forged","credential_type":"api_key","values":{"k":"v"},"ttl_days":30}`,
		"/api/v2/vault/rotate/" + id:   ``,
		"/api/v2/api-keys":             `{"name":"forged","scopes":["vault:read"]}`,
		"/api/v2/members/invite":       `{"email":"mallory@example.org","role":"owner"}`,
		"/api/v2/keys":                 `{"name":"forged"}`,
		"/api/v2/auth/logout":          ``,
		"/api/v2/auth/refresh":         ``,
		"/api/v2/auth/change-password": `{"current_password":"` + o.password + `","new_password":"the password of mallory"}`,
	}
	for path, body := range bodies {
		// A form can send anything as text: its name is the beginning, its value the end.
		head, tail, _ := strings.Cut(body, ",")
		if tail != "" {
			head += `,"x":"`
			tail = `",` + tail
		}
		url := stranger(t, fmt.Sprintf(`<form method="post" enctype="text/plain" action="%s"><input name='%s' value='%s'></form>`, p.url+path, head, tail))
		b.elsewhere(url)
		b.script(`document.forms[0].submit()`)
		b.until(fmt.Sprintf(`location.href === %s && document.body.innerText.includes('error')`, quoted(p.url+path)))
		if says := value[string](b, `document.body.innerText`); !strings.Contains(says, `"code":403`) {
			t.Errorf("a form to %s is answered %s", path, says)
		}
	}
	b.elsewhere(stranger(t, ""))
	requests := [][2]string{{"DELETE", "/api/v2/vault/" + id}, {"PUT", "/api/v2/vault/" + id}, {"POST", "/api/v2/auth/logout"}}
	for path := range bodies {
		requests = append(requests, [2]string{"POST", path})
	}
	for _, r := range requests {
		body := "null"
		if content := bodies[r[1]]; content != "" {
			body = quoted(content)
		}
		for _, options := range []string{`mode: 'no-cors'`, `headers: {'Content-Type': 'application/json'}`, `mode: 'cors'`} {
			value[string](b, fmt.Sprintf(`fetch(%s, {method: %s, body: %s, credentials: 'include', %s}).then(r => r.type, e => e.name)`, quoted(p.url+r[1]), quoted(r[0]), body, options))
		}
	}
	// What reads leaves entries of the log and nothing else, and its answers are not for others.
	for _, path := range []string{"/api/v2/vault/" + id, "/api/v2/auth/me", "/api/v2/auth/logout", "/api/v2/vault/rotate/" + id} {
		if got := value[string](b, fmt.Sprintf(`fetch(%s, {credentials: 'include'}).then(r => r.text(), e => e.name)`, quoted(p.url+path))); got != "TypeError" {
			t.Errorf("another origin reads %s: %s", path, got)
		}
		value[bool](b, fmt.Sprintf(`new Promise(done => { const i = new Image(); i.onload = i.onerror = () => done(true); i.src = %s })`, quoted(p.url+path)))
	}

	ctx := t.Context()
	if list, err := o.ListCredentials(ctx, nil); err != nil || len(list.Credentials) != 1 || list.Credentials[0].Version != 1 {
		t.Error("the credentials:", list, err)
	}
	if list, err := o.ListAPIKeys(ctx); err != nil || len(list.ApiKeys) != 0 {
		t.Error("the API keys:", list, err)
	}
	if list, err := o.ListMembers(ctx); err != nil || len(list.Members) != 1 || len(list.Invitations) != 0 {
		t.Error("the members:", list, err)
	}
	if _, err := p.newClient().Login(ctx, v2.LoginRequest{Email: o.email, Password: o.password}); err != nil {
		t.Error("the password:", err)
	}
	b.open("/vault")
	b.titled("Vault") // the session is as it was
	b.sees("target")
}

// Nobody is shown the dashboard inside of another page.
func TestNoOtherPageHoldsTheDashboard(t *testing.T) {
	p := start(t)
	o := p.register("Frames", "fay@example.org")
	b := p.tab()
	b.signIn(o, "/")
	for _, path := range []string{"/", "/vault", "/sign-in", "/settings/api-keys"} {
		b.elsewhere(stranger(t, fmt.Sprintf(`<iframe src="%s" width="800" height="600"></iframe>`, p.url+path)))
		frames := ask(b, page.GetFrameTree, cdp.Empty{}).FrameTree.ChildFrames
		if len(frames) != 1 || !strings.HasPrefix(frames[0].Frame.URL, "chrome-error:") {
			t.Errorf("%s is shown inside of another page: %s", path, encoded(frames))
		}
	}
	b.forget()
}

func TestSigningInMakesANewSession(t *testing.T) {
	p := start(t)
	mallory, victim := p.register("Mallory", "mallory@example.org"), p.register("Victim", "vic@example.org")
	b := p.tab()
	b.signIn(mallory, "/")
	planted := b.cookies()
	b.open("/sign-in")
	b.fill("E-mail address", victim.email)
	b.fill("Password", victim.password)
	b.press("Sign in")
	b.titled("Overview")
	b.sees(victim.email)
	now := b.cookies()
	for _, name := range []string{"accessToken", "refreshToken"} {
		if planted[name] == nil || now[name] == nil || planted[name].Value == now[name].Value {
			t.Errorf("%s stays as it was before signing in", name)
		}
	}
	if got := p.as(planted["accessToken"].Value); got != mallory.email {
		t.Errorf("the token from before is %q now", got)
	}

	// Nor do tokens that nobody gave out become a session.
	b = p.tab()
	for name, path := range map[string]string{"accessToken": "/", "refreshToken": "/api/v2/auth"} {
		ask(b, network.SetCookie, network.SetCookieParams{Name: name, Value: "planted", URL: p.url + path, Path: path})
	}
	b.open("/")
	b.titled("Sign in")
	b.fill("E-mail address", victim.email)
	b.fill("Password", victim.password)
	b.press("Sign in")
	b.titled("Overview")
	for name, c := range b.cookies() {
		if c.Value == "planted" {
			t.Errorf("%s is the one that was planted", name)
		}
	}

	// A refresh changes both; signing out ends them.
	before := b.cookies()
	if status := value[int](b, `fetch('/api/v2/auth/refresh', {method: 'POST'}).then(r => r.status)`); status != http.StatusOK {
		t.Fatal(status)
	}
	after := b.cookies()
	if before["refreshToken"].Value == after["refreshToken"].Value {
		t.Error("a refresh token can be used again")
	}
	b.press("Sign out")
	b.titled("Sign in")
	if got := p.as(after["accessToken"].Value); got != "" {
		t.Errorf("after signing out its token is %q still", got)
	}
}

// as returns whom an access token stands for; nobody is the empty address.
func (p *program) as(token string) string {
	p.t.Helper()
	request, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, p.url+"/api/v2/auth/me", nil)
	if err != nil {
		p.t.Fatal(err)
	}
	request.AddCookie(&http.Cookie{Name: "accessToken", Value: token})
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		p.t.Fatal(err)
	}
	defer response.Body.Close()
	var me struct{ User struct{ Email string } }
	if err := json.NewDecoder(response.Body).Decode(&me); err != nil {
		p.t.Fatal(err)
	}
	return me.User.Email
}

// checkCookies holds the cookies of a session to what they must be.
func (b *tab) checkCookies(secure bool) {
	b.t.Helper()
	all := b.cookies()
	if len(all) != 2 {
		b.t.Errorf("%d cookies", len(all))
	}
	for name, path := range map[string]string{"accessToken": "/", "refreshToken": "/api/v2/auth"} {
		c := all[name]
		if c == nil || !c.HTTPOnly || c.SameSite != "Strict" || c.Secure != secure || c.Path != path || c.Session || strings.HasPrefix(c.Domain, ".") {
			b.t.Errorf("the cookie %s: %+v", name, c)
		}
	}
	if script := value[string](b, `document.cookie`); script != "" {
		b.t.Errorf("scripts see the cookies %q", script)
	}
}

func TestCookiesAreForTheServerAlone(t *testing.T) {
	p := start(t)
	o := p.register("Cookies", "cora@example.org")
	b := p.tab()
	b.signIn(o, "/")
	b.checkCookies(false) // plain HTTP, on loopback

	secure := newTab(t, serveTLS(t))
	ask(secure, security.SetIgnoreCertificateErrors, security.SetIgnoreCertificateErrorsParams{Ignore: true}) // of a certificate that the test made
	secure.size(1280, 900)
	secure.open("/register")
	secure.fill("Organisation", "Over TLS")
	secure.fill("E-mail address", "tess@example.org")
	secure.fill("Password", "a long enough password")
	secure.press("Register")
	secure.titled("Overview")
	secure.checkCookies(true)
}

// serveTLS runs a production server until the test has ended, and returns its URL.
func serveTLS(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}), "tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
		"config.yaml": fmt.Appendf(nil, `
listen: 127.0.0.1:0
publicURL: https://127.0.0.1:8200
dataDir: %s
tls: {certFile: %s, keyFile: %s}
kms: {url: "file://%s"}
systemKeyFile: %s
mail: {from: vault@example.org, smtp: {address: "127.0.0.1:1", security: none}}
`, file("data"), file("tls.crt"), file("tls.key"), file("kms.key"), file("system.key")),
	} {
		if err := os.WriteFile(file(name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	settings, err := config.Load(file("config.yaml"), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ready, line := io.Pipe()
	done := make(chan error, 1)
	var said protocol
	go func() {
		err := app.Serve(ctx, settings, line, &said)
		line.CloseWithError(errors.Join(err, io.EOF))
		done <- err
	}()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("the program: %v", err)
		}
	})
	var first struct {
		BaseURL string `json:"base_url"`
	}
	if err := json.NewDecoder(ready).Decode(&first); err != nil {
		t.Fatalf("the program is not ready: %v\n%s", err, said.tail(20))
	}
	return first.BaseURL
}

// Nothing secret stays where somebody finds it later: in no storage of the browser, in no cache, in no address, and not behind the button
// back.
func TestNothingSecretStaysBehind(t *testing.T) {
	p := start(t)
	o := p.register("Traces", "tara@example.org")
	const secret = "nobody finds this later"
	id := p.seal(o, "traces", "api_key", "key", secret, 30)
	b := p.tab()
	var mu sync.Mutex
	var kept []string // what may be cached
	var sent []string // referrers
	if err := chromedp.Listen(b.ctx, func(event any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := event.(type) {
		case *network.EventResponseReceived:
			if cache := fmt.Sprint(header(e.Response.Headers, "Cache-Control")); !strings.Contains(e.Response.URL, "/assets/") && cache != "no-store" {
				kept = append(kept, e.Response.URL+": "+cache)
			}
		case *network.EventRequestWillBeSent:
			if r := header(e.Request.Headers, "Referer"); r != nil && fmt.Sprint(r) != "" {
				sent = append(sent, e.Request.URL+": "+fmt.Sprint(r))
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
	link := p.link(o.email, "/verify")
	_, token, _ := strings.Cut(link, "#token=")
	b.open(strings.TrimPrefix(link, p.url))
	b.titled("Verify your address")
	if at := b.path(); at != "/verify" {
		t.Errorf("the token stays in the address %s", at)
	}
	b.press("Verify my address")
	b.titled("Your address is verified")

	b.signIn(o, "/vault/"+id)
	b.press("Read values")
	b.press("Show key")
	b.sees(secret)
	stores := value[map[string]int](b, `(async () => ({local: localStorage.length, session: sessionStorage.length, databases: (await indexedDB.databases()).length,
		caches: (await caches.keys()).length, workers: (await navigator.serviceWorker.getRegistrations()).length, state: history.state === null ? 0 : 1}))()`)
	for name, n := range stores {
		if n != 0 {
			t.Errorf("the page keeps %d things in its %s", n, name)
		}
	}
	b.press("Sign out")
	b.titled("Sign in")
	for range 3 {
		// The old page stays on the screen, and shows such a heading, until the next one has begun.
		b.script(`(window.leaving = true, addEventListener('popstate', () => { window.leaving = false }, {once: true}), setTimeout(() => history.back()))`) // later, so that this script still answers
		b.until(`!window.leaving && ['Sign in', 'Verify your address'].includes(document.querySelector('h1')?.innerText)`)
		if strings.Contains(value[string](b, `document.documentElement.outerHTML`), secret) {
			t.Errorf("after signing out %s shows the secret", b.path())
		}
	}
	for _, visited := range ask(b, page.GetNavigationHistory, cdp.Empty{}).Entries {
		if strings.Contains(visited.URL, token) || strings.Contains(visited.UserTypedURL, token) && !strings.Contains(visited.UserTypedURL, "#") {
			t.Errorf("the history has the token: %s", visited.URL)
		}
	}
	for _, r := range b.requested() {
		if strings.Contains(r, token) || strings.Contains(r, "nobody") {
			t.Errorf("a secret is in the address of %s", r)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	for _, k := range kept {
		t.Errorf("may be cached: %s", k)
	}
	for _, s := range sent {
		t.Errorf("tells where it is from: %s", s)
	}
}

// header returns a header's value, whatever case its name has.
func header(all network.Headers, name string) any {
	for n, v := range all {
		if strings.EqualFold(n, name) {
			return v
		}
	}
	return nil
}
