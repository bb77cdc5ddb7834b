package vault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/kept"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// keep sets a rule of the history of the first tenant.
func (f *fixture) keep(path string, versions int) {
	f.t.Helper()
	if _, err := f.vault.Rules.Set(f.t.Context(), f.a, kept.Rule{Path: path, Versions: versions}); err != nil {
		f.t.Fatal(err)
	}
}

// change gives a credential new values, one after the other.
func (f *fixture) change(id string, values ...string) {
	f.t.Helper()
	for _, v := range values {
		if _, err := f.vault.Replace(f.t.Context(), f.a, id, ReplaceRequest{Values: secrets(map[string]string{"k": v})}); err != nil {
			f.t.Fatal(err)
		}
	}
}

// readable returns the values of the versions that can be read, oldest first, after it has compared them
// with what the history says.
func (f *fixture) readable(id string) (all []string) {
	f.t.Helper()
	versions, err := f.vault.Versions(f.t.Context(), f.a, id)
	must(f.t, err)
	for _, v := range slices.Backward(versions) {
		got, err := f.vault.Read(f.t.Context(), f.a, ByVersion(id, v.Number))
		if (err == nil) != v.Readable || err != nil && fault.Of(err) != fault.Forbidden || err == nil && got.Version != v.Number {
			f.t.Errorf("version %d, readable %v: %+v %v", v.Number, v.Readable, got.Credential, err)
		}
		if err == nil {
			all = append(all, string(got.Values["k"]))
		}
	}
	return all
}

func (f *fixture) wantReadable(id string, want ...string) {
	f.t.Helper()
	if got := f.readable(id); !slices.Equal(got, want) {
		f.t.Errorf("readable are %q, want %q", got, want)
	}
}

// Without a rule a new value erases the earlier one; with one, as many stay readable as it says, and undo
// brings one back.
func TestARuleKeepsEarlierVersions(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		c := f.sealNamed(f.a, "shop/db", map[string]string{"k": "one"})
		f.change(c.ID, "two")
		f.wantReadable(c.ID, "two")
		f.keep("shop/**", 2)
		f.change(c.ID, "three", "four", "five")
		f.wantReadable(c.ID, "three", "four", "five")
		undone, err := f.vault.Undo(t.Context(), f.a, c.ID, 3, "")
		must(t, err)
		if e := f.last(f.a); undone.Version != 6 || e.EventType != audit.CredentialRotated || e.Attributes["undo_to"] != "3" || e.Attributes[audit.AttributeVersion] != "6" {
			t.Errorf("undone: %+v, %+v", undone, e)
		}
		f.wantReadable(c.ID, "four", "five", "three")
		if _, err := f.vault.Undo(t.Context(), f.a, c.ID, 3, ""); fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), "version 3 is not kept") {
			t.Errorf("a version that is erased: %v", err)
		}
		if _, err := f.vault.Undo(t.Context(), f.a, c.ID, 4, Condition(c.EntityTag())); !errors.Is(err, ErrCondition) {
			t.Errorf("on another version: %v", err)
		}
		put, created, err := f.vault.Put(t.Context(), f.a, PutRequest{SealRequest: SealRequest{Name: "shop/db", Type: "t", Values: secrets(map[string]string{"k": "six"})}})
		if err != nil || created || put.ID != c.ID {
			t.Error(put, created, err)
		}
		f.wantReadable(c.ID, "five", "three", "six")
		other := f.sealNamed(f.a, "bank/db", map[string]string{"k": "a"})
		f.change(other.ID, "b")
		f.wantReadable(other.ID, "b")
		must(t, f.vault.Delete(t.Context(), f.a, c.ID))
		if keys, _ := f.rows(kept.Family); len(keys) != 0 {
			t.Errorf("a deleted credential has %d kept versions", len(keys))
		}
		f.verify()
	})
}

