package vault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/details"
)

func tagged(tags ...string) details.Change { return details.Change{Tags: &tags} }

func text(s string) *string { return &s }

func (f *fixture) describe(id string, c details.Change) Credential {
	f.t.Helper()
	described, err := f.vault.Describe(f.t.Context(), f.a, id, c)
	must(f.t, err)
	return described
}

// What people say of a credential changes field by field, apart from its values, and goes with it. No
// entry holds a word of it.
func TestDetailsChangeApartFromValues(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	first := f.describe(c.ID, details.Change{Description: text("canary of\n\tthe shop"), Contact: text("canary@example.org"), Tags: tagged("pci", "cafe\u0301", "pci").Tags})
	want := &details.Details{Description: "canary of\n\tthe shop", Contact: "canary@example.org", Tags: []string{"café", "pci"}}
	if !reflect.DeepEqual(first.Details, want) || first.Version != 1 || first.EntityTag() != c.EntityTag() {
		t.Errorf("%+v", first)
	}
	e := f.last(f.a)
	if e.EventType != audit.CredentialDescribed || e.Outcome != audit.Success || e.Resource.ID != c.ID || e.Attributes["tags"] != "2" || strings.Contains(fmt.Sprint(e), "canary") {
		t.Errorf("%+v", e)
	}
	f.describe(c.ID, details.Change{Contact: text("")})
	want.Contact = ""
	f.replace(c.ID, 10, login)
	_, err := f.vault.Rename(t.Context(), f.a, c.ID, "other", "")
	must(t, err)
	f.trash(c.ID)
	_, err = f.vault.Renew(t.Context(), f.a, c.ID, 0, "")
	must(t, err)
	now, err := f.vault.Metadata(t.Context(), f.a, c.ID)
	must(t, err)
	list, _, err := f.vault.List(t.Context(), f.a, ListQuery{Filter: Filter{Tag: "cafe\u0301"}})
	must(t, err)
	if !reflect.DeepEqual(now.Details, want) || !reflect.DeepEqual(list[0].Details, want) {
		t.Errorf("%+v, and in the list %+v", now.Details, list[0].Details)
	}
	must(t, f.vault.Delete(t.Context(), f.a, c.ID))
	if keys, _ := f.rows(details.Family); len(keys) != 0 {
		t.Errorf("left behind: %q", keys)
	}
	other := f.seal(f.a, login)
	f.describe(other.ID, tagged("a"))
	f.describe(other.ID, tagged())
	if keys, _ := f.rows(details.Family); len(keys) != 0 {
		t.Errorf("a row without details: %q", keys)
	}
	f.describe(other.ID, tagged("a"))
	f.pass(200 * day) // it expires, and its grace ends
	if keys, _ := f.rows(details.Family); len(keys) != 0 {
		t.Errorf("of an erased credential: %q", keys)
	}
	f.verify()
}

