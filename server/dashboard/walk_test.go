package dashboard_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/browser"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/latticekeep/latticekeep/api/client"
)

// One user's way through the whole program, by the mouse.
func TestAUserFindsTheWay(t *testing.T) {
	p := start(t)
	b := p.tab()
	const name, secret = "Datenbank der Käserei", "höchst geheim 🧀"
	b.open("/")
	b.titled("Sign in")
	b.follow("Register")
	b.fill("Organisation", "Käsekontor Müller & Töchter")
	b.fill("E-mail address", "ada@example.org")
	b.fill("Password", "eine lange Passphrase aus Wörtern")
	b.press("Register")
	b.titled("Overview")
	b.sees("Käsekontor Müller & Töchter")
	b.sees("is not verified yet")

	b.open(strings.TrimPrefix(p.link("ada@example.org", "/verify"), p.url))
	b.press("Verify my address")
	b.titled("Your address is verified")
	b.follow("Continue")
	b.titled("Overview")
	b.gone("is not verified yet")

	b.follow("Settings")
	b.press("Create an API key")
	b.fill("Name", "deployer")
	b.click("checkbox", "Create, change and delete credentials vault:write")
	b.press("Create")
	b.sees("This is the only time")
	key := value[string](b, `document.querySelector('[data-testid=api-key]').textContent`)
	deployer := p.newClient(client.WithAPIKey(key))
	b.press("I have stored it")
	b.gone("This is the only time")
	if list, err := deployer.ListCredentials(t.Context(), nil); err != nil || len(list.Credentials) != 0 {
		t.Fatal(list, err)
	}

	b.follow("Vault")
	b.titled("Vault")
	b.sees("The vault is empty")
	b.open("/vault/new")
	b.fill("Name", name)
	b.fill("Type", "database")
	b.fill("Key", "password")
	b.fill("Value", secret)
	b.press("Create")
	b.titled(name)
	id := strings.TrimPrefix(b.path(), "/vault/")
	if sealed, err := deployer.UnsealCredential(t.Context(), id); err != nil || sealed.Values["password"] != secret {
		t.Fatal(sealed, err)
	}
	b.press("Read values")
	b.press("Show password")
	b.sees(secret)
	b.press("Hide now")
	b.gone(secret)
	b.press("Re-encrypt")
	b.sees("Re-encrypt this credential?")
	b.press("Re-encrypt")
	b.sees("Re-encrypted: version 2")
	if !value[bool](b, `[...document.querySelectorAll('.messages p')].every(p => {
		const {x, y, width, height} = p.getBoundingClientRect();
		return !document.elementFromPoint(x + width / 2, y + height / 2).closest('.messages');
	})`) {
		t.Error("a message takes the mouse from what it covers")
	}
	if sealed, err := deployer.UnsealCredential(t.Context(), id); err != nil || sealed.Version != 2 || sealed.Values["password"] != secret {
		t.Fatal(sealed, err)
	}

	b.titled(name)
	b.follow("In the audit log")
	b.titled("Audit log")
	b.press("Verify this page")
	b.sees("verified: hash, signature, inclusion.")
	b.follow("Credential re-encrypted")
	b.press("Verify in this browser") // which the message may cover
	b.sees("This entry is what was written, by this log, at this place.")

	b.open("/compliance/soc2")
	b.titled("SOC 2")
	b.sees("What the operator of this service has to fix")
	downloads := b.downloads()
	b.follow("Report for an auditor")
	b.press("Make the PDF report")
	b.follow("Download PDF")
	if report := downloads(".pdf"); !bytes.HasPrefix(report, []byte("%PDF-")) {
		t.Errorf("no PDF: %.100q", report)
	}

	b.follow("Settings")
	b.press("Revoke deployer")
	b.sees("Revoke this API key?")
	b.press("Revoke")
	b.sees("The key is revoked")
	if _, err := deployer.ListCredentials(t.Context(), nil); !errors.Is(err, client.ErrUnauthenticated) {
		t.Error("with a revoked key:", err)
	}

	b.follow("Vault")
	b.follow(name)
	b.titled(name)
	b.press("Move to trash")
	b.sees("Move this credential to the trash?")
	b.press("Move to trash")
	b.sees("The credential is in the trash, so its values cannot be read.")
	b.press("Renew")
	b.sees("Renewed: version")
	b.press("Read values")
	b.sees("until the page forgets this")
	b.press("Delete")
	b.fill("Enter the name to confirm", "something else")
	b.press("Delete")
	b.sees("This is not the name")
	b.fill("Enter the name to confirm", name)
	b.press("Delete")
	b.titled("Vault")
	b.sees("The vault is empty")
	b.press("Sign out")
	b.titled("Sign in")
	if left := b.cookies(); len(left) != 0 {
		t.Errorf("cookies after signing out: %v", left)
	}
}

