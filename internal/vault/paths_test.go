package vault

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/pathindex"
)

// index makes the index of paths, as a server does after its start.
func (f *fixture) index() {
	f.t.Helper()
	b := &pathindex.Builder{Store: f.store, Ready: func(context.Context) (bool, error) { return true, nil }, Logger: slog.New(slog.DiscardHandler)}
	if done, err := b.Build(f.t.Context()); err != nil || !done {
		f.t.Fatal(done, err)
	}
}

// namesOf returns the names of all pages of a list.
func (f *fixture) namesOf(p authz.Principal, q ListQuery) (names []string) {
	f.t.Helper()
	for {
		list, rest, err := f.vault.List(f.t.Context(), p, q)
		next := rest.Cursor
		must(f.t, err)
		for _, c := range list {
			names = append(names, c.Name)
		}
		if q.Cursor = next; next == "" {
			return names
		}
	}
}

// A list by name has each credential once, where its name is now.
func TestAListByNameIsInTheOrderOfNames(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		f.index()
		v := map[string]string{"k": "v"}
		ids := map[string]string{}
		want := []string{"a-b", "a/b", "a/c", "a0", "b", "b/a", "e\u0301/x", "z"}
		for _, i := range []int{5, 2, 0, 7, 3, 1, 6, 4} {
			ids[want[i]] = f.sealNamed(f.a, want[i], v).ID
		}
		f.sealNamed(f.b, "a/of another tenant", v)
		is := func(what string, q ListQuery, want ...string) {
			t.Helper()
			for _, limit := range []int{0, 1, 3} {
				if q.Limit = limit; !slices.Equal(f.namesOf(f.a, q), want) {
					t.Errorf("%s, %d on a page: %q, want %q", what, limit, f.namesOf(f.a, q), want)
				}
			}
		}
		byName := ListQuery{Order: listing.ByName}
		want[6], want[7] = "z", "e\u0301/x" // é follows z
		is("all", byName, want...)
		is("prefix", ListQuery{Filter: Filter{Prefix: "a/"}}, "a/b", "a/c")
		is("prefix in another form", ListQuery{Filter: Filter{Prefix: "é"}}, "e\u0301/x")
		is("prefix and text", ListQuery{Filter: Filter{Prefix: "a", Text: "C"}}, "a/c")
		is("no such prefix", ListQuery{Filter: Filter{Prefix: "none/"}})

		_, err := f.vault.Rename(t.Context(), f.a, ids["a/b"], "b/0", "")
		must(t, err)
		_, err = f.vault.Rotate(t.Context(), f.a, ids["a/c"])
		must(t, err)
		must(t, f.vault.Delete(t.Context(), f.a, ids["a0"]))
		is("after changes", byName, "a-b", "a/c", "b", "b/0", "b/a", "z", "e\u0301/x")
		if rows, _ := f.rows("credential-path/" + string(f.a.Tenant)); len(rows) != 7 {
			t.Errorf("%q", rows)
		}
		f.verify()
	})
}