// Two who change different fields at the same time lose nothing.
func TestDetailsOfTwoEditorsAreBothThere(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	var wg sync.WaitGroup
	for _, change := range []details.Change{{Description: text("d")}, {Contact: text("c")}, tagged("t")} {
		wg.Go(func() {
			if _, err := f.vault.Describe(t.Context(), f.a, c.ID, change); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	now, err := f.vault.Metadata(t.Context(), f.a, c.ID)
	must(t, err)
	if want := (&details.Details{Description: "d", Contact: "c", Tags: []string{"t"}}); !reflect.DeepEqual(now.Details, want) {
		t.Errorf("%+v", now.Details)
	}
}

func TestDetailsHaveBounds(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	many := make([]string, details.MaxTags+1)
	for i := range many {
		many[i] = fmt.Sprint(i)
	}
	for field, all := range map[string][]details.Change{
		"description": {{Description: text(strings.Repeat("ä", details.MaxDescription+1))}, {Description: text("a\x00")}, {Description: text("\xff")}},
		"contact":     {{Contact: text(strings.Repeat("ä", details.MaxContact+1))}, {Contact: text("two\nlines")}, {Contact: text("two\u2028lines")}},
		"tag":         {tagged(""), tagged("a b"), tagged("a,b"), tagged("a\u00a0b"), tagged("a\x1b"), tagged("a\u202eb"), tagged("a\u200bb"), tagged(strings.Repeat("ä", details.MaxTag+1)), tagged(many...)},
	} {
		for _, change := range all {
			if _, err := f.vault.Describe(t.Context(), f.a, c.ID, change); fault.Of(err) != fault.Invalid || !strings.HasPrefix(fault.Message(err), field) {
				t.Errorf("%s %q: %v", field, fmt.Sprint(change.Tags), err)
			}
		}
	}
	f.describe(c.ID, details.Change{Description: text(strings.Repeat("ä", details.MaxDescription)), Contact: text(strings.Repeat("ä", details.MaxContact)), Tags: tagged(append(many[2:], strings.Repeat("ä", details.MaxTag))...).Tags})
	if _, _, err := f.vault.List(t.Context(), f.a, ListQuery{Filter: Filter{Tag: "a b"}}); fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), "tag") {
		t.Errorf("a tag that there cannot be: %v", err)
	}
}

// Whoever may not write a credential, whoever's it is, and an object's, are refused alike, with an entry.
func TestDetailsAreRefusedAsOtherChanges(t *testing.T) {
	f := newFixture(t, time.Minute)
	c, foreign := f.sealNamed(f.a, "shop/db", login), f.seal(f.b, login)
	expired := f.sealFor(f.a, "old", "t", 1)
	f.advance(2 * day)
	owned := f.object("shop", "owned", 0, 30, 0)
	reader := f.limited(authz.Rule{Path: "shop/**", Verbs: []authz.Verb{authz.ListPath, authz.ReadPath}}, authz.Rule{Path: "other/**", Verbs: authz.Verbs()})
	for what, try := range map[string]struct {
		p      authz.Principal
		id     string
		reason string
	}{
		"of another tenant": {f.a, foreign.ID, reasonMissing}, "malformed": {f.a, "x", reasonMissing}, "expired": {f.a, expired.ID, reasonExpired},
		"an object's": {f.a, owned.Credential.ID, reasonOwned}, "without write": {reader, c.ID, string(authz.OutsidePolicy)},
	} {
		if _, err := f.vault.Describe(t.Context(), try.p, try.id, tagged("t")); !errors.Is(err, errDenied) {
			t.Errorf("%s: %v", what, err)
		}
		if e := f.last(f.a); e.EventType != audit.CredentialDescribed || e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != try.reason {
			t.Errorf("%s: %+v", what, e)
		}
	}
	f.vault.DetailsReady = func(context.Context) (bool, error) { return false, nil }
	if _, err := f.vault.Describe(t.Context(), f.a, c.ID, tagged("t")); !errors.Is(err, errDetailsReplicas) {
		t.Errorf("beside an earlier release: %v", err)
	}
	if keys, _ := f.rows(details.Family); len(keys) != 0 {
		t.Errorf("a refused change leaves %q", keys)
	}
}

// A list by tag has what has the tag, in every order, whole and by pages, for everybody who may see it.
func TestListsByTag(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.index()
	var want []string
	for i := range 6 {
		c := f.sealNamed(f.a, fmt.Sprint("shop/", i), login)
		f.describe(c.ID, tagged(fmt.Sprint("n", i%2), "all"))
		if i%2 == 1 {
			want = append(want, c.Name)
		}
	}
	hidden := f.sealNamed(f.a, "other", login)
	f.describe(hidden.ID, tagged("n1"))
	shop := f.limited(anyVerb("shop/**"))
	for _, q := range []ListQuery{{Order: "name"}, {Order: "created"}, {Order: "updated", Limit: 2}, {Order: "name", Limit: 1}, {Limit: 2}, {Order: "name", Filter: Filter{Prefix: "shop/"}}} {
		q.Tag = "n1"
		got := f.namesOf(shop, q)
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("%+v: %v", q, got)
		}
	}
	_, rest, err := f.vault.List(t.Context(), shop, ListQuery{Filter: Filter{Tag: "n1"}, Count: true})
	must(t, err)
	if rest.Total != len(want) {
		t.Errorf("a total of %d", rest.Total)
	}
	if got := f.namesOf(f.a, ListQuery{Filter: Filter{Tag: "n1"}}); len(got) != len(want)+1 {
		t.Errorf("with all paths: %v", got)
	}
	_, rest, err = f.vault.List(t.Context(), f.a, ListQuery{Filter: Filter{Tag: "all"}, Limit: 1})
	must(t, err)
	if _, _, err := f.vault.List(t.Context(), f.a, ListQuery{Filter: Filter{Tag: "n1"}, Limit: 1, Cursor: rest.Cursor}); fault.Of(err) != fault.Invalid {
		t.Errorf("the cursor of another tag: %v", err)
	}
}

