package dashboard_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/remote"
)

// Tests in a browser share one headless Chromium, which is started by the first of them and ends with the process. Each test opens tabs of
// its own (newTab), whose cookies and storage nobody else sees. A tab fails its test when the content security policy was violated, when a
// script threw or complained on the console, when a file of the page did not load, or when the page asked another host for anything.

// hangs bounds what a test waits for in the browser. No test comes near it unless something is wrong.
const hangs = 2 * time.Minute

// errNoChromium says why tests are skipped.
var errNoChromium = errors.New("no Chromium is installed: run make chromium")

// chromium is the browser that all tests of the package share.
type chromium struct {
	ctx  context.Context
	pipe io.Closer // its end ends the browser: held as long as this process runs
}

var inBrowser = sync.OnceValues(func() (*chromium, error) {
	path, err := exec.LookPath("chromium")
	if err != nil {
		return nil, errNoChromium
	}
	dir, err := os.MkdirTemp("", "latticekeep-chromium-")
	if err != nil {
		return nil, err
	}
	c := new(chromium)
	address, err := c.start(path, dir)
	if err != nil {
		return nil, err
	}
	allocator, _ := remote.NewAllocator(context.Background(), address, remote.NoModifyURL)
	c.ctx, _ = chromedp.NewContext(allocator)
	return c, chromedp.Do(c.ctx)
})

// watch starts the browser in a process group of its own and waits on standard input for the end of the process that started it, in
// whatever way that ends. Then it ends the group and removes the directory: so nothing remains, and tests need no TestMain.
const watch = `
trap '' HUP INT TERM
dir=$1; shift
setsid "$@" </dev/null & browser=$!
exec 2>/dev/null
read -r _
kill -KILL "-$browser"
wait "$browser"
rm -rf "$dir"
`

// start starts the browser and returns the address of its debugging interface.
func (c *chromium) start(path, dir string) (string, error) {
	cmd := exec.Command("/bin/sh", "-c", watch, "watch", dir, path,
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check", "--disable-background-networking",
		"--disable-component-update", "--disable-default-apps", "--disable-extensions", "--disable-sync", "--disable-breakpad", "--metrics-recording-only",
		"--disable-background-timer-throttling", "--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows",
		"--disable-dev-shm-usage", "--force-color-profile=srgb", "--hide-scrollbars", "--lang=en-US",
		"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", // nothing but loopback is reached, whatever asks for it
		"--user-data-dir="+filepath.Join(dir, "profile"), "--remote-debugging-port=0", "about:blank")
	cmd.Env = append(os.Environ(), "HOME="+dir, "TMPDIR="+dir, "TZ=Europe/Berlin")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // not interrupted with the tests, whose end it waits for
	errs, err := cmd.StderrPipe()
	if err != nil {
		return "", err
	}
	if c.pipe, err = cmd.StdinPipe(); err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", fmt.Errorf("starting Chromium: %w", err)
	}
	var said []string
	lines := bufio.NewReader(errs)
	for {
		line, err := lines.ReadString('\n')
		if address, ok := strings.CutPrefix(strings.TrimSpace(line), "DevTools listening on "); ok {
			go func() { _, _ = io.Copy(io.Discard, errs) }() // or the browser would wait for a reader of what it logs
			return address, nil
		}
		if said = append(said, line); err != nil {
			return "", errors.Join(fmt.Errorf("the browser ended: %s", strings.Join(said, "")), c.pipe.Close(), cmd.Wait())
		}
	}
}

// tab is a tab that a test drives. Its methods fail the test when something does not work.
type tab struct {
	t      testing.TB
	ctx    context.Context
	origin string

	mu         sync.Mutex
	violations []string // of the content security policy
	errors     []string // thrown, or on the console
	requests   []string // methods and URLs, in order
}

// newTab opens a tab with cookies and storage of its own, for a server of the test's at a URL such as http://127.0.0.1:1234. The test is
// skipped where Chromium is not installed.
func newTab(t testing.TB, server string) *tab {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs Chromium")
	}
	browser, err := inBrowser()
	if errors.Is(err, errNoChromium) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	b := &tab{t: t, origin: strings.TrimSuffix(server, "/")}
	ctx, end := chromedp.NewContext(browser.ctx, chromedp.WithNewBrowserContext(), chromedp.WithListener(b.hear))
	b.ctx = ctx
	t.Cleanup(func() {
		end()
		b.check()
	})
	if err := chromedp.Do(ctx); err != nil { // without an end to it, or the tab would end then
		t.Fatalf("opening a tab: %v", err)
	}
	ask(b, runtime.AddBinding, runtime.AddBindingParams{Name: "reportViolation"})
	ask(b, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{
		Source: `addEventListener('securitypolicyviolation', e => reportViolation([e.effectiveDirective, e.blockedURI, e.sourceFile, e.lineNumber, e.sample].join(' ')), true)`,
	})
	return b
}