// The rule of the present name counts, the most specific one.
func TestTheMostSpecificRuleCounts(t *testing.T) {
	f := newFixture(t, 0)
	for path, n := range map[string]int{"**": 1, "shop/**": 2, "shop/*/db": 3, "shop/prod/**": 0, "shop/prod/db": 4} {
		f.keep(path, n)
	}
	for name, n := range map[string]int{"x": 1, "shop": 1, "shop/a": 2, "shop/a/db": 3, "shop/prod/x": 0, "shop/prod/x/y": 0, "shop/prod/db": 4} {
		c := f.sealNamed(f.a, name, map[string]string{"k": "0"})
		f.change(c.ID, "1", "2", "3", "4", "5")
		if got := f.readable(c.ID); len(got) != n+1 {
			t.Errorf("%s: %q, want %d earlier ones", name, got, n)
		}
	}
	c := f.sealNamed(f.a, "shop/t/db", map[string]string{"k": "0"})
	f.change(c.ID, "1", "2", "3")
	_, err := f.vault.Rename(t.Context(), f.a, c.ID, "other", "")
	must(t, err)
	f.wantReadable(c.ID, "2", "3") // the renamed version has the values of the one before
	f.verify()
}

// A lower number, or no rule, erases in the commit of the entry that says so.
func TestALowerNumberErasesAtOnce(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		f.keep("**", 3)
		a, b := f.sealNamed(f.a, "a", map[string]string{"k": "secret-0"}), f.sealNamed(f.a, "b", map[string]string{"k": "0"})
		f.change(a.ID, "1", "2", "3")
		f.change(b.ID, "1", "2", "3")
		f.keep("a", 1)
		if e := f.last(f.a); e.EventType != audit.HistoryRuleChanged || e.Attributes["erased"] != "2" || e.Attributes["versions_kept"] != "1" || len(e.Attributes["rule"]) != 32 {
			t.Errorf("%+v", e)
		}
		f.wantReadable(a.ID, "2", "3")
		f.wantReadable(b.ID, "0", "1", "2", "3")
		rules, err := f.vault.Rules.Remove(t.Context(), f.a, "**")
		if err != nil || fmt.Sprint(rules) != "[{a 1}]" {
			t.Error(rules, err)
		}
		if e := f.last(f.a); e.Attributes["erased"] != "3" {
			t.Errorf("%+v", e)
		}
		f.wantReadable(a.ID, "2", "3")
		f.wantReadable(b.ID, "3")
		if got, err := f.vault.Rules.Rules(t.Context(), f.a); err != nil || fmt.Sprint(got) != "[{a 1}]" {
			t.Error(got, err)
		}
		if got, err := f.vault.Rules.Rules(t.Context(), f.b); err != nil || len(got) != 0 {
			t.Errorf("another tenant has the rules %v: %v", got, err)
		}
		f.verify()
	})
}

// However many there are: what a rule no longer keeps is not readable from its commit on, and its rows
// go in further ones, also after a process that ended in between.
func TestErasingGoesOn(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 3)
	var ids []string
	for i := range 400 {
		c := f.sealNamed(f.a, fmt.Sprint("n", i), map[string]string{"k": "0"})
		f.change(c.ID, "1", "2")
		ids = append(ids, c.ID)
	}
	slices.Sort(ids)
	ctx, cancel := context.WithCancel(t.Context())
	updates := 0
	f.store.before = func() {
		if updates++; updates == 2 {
			cancel()
		}
	}
	if _, err := f.vault.Rules.Set(ctx, f.a, kept.Rule{Path: "**", Versions: 1}); err != nil {
		t.Fatal(err)
	}
	f.store.before = nil
	if keys, _ := f.rows(kept.Family); len(keys) <= 400 || len(keys) >= 800 {
		t.Fatalf("%d kept versions are left in the middle of it", len(keys))
	}
	f.wantReadable(ids[0], "1", "2")
	f.wantReadable(ids[399], "1", "2")
	n, err := f.vault.Sweep(t.Context())
	if keys, _ := f.rows(kept.Family); err != nil || n == 0 || len(keys) != 400 {
		t.Errorf("%d kept versions are left after %d steps: %v", len(keys), n, err)
	}
	if n, err := f.vault.Sweep(t.Context()); err != nil || n != 0 {
		t.Errorf("a sweep with nothing to do: %d, %v", n, err)
	}
	f.wantReadable(ids[399], "1", "2")
	f.verify()
}

