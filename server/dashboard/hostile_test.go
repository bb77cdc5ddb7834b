package dashboard_test

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// hostile are names that try to be something else.
var hostile = []string{
	`<img src=x onerror=alert(1)>`,
	`"><script>alert(1)</script>`,
	`<svg/onload=alert(1)>`,
	`' onmouseover='alert(1)' x='`,
	`javascript:alert(1)/x`,
	`</title><style>*{display:none}</style>`,
	`{{7*7}}${7*7}<!--`,
	"invoice\u202efdp.exe",
	"\u2067שלום\u2069 \u200f\u061cمرحبا",
	"Käse 🧀 Ünïcödé नमस्ते",
	strings.Repeat("W", 255),
	strings.Repeat("ß", 127) + "!",
}

// seen is a name as pages show it: what nobody would see is written out.
func seen(name string) string {
	for _, c := range "\u202e\u2067\u2069\u200f\u061c" {
		name = strings.ReplaceAll(name, string(c), fmt.Sprintf("⟨U+%04X⟩", c))
	}
	return name
}

// Whatever somebody writes is shown as text, on every page.
func TestWhatUsersWriteIsText(t *testing.T) {
	p := start(t)
	ctx := t.Context()
	o := p.register(hostile[0], "eve@example.org")
	p.verify(o)
	var credential, key string
	for i, name := range hostile {
		credential = p.seal(o, name, "api_key", fmt.Sprint("key-", i), name, 30)
		made, err := o.CreateKey(ctx, v2.CreateKeyRequest{Name: name, RotationPeriod: new(30)})
		if err != nil {
			t.Fatal(err)
		}
		key = made.Key.KeyId
		p.must(o.CreateAPIKey(ctx, v2.CreateAPIKeyRequest{Name: name, Scopes: []v2.Scope{v2.ScopeVaultRead}}))
		p.must(o.CreatePolicy(ctx, v2.PolicyRequest{Name: name, Rules: []v2.PolicyRuleRequest{{Path: "**", Verbs: []v2.PathVerb{v2.PathVerbRead}}}}))
		p.must(o.CreateGroup(ctx, v2.GroupRequest{Name: name}))
	}
	addresses := []string{`o'neil+x=y@example.org`, `a&b@example.org`, "müller@example.org", strings.Repeat("w", 64) + "@" + strings.Repeat("long.", 30) + "example.org"}
	for _, a := range []string{`"<img/src=x/onerror=alert(1)>"@example.org`, `<b>@example.org`, "a\u202eb@example.org"} {
		if _, err := o.InviteMember(ctx, v2.InviteRequest{Email: a, Role: v2.RoleMember}); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%q: %v", a, err)
		}
	}
	taken := addresses[:0]
	for _, a := range addresses {
		if _, err := o.InviteMember(ctx, v2.InviteRequest{Email: a, Role: v2.RoleMember}); err == nil {
			taken = append(taken, a)
		} else if !errors.Is(err, client.ErrInvalid) {
			t.Fatal(err)
		}
	}
	if len(taken) < 2 {
		t.Fatalf("of the addresses only %q are taken", taken)
	}

	b := p.tab()
	var dialogs atomic.Int32
	if err := chromedp.Listen(b.ctx, func(event any) {
		if _, ok := event.(*page.EventJavascriptDialogOpening); ok {
			dialogs.Add(1)
		}
	}); err != nil {
		t.Fatal(err)
	}
	stop := b.answer("GET", "/api/v2/cluster/sealed-credentials*", reply{status: http.StatusOK, body: hostileCluster()})
	b.signIn(o, "/")
	look := func(where string, names ...string) {
		t.Helper()
		for _, width := range []int64{1280, 390} {
			b.size(width, 900)
			b.until(fmt.Sprintf(`document.documentElement.clientWidth === %d`, width))
			b.narrow()
		}
		b.size(1280, 900)
		for _, injected := range value[[]string](b, `[...document.querySelectorAll('main script, main style, img:not([alt=""]), [onload], [onerror], [onmouseover], a[href^="javascript:" i], main b')].map(e => e.outerHTML.slice(0, 200))`) {
			t.Errorf("%s: a name became %s", where, injected)
		}
		text := value[string](b, `document.title + '\n' + document.body.textContent + [...document.querySelectorAll('[aria-label], main [title]')].map(e => e.ariaLabel + '\n' + e.title).join('\n')`)
		if i := strings.IndexAny(text, "\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"); i >= 0 {
			t.Errorf("%s: what turns the text around is on the page: %q", where, text[max(0, i-40):min(len(text), i+20)])
		}
		for _, name := range names {
			if !strings.Contains(text, seen(name)) {
				t.Errorf("%s does not show %q", where, seen(name))
			}
		}
	}
	objects := slices.Concat(hostile[:4], hostile[7:8])
	for _, view := range []struct {
		address string
		names   []string
	}{
		{"/", hostile[:1]}, {"/vault?sort=updated", hostile}, {"/vault", nil}, {"/vault/" + credential, hostile[len(hostile)-1:]}, {"/keys", hostile}, {"/keys/" + key, hostile[len(hostile)-1:]},
		{"/audit", nil}, {"/cluster", objects}, {"/settings/api-keys", hostile}, {"/settings/members", taken}, {"/settings/policies", hostile}, {"/settings/groups", hostile}, {"/settings/profile", hostile[:1]}, {"/compliance/soc2", nil},
		{"/vault?q=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E", hostile[:1]}, {"/vault/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E", nil}, {"/audit?user_id=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E", nil},
		{"/cluster?namespace=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E", nil},
	} {
		b.open(view.address)
		b.settled()
		look(view.address, view.names...)
	}
	stop()

	b.open("/vault?q=" + "invoice")
	b.titled("Vault")
	b.follow(seen(hostile[7]))
	b.titled(seen(hostile[7]))
	b.press("Read values")
	b.press("Show key-7")
	b.sees("Characters that cannot be seen are written as")
	look("a revealed value", hostile[7])
	b.press("Hide now")
	b.press("Delete")
	b.sees("Delete this credential?")
	look("the question before deleting", hostile[7])
	b.fill("Enter the name to confirm", seen(hostile[7]))
	b.press("Delete")
	b.titled("Vault")

	stop = b.answer("GET", "/api/v2/vault/list*", refusal(http.StatusInternalServerError, hostile[0]+hostile[7]))
	b.open("/vault?q=x")
	b.until(`document.querySelector('.trouble details')`)
	b.script(`document.querySelector('.trouble details').open = true`)
	b.sees("Server message")
	look("a refusal", hostile[0], hostile[7])
	stop()
	if n := dialogs.Load(); n != 0 {
		t.Errorf("%d scripts of names ran", n)
	}
}

// hostileCluster is an answer whose texts try to be something else.
func hostileCluster() string {
	at := time.Now().UTC()
	list := v2.SealedCredentialList{Success: true, Operator: true, SealingKeys: []v2.SealingKeyUse{}}
	for i, text := range append(slices.Clone(hostile[:4]), hostile[7]) {
		list.SealedCredentials = append(list.SealedCredentials, v2.SealedCredential{
			Namespace: text, Name: text + fmt.Sprint(i), CredentialType: text, Source: v2.SealedCredentialSource(text), Scope: new(v2.SealedCredentialScope(text)), CreatedAt: at,
			TargetSecret: &text, Conditions: []v2.ObjectCondition{{Type: "Ready", Status: "False", Reason: text, Message: text, LastTransitionTime: at}, {Type: text, Status: v2.ObjectConditionStatus(text), Reason: text, Message: text, LastTransitionTime: at}},
		})
	}
	return encoded(list)
}