// downloads has the tab's downloads go to a folder. What it returns waits for one whose name has an ending, and returns its content.
func (b *tab) downloads() func(ending string) []byte {
	b.t.Helper()
	dir := b.t.TempDir()
	ctx, cancel := b.bounded()
	defer cancel()
	_, err := chromedp.CallBrowser(ctx, browser.SetDownloadBehavior, browser.SetDownloadBehaviorParams{
		Behavior: browser.SetDownloadBehaviorBehaviorAllow, BrowserContextID: chromedp.FromContext(b.ctx).BrowserContextID, DownloadPath: dir,
	})
	if err != nil {
		b.fatal("allowing downloads", err)
	}
	return func(ending string) []byte {
		b.t.Helper()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for deadline := time.After(hangs); ; {
			found, err := filepath.Glob(filepath.Join(dir, "*"+ending))
			if err != nil {
				b.t.Fatal(err)
			}
			if len(found) == 1 { // until it is whole it has another name, or is the empty file that keeps the name
				content, err := os.ReadFile(found[0])
				if err != nil {
					b.t.Fatal(err)
				}
				if len(content) > 0 {
					return content
				}
			}
			select {
			case <-tick.C:
			case <-deadline:
				b.fatal("downloading", fmt.Errorf("%d files *%s", len(found), ending))
			}
		}
	}
}

// focused returns role and name of what has the focus, as a screen reader says them.
func (b *tab) focused() (role, name string) {
	b.t.Helper()
	element := ask(b, runtime.Evaluate, runtime.EvaluateParams{Expression: `document.activeElement`})
	no := false
	nodes := ask(b, accessibility.GetPartialAXTree, accessibility.GetPartialAXTreeParams{ObjectID: element.Result.ObjectID, FetchRelatives: &no}).Nodes
	if len(nodes) == 0 || nodes[0].Role == nil || nodes[0].Name == nil {
		return "", ""
	}
	return strings.Trim(string(nodes[0].Role.Value), `"`), unquoted(string(nodes[0].Name.Value))
}

// tabTo presses the tabulator until something has the focus.
func (b *tab) tabTo(role, name string) {
	b.t.Helper()
	var passed []string
	for range 150 {
		r, n := b.focused()
		if r == role && n == name {
			if !value[bool](b, `document.activeElement.matches(':focus-visible')`) {
				b.t.Errorf("nothing shows that the %s %q has the focus", role, name)
			}
			return
		}
		passed = append(passed, r+" "+n)
		b.keys(kb.Tab)
	}
	b.fatal("pressing the tabulator", fmt.Errorf("it does not come to the %s %q, but to %q", role, name, passed))
}

// enter presses the tabulator until a field has the focus, and types.
func (b *tab) enter(role, name, text string) {
	b.t.Helper()
	b.tabTo(role, name)
	b.run(chromedp.KeyEvent(text))
}

// activate presses the tabulator until something has the focus, and then the enter key.
func (b *tab) activate(role, name string) {
	b.t.Helper()
	b.until(`document.querySelector('h1') && ` + still)
	b.tabTo(role, name)
	b.keys(kb.Enter)
}

func TestTheKeyboardAloneIsEnough(t *testing.T) {
	p := start(t)
	o := p.register("Keys and Sons", "ida@example.org")
	b := p.tab()
	b.open("/")
	b.titled("Sign in")
	b.until(`document.activeElement !== document.body`) // the page sets the focus after it has painted
	if role, name := b.focused(); role != "textbox" || name != "E-mail address" {
		t.Errorf("the focus begins at the %s %q", role, name)
	}
	b.enter("textbox", "E-mail address", o.email)
	b.enter("textbox", "Password", o.password)
	b.keys(kb.Enter)
	b.titled("Overview")

	b.activate("link", "Vault")
	b.titled("Vault")
	b.sees("The vault is empty")
	b.activate("link", "Skip to the content")
	if role, name := b.focused(); role != "heading" || name != "Vault" {
		t.Errorf("the way to the content leads to the %s %q", role, name)
	}
	b.activate("link", "New credential")
	b.titled("New credential")
	b.enter("textbox", "Name", "by keyboard")
	b.enter("textbox", "Key", "token")
	b.enter("textbox", "Value", "typed by hand")
	b.activate("button", "Create")
	b.titled("by keyboard")

	b.activate("button", "Read values")
	b.sees("until the page forgets this")
	b.activate("button", "Show token")
	b.sees("typed by hand")
	b.activate("button", "Hide now")
	b.gone("typed by hand")
	b.until(`document.activeElement.innerText === 'Read values'`)

	b.activate("button", "Delete")
	b.sees("Delete this credential?")
	for range 30 { // the focus stays in the dialog, or is with the browser
		b.keys(kb.Tab)
		if !value[bool](b, `document.activeElement === document.body || !!document.activeElement.closest('dialog')`) {
			role, name := b.focused()
			t.Fatalf("the focus left the dialog for the %s %q", role, name)
		}
	}
	b.keys(kb.Escape)
	b.gone("Delete this credential?")
	b.until(`document.activeElement.innerText === 'Delete'`)
	b.activate("button", "Sign out")
	b.titled("Sign in")
}

