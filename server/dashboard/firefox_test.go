package dashboard_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/websocket"
)

// firefox is a tab of Debian's Firefox, driven by WebDriver BiDi.
type firefox struct {
	t          testing.TB
	conn       *websocket.Conn
	commands   int
	tab        string
	origin     string
	complaints []string // what the page said on the console as an error
}

// What Firefox does by itself at its start, switched off: it reaches nothing here.
const quietFirefox = `user_pref("app.update.enabled", false);
user_pref("app.normandy.enabled", false);
user_pref("browser.safebrowsing.downloads.enabled", false);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("network.captive-portal-service.enabled", false);
user_pref("network.connectivity-service.enabled", false);
user_pref("services.settings.server", "http://127.0.0.1:9");
user_pref("network.proxy.no_proxies_on", "127.0.0.1");
`

// startFirefox starts one for a server, and ends it with the test. Without it the test is skipped.
func startFirefox(t testing.TB, origin string) *firefox {
	t.Helper()
	path, err := exec.LookPath("firefox-esr")
	if err != nil {
		t.Skip("firefox-esr is not installed: make firefox installs it")
	}
	dir := t.TempDir()
	profile := filepath.Join(dir, "profile")
	if err := os.Mkdir(profile, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(profile, "user.js"), []byte(quietFirefox), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--headless", "--no-remote", "--remote-debugging-port", "0", "--remote-allow-origins", "http://127.0.0.1", "--profile", profile, "about:blank")
	cmd.Env = append(os.Environ(), "HOME="+dir, "TMPDIR="+dir, "MOZ_HEADLESS=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	errs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // the browser and the processes that it has started
		_ = cmd.Wait()
	})
	lines := bufio.NewScanner(errs)
	var address string
	for address == "" {
		if !lines.Scan() {
			t.Fatal("Firefox ended before it listened")
		}
		address, _ = strings.CutPrefix(lines.Text(), "WebDriver BiDi listening on ")
		if !strings.HasPrefix(address, "ws://127.0.0.1:") {
			address = ""
		}
	}
	go func() {
		for lines.Scan() { // or the browser would wait for a reader of what it logs
		}
	}()
	conn, err := websocket.Dial(address+"/session", "", "http://127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	f := &firefox{t: t, conn: conn, origin: origin}
	f.command("session.new", map[string]any{"capabilities": map[string]any{}}, nil)
	f.command("session.subscribe", map[string]any{"events": []string{"log.entryAdded"}}, nil)
	var tree struct{ Contexts []struct{ Context string } }
	f.command("browsingContext.getTree", map[string]any{}, &tree)
	f.tab = tree.Contexts[0].Context
	return f
}

// command sends a command, and decodes its result.
func (f *firefox) command(method string, params, result any) {
	f.t.Helper()
	f.commands++
	_ = f.conn.SetDeadline(time.Now().Add(hangs))
	if err := websocket.JSON.Send(f.conn, map[string]any{"id": f.commands, "method": method, "params": params}); err != nil {
		f.t.Fatalf("%s: %v", method, err)
	}
	for {
		var message struct {
			ID             int
			Type           string
			Result, Params json.RawMessage
			Message        string
		}
		if err := websocket.JSON.Receive(f.conn, &message); err != nil {
			f.t.Fatalf("%s: %v", method, err)
		}
		if message.Type == "event" {
			var entry struct{ Level, Text string }
			if json.Unmarshal(message.Params, &entry) == nil && entry.Level == "error" {
				f.complaints = append(f.complaints, entry.Text)
			}
			continue
		}
		if message.ID != f.commands {
			continue
		}
		if message.Type != "success" {
			f.t.Fatalf("%s: %s", method, message.Message)
		}
		if result != nil {
			if err := json.Unmarshal(message.Result, result); err != nil {
				f.t.Fatalf("%s: %v", method, err)
			}
		}
		return
	}
}

func (f *firefox) open(path string) {
	f.t.Helper()
	f.command("browsingContext.navigate", map[string]any{"context": f.tab, "url": f.origin + path, "wait": "complete"}, nil)
}

// run evaluates an expression, or the promise that it gives.
func (f *firefox) run(expression string) {
	f.t.Helper()
	var answer struct {
		Type             string
		ExceptionDetails struct{ Text string }
	}
	f.command("script.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "target": map[string]any{"context": f.tab}}, &answer)
	if answer.Type != "success" {
		f.t.Fatalf("%s: %s", expression, answer.ExceptionDetails.Text)
	}
}

// until waits for a condition, in the page.
func (f *firefox) until(condition string) {
	f.t.Helper()
	f.run(fmt.Sprintf(`new Promise((done, failed) => {
		const end = Date.now() + %d;
		(function look() {
			if (%s) done();
			else if (Date.now() > end) failed(new Error('in vain; the page says: ' + document.body.innerText.slice(0, 2000)));
			else setTimeout(look, 20);
		})();
	})`, hangs.Milliseconds()/2, condition))
}

func (f *firefox) sees(text string) { f.t.Helper(); f.until(shows(text)) }

func (f *firefox) press(button string) {
	f.t.Helper()
	find := fmt.Sprintf(`[...document.querySelectorAll('button')].find(b => !b.disabled && (b.getAttribute('aria-label') ?? b.innerText.trim()) === %s)`, quoted(button))
	f.until("!!" + find)
	f.run("void " + find + ".click()")
}

func (f *firefox) fill(label, text string) {
	f.t.Helper()
	f.run(fmt.Sprintf(`(() => {
		const field = document.getElementById([...document.querySelectorAll('label')].find(l => l.innerText.trim() === %s).htmlFor);
		field.value = %s;
		field.dispatchEvent(new Event('input', {bubbles: true}));
	})()`, quoted(label), quoted(text)))
}

// The dashboard works in Firefox, too: every page comes, values are shown, the log is verified and a manifest sealed.
func TestTheDashboardWorksInFirefox(t *testing.T) {
	p := start(t)
	f := startFirefox(t, p.url)
	o := p.register("Fuchsbau", "fox@example.org")
	p.verify(o)
	id := p.seal(o, "shop/prod/db", "database", "password", "höchst geheim", 30)
	f.open("/sign-in")
	f.until(`document.querySelector('h1')?.innerText === 'Sign in'`)
	f.fill("E-mail address", o.email)
	f.fill("Password", o.password)
	f.press("Sign in")
	f.until(`document.querySelector('h1')?.innerText === 'Overview' && ` + still)
	for _, path := range []string{
		"/vault", "/vault?folder=shop%2F", "/vault?sort=updated", "/vault/new", "/crypto", "/keys", "/compliance", "/compliance/soc2", "/audit", "/audit?show=changes",
		"/cluster", "/settings/api-keys", "/settings/members", "/settings/profile", "/settings/sessions", "/settings/plan",
	} {
		f.open(path)
		f.until(`document.querySelector('h1')?.innerText && ` + still)
		f.until(`!document.querySelector('.trouble')`)
		f.until(`document.documentElement.scrollWidth <= document.documentElement.clientWidth`)
	}
	f.open("/vault/" + id)
	f.press("Read values")
	f.press("Show password")
	f.sees("höchst geheim")
	f.press("Hide now")
	f.press("Edit values")
	f.press("Review changes")
	f.sees("Nothing is changed")
	f.open("/audit")
	f.until(still)
	f.press("Verify this page")
	f.sees("verified: hash, signature, inclusion.")
	f.open("/cluster/seal")
	f.until(still)
	f.fill("Name", "db")
	f.fill("Namespace", "shop")
	f.fill("Credential type", "database")
	f.fill("Key", "password")
	f.fill("Value", "only the vault reads this")
	f.press("Seal")
	f.sees("kind: SealedCredential")
	if len(f.complaints) > 0 {
		t.Errorf("the console has %q", f.complaints)
	}
}