// An erasure that another change of the rules overtakes leaves nothing that no rule keeps.
func TestErasuresThatOverlap(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 3)
	var ids []string
	for i := range 400 {
		c := f.sealNamed(f.a, fmt.Sprint("n", i), map[string]string{"k": "0"})
		f.change(c.ID, "1", "2", "3")
		ids = append(ids, c.ID)
	}
	updates := 0
	f.store.before = func() {
		if updates++; updates != 3 { // the first erasure has come some way
			return
		}
		ctx, cancel := context.WithCancel(t.Context())
		second := 0
		f.store.before = func() {
			if second++; second == 4 { // and this one, which finishes it first, ends after its own first step
				cancel()
			}
		}
		_, err := f.vault.Rules.Set(ctx, f.a, kept.Rule{Path: "**", Versions: 1})
		must(t, err)
		f.store.before = nil
	}
	f.keep("**", 2)
	if updates < 3 {
		t.Fatalf("%d commits", updates)
	}
	for _, id := range ids {
		f.wantReadable(id, "2", "3")
	}
	if keys, _ := f.rows(kept.Family); len(keys) != 400 {
		t.Errorf("%d kept versions are left", len(keys))
	}
	f.verify()
}

// A rule that keeps more brings nothing back that another one has taken, whose erasure has not ended.
func TestARaisedRuleBringsNothingBack(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 3)
	var ids []string
	for i := range 200 {
		c := f.sealNamed(f.a, fmt.Sprint("n", i), map[string]string{"k": "0"})
		f.change(c.ID, "1", "2", "3")
		ids = append(ids, c.ID)
	}
	ctx, cancel := context.WithCancel(t.Context())
	updates := 0
	f.store.before = func() {
		if updates++; updates == 2 {
			cancel()
		}
	}
	_, err := f.vault.Rules.Set(ctx, f.a, kept.Rule{Path: "**", Versions: 0})
	must(t, err)
	f.store.before = nil
	if keys, _ := f.rows(kept.Family); len(keys) == 0 {
		t.Fatal("the erasure has ended")
	}
	f.keep("**", 3)
	for _, id := range ids {
		f.wantReadable(id, "3")
	}
	f.verify()
}

// An erasure passes damaged records, however many there are in a row.
func TestAnErasurePassesDamagedRecords(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 1)
	for i := range 600 {
		c := f.sealNamed(f.a, fmt.Sprint("n", i), map[string]string{"k": "0"})
		f.change(c.ID, "1")
	}
	keys, _ := f.rows(record.Family)
	f.tamper(func(tx store.Tx) (err error) {
		for _, key := range keys {
			err = errors.Join(err, tx.Put(key, []byte("damaged")))
		}
		return err
	})
	updates := 0
	f.store.before = func() {
		if updates++; updates > 10 {
			t.Fatal("the erasure does not end")
		}
	}
	f.keep("**", 0)
}

// All rules are replaced in one commit, so what both keep is never erased, and more rules than there can be
// are none in between.
func TestRulesAreReplacedAtOnce(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 0)
	f.keep("shop/**", 2)
	c := f.sealNamed(f.a, "shop/db", map[string]string{"k": "0"})
	f.change(c.ID, "1", "2")
	rules, err := f.vault.Rules.Replace(t.Context(), f.a, []kept.Rule{{Path: "shop/*", Versions: 1}, {Path: "a", Versions: 1}})
	if e := f.last(f.a); err != nil || fmt.Sprint(rules) != "[{a 1} {shop/* 1}]" || e.EventType != audit.HistoryRuleChanged || e.Attributes["erased"] != "1" {
		t.Error(rules, err, e.EventType, e.Attributes)
	}
	f.wantReadable(c.ID, "1", "2")
}

// At whatever moment of an undo the credential expires: it changes nothing, or has the values.
func TestAnUndoAtTheMomentOfExpiry(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 1)
	refused := 0
	for moment := range 12 {
		c := f.seal(f.a, map[string]string{"k": "0"})
		f.change(c.ID, "1")
		asked := 0
		f.vault.now = func() time.Time {
			if asked++; asked == moment+1 {
				f.advance(31 * day)
			}
			return f.now()
		}
		undone, err := f.vault.Undo(t.Context(), f.a, c.ID, 1, "")
		f.vault.now = f.now
		if err != nil {
			if refused++; !errors.Is(err, fault.Forbidden) {
				t.Errorf("moment %d: %v", moment, err)
			}
			continue
		}
		back, err := f.vault.Renew(t.Context(), f.a, c.ID, 0, "")
		must(t, err)
		if got, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)); err != nil || string(got.Values["k"]) != "0" || back.Version != undone.Version+1 {
			t.Errorf("moment %d: %q, %v", moment, got.Values, err)
		}
	}
	if refused < 3 || refused == 12 {
		t.Errorf("%d of 12 were refused", refused)
	}
	f.verify()
}