// Whoever follows a link is asked to sign in, and then is where the link leads. Back and forward are what they are elsewhere.
func TestLinksLeadWhereTheySay(t *testing.T) {
	p := start(t)
	o := p.register("Links", "lea@example.org")
	id := p.seal(o, "deep", "api_key", "key", "value", 30)
	b := p.tab()
	for _, page := range []string{"/audit/2", "/vault/" + id, "/audit?outcome=success", "/settings/sessions", "/compliance/gdpr", "/crypto?do=verify"} {
		b.open(page)
		b.titled("Sign in")
		b.fill("E-mail address", o.email)
		b.fill("Password", o.password)
		b.press("Sign in")
		b.until(fmt.Sprintf(`location.pathname + location.search === %s && document.querySelector('.shell h1')`, quoted(page)))
		b.settled()
		b.press("Sign out")
		b.titled("Sign in")
	}
	for _, elsewhere := range []string{"https://example.org/", "//example.org/", `/\example.org/`, "javascript:alert(1)", "/\t/example.org"} {
		b.open("/sign-in?next=" + strings.NewReplacer("\t", "%09", `\`, "%5C").Replace(elsewhere))
		b.fill("E-mail address", o.email)
		b.fill("Password", o.password)
		b.press("Sign in")
		b.settled()
		b.until(`document.querySelector('.shell h1')`)
		if origin := value[string](b, `location.origin`); origin != p.url {
			t.Fatalf("%q leads to %s", elsewhere, origin)
		}
		b.press("Sign out")
		b.titled("Sign in")
	}

	b.signIn(o, "/")
	b.follow("Vault")
	b.titled("Vault")
	b.sees("deep")
	b.choose("Status", "Expired or in the trash")
	b.sees("No credential matches")
	if at := b.path(); at != "/vault?status=expired" {
		t.Errorf("the filter is at %s", at)
	}
	b.script(`history.back()`)
	b.sees("1 credential")
	b.follow("deep")
	b.titled("deep")
	b.follow("In the audit log")
	b.titled("Audit log")
	for _, title := range []string{"deep", "Vault", "Overview"} {
		b.script(`history.back()`)
		b.titled(title)
	}
	b.script(`history.forward()`)
	b.titled("Vault")
	b.open("/nowhere-at-all")
	b.titled("This page does not exist")
	b.takeErrors() // the browser's own, of the 404
}

// What is sealed for a cluster never leaves the page in the clear.
func TestManifestsAreSealedInThePage(t *testing.T) {
	p := start(t)
	b := p.tab()
	b.signIn(p.register("Manifests", "nils@example.org"), "/cluster/seal")
	const secret = "only the vault reads this"
	b.fill("Name", "db")
	b.fill("Namespace", "shop")
	b.fill("Credential type", "database")
	b.fill("Key", "password")
	b.fill("Value", secret)
	before := len(b.requested())
	b.press("Seal")
	b.sees("Sealed. No plaintext left this page")
	if asked := b.requested()[before:]; len(asked) != 0 {
		t.Errorf("sealing asked for %q", asked)
	}
	downloads := b.downloads()
	b.press("Download")
	manifest := string(downloads(".yaml"))
	for _, has := range []string{"kind: SealedCredential", "namespace: shop", "password:"} {
		if !strings.Contains(manifest, has) {
			t.Errorf("the manifest lacks %q:\n%s", has, manifest)
		}
	}
	if strings.Contains(manifest, secret) {
		t.Error("the manifest has the value in the clear")
	}
	b.press("Forget the values")
	b.sees("The values are no longer on this page")
	if strings.Contains(value[string](b, `document.documentElement.outerHTML + [...document.querySelectorAll('textarea, input')].map(e => e.value)`), secret) {
		t.Error("the page still has the value")
	}
}

// What is done while somebody looks at the log comes to the page by itself.
func TestTheLogIsFollowed(t *testing.T) {
	p := start(t)
	o := p.register("Followers", "fred@example.org")
	b := p.tab()
	b.signIn(o, "/audit")
	b.press("Follow")
	b.sees("following")
	p.seal(o, "while watching", "token", "token", "t", 30)
	b.sees("Credential created")
	b.sees("while watching") // its name, which the entry does not have
	b.sees("fred@example.org")
	b.press("Pause")
	b.sees("Following is paused.")
}
