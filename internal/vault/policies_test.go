package vault

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// limited returns a principal of the tenant of f.a with a policy.
func (f *fixture) limited(rules ...authz.Rule) authz.Principal {
	f.t.Helper()
	policy, err := authz.NewPolicy(rules)
	must(f.t, err)
	p := f.a
	p.ID, p.Access = "key_of_somebody", authz.Access{policy}
	return p
}

func anyVerb(path string) authz.Rule { return authz.Rule{Path: path, Verbs: authz.Verbs()} }

// Credentials of one name are all on the pages of somebody whose policy names it whole.
func TestNamesakesAcrossPages(t *testing.T) {
	f := newFixture(t, 0)
	f.index()
	var want []string
	for range 3 {
		want = append(want, f.sealNamed(f.a, "shop/db", login).ID)
	}
	f.sealNamed(f.a, "shop/dc", login)
	last := f.sealNamed(f.a, "shop/dd", login)
	slices.Sort(want)
	p := f.limited(anyVerb("shop/db"), anyVerb("shop/dd"))
	if ids, n := f.pages(p, ListQuery{Limit: 1}); !slices.Equal(ids, append(want, last.ID)) {
		t.Errorf("%d of 4 on %d pages", len(ids), n)
	}
}

// A credential outside a policy is one case with what is not there, in the answer and in the work, for
// each method that names a credential. Only the reason in the log differs.
func TestOutsideAPolicyNothingIsThere(t *testing.T) {
	f := newFixture(t, 0)
	p := f.limited(anyVerb("mine/**"))
	there, outside := f.sealNamed(f.a, "mine/db", login), f.sealNamed(f.a, "theirs/db", login)
	generated := f.object("shop", "theirs", 0, 30, time.Hour)
	_, err := f.vault.Read(t.Context(), p, ByID(there.ID)) // makes the decoy
	must(t, err)
	operations := map[string]func(id string) error{
		"Unseal": func(id string) error { _, err := f.vault.Read(t.Context(), p, ByID(id)); return err },
		"UnsealVersion": func(id string) error {
			_, err := f.vault.Read(t.Context(), p, ByVersion(id, 1))
			return err
		},
		"Versions": func(id string) error { _, err := f.vault.Versions(t.Context(), p, id); return err },
		"Metadata": func(id string) error { _, err := f.vault.Metadata(t.Context(), p, id); return err },
		"Rotate":   func(id string) error { _, err := f.vault.Rotate(t.Context(), p, id); return err },
		"Replace": func(id string) error {
			_, err := f.vault.Replace(t.Context(), p, id, ReplaceRequest{Values: secrets(login)})
			return err
		},
		"Patch": func(id string) error {
			_, err := f.vault.Patch(t.Context(), p, id, PatchRequest{Set: secrets(login)})
			return err
		},
		"Delete":       func(id string) error { return f.vault.Delete(t.Context(), p, id) },
		"UnsealByName": func(name string) error { _, err := f.vault.Read(t.Context(), p, ByName(name)); return err },
	}
	for operation, do := range operations {
		absent, cases := authz.NewID("cred"), []string{outside.ID, generated.ID}
		if operation == "UnsealByName" {
			absent, cases = "mine/none", []string{"theirs/db", "theirs/none", "theirs", "mine/../theirs/db"}
		}
		want, refused := f.measured(func() error { return do(absent) })
		if !errors.Is(refused, fault.Forbidden) || f.last(p).Attributes[audit.AttributeReason] != reasonMissing {
			t.Fatal(operation, refused, f.last(p))
		}
		for _, which := range cases {
			did, err := f.measured(func() error { return do(which) })
			if err == nil || err.Error() != refused.Error() || did != want {
				t.Errorf("%s: outside it said %q and did %+v, want %q and %+v", operation, err, did, refused, want)
			}
			e := f.last(p)
			if e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != string(authz.OutsidePolicy) || len(e.Attributes) != 1 {
				t.Errorf("%s: the entry is %+v", operation, e)
			}
			if operation == "UnsealByName" && e.Resource.ID != "" {
				t.Error("the entry names a credential that was not looked for:", e)
			}
		}
	}
	for _, operation := range []string{"Unseal", "Versions", "Metadata", "Replace", "Rotate"} {
		must(t, operations[operation](there.ID))
	}
	must(t, operations["UnsealByName"]("mine/db"))
	must(t, operations["Delete"](there.ID))
	for _, id := range []string{outside.ID, generated.ID} {
		if c, err := f.vault.Metadata(t.Context(), f.a, id); err != nil || c.Version != 1 {
			t.Error("somebody outside changed it:", c, err)
		}
	}
	f.verify()
}