// With folders, a list has what is directly under its prefix, and each folder once, whatever a page holds.
func TestAListOfFoldersHasEachOnce(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		f.index()
		for _, name := range []string{"shop", "shop/prod/db", "shop/prod/mail", "shop/dev/db", "shop/key", "shop-old/db", "shop0", "a/b/c", "e\u0301/x"} {
			f.sealFor(f.a, name, "database", 30)
		}
		f.sealFor(f.a, "bank/card", "card", 30)
		read := func(p authz.Principal, q ListQuery) (names, folders []string) {
			t.Helper()
			for again := true; again; again = q.Cursor != "" {
				list, rest, err := f.vault.List(t.Context(), p, q)
				must(t, err)
				if q.Limit > 0 && len(list)+len(rest.Folders) > q.Limit {
					t.Errorf("%+v: %d credentials and %d folders on a page", q, len(list), len(rest.Folders))
				}
				for _, c := range list {
					names = append(names, c.Name)
				}
				folders, q.Cursor = append(folders, rest.Folders...), rest.Cursor
			}
			return names, folders
		}
		for _, budget := range []listing.Budget{listing.PageBudget(), {Records: 1, Bytes: 1 << 20}} {
			f.vault.pageBudget = budget
			for _, limit := range []int{0, 1, 2, 100} {
				for what, c := range map[string]struct {
					p              authz.Principal
					filter         Filter
					names, folders []string
				}{
					"top":        {f.a, Filter{}, []string{"shop", "shop0"}, []string{"a/", "bank/", "shop-old/", "shop/", "\u00e9/"}},
					"shop/":      {f.a, Filter{Prefix: "shop/"}, []string{"shop/key"}, []string{"shop/dev/", "shop/prod/"}},
					"shop":       {f.a, Filter{Prefix: "shop"}, []string{"shop", "shop0"}, []string{"shop-old/", "shop/"}},
					"e/":         {f.a, Filter{Prefix: "e\u0301/"}, []string{"e\u0301/x"}, nil},
					"of a type":  {f.a, Filter{Type: "card"}, nil, []string{"bank/"}},
					"by text":    {f.a, Filter{Prefix: "shop/", Text: "mail"}, nil, []string{"shop/prod/"}},
					"by policy":  {f.limited(anyVerb("shop/prod/**"), anyVerb("bank/*")), Filter{}, nil, []string{"bank/", "shop/"}},
					"inside one": {f.limited(anyVerb("shop/prod/**")), Filter{Prefix: "shop/"}, nil, []string{"shop/prod/"}},
				} {
					c.filter.Folders = true
					names, folders := read(c.p, ListQuery{Filter: c.filter, Limit: limit})
					if !slices.Equal(names, c.names) || !slices.Equal(folders, c.folders) {
						t.Errorf("%s, %d on a page: %q and %q, want %q and %q", what, limit, names, folders, c.names, c.folders)
					}
				}
			}
		}
		// Names whose normal form is longer than the index tells apart are listed one by one, and none is hidden.
		long := strings.Repeat("\U0001D160", 55)
		for _, name := range []string{long + "/one", long + "/two", long + "zz", long} {
			f.sealFor(f.a, name, "long", 30)
		}
		f.vault.pageBudget = listing.PageBudget()
		if names, folders := read(f.a, ListQuery{Filter: Filter{Type: "long", Folders: true}, Limit: 1}); len(names) != 4 || len(folders) != 0 {
			t.Errorf("of names that are too long: %d and %q", len(names), folders)
		}
		for what, q := range map[string]ListQuery{"an order of times": {Order: listing.ByUpdated, Filter: Filter{Folders: true}}} {
			if _, _, err := f.vault.List(t.Context(), f.a, q); !errors.Is(err, fault.Invalid) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if _, _, err := f.vault.List(t.Context(), f.pod("cluster", "shop"), ListQuery{Filter: Filter{Folders: true}}); !errors.Is(err, fault.Invalid) {
			t.Errorf("a ServiceAccount: %v", err)
		}
	})
}

// Somebody with policies is told nothing by how much is read: a list costs what it shows, and a look
// for each segment in the place of a "*".
func TestAListReadsNothingOfWhatIsOutside(t *testing.T) {
	f := newFixture(t, 0)
	f.index()
	v := map[string]string{"k": "v"}
	for _, name := range []string{"shop/a", "shop/b", "shop/c", "bank/db", "mail/db"} {
		f.sealNamed(f.a, name, v)
	}
	cost := func(paths ...string) (rows int64, names []string) {
		t.Helper()
		var rules []authz.Rule
		for _, path := range paths {
			rules = append(rules, anyVerb(path))
		}
		p := f.limited(rules...)
		before := f.store.rows.Load() + f.store.gets.Load()
		names = f.namesOf(p, ListQuery{Limit: 100})
		_, err := f.vault.Summary(t.Context(), p, day)
		must(t, err)
		return f.store.rows.Load() + f.store.gets.Load() - before, names
	}
	type few struct {
		rows  int64
		names []string
	}
	before := map[string]few{}
	lists := map[string][]string{"shop/**": {"shop/**"}, "shop/b": {"shop/b"}, "two": {"shop/a", "mail/**"}, "*/db": {"*/db"}}
	for name, paths := range lists {
		rows, names := cost(paths...)
		before[name] = few{rows, names}
	}
	if got := before["two"].names; !slices.Equal(got, []string{"mail/db", "shop/a"}) {
		t.Error(got)
	}
	for i := range 400 {
		f.sealNamed(f.a, fmt.Sprintf("%s/hidden/%03d", []string{"bank", "mail0", "shop-", "zoo"}[i%4], i), v)
	}
	for name, paths := range lists {
		rows, names := cost(paths...)
		// The list and the summary each look at one name behind each stretch.
		if most := before[name].rows + 2*int64(len(paths)) + map[string]int64{"*/db": 20}[name]; rows > most || !slices.Equal(names, before[name].names) {
			t.Errorf("%s: %d rows and %q beside 400 more, %d and %q without", name, rows, names, before[name].rows, before[name].names)
		}
	}
}

