package dashboard_test

import (
	"fmt"
	"net/http"
	"testing"
)

// endSessions ends the sessions of a user, but for the one of its client.
func (p *program) endSessions(o owner) {
	p.t.Helper()
	list, err := o.ListSessions(p.t.Context())
	if err != nil {
		p.t.Fatal(err)
	}
	for _, s := range list.Sessions {
		if s.Current {
			continue
		}
		if err := o.EndSession(p.t.Context(), s.SessionId); err != nil {
			p.t.Fatal(err)
		}
	}
}

// fillCredential enters a credential.
func (b *tab) fillCredential(name, key, secret string) {
	b.t.Helper()
	b.fill("Name", name)
	b.fill("Key", key)
	b.fill("Value", secret)
}

func TestASessionThatEndsLosesNothing(t *testing.T) {
	p := start(t)
	o := p.register("Sessions", "sam@example.org")
	b := p.tab()
	b.signIn(o, "/vault/new")
	b.fillCredential("survivor", "key", "not lost")
	p.endSessions(o)
	b.press("Create")
	b.sees("Your session has ended")
	if got := b.holds("E-mail address"); got != o.email {
		t.Errorf("the dialog asks %q to sign in", got)
	}
	b.fill("Password", "not the password")
	b.press("Sign in")
	b.sees("do not belong together")
	b.fill("Password", o.password)
	b.press("Sign in")
	b.titled("survivor")
	b.press("Read values")
	b.press("Show key")
	b.sees("not lost")
	b.press("Hide now")

	// Of several requests at once, one question is asked.
	p.endSessions(o)
	b.follow("Overview")
	b.sees("Your session has ended")
	b.fill("Password", o.password)
	b.press("Sign in")
	b.titled("Overview")
	if n := value[int](b, `document.querySelectorAll('[role=alert]').length`); n != 0 {
		t.Errorf("%d parts of the page failed", n)
	}
}

// What is refused keeps what was entered, and says what to do.
func TestEachRefusalSaysWhatToDo(t *testing.T) {
	p := start(t)
	o := p.register("Refusals", "rita@example.org")
	b := p.tab()
	b.signIn(o, "/vault/new")
	b.fillCredential("kept", "key", "kept too")
	limited := refusal(http.StatusTooManyRequests, "too many requests")
	limited.headers["Retry-After"] = "2"
	for _, c := range []struct {
		reply reply
		says  string
	}{
		{refusal(http.StatusForbidden, "access denied"), "Not allowed. Your role or the plan does not allow this."},
		{refusal(http.StatusConflict, "conflict"), "Changed meanwhile. Conflict."},
		{refusal(http.StatusUnprocessableEntity, "the name is empty"), "Check what you entered. The name is empty."},
		{limited, "Too many requests. Wait until the countdown has ended, then try again. Nothing was done."},
		{refusal(http.StatusInternalServerError, "internal error"), "An error of ours. Something went wrong on the server. Try again; if it stays, report the request id."},
		{refusal(http.StatusServiceUnavailable, "temporarily unavailable"), "Not available just now. The service cannot do this at the moment."},
		{reply{status: http.StatusBadGateway, body: "<html>a proxy's own page"}, "An error of ours."},
	} {
		stop := b.answer("POST", "/api/v2/vault/seal", c.reply)
		b.press("Create")
		b.sees(c.says)
		if c.reply.headers != nil {
			b.until(detail("req_of_a_test"))
		}
		if c.reply.status == http.StatusTooManyRequests {
			b.sees("Try again in")
			b.gone("Try again in")
		}
		stop()
		if name, secret := b.holds("Name"), b.holds("Value"); name != "kept" || secret != "kept too" {
			t.Errorf("after %d the form has %q, %q", c.reply.status, name, secret)
		}
	}
	b.offline(true)
	b.press("Create")
	b.sees("No connection. The server could not be reached.")
	b.offline(false)
	b.press("Create")
	b.titled("kept")

	b.follow("Vault")
	b.titled("Vault")
	for _, status := range []int{http.StatusForbidden, http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusServiceUnavailable} {
		r := refusal(status, "a refusal of a test")
		r.headers["Retry-After"] = "1"
		stop := b.answer("GET", "/api/v2/vault/list*", r)
		b.open("/vault?q=" + fmt.Sprint(status))
		b.until(detail("a refusal of a test"))
		b.sees("Try again in")
		stop()
		b.press("Try again")
		b.sees("No credential matches")
	}
}

// detail is an expression of whether a failure has a text behind "Show details".
func detail(text string) string {
	return fmt.Sprintf(`[...document.querySelectorAll('.trouble details')].some(d => !d.open && d.textContent.includes(%s))`, quoted(text))
}

// All scores are one request, which says that it failed and is repeated.
func TestScoresThatFailAreAskedForAgain(t *testing.T) {
	p := start(t)
	o := p.register("Scores", "sina@example.org")
	b := p.tab()
	stop := b.answer("GET", "/api/v2/compliance/scores", refusal(http.StatusInternalServerError, "a refusal of a test"))
	b.signIn(o, "/compliance")
	b.until(detail("a refusal of a test"))
	stop()
	b.press("Try again")
	b.until(`document.querySelectorAll('main a[href^="/compliance/"]').length >= 9`)
	b.until("!document.querySelector('.trouble')")
}
