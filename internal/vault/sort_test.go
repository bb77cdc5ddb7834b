package vault

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
)

// orders of times, as a client would sort.
var orders = map[listing.Order]func(a, b Credential) int{
	listing.ByCreated: func(a, b Credential) int { return b.CreatedAt.Compare(a.CreatedAt) },
	listing.ByUpdated: func(a, b Credential) int { return b.SealedAt.Compare(a.SealedAt) },
	listing.ByExpires: func(a, b Credential) int { return a.ExpiresAt.Compare(b.ExpiresAt) },

	listing.ByLastRead: func(a, b Credential) int { return b.LastRead.Compare(a.LastRead) },
	listing.ByUnread:   func(a, b Credential) int { return lastUse(a).Compare(lastUse(b)) },
}

func lastUse(c Credential) time.Time {
	if c.LastRead.IsZero() {
		return c.CreatedAt
	}
	return c.LastRead
}

// An order of times shows what the list without it shows, page by page, and a total counts no more.
func TestOrdersOfTimes(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		f.index()
		reads := map[string]time.Time{}
		for i := range 30 {
			c := f.sealFor(f.a, fmt.Sprint([]string{"shop/", "bank/"}[i%2], i/4), []string{"database", "api_key"}[i%3/2], 1+i*7%13)
			if f.advance(time.Hour); i%4 == 0 {
				_, err := f.vault.Rotate(t.Context(), f.a, c.ID)
				must(t, err)
			}
			if i%3 == 0 { // the others are never read
				_, err := f.vault.Read(t.Context(), f.a, ByID(c.ID))
				must(t, err)
				reads[c.ID] = f.now().UTC()
			}
			if i%10 == 9 {
				f.object("billing", fmt.Sprint("o", i), 0, 5, 0)
			}
		}
		f.advance(2 * day)
		for who, p := range map[string]authz.Principal{
			"all": f.a, "limited": f.limited(anyVerb("shop/**"), anyVerb("bank/1")), "pod": f.pod("cluster", "shop"), "nothing": f.limited(),
		} {
			for _, filter := range []Filter{{}, {Type: "api_key"}, {Prefix: "shop/"}, {Status: listing.Active}, {Text: "1"}} {
				all, _, err := f.vault.List(t.Context(), p, ListQuery{Filter: filter})
				must(t, err)
				for i, c := range all {
					all[i].LastRead = reads[c.ID].Truncate(time.Hour)
				}
				for order, compare := range orders {
					slices.SortFunc(all, func(a, b Credential) int { return cmp.Or(compare(a, b), cmp.Compare(a.ID, b.ID)) })
					var want []string
					for _, c := range all {
						want = append(want, c.ID)
					}
					for _, limit := range []int{0, 1, 7} {
						ids, n := f.pages(p, ListQuery{Filter: filter, Order: order, Limit: limit})
						if pages := (len(want) + limit - 1) / max(limit, 1); !slices.Equal(ids, want) || limit > 0 && n != max(pages, 1) {
							t.Errorf("%s %+v by %s, %d a page: %d pages of\n%q, want\n%q", who, filter, order, limit, n, ids, want)
						}
					}
				}
				for _, order := range []listing.Order{listing.ByID, listing.ByName, listing.ByExpires} {
					list, rest, err := f.vault.List(t.Context(), p, ListQuery{Filter: filter, Order: order, Limit: 2, Count: true})
					if err != nil || rest.Total != len(all) || !rest.Whole || len(list) > 2 {
						t.Errorf("%s %+v by %q: a total of %+v, want %d: %v", who, filter, order, rest, len(all), err)
					}
				}
			}
		}
	})
}

// A cursor is one of its order, and too many credentials are not sorted, but their number is a lower bound.
func TestBoundsOfOrdersOfTimes(t *testing.T) {
	f := newFixture(t, 0)
	f.index()
	for range 4 {
		f.sealFor(f.a, "a/b", "database", 30)
	}
	_, rest, err := f.vault.List(t.Context(), f.a, ListQuery{Order: listing.ByCreated, Limit: 1})
	must(t, err)
	for _, order := range []listing.Order{listing.ByID, listing.ByName, listing.ByUpdated, listing.ByExpires} {
		if _, _, err := f.vault.List(t.Context(), f.a, ListQuery{Order: order, Limit: 1, Cursor: rest.Cursor}); !errors.Is(err, fault.Invalid) {
			t.Errorf("by %q, with the cursor of another order: %v", order, err)
		}
	}
	f.sealFor(f.a, "b", "database", 30)
	f.vault.summaryBudget = listing.Budget{Records: 6, Bytes: 1 << 20}
	for _, order := range []listing.Order{listing.ByCreated, listing.ByLastRead, listing.ByUnread} { // they take as many
		if list, _, err := f.vault.List(t.Context(), f.a, ListQuery{Order: order}); err != nil || len(list) != 5 {
			t.Errorf("by %s: %d, %v", order, len(list), err)
		}
	}
	f.vault.summaryBudget = listing.Budget{Records: 4, Bytes: 1 << 20}
	if _, _, err := f.vault.List(t.Context(), f.a, ListQuery{Order: listing.ByCreated}); !errors.Is(err, fault.Invalid) {
		t.Errorf("too many: %v", err)
	}
	if list, _, err := f.vault.List(t.Context(), f.a, ListQuery{Order: listing.ByCreated, Filter: Filter{Prefix: "a/"}}); err != nil || len(list) != 4 {
		t.Errorf("fewer, with a prefix: %d, %v", len(list), err)
	}
	if list, rest, err := f.vault.List(t.Context(), f.a, ListQuery{Count: true}); err != nil || len(list) != 5 || rest.Total != 4 || rest.Whole {
		t.Errorf("a total of too many: %d, %+v, %v", len(list), rest, err)
	}
}