// Re-encryption leaves no ciphertext of before, and keeps numbers and values.
func TestReencryptionIncludesKeptVersions(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		f.keep("**", 5)
		c := f.seal(f.a, map[string]string{"k": "0"})
		f.change(c.ID, "1", "2")
		_, before := f.rows(kept.Family)
		_, err := f.vault.Rotate(t.Context(), f.a, c.ID)
		must(t, err)
		if e := f.last(f.a); e.Attributes["versions_reencrypted"] != "2" {
			t.Errorf("%+v", e)
		}
		keys, after := f.rows(kept.Family)
		if len(keys) != 2 {
			t.Errorf("%d kept versions", len(keys))
		}
		for i := range before {
			if slices.ContainsFunc(after, func(row []byte) bool { return string(row) == string(before[i]) }) {
				t.Error("a kept version has its earlier ciphertext")
			}
		}
		f.wantReadable(c.ID, "0", "1", "2")
		f.verify()
	})
}

// The values of a kept version are for whoever may read the credential now, and undo for whoever may
// write it, too. Rules are for admins whom no policy limits.
func TestWhoReadsKeptVersions(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 5)
	c := f.sealNamed(f.a, "shop/db", map[string]string{"k": "0"})
	f.change(c.ID, "1")
	_, err := f.vault.Rename(t.Context(), f.a, c.ID, "bank/db", "")
	must(t, err)
	shop, bank, reader := f.limited(anyVerb("shop/**")), f.limited(anyVerb("bank/**")), f.a
	reader.Scopes = []authz.Scope{authz.VaultRead}
	writer := f.a
	writer.Scopes = []authz.Scope{authz.VaultWrite}
	for name, p := range map[string]authz.Principal{"of the earlier name": shop, "of another tenant": f.b, "who only writes": writer,
		"whose policy only writes": f.limited(authz.Rule{Path: "bank/**", Verbs: []authz.Verb{authz.WritePath, authz.ListPath}})} {
		if _, err := f.vault.Read(t.Context(), p, ByVersion(c.ID, 1)); fault.Of(err) != fault.Forbidden {
			t.Errorf("somebody %s reads: %v", name, err)
		}
		if _, err := f.vault.Undo(t.Context(), p, c.ID, 1, ""); fault.Of(err) != fault.Forbidden || fault.Message(err) != fault.Message(errDenied) {
			t.Errorf("somebody %s undoes: %v", name, err)
		}
	}
	if _, err := f.vault.Undo(t.Context(), reader, c.ID, 1, ""); fault.Of(err) != fault.Forbidden {
		t.Errorf("a reader undoes: %v", err)
	}
	if got, err := f.vault.Read(t.Context(), bank, ByVersion(c.ID, 1)); err != nil || string(got.Values["k"]) != "0" {
		t.Errorf("somebody of the present name: %v", err)
	}
	if _, err := f.vault.Undo(t.Context(), bank, c.ID, 1, ""); err != nil {
		t.Error(err)
	}
	if _, err := f.vault.Rules.Rules(t.Context(), f.limited(anyVerb("bank/**"))); fault.Of(err) != fault.Forbidden {
		t.Errorf("somebody whom a policy limits reads the rules: %v", err)
	}
	admin := bank
	admin.Scopes = authz.TenantScopes()
	if _, err := f.vault.Rules.Set(t.Context(), admin, kept.Rule{Path: "bank/**", Versions: 0}); fault.Of(err) != fault.Forbidden {
		t.Errorf("an admin whom a policy limits: %v", err)
	}
	if _, err := f.vault.Rules.Set(t.Context(), reader, kept.Rule{Path: "bank/**", Versions: 0}); fault.Of(err) != fault.Forbidden {
		t.Errorf("a reader: %v", err)
	}
	f.advance(100 * 24 * time.Hour)
	if _, err := f.vault.Read(t.Context(), f.a, ByVersion(c.ID, 1)); fault.Of(err) != fault.Forbidden {
		t.Errorf("of an expired credential: %v", err)
	}
}