// A list reads as much with details of one credential as with none, and finds them all whether they are
// few or many. With many it reads one row more for each credential.
func TestDetailsCostAListLittle(t *testing.T) {
	f := newFixture(t, time.Minute)
	var ids []string
	for i := range 203 {
		ids = append(ids, f.sealNamed(f.a, fmt.Sprint(i), map[string]string{"k": "v"}).ID)
	}
	reads := func() int64 {
		did, err := f.measured(func() error { _, _, err := f.vault.List(t.Context(), f.a, ListQuery{}); return err })
		must(t, err)
		return did.gets + did.scans
	}
	none := reads()
	f.describe(ids[0], tagged("t"))
	if one := reads(); one != none {
		t.Errorf("%d reads with details of one credential, %d with none", one, none)
	}
	for i, id := range ids {
		f.describe(id, tagged("t"))
		if n := i + 1; n != 199 && n != 200 && n != 201 && n != 202 {
			continue
		}
		list, _, err := f.vault.List(t.Context(), f.a, ListQuery{Filter: Filter{Tag: "t"}})
		must(t, err)
		if len(list) != i+1 {
			t.Errorf("%d credentials of %d that have the tag", len(list), i+1)
		}
	}
	if many := reads(); many != none+int64(len(ids)) {
		t.Errorf("%d reads with details of all, %d with none", many, none)
	}
}

// A row that somebody else wrote says nothing of a credential: it is left out of lists and counted, and
// its metadata are refused.
func TestDetailsOfSomebodyElseAreRefused(t *testing.T) {
	f := newFixture(t, time.Minute)
	one, other := f.seal(f.a, login), f.seal(f.a, login)
	f.describe(one.ID, tagged("one"))
	f.tamper(func(tx store.Tx) error {
		row, err := tx.Get(details.Key(f.a.Tenant, one.ID))
		return errors.Join(err, tx.Put(details.Key(f.a.Tenant, other.ID), bytes.Clone(row)))
	})
	list, _, err := f.vault.List(t.Context(), f.a, ListQuery{})
	must(t, err)
	if len(list) != 1 || list[0].ID != one.ID {
		t.Errorf("%+v", list)
	}
	if e := f.last(f.a); e.Outcome != audit.Failure || e.Attributes["damaged"] != "1" {
		t.Errorf("%+v", e)
	}
	if _, err := f.vault.Metadata(t.Context(), f.a, other.ID); !errors.Is(err, errDenied) {
		t.Errorf("metadata: %v", err)
	}
	if _, err := f.vault.Describe(t.Context(), f.a, other.ID, tagged("t")); !errors.Is(err, errDenied) {
		t.Errorf("a change: %v", err)
	}
	must(t, f.vault.Delete(t.Context(), f.a, one.ID))
}
