package vault

import (
	"fmt"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/vault/listing"
)

// The ends of a search's pages reveal nothing about the names, types and ages of credentials that
// are hidden from the caller. Otherwise the caller could guess them letter by letter.
func TestPagesEndAlikeWhateverIsHidden(t *testing.T) {
	f := newFixture(t, time.Minute)
	for i := range 3 {
		f.object("billing", fmt.Sprint("canary-", i), 0, 2, 0)
	}
	for range 4 {
		f.sealFor(f.a, "free", "database", 30)
	}
	shop := f.pod("cluster", "shop")
	for _, left := range []listing.Budget{listing.PageBudget(), {Records: 1, Bytes: 1 << 20}, {Records: 12, Bytes: 1 << 20}, {Records: 30, Bytes: 1 << 20}, {Records: 60, Bytes: 1 << 20}} {
		f.vault.pageBudget = left
		_, none := f.pages(shop, ListQuery{Filter: Filter{Text: "nothing has this"}})
		for _, filter := range []Filter{{Text: "canary"}, {Type: "generic", Text: "canary-1"}, {ExpiresBefore: f.now().Add(3 * day)}} {
			if ids, n := f.pages(shop, ListQuery{Filter: filter}); len(ids) != 0 || n != none {
				t.Errorf("%+v with %v: %d credentials on %d pages, but what nothing has is on %d", filter, left, len(ids), n, none)
			}
		}
	}
}