// An object that adopts a credential takes no kept versions with it, and none come back when it goes.
func TestAnAdoptedCredentialHasNoKeptVersions(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 5)
	c := f.sealNamed(f.a, "db", map[string]string{"k": "0"})
	f.change(c.ID, "1")
	op, uid := f.operator(), "8c2b1c1e-0000-4000-8000-000000000009"
	o, err := f.vault.Adopt(t.Context(), op, uid, Object{Cluster: "c", Namespace: "ns", Name: "db"}, c.ID, nil)
	must(t, err)
	f.wantReadable(c.ID, "1")
	d := f.desired(map[string]string{"k": "2"}, "a")
	d.Object = Object{Cluster: "c", Namespace: "ns", Name: "db"}
	_, err = f.vault.Apply(t.Context(), op, uid, o.Version, d)
	must(t, err)
	must(t, f.leave(op, uid, [32]byte{}))
	f.wantReadable(c.ID, "2")
	if keys, _ := f.rows(kept.Family); len(keys) != 0 {
		t.Errorf("%d kept versions", len(keys))
	}
	f.verify()
}

// A kept version that is erased cannot be put back, and another row in its place is none.
func TestAKeptVersionThatIsPutBack(t *testing.T) {
	f := newFixture(t, 0)
	f.keep("**", 2)
	c, other := f.sealNamed(f.a, "a", map[string]string{"k": "0"}), f.sealNamed(f.a, "b", map[string]string{"k": "x"})
	f.change(c.ID, "1")
	f.change(other.ID, "y")
	keys, values := f.rows(kept.Family)
	f.keep("a", 0)
	f.tamper(func(tx store.Tx) error {
		for i := range keys {
			if err := tx.Put(keys[i], values[i]); err != nil {
				return err
			}
		}
		return nil
	})
	if _, err := f.vault.Read(t.Context(), f.a, ByVersion(c.ID, 1)); fault.Of(err) != fault.Forbidden {
		t.Errorf("an erased version: %v", err)
	}
	if e := f.last(f.a); e.Outcome != audit.Failure || e.Attributes[audit.AttributeReason] != reasonIntegrity {
		t.Errorf("%+v", e)
	}
	i := slices.IndexFunc(keys, func(key []byte) bool { return bytes.HasPrefix(key, kept.Prefix(f.a.Tenant, c.ID)) })
	f.tamper(func(tx store.Tx) error { return tx.Put(kept.Key(f.a.Tenant, other.ID, 1), values[i]) })
	if _, err := f.vault.Read(t.Context(), f.a, ByVersion(other.ID, 1)); fault.Of(err) != fault.Forbidden && !state.IsRefused(err) {
		t.Errorf("another row in its place: %v", err)
	}
}

func TestBoundsOfRules(t *testing.T) {
	f := newFixture(t, 0)
	for _, r := range []kept.Rule{{Path: "", Versions: 1}, {Path: "a//b", Versions: 1}, {Path: "a*", Versions: 1}, {Path: "**", Versions: -1}, {Path: "**", Versions: 21}} {
		if _, err := f.vault.Rules.Set(t.Context(), f.a, r); fault.Of(err) != fault.Invalid {
			t.Errorf("%+v: %v", r, err)
		}
	}
	if rules, err := f.vault.Rules.Remove(t.Context(), f.a, "none"); err != nil || len(rules) != 0 {
		t.Error(rules, err)
	}
	if keys, _ := f.rows(kept.RulesFamily); len(keys) != 0 {
		t.Errorf("removing no rule writes %q", keys)
	}
	for i := range kept.MaxRules {
		f.keep(fmt.Sprint("p", i), 1)
	}
	f.keep("p1", 2) // in place of one
	if _, err := f.vault.Rules.Set(t.Context(), f.a, kept.Rule{Path: "more", Versions: 1}); fault.Of(err) != fault.Conflict {
		t.Errorf("one too many: %v", err)
	}
	f.vault.Rules.Ready = func(context.Context) (bool, error) { return false, nil }
	if _, err := f.vault.Rules.Set(t.Context(), f.a, kept.Rule{Path: "p1", Versions: 1}); fault.Of(err) != fault.Conflict || !strings.Contains(fault.Message(err), "earlier release") {
		t.Errorf("beside an earlier release: %v", err)
	}
	if _, err := f.vault.Rules.Remove(t.Context(), f.a, "p1"); err != nil {
		t.Error(err)
	}
}
