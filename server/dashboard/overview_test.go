package dashboard_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// calls returns the requests of the interface from the nth on.
func (b *tab) calls(from int) (all []string) {
	for _, r := range b.requested()[from:] {
		if strings.Contains(r, "/api/") {
			all = append(all, strings.Replace(r, b.origin, "", 1))
		}
	}
	return all
}

// entries returns how many entries the tenant of an owner has, without that of this question.
func (p *program) entries(o owner) int64 {
	p.t.Helper()
	log, err := o.QueryAuditLog(p.t.Context(), &v2.QueryAuditLogParams{Limit: new(1)})
	if err != nil {
		p.t.Fatal(err)
	}
	return log.Entries[0].TenantSequence
}

// A visit of the overview is two requests and two entries: who is asking, and the overview.
func TestTheOverviewIsOneRequest(t *testing.T) {
	p := start(t)
	o := p.register("Calm Ltd", "cora@example.org")
	p.seal(o, "first", "token", "token", "t", 3)
	p.seal(o, "second", "token", "token", "t", 90)
	b := p.tab()
	b.signIn(o, "/keys")
	b.settled()
	from, entries := len(b.requested()), p.entries(o)
	b.open("/")
	b.titled("Overview")
	b.sees("1 credential expires within 7 days")
	b.settled()
	if asked := b.calls(from); !slices.Equal(asked, []string{"GET /api/v2/auth/me", "GET /api/v2/overview"}) {
		t.Errorf("a visit asked for %q", asked)
	}
	if left := p.entries(o) - entries - 1; left != 2 { // one is of the question before
		t.Errorf("a visit leaves %d entries", left)
	}
	b.follow("Encrypt and sign")
	b.titled("Encrypt and sign")
	b.settled()
	from = len(b.requested())
	b.follow("Overview")
	b.titled("Overview")
	b.sees("What needs you")
	b.settled()
	if asked := b.calls(from); !slices.Equal(asked, []string{"GET /api/v2/overview"}) {
		t.Errorf("coming back asked for %q", asked)
	}
}

// The overview lists waiting work, each item with a link to its page. It ticks the steps that a new tenant has done.
// When all is done it says so.
func TestTheOverviewSaysWhatWaits(t *testing.T) {
	p := start(t)
	o := p.register("Steps Ltd", "stella@example.org")
	b := p.tab()
	b.signIn(o, "/")
	b.sees("0 of 4 done")
	b.sees("Your address is not verified")
	b.accessible()
	p.verify(o)
	p.must(o.CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "app", Scopes: []v2.Scope{v2.ScopeVaultRead}}))
	b.open("/")
	b.sees("2 of 4 done")
	b.gone("Your address is not verified")
	b.follow("Create a credential")
	b.titled("New credential")
	p.must(o.InviteMember(t.Context(), v2.InviteRequest{Email: "mia@example.org", Role: v2.RoleMember}))
	id := p.seal(o, "short", "token", "token", "t", 2)
	b.open("/")
	b.sees("1 credential expires within 7 days")
	b.gone("First steps")
	b.follow("1 credential expires within 7 days")
	b.titled("Vault")
	b.sees("short")
	if at := b.path(); at != "/vault?status=active&within=7" {
		t.Error(at)
	}
	p.must(o.UnsealCredential(t.Context(), id))
	b.open("/")
	if got := value[string](b, `new Promise(done => { const look = () => { const svg = document.querySelector('.chart svg'); svg ? done(svg.getAttribute('aria-label')) : setTimeout(look, 20); }; look(); })`); !strings.HasPrefix(got, "The last 30 days: Secrets read 1, ") {
		t.Errorf("the picture says %q", got)
	}
	b.activate("DisclosureTriangle", "As a table")
	if rows := value[int](b, `document.querySelectorAll('.overview details tbody tr').length`); rows != 30 {
		t.Errorf("%d days in the table", rows)
	}
	if first := value[string](b, `document.querySelector('.overview details tbody tr').innerText`); !strings.Contains(first, "\t1\t") {
		t.Errorf("today in the table: %q", first)
	}
	b.accessible()
	// Whatever a member with less may not see is not there, and nothing is asked for it.
	stop := b.answer("GET", "/api/v2/overview", reply{status: 200, body: `{"success": true, "todo": [], "setup": {}}`})
	b.open("/")
	b.sees("Nothing needs you.")
	b.gone("Compliance scores")
	stop()
	stop = b.answer("GET", "/api/v2/overview", reply{status: 200, body: `{"success": true, "unavailable": ["compliance"], "setup": {},
		"todo": [{"kind": "of_a_later_release", "count": 1}, {"kind": "controls_failing", "count": 2, "framework": "gdpr"}],
		"health": [{"part": "chain", "status": "failed", "message": "It does not verify."}, {"part": "kms", "status": "unknown", "message": "Not known."}],
		"activity": {"complete": false, "days": [{"date": "2026-11-20", "secrets": 0, "changes": 0}]}}`})
	b.open("/")
	b.sees("It does not verify.")
	b.sees("reviews, denials and scores")
	b.sees("Not everything is counted")
	b.accessible()
	b.follow("Controls that you can fix fail in GDPR")
	b.until(`location.pathname === '/compliance/gdpr'`)
	stop()
	b.settled()
}

// The overview lists credentials that nobody reads, and the keyboard alone reaches them.
func TestTheOverviewNamesWhatNobodyReads(t *testing.T) {
	p := startAt(t, -100*24*time.Hour)
	o := p.register("Quiet Ltd", "quinn@example.org")
	p.verify(o)
	operator := p.operator()
	p.must(operator.ActivateTenant(t.Context(), p.tenant(o)))
	for i := range 6 {
		p.seal(o, fmt.Sprint("forgotten ", i), "token", "token", "t", 300)
	}
	used := p.seal(o, "in use", "token", "token", "t", 300)
	p.advance(100 * 24 * time.Hour)
	p.must(o.Login(t.Context(), v2.LoginRequest{Email: o.email, Password: o.password}))
	p.must(o.UnsealCredential(t.Context(), used))
	b := p.tab()
	b.signIn(o, "/")
	b.sees("6 credentials that nobody has read for 90 days")
	if links := value[int](b, `[...document.querySelectorAll('.overview a')].filter(a => a.innerText.startsWith('forgotten')).length`); links != 5 {
		t.Errorf("%d are named", links)
	}
	b.gone("in use")
	b.tabTo("link", "All credentials, unused for the longest time first")
	b.keys(kb.Enter)
	b.titled("Vault")
	b.settled()
}
