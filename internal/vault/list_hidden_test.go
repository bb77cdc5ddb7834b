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
	f.index()
	for i := range 3 {
		f.object("billing", fmt.Sprint("canary-", i), 0, 2, 0)
	}
	for range 4 {
		f.sealFor(f.a, "free", "database", 30)
	}
	shop := f.pod("cluster", "shop")
	cursor := func(q ListQuery) bool {
		list, rest, err := f.vault.List(t.Context(), shop, q)
		next := rest.Cursor
		must(t, err)
		if len(list) != q.Limit {
			t.Errorf("%+v: %d credentials", q, len(list))
		}
		return next != ""
	}
	f.sealFor(f.a, "zebra", "database", 30)
	alone := cursor(ListQuery{Filter: Filter{Prefix: "zebra"}, Limit: 1})
	f.object("billing", "zebra-canary", 0, 2, 0)
	if beside := cursor(ListQuery{Filter: Filter{Prefix: "zebra"}, Limit: 1}); alone != beside {
		t.Errorf("a full page has a cursor: %v alone, %v beside a hidden one", alone, beside)
	}
	for _, left := range []listing.Budget{listing.PageBudget(), {Records: 1, Bytes: 1 << 20}, {Records: 12, Bytes: 1 << 20}, {Records: 30, Bytes: 1 << 20}, {Records: 60, Bytes: 1 << 20}} {
		f.vault.pageBudget = left
		_, none := f.pages(shop, ListQuery{Filter: Filter{Text: "nothing has this"}})
		for _, filter := range []Filter{{Text: "canary"}, {Type: "generic", Text: "canary-1"}, {ExpiresBefore: f.now().Add(3 * day)}, {Prefix: "canary"}, {Prefix: "canary-2"}, {Tag: "canary"}, {Prefix: "canary", Tag: "canary"}} {
			for _, limit := range []int{0, 1} {
				if ids, n := f.pages(shop, ListQuery{Filter: filter, Limit: limit}); len(ids) != 0 || n != none {
					t.Errorf("%+v with %v, limit %d: %d credentials on %d pages, but what nothing has is on %d", filter, left, limit, len(ids), n, none)
				}
			}
		}
	}
}