// hear collects what the tab says of itself.
func (b *tab) hear(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventBindingCalled:
		b.violations = append(b.violations, e.Payload)
	case *runtime.EventExceptionThrown:
		b.errors = append(b.errors, "thrown: "+(&chromedp.ExceptionError{ExceptionDetails: e.ExceptionDetails}).Error())
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.ConsoleAPICalledTypeError || e.Type == runtime.ConsoleAPICalledTypeWarning || e.Type == runtime.ConsoleAPICalledTypeAssert {
			var args []string
			for _, a := range e.Args {
				args = append(args, string(a.Value)+a.Description)
			}
			b.errors = append(b.errors, "console: "+strings.Join(args, " "))
		}
	case *log.EventEntryAdded:
		// A refusal of the interface is for the page to show; a file that does not load is not.
		refusal := e.Entry.Source == log.EntrySourceNetwork && strings.Contains(e.Entry.URL, "/api/")
		if (e.Entry.Level == log.EntryLevelError || e.Entry.Level == log.EntryLevelWarning) && !refusal {
			b.errors = append(b.errors, fmt.Sprintf("log: %s %s", e.Entry.Text, e.Entry.URL))
		}
	case *network.EventRequestWillBeSent:
		b.requests = append(b.requests, e.Request.Method+" "+e.Request.URL)
	}
}

// check fails the test for what went wrong in the tab unnoticed.
func (b *tab) check() {
	b.t.Helper()
	for _, v := range b.takeViolations() {
		b.t.Errorf("the content security policy was violated: %s", v)
	}
	for _, e := range b.takeErrors() {
		b.t.Errorf("the page says: %s", e)
	}
	for _, r := range b.foreign() {
		b.t.Errorf("the page asked another host: %s", r)
	}
}

// foreign returns the requests until now that were not for the server.
func (b *tab) foreign() (all []string) {
	for _, r := range b.requested() {
		_, target, _ := strings.Cut(r, " ")
		u, err := url.Parse(target)
		if err != nil || u.Scheme+"://"+u.Host != b.origin && !slices.Contains([]string{"about", "blob", "data"}, u.Scheme) {
			all = append(all, r)
		}
	}
	return all
}

// takeViolations returns the violations of the content security policy until now, of a test that expects them.
func (b *tab) takeViolations() (v []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	v, b.violations = b.violations, nil
	return v
}

// takeErrors returns what was thrown or complained of until now, of a test that expects it.
func (b *tab) takeErrors() (e []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e, b.errors = b.errors, nil
	return e
}

// requested returns methods and URLs of all requests until now, such as "GET http://127.0.0.1:1234/vault".
func (b *tab) requested() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests)
}

// bounded is the tab's context with a bound.
func (b *tab) bounded() (context.Context, context.CancelFunc) {
	return context.WithTimeout(b.ctx, hangs)
}

// ask calls a command of the browser's debugging interface for a tab.
func ask[P, R any](b *tab, command cdp.Command[P, R], parameters P) R {
	b.t.Helper()
	ctx, cancel := b.bounded()
	defer cancel()
	result, err := chromedp.Call(ctx, command, parameters)
	if err != nil {
		b.fatal(command.Method, err)
	}
	return result
}

// run runs actions, such as chromedp.Click("button").
func (b *tab) run(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	if err := b.try(actions...); err != nil {
		b.fatal("doing what the test says", err)
	}
}

// try is run for whoever expects that it may fail.
func (b *tab) try(actions ...chromedp.Action[chromedp.Void]) error {
	ctx, cancel := b.bounded()
	defer cancel()
	return chromedp.Do(ctx, actions...)
}

// get runs an action that returns something, such as chromedp.Text("h1").
func get[T any](b *tab, action chromedp.Action[T]) T {
	b.t.Helper()
	ctx, cancel := b.bounded()
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	if err != nil {
		b.fatal("reading", err)
	}
	return value
}