// Each verb of a policy allows its methods and no other.
func TestEachVerbAllowsItsMethods(t *testing.T) {
	f := newFixture(t, time.Hour)
	for _, v := range authz.Verbs() {
		p := f.limited(authz.Rule{Path: "a/*", Verbs: []authz.Verb{v}})
		c := f.sealNamed(f.a, "a/b", login)
		for name, is := range map[string]struct {
			verb authz.Verb
			do   func() error
		}{
			"unseal":   {authz.ReadPath, func() error { _, err := f.vault.Read(t.Context(), p, ByID(c.ID)); return err }},
			"by name":  {authz.ReadPath, func() error { _, err := f.vault.Read(t.Context(), p, ByName("a/b")); return err }},
			"metadata": {authz.ListPath, func() error { _, err := f.vault.Metadata(t.Context(), p, c.ID); return err }},
			"versions": {authz.ListPath, func() error { _, err := f.vault.Versions(t.Context(), p, c.ID); return err }},
			"rotate":   {authz.WritePath, func() error { _, err := f.vault.Rotate(t.Context(), p, c.ID); return err }},
			"seal": {authz.WritePath, func() error {
				_, err := f.vault.Seal(t.Context(), p, SealRequest{Name: "a/b", Type: "database", Values: secrets(login)})
				return err
			}},
		} {
			if err := is.do(); (err == nil) != (v == is.verb) || err != nil && !errors.Is(err, fault.Forbidden) {
				t.Errorf("%s with %s: %v", name, v, err)
			}
		}
		if _, err := f.vault.Patch(t.Context(), p, c.ID, PatchRequest{Set: secrets(login)}); !errors.Is(err, fault.Forbidden) {
			t.Errorf("patching takes two verbs, not %s alone: %v", v, err)
		}
		if _, _, err := f.vault.Put(t.Context(), p, PutRequest{SealRequest: SealRequest{Name: "a/put", Type: "database", Values: secrets(login)}}); !errors.Is(err, fault.Forbidden) {
			t.Errorf("a put takes two verbs, not %s alone: %v", v, err)
		}
		_, err := f.vault.Rotate(t.Context(), p, c.ID, "\"another\"")
		if errors.Is(err, ErrCondition) {
			t.Errorf("a condition is told to whoever may not read, with %s", v)
		}
		list, _, err := f.vault.List(t.Context(), p, ListQuery{})
		if must(t, err); len(list) > 0 != (v == authz.ListPath) {
			t.Errorf("%s lists %d", v, len(list))
		}
		if err := f.vault.Delete(t.Context(), p, c.ID); (err == nil) != (v == authz.DeletePath) {
			t.Errorf("deleting with %s: %v", v, err)
		}
	}
}

// A list, its cursors and a summary are those of a tenant in which nothing else is.
func TestListsTellNothingOfWhatIsOutside(t *testing.T) {
	t.Run("with an index of paths", func(t *testing.T) { listsTellNothing(t, true) })
	t.Run("with none yet", func(t *testing.T) { listsTellNothing(t, false) })
}