// What an earlier release wrote is listed at once, and by name when it is indexed; a row that leads
// nowhere lists nothing.
func TestAStoreWithoutAnIndexIsListed(t *testing.T) {
	f := newFixture(t, time.Minute)
	v := map[string]string{"k": "v"}
	one := f.sealNamed(f.a, "shop/b", v)
	f.sealNamed(f.a, "shop/a", v)
	f.sealNamed(f.a, "bank/a", v)
	keys, _ := f.rows("credential-path/")
	f.tamper(func(tx store.Tx) (err error) {
		for _, key := range keys {
			err = errors.Join(err, tx.Delete(key))
		}
		return err
	})
	limited, sorted := f.limited(anyVerb("shop/*")), func(names []string) string {
		slices.Sort(names)
		return strings.Join(names, " ")
	}
	for _, limit := range []int{0, 1} {
		if got := sorted(f.namesOf(limited, ListQuery{Limit: limit})); got != "shop/a shop/b" {
			t.Errorf("before the index: %s", got)
		}
		if got := sorted(f.namesOf(f.a, ListQuery{Filter: Filter{Prefix: "bank/"}, Limit: limit})); got != "bank/a" {
			t.Errorf("a prefix before the index: %s", got)
		}
	}
	if _, _, err := f.vault.List(t.Context(), f.a, ListQuery{Order: listing.ByName}); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
	f.index()
	f.index() // once more changes nothing
	f.tamper(func(tx store.Tx) error {
		return errors.Join(
			tx.Put(pathindex.Key(f.a.Tenant, "shop/another name", one.ID), []byte{}),
			tx.Put(pathindex.Key(f.a.Tenant, "shop/gone", authz.NewID(idPrefix)), []byte{}),
			tx.Put([]byte(strings.TrimSuffix(string(pathindex.Key(f.a.Tenant, "shop/odd", "")), "\x00")), []byte{}),
		)
	})
	for _, p := range []authz.Principal{limited, f.a} {
		if got := f.namesOf(p, ListQuery{Filter: Filter{Prefix: "shop/"}, Limit: 1}); !slices.Equal(got, []string{"shop/a", "shop/b"}) {
			t.Errorf("%q", got)
		}
	}
	keys, _ = f.rows("credential/" + string(f.a.Tenant) + "/" + one.ID)
	f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], []byte("junk")) })
	if got := f.namesOf(limited, ListQuery{}); !slices.Equal(got, []string{"shop/a"}) {
		t.Errorf("beside a damaged record: %q", got)
	}
}

// A damaged record says no name, and its place in lists goes with it all the same.
func TestADamagedRecordLeavesNoPlaceInLists(t *testing.T) {
	f := newUnboundFixture(t, time.Minute)
	one := f.seal(f.a, login)
	f.sealNamed(f.a, "another", login)
	keys, _ := f.rows("credential/" + string(f.a.Tenant) + "/" + one.ID)
	f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], []byte("junk")) })
	must(t, f.vault.Delete(t.Context(), f.a, one.ID))
	if keys, _ = f.rows("credential-path/"); len(keys) != 1 {
		t.Errorf("%q", keys)
	}
}