// fatal ends the test with what is on the screen and on the console.
func (b *tab) fatal(what string, err error) {
	b.t.Helper()
	shown, _ := evaluate[string](b, `location.href + "\n" + (document.body?.innerText ?? "")`)
	b.mu.Lock()
	said := slices.Concat(b.violations, b.errors)
	b.mu.Unlock()
	b.t.Fatalf("%s: %v\non the screen: %s\n%s", what, err, shown, strings.Join(said, "\n"))
}

// open goes to an address of the server, such as /vault, and waits until it has loaded.
func (b *tab) open(path string) {
	b.t.Helper()
	b.run(chromedp.Navigate(b.origin + path))
}

// evaluate evaluates an expression in the page, under the page's policy, and waits if it is a promise.
func evaluate[T any](b *tab, expression string) (T, error) {
	ctx, cancel := b.bounded()
	defer cancel()
	return chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise, func(p *runtime.EvaluateParams) { p.AllowUnsafeEvalBlockedByCSP = new(bool) }))
}

// eval puts the value of an expression, or of the promise that it gives, into a variable.
func (b *tab) eval(expression string, into any) {
	b.t.Helper()
	value, err := evaluate[[]byte](b, expression)
	if err == nil {
		err = json.Unmarshal(value, into)
	}
	if err != nil {
		b.fatal(expression, err)
	}
}

// until waits for an expression to be true, whichever pages come and go meanwhile. An expression that throws is not true yet.
func (b *tab) until(expression string) {
	b.t.Helper()
	// The page itself looks, whenever it has time: so it takes as long as it takes.
	look := fmt.Sprintf(`new Promise(done => {
		const look = () => {
			let is = false;
			try { is = %s } catch {}
			is ? done(true) : setTimeout(look, 10);
		};
		look();
	})`, expression)
	for {
		_, err := evaluate[bool](b, look)
		if err == nil {
			return
		}
		left := strings.Contains(err.Error(), "navigated or closed") || strings.Contains(err.Error(), "context was destroyed") ||
			strings.Contains(err.Error(), "Cannot find context") || strings.Contains(err.Error(), "Promise was collected")
		if !left {
			b.fatal("waiting for "+expression, err)
		}
	}
}

// path returns the address that is shown, without the origin.
func (b *tab) path() (path string) {
	b.t.Helper()
	b.eval(`location.href.slice(location.origin.length)`, &path)
	return path
}

// size gives the tab a screen: 390×844 is a phone, 1440×900 a desk. The tab is a touch screen below 600 pixels.
func (b *tab) size(width, height int64) {
	b.t.Helper()
	var o []chromedp.EmulateViewportOption
	if width < 600 {
		o = append(o, chromedp.EmulateMobile, chromedp.EmulateTouch)
	}
	b.run(chromedp.EmulateViewport(width, height, o...))
}

// prefer sets features of media queries, such as "prefers-color-scheme", "dark".
func (b *tab) prefer(feature, value string) {
	b.t.Helper()
	ask(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: feature, Value: value}}})
}

// offline takes the network from the tab, or gives it back.
func (b *tab) offline(is bool) {
	b.t.Helper()
	ask(b, network.EmulateNetworkConditionsByRule, network.EmulateNetworkConditionsByRuleParams{
		MatchedNetworkConditions: []*network.Conditions{{Offline: is, DownloadThroughput: -1, UploadThroughput: -1}},
	})
	ask(b, network.OverrideNetworkState, network.OverrideNetworkStateParams{Offline: is, DownloadThroughput: -1, UploadThroughput: -1}) // what the page is told
}

// axe is axe-core, which finds what is not accessible.
var axe = sync.OnceValues(func() ([]byte, error) { return os.ReadFile(filepath.Join("testdata", "axe.min.js")) })

// accessible fails the test for each rule of WCAG 2.2 A and AA, and of good practice, that the page violates as it is now shown.
func (b *tab) accessible() {
	b.t.Helper()
	for _, v := range b.inaccessible() {
		b.t.Errorf("%s is not accessible: %s", b.path(), v)
	}
}