func listsTellNothing(t *testing.T, indexed bool) {
	f := newFixture(t, time.Hour)
	if indexed {
		f.index()
	}
	p := f.limited(anyVerb("mine/*"))
	var mine []string
	for i := range 5 {
		mine = append(mine, f.sealFor(f.a, fmt.Sprint("mine/", i), "database", 30).ID)
	}
	if !indexed { // by the ids instead of the names
		slices.Sort(mine)
	}
	type answer struct {
		ids     [][]string
		summary Summary
	}
	ask := func(q ListQuery) (a answer) {
		t.Helper()
		for {
			list, rest, err := f.vault.List(t.Context(), p, q)
			next := rest.Cursor
			must(t, err)
			var ids []string
			for _, c := range list {
				ids = append(ids, c.ID)
			}
			if e := f.last(p); e.Attributes["count"] != fmt.Sprint(len(ids)) || len(e.Attributes) != 1 {
				t.Error("the entry tells more:", e.Attributes)
			}
			if a.ids, q.Cursor = append(a.ids, ids), next; next == "" {
				break
			}
		}
		var err error
		a.summary, err = f.vault.Summary(t.Context(), p, 60*day)
		must(t, err)
		return a
	}
	queries := []ListQuery{{}, {Limit: 2}, {Limit: 5}, {Limit: 1, Filter: Filter{Text: "mine"}}, {Filter: Filter{Text: "theirs"}}, {Limit: 3, Filter: Filter{Type: "api"}}}
	var alone []answer
	for _, q := range queries {
		alone = append(alone, ask(q))
	}
	if !slices.Equal(slices.Concat(alone[1].ids...), mine) || len(alone[1].ids) != 3 || alone[0].summary.Total != 5 {
		t.Fatal(alone)
	}
	for i := range 30 {
		f.sealFor(f.a, fmt.Sprint([]string{"theirs/", "mine/sub/", "", "mine/sub/deep/"}[i%4], i), "api", 3+i)
	}
	f.object("shop", "theirs", 0, 30, 0)
	damaged := f.sealNamed(f.a, "mine/damaged", login)
	f.tamper(func(tx store.Tx) error { return tx.Put(record.Key(f.a.Tenant, damaged.ID, 1), []byte("x")) })
	for _, left := range []listing.Budget{listing.PageBudget(), {Records: 3, Bytes: 1 << 20}} {
		f.vault.pageBudget, f.vault.summaryBudget = left, listing.SummaryBudget()
		for i, q := range queries {
			if got := ask(q); left == listing.PageBudget() && fmt.Sprint(got) != fmt.Sprint(alone[i]) || got.summary.Total != 5 {
				t.Errorf("%+v: %v, alone it was %v", q, got, alone[i])
			}
		}
	}
	f.vault.summaryBudget = listing.Budget{Records: 5, Bytes: 1 << 20}
	if s, err := f.vault.Summary(t.Context(), p, 0); err != nil || !s.Complete || len(s.Types) != 1 || s.Total != 5 {
		t.Error(s, err)
	}
}

// An Idempotency-Key that somebody else used tells a principal with a policy nothing.
func TestAnIdempotencyKeyTellsNothingOfOthers(t *testing.T) {
	f := newFixture(t, time.Hour)
	p, q := f.limited(anyVerb("mine/*")), f.limited(anyVerb("mine/*"))
	q.ID = "key_of_another"
	seal := func(p authz.Principal, name string) (Credential, error) {
		return f.vault.Seal(t.Context(), p, SealRequest{Name: name, Type: "database", Values: secrets(login), IdempotencyKey: "deploy-1"})
	}
	made := make(map[string]bool)
	for _, one := range []authz.Principal{f.a, p, q} {
		name := "mine/" + one.ID[len(one.ID)-1:]
		first, err := seal(one, name)
		must(t, err)
		again, err := seal(one, name)
		if must(t, err); again.ID != first.ID || made[first.ID] {
			t.Errorf("%s: %s, then %s", one.ID, first.ID, again.ID)
		}
		made[first.ID] = true
	}
	if _, err := seal(p, "theirs/x"); !errors.Is(err, fault.Forbidden) {
		t.Error("outside:", err)
	}
	if e := f.last(p); e.EventType != audit.CredentialSealed || e.Attributes[audit.AttributeReason] != string(authz.OutsidePolicy) || e.Resource.ID != "" {
		t.Error(e)
	}
	if _, err := seal(p, "mine/other"); !errors.Is(err, fault.Invalid) {
		t.Error("the key of another request:", err)
	}
}
