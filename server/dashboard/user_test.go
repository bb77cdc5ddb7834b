package dashboard_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/dom"
	"github.com/chromedp/cdproto/fetch"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// What a user does with a tab. Things are found as a screen reader has them, by what they are and what they are called, and each method
// waits until the thing is there.

// entered are the roles of what text is entered into.
var entered = []string{"textbox", "searchbox", "spinbutton", "combobox"}

// named returns the elements of one of some roles with a name, in the order of the page.
func (b *tab) named(name string, roles ...string) (found []cdp.BackendNodeID) {
	ctx, cancel := b.bounded()
	defer cancel()
	document, err := chromedp.Call(ctx, dom.GetDocument, dom.GetDocumentParams{Depth: new(int64)})
	if err != nil {
		return nil // a page that goes has nothing
	}
	answer, err := chromedp.Call(ctx, accessibility.QueryAXTree, accessibility.QueryAXTreeParams{NodeID: document.Root.NodeID, AccessibleName: name})
	if err != nil {
		return nil
	}
	for _, n := range answer.Nodes {
		if !n.Ignored && n.Role != nil && slices.Contains(roles, strings.Trim(string(n.Role.Value), `"`)) {
			found = append(found, n.BackendDOMNodeID)
		}
	}
	return found
}

// find waits for the one element of a role with a name.
func (b *tab) find(name string, roles ...string) cdp.BackendNodeID {
	b.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var found []cdp.BackendNodeID
	for deadline := time.After(hangs); ; {
		if found = b.named(name, roles...); len(found) == 1 {
			return found[0]
		}
		select {
		case <-tick.C:
		case <-deadline:
			b.fatal(fmt.Sprintf("looking for the %v %q", roles, name), fmt.Errorf("there are %d", len(found)))
		}
	}
}

// click presses the mouse where the element is. One that moves or goes meanwhile is looked for again.
func (b *tab) click(role, name string) {
	b.t.Helper()
	for {
		node := b.find(name, role)
		err := b.clickNode(node)
		if err == nil {
			return
		}
		if b.ctx.Err() != nil || !strings.Contains(err.Error(), "-32000") {
			b.fatal(fmt.Sprintf("pressing the %s %q", role, name), err)
		}
	}
}

func (b *tab) clickNode(node cdp.BackendNodeID) error {
	ctx, cancel := b.bounded()
	defer cancel()
	if _, err := chromedp.Call(ctx, dom.ScrollIntoViewIfNeeded, dom.ScrollIntoViewIfNeededParams{BackendNodeID: node}); err != nil {
		return err
	}
	place, err := chromedp.Call(ctx, dom.GetContentQuads, dom.GetContentQuadsParams{BackendNodeID: node})
	if err != nil {
		return err
	}
	if len(place.Quads) == 0 {
		return errors.New("-32000: it is not drawn") // as of one that has gone
	}
	q := place.Quads[0]
	return chromedp.Do(ctx, chromedp.MouseClickXY((q[0]+q[2]+q[4]+q[6])/4, (q[1]+q[3]+q[5]+q[7])/4))
}

func (b *tab) press(button string) { b.t.Helper(); b.click("button", button) }
func (b *tab) follow(link string)  { b.t.Helper(); b.click("link", link) }

// fill replaces what is in a field by text, as if it was typed.
func (b *tab) fill(label, text string) {
	b.t.Helper()
	node := b.find(label, entered...)
	ask(b, dom.Focus, dom.FocusParams{BackendNodeID: node})
	on[any](b, node, `function() { this.select() }`)
	if text == "" {
		b.keys(kb.Delete)
		return
	}
	ask(b, input.InsertText, input.InsertTextParams{Text: text})
}

// choose takes an option of a list by what it says.
func (b *tab) choose(label, option string) {
	b.t.Helper()
	node := b.find(label, "combobox")
	chosen := on[bool](b, node, `function() {
		const option = [...this.options].find(o => o.text.trim() === `+quoted(option)+`);
		if (!option) return false;
		this.focus();
		this.value = option.value;
		this.dispatchEvent(new Event('input', {bubbles: true}));
		this.dispatchEvent(new Event('change', {bubbles: true}));
		return true;
	}`)
	if !chosen {
		b.fatal("choosing", fmt.Errorf("%q has no option %q", label, option))
	}
}

// value returns what an expression, or the promise that it gives, is in the page.
func value[T any](b *tab, expression string) (v T) {
	b.t.Helper()
	v, err := evaluate[T](b, expression)
	if err != nil {
		b.fatal(expression, err)
	}
	return v
}

// script runs an expression in the page for what it does.
func (b *tab) script(expression string) {
	b.t.Helper()
	if _, err := evaluate[chromedp.Void](b, "void ("+expression+")"); err != nil {
		b.fatal(expression, err)
	}
}

// holds returns what is in a field.
func (b *tab) holds(label string) string {
	b.t.Helper()
	return on[string](b, b.find(label, entered...), `function() { return this.value }`)
}

