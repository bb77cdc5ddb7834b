package dashboard_test

import (
	"cmp"
	"fmt"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sync/errgroup"

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
