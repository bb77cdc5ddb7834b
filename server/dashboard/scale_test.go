package dashboard_test

import (
	"cmp"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// manyCredentials names how many credentials the list has, for a run by hand.
const manyCredentials = "DASHBOARD_CREDENTIALS"

// A long list is read page by page, and no page holds more than its own rows.
func TestLongListsStayLight(t *testing.T) {
	n, err := strconv.Atoi(cmp.Or(os.Getenv(manyCredentials), "300"))
	if err != nil {
		t.Fatal(err)
	}
	p := start(t)
	o := p.register("Many", "max@example.org")
	p.must(p.operator().SetTenantLimits(t.Context(), p.tenant(o), v2.LimitTenantRequest{V2: new(1_000_000)}))
	var seals errgroup.Group
	seals.SetLimit(8)
	for i := range n {
		seals.Go(func() error {
			_, err := o.SealCredential(t.Context(), v2.SealRequest{Name: fmt.Sprintf("service-%05d/token", i), CredentialType: "token", Values: map[string]string{"token": "t"}, TtlDays: new(30)}, nil)
			return err
		})
	}
	if err := seals.Wait(); err != nil {
		t.Fatal(err)
	}
	b := p.tab()
	const perPage, mostNodes = 50, 2500
	// Each page is what a script sees of it, and how long it was on its way.
	turn := func(address, button string) (pages int, seen map[string]bool, slowest float64) {
		t.Helper()
		b.open(address)
		b.settled()
		for seen = map[string]bool{}; ; pages++ {
			rows := value[[]string](b, `[...document.querySelectorAll('main tbody tr')].map(r => r.innerText)`)
			if len(rows) > perPage {
				t.Fatalf("%s shows %d rows at once", address, len(rows))
			}
			for _, r := range rows {
				seen[r] = true
			}
			if nodes := value[int](b, `document.getElementsByTagName('*').length`); nodes > mostNodes {
				t.Fatalf("%s has %d elements on page %d", address, nodes, pages)
			}
			if len(b.named(button, "button")) == 0 || pages > 500 {
				return pages + 1, seen, slowest
			}
			b.script(`window.turned = performance.now(), window.first = document.querySelector('main tbody tr').innerText`)
			b.press(button)
			b.until(`document.querySelector('main tbody tr').innerText !== window.first && ` + still)
			slowest = max(slowest, value[float64](b, `performance.now() - window.turned`))
		}
	}
	b.signIn(o, "/")
	pages, seen, slowest := turn("/vault", "Next page")
	t.Logf("%d credentials on %d pages, the slowest after %.0f ms", len(seen), pages, slowest)
	if len(seen) != n {
		t.Errorf("%d of %d credentials were on a page", len(seen), n)
	}
	pages, seen, slowest = turn("/audit", "Next page")
	t.Logf("%d entries on %d pages, the slowest after %.0f ms", len(seen), pages, slowest)
	if len(seen) < n {
		t.Errorf("%d entries were on a page", len(seen))
	}
	b.open("/vault")
	b.fill("Search by name", fmt.Sprintf("%05d", n-1))
	b.sees("1 credential")
	b.follow(fmt.Sprintf("service-%05d/token", n-1))
	b.titled(fmt.Sprintf("service-%05d/token", n-1))
}

// manyEntries names how many entries the log has, for a run by hand.
const manyEntries = "DASHBOARD_ENTRIES"

// Whatever the log holds, a visit of the overview and of the log asks as often, and shows as many rows and elements.
func TestALongLogStaysLight(t *testing.T) {
	n, err := strconv.Atoi(cmp.Or(os.Getenv(manyEntries), "600"))
	if err != nil {
		t.Fatal(err)
	}
	p := start(t)
	o := p.register("Long log", "lola@example.org")
	p.verify(o)
	p.must(p.operator().SetTenantLimits(t.Context(), p.tenant(o), v2.LimitTenantRequest{V2: new(1_000_000)}))
	p.seal(o, "the only change", "token", "token", "t", 30)
	key, err := o.CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "reader", Scopes: []v2.Scope{v2.ScopeVaultRead}})
	p.must(key, err)
	reader := p.newClient(client.WithAPIKey(key.ApiKey))
	var reads errgroup.Group
	reads.SetLimit(64)
	for range n {
		reads.Go(func() error {
			_, err := reader.GetAccount(t.Context())
			return err
		})
	}
	if err := reads.Wait(); err != nil {
		t.Fatal(err)
	}
	p.must(o.Login(t.Context(), v2.LoginRequest{Email: o.email, Password: o.password}))
	b := p.tab()
	b.signIn(o, "/settings/profile")
	for _, visit := range []struct {
		address  string
		requests int
		rows     int
		shows    string
	}{
		{"/", 2, 30, "Last 30 days"}, {"/audit", 4, 50, "50 entries on this page"}, {"/audit?show=changes", 4, 50, "Credential created"},
	} {
		from := len(b.requested())
		b.open(visit.address)
		b.script(`window.began = performance.now()`)
		b.settled()
		b.sees(visit.shows)
		took := value[float64](b, `performance.now() - window.began`)
		asked := 0
		for _, r := range b.requested()[from:] {
			if strings.Contains(r, "/api/") {
				asked++
			}
		}
		rows, nodes := value[int](b, `document.querySelectorAll('main tbody tr').length`), value[int](b, `document.getElementsByTagName('*').length`)
		t.Logf("%s with %d entries: %d requests, %d rows, %d elements, after %.0f ms", visit.address, n, asked, rows, nodes, took)
		if asked > visit.requests || rows > visit.rows || nodes > 2500 {
			t.Errorf("%s: %d requests, %d rows and %d elements", visit.address, asked, rows, nodes)
		}
	}
}

// The time until the first useful content of a page is there, as a ratio to a page of the same server that asks for
// nothing but the account.
func BenchmarkFirstUsefulPaint(b *testing.B) {
	p := start(b)
	o := p.register("Paint", "paula@example.org")
	for i := range 60 {
		p.seal(o, fmt.Sprint("service-", i), "token", "token", "t", 30)
	}
	page := p.tab()
	page.signIn(o, "/")
	load := func(address, there string) time.Duration {
		began := time.Now()
		page.open(address)
		page.until(there)
		return time.Since(began)
	}
	for _, useful := range []struct{ name, address, there string }{
		{"overview", "/", `document.querySelector('.numbers')`}, {"vault", "/vault", `document.querySelector('main tbody tr')`}, {"audit", "/audit", `document.querySelector('main tbody tr')`},
	} {
		b.Run(useful.name, func(b *testing.B) {
			var took, plain time.Duration
			for b.Loop() {
				plain += load("/settings/plan", `document.querySelector('main h1')`)
				took += load(useful.address, useful.there)
			}
			b.ReportMetric(float64(took)/float64(plain), "loads-of-a-plain-page")
			b.ReportMetric(float64(took.Milliseconds())/float64(b.N), "ms")
		})
	}
}