// on calls a function on an element.
func on[T any](b *tab, node cdp.BackendNodeID, function string) (value T) {
	b.t.Helper()
	object := ask(b, dom.ResolveNode, dom.ResolveNodeParams{BackendNodeID: node})
	yes := true
	result := ask(b, runtime.CallFunctionOn, runtime.CallFunctionOnParams{FunctionDeclaration: function, ObjectID: object.Object.ObjectID, ReturnByValue: &yes})
	if result.ExceptionDetails != nil {
		b.fatal(function, &chromedp.ExceptionError{ExceptionDetails: result.ExceptionDetails})
	}
	if len(result.Result.Value) > 0 {
		if err := json.Unmarshal(result.Result.Value, &value); err != nil {
			b.fatal(function, err)
		}
	}
	return value
}

// shows is an expression of whether the page shows a text. Runs of spaces and lines are one space.
func shows(text string) string {
	return fmt.Sprintf(`document.body.innerText.replace(/\s+/g, ' ').includes(%s)`, quoted(text))
}

// sees waits until the page shows a text, and gone until it does not.
func (b *tab) sees(text string) { b.t.Helper(); b.until(shows(text)) }
func (b *tab) gone(text string) { b.t.Helper(); b.until("!" + shows(text)) }

// quoted is text as JavaScript writes it.
func quoted(text string) string {
	literal, err := json.Marshal(text)
	if err != nil {
		panic(err) // text can always be written
	}
	return string(literal)
}

// unquoted is the text that a JSON string is of.
func unquoted(literal string) (text string) {
	_ = json.Unmarshal([]byte(literal), &text) // empty, if it is none
	return text
}

// still is an expression of whether the page has loaded what it shows.
const still = `!document.querySelector('.skeleton, [aria-busy=true]') && ![...document.querySelectorAll('main .quiet')].some(e => e.textContent === 'loading')`

// titled waits until the page with a heading has come, with what it loads.
func (b *tab) titled(title string) {
	b.t.Helper()
	b.until(fmt.Sprintf(`document.querySelector('h1')?.innerText.trim() === %s && %s`, quoted(title), still))
}

// settled waits until a page has come, with what it loads.
func (b *tab) settled() {
	b.t.Helper()
	b.until(`document.querySelector('h1') && ` + still)
}

// keys presses keys, such as kb.Tab, one after the other.
func (b *tab) keys(pressed ...string) {
	b.t.Helper()
	for _, k := range pressed {
		b.run(chromedp.KeyEvent(k))
	}
}

// signIn begins a session by the interface, and opens a page.
func (b *tab) signIn(o owner, page string) {
	b.t.Helper()
	b.open("/sign-in")
	status := value[int](b, fmt.Sprintf(`fetch('/api/v2/auth/login', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify({email: %s, password: %s})}).then(r => r.status)`,
		quoted(o.email), quoted(o.password)))
	if status != http.StatusOK {
		b.t.Fatalf("signing in: %d", status)
	}
	b.open(page)
	b.settled()
}

// cookies are those that the tab has for the server, by name.
func (b *tab) cookies() map[string]*network.Cookie {
	b.t.Helper()
	all := map[string]*network.Cookie{}
	for _, c := range ask(b, network.GetCookies, network.GetCookiesParams{URLs: []string{b.origin + "/api/v2/auth/refresh"}}).Cookies {
		all[c.Name] = c
	}
	return all
}

// reply is an answer that a test gives in the place of the server.
type reply struct {
	status  int
	body    string
	headers map[string]string
}

// refusal is the interface's envelope of an error.
func refusal(status int, message string) reply {
	return reply{status: status, headers: map[string]string{"X-Request-Id": "req_of_a_test"},
		body: fmt.Sprintf(`{"success":false,"error":{"code":%d,"message":%s,"request_id":"req_of_a_test"}}`, status, quoted(message))}
}

// answer has the requests of a method to a path, which may have wildcards, answered in the place of the server, until the function that it
// returns is called.
func (b *tab) answer(method, path string, r reply) (stop func()) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.ctx) // however long the test takes
	var pending sync.WaitGroup
	err := chromedp.Listen(ctx, func(event any) {
		e, ok := event.(*fetch.EventRequestPaused)
		if !ok {
			return
		}
		pending.Go(func() { // this function runs between the messages of the tab, and may not send any
			if e.Request.Method != method {
				_, _ = chromedp.Call(ctx, fetch.ContinueRequest, fetch.ContinueRequestParams{RequestID: e.RequestID})
				return
			}
			headers := []*fetch.HeaderEntry{{Name: "Content-Type", Value: "application/json"}}
			for name, value := range r.headers {
				headers = append(headers, &fetch.HeaderEntry{Name: name, Value: value})
			}
			_, _ = chromedp.Call(ctx, fetch.FulfillRequest, fetch.FulfillRequestParams{RequestID: e.RequestID, ResponseCode: int64(r.status), ResponseHeaders: headers, Body: []byte(r.body)})
		})
	})
	if err != nil {
		b.fatal("listening", err)
	}
	ask(b, fetch.Enable, fetch.EnableParams{Patterns: []*fetch.RequestPattern{{URLPattern: b.origin + path}}})
	return func() {
		b.t.Helper()
		ask(b, fetch.Disable, cdp.Empty{})
		cancel()
		pending.Wait()
	}
}