// inaccessible returns what accessible complains of.
func (b *tab) inaccessible() (all []string) {
	b.t.Helper()
	script, err := axe()
	if err != nil {
		b.t.Fatal(err)
	}
	// In a world of its own it changes nothing in the page, whose policy does not hold there.
	frame := ask(b, page.GetFrameTree, cdp.Empty{}).FrameTree.Frame.ID
	world := ask(b, page.CreateIsolatedWorld, page.CreateIsolatedWorldParams{FrameID: frame, WorldName: "axe"}).ExecutionContextID
	there := func(p *runtime.EvaluateParams) { p.ContextID = world }
	b.run(chromedp.Evaluate[chromedp.Void](string(script), there))
	found := get(b, chromedp.Evaluate[string](`axe.run(document, {
		runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'], resultTypes: ['violations'],
	}).then(r => JSON.stringify(r.violations.map(v => v.id + ': ' + v.help + '\n' + v.nodes.map(n => '    ' + n.html + '\n    ' + n.failureSummary.replaceAll('\n', '\n    ')).join('\n'))))`,
		there, chromedp.EvalAwaitPromise))
	if err := json.Unmarshal([]byte(found), &all); err != nil {
		b.t.Fatalf("axe says %q: %v", found, err)
	}
	return all
}

// What goes wrong in a tab does not go unnoticed.
func TestTheTabNoticesWhatGoesWrong(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/held", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Security-Policy", "default-src 'self'; require-trusted-types-for 'script'; trusted-types 'none'")
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = io.WriteString(w, `<!doctype html><html lang="en"><meta name="viewport" content="width=device-width"><title>held</title><link rel="icon" href="/icon"><main><h1>Held</h1></main>`)
	})
	mux.HandleFunc("/loose", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = io.WriteString(w, `<!doctype html><html lang="en"><title>loose</title><link rel="icon" href="/icon"><main><h1>Loose</h1><img src="http://127.0.0.2:1/image"></main>`)
	})
	mux.HandleFunc("/icon", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Type", "image/svg+xml") })
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)

	b := newTab(t, server.URL)
	b.open("/held")
	b.accessible()
	b.mu.Lock()
	if n := len(b.violations) + len(b.errors); n > 0 {
		t.Errorf("of nothing %d complaints", n)
	}
	b.mu.Unlock()
	heard := func(what string, is func() bool) {
		t.Helper()
		for began := time.Now(); !is(); b.eval(`new Promise(done => setTimeout(() => done(1)))`, new(int)) {
			if time.Since(began) > hangs/4 {
				t.Fatalf("%s is not noticed", what)
			}
		}
	}
	for what, script := range map[string]string{
		"markup out of text":  `document.querySelector('main').innerHTML = '<p>x</p>'`,
		"code out of text":    `new Function('return 1')()`,
		"an inline style":     `document.querySelector('main').setAttribute('style', 'color: red')`,
		"an inline script":    `(() => { const s = document.createElement('script'); s.append('1'); document.head.append(s); })()`,
		"a policy of types":   `trustedTypes.createPolicy('x', {createHTML: s => s})`,
		"another host's file": `document.querySelector('main').append(Object.assign(new Image(), {alt: 'x', src: 'http://127.0.0.2:1/image'}))`,
	} {
		_, _ = evaluate[chromedp.Void](b, `try { `+script+` } catch {}`)
		heard(what, func() bool { return len(b.takeViolations()) > 0 })
		b.takeErrors()
	}
	for what, script := range map[string]string{
		"thrown: ":  `setTimeout(() => { throw new Error('of no use') })`,
		"of no use": `Promise.reject(new Error('of no use')); 1`,
		"console: ": `console.error('of no use')`,
		"log: ":     `fetch('/nothing').catch(() => {})`,
	} {
		_, _ = evaluate[chromedp.Void](b, script)
		heard(what, func() bool { return strings.Contains(strings.Join(b.takeErrors(), "\n"), what) })
	}
	b.open("/loose")
	heard("a request to another host", func() bool { return len(b.foreign()) > 0 })
	if found := b.inaccessible(); len(found) != 1 || !strings.HasPrefix(found[0], "image-alt") {
		t.Errorf("axe finds %q", found)
	}
	b.takeErrors()
	b.mu.Lock()
	b.requests = nil
	b.mu.Unlock()

	other := newTab(t, server.URL)
	b.open("/held")
	other.open("/held")
	b.eval(`(document.cookie = 'a=b', localStorage.setItem('a', 'b'), 1)`, new(int))
	var kept string
	other.eval(`document.cookie + (localStorage.getItem('a') ?? '')`, &kept)
	if kept != "" {
		t.Errorf("another tab sees %q", kept)
	}
	b.size(390, 844)
	b.prefer("prefers-color-scheme", "dark")
	b.until(`innerWidth === 390 && matchMedia('(prefers-color-scheme: dark)').matches && matchMedia('(pointer: coarse)').matches`)
	b.offline(true)
	b.until(`!navigator.onLine`)
	b.offline(false)
	b.until(`navigator.onLine`)
}
