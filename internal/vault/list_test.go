package vault

import (
	"cmp"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

func (f *fixture) sealFor(p authz.Principal, name, kind string, days int) Credential {
	f.t.Helper()
	c, err := f.vault.Seal(f.t.Context(), p, SealRequest{Name: name, Type: kind, TTLDays: days, Values: secrets(login)})
	must(f.t, err)
	return c
}

// pages returns the ids of all pages of a list in their order, and the number of pages.
func (f *fixture) pages(p authz.Principal, q ListQuery) (ids []string, n int) {
	f.t.Helper()
	for {
		list, rest, err := f.vault.List(f.t.Context(), p, q)
		next := rest.Cursor
		must(f.t, err)
		if q.Limit > 0 && len(list) > q.Limit {
			f.t.Fatalf("%d credentials on a page of %d", len(list), q.Limit)
		}
		for _, c := range list {
			ids = append(ids, c.ID)
		}
		n++
		if q.Cursor = next; next == "" {
			return ids, n
		}
	}
}

// contains reports whether a search should find the name. It is written independently: some part of
// the name equals the text, ignoring case.
func contains(name, text string) bool {
	runes, n := []rune(name), len([]rune(text))
	for i := range len(runes) - n + 1 {
		if strings.EqualFold(string(runes[i:i+n]), text) {
			return true
		}
	}
	return false
}

// arabic is a right-to-left name, and bidi a name with a control character that reverses the text.
const arabic, bidi = "\u0645\u0641\u062a\u0627\u062d \u0627\u0644\u062f\u0641\u0639", "pay\u202egnihton"

func TestAFilteredListShowsEachCredentialOnce(t *testing.T) {
	t.Parallel() // it mostly waits
	limits := []int{0, 1, 3, 100}
	if testing.Short() {
		limits = []int{3}
	}
	f := newFixture(t, time.Minute)
	names := []string{
		"payments", "PAYMENTS-eu", "Straße", "STRASSE", "Jürgen Müller", "JÜRGEN", "Ångström", arabic, bidi, "<script>alert(1)</script>",
		"K\u00fcche", "\u212a\u00dcCHE", "\u0130stanbul", "istanbul", strings.Repeat("n", 255), strings.Repeat("é", 127), "%_*", "a b",
	}
	var all []Credential
	for i, name := range names {
		for _, kind := range []string{"api_key", "database"} {
			all = append(all, f.sealFor(f.a, name, kind, 10+5*(i%4)))
		}
		f.sealFor(f.b, name, "api_key", 30)
	}
	f.object("shop", "payments-of-the-shop", 0, 30, 0)
	owned, _, err := f.vault.List(t.Context(), f.a, ListQuery{Filter: Filter{Text: "of-the-shop"}})
	if err != nil || len(owned) != 1 || !owned[0].Owned {
		t.Fatal(owned, err)
	}
	all = append(all, owned[0])
	f.advance(15 * day) // the ones with a TTL of 10 and 15 days have expired
	now, end := f.now(), f.now().Add(5*day)
	for _, filter := range []Filter{
		{}, {Text: "pay"}, {Text: "MENTS"}, {Text: "straße"}, {Text: "STRAẞE"}, {Text: "strasse"}, {Text: "JÜR"}, {Text: "jü"}, {Text: "j\u0075\u0308r"},
		{Text: "å"}, {Text: "\u212b"}, {Text: arabic[:6]}, {Text: arabic}, {Text: "\u202e"}, {Text: "<SCRIPT>"}, {Text: "küche"}, {Text: "k"}, {Text: "i"},
		{Text: "ı"}, {Text: strings.Repeat("N", 255)}, {Text: strings.Repeat("É", 127)}, {Text: "%"}, {Text: " "}, {Text: "none of them"},
		{Type: "database"}, {Type: "Database"}, {Type: "data"}, {Status: listing.Active}, {Status: listing.Expired}, {ExpiresBefore: now}, {ExpiresBefore: end},
		{ExpiresBefore: end.Add(time.Microsecond)}, {ExpiresBefore: time.Unix(0, 0)}, {Text: "a", Type: "api_key", Status: listing.Active, ExpiresBefore: end.Add(day)},
		{Status: listing.Expired, ExpiresBefore: now.Add(-day)},
	} {
		var want []string
		for _, c := range all {
			expired := !now.Before(c.ExpiresAt)
			if contains(c.Name, filter.Text) && (filter.Type == "" || filter.Type == c.Type) &&
				(filter.Status == "" || (filter.Status == listing.Expired) == expired) &&
				(filter.ExpiresBefore.IsZero() || c.ExpiresAt.Before(filter.ExpiresBefore)) {
				want = append(want, c.ID)
			}
		}
		slices.Sort(want)
		for _, limit := range limits {
			for _, left := range []listing.Budget{listing.PageBudget(), {Records: 1, Bytes: 1 << 20}, {Records: 30, Bytes: 1 << 20}, {Records: 2500, Bytes: 1}} {
				f.vault.pageBudget = left
				if got, _ := f.pages(f.a, ListQuery{Filter: filter, Limit: limit}); !slices.Equal(got, want) {
					t.Errorf("%+v in pages of %d with %v: %d of %d: %v", filter, limit, left, len(got), len(want), got)
				}
			}
		}
	}
	f.verify()
}

// A page ends after a bounded number of reads, wherever the matches are.
func TestAPageLooksAtABoundedNumberOfCredentials(t *testing.T) {
	f := newFixture(t, time.Minute)
	budget := listing.Budget{Records: listing.PageBudget().Records / 10, Bytes: 32 << 20} // so that no read takes long
	f.vault.pageBudget = budget
	f.fill(3 * budget.Records)
	for what, q := range map[string]ListQuery{
		"nothing is found": {Filter: Filter{Text: "none"}, Limit: 100}, "without a limit": {Filter: Filter{Text: "none"}},
		"all are found": {Filter: Filter{Text: "filled"}}, "nothing is searched for": {Limit: 20},
	} {
		f.store.rows.Store(0)
		list, rest, err := f.vault.List(t.Context(), f.a, q)
		next := rest.Cursor
		must(t, err)
		// The log reads some rows too.
		if n := f.store.rows.Load(); next == "" || n > int64(budget.Records)+100 || f.store.gets.Load() > int64(budget.Records)+100 {
			t.Errorf("%s: %d rows, %d found, cursor %q", what, n, len(list), next)
		}
		if q.Text == "" && len(list) != 20 {
			t.Errorf("%s: %d found", what, len(list))
		}
		f.store.gets.Store(0)
	}
	if got, pages := f.pages(f.a, ListQuery{Filter: Filter{Text: "none"}, Limit: 10}); len(got) != 0 || pages > 5 {
		t.Errorf("%d found on %d pages", len(got), pages)
	}
	s, err := f.vault.Summary(t.Context(), f.a, day)
	if err != nil || !s.Complete || s.Total != 3*budget.Records {
		t.Errorf("%+v %v", s, err)
	}
	f.vault.summaryBudget = listing.Budget{Records: 100, Bytes: 1 << 20}
	f.store.rows.Store(0)
	if s, err = f.vault.Summary(t.Context(), f.a, day); err != nil || s.Complete || s.Total != 100 || s.Active != 100 || len(s.NextToExpire) != listing.MaxNextToExpire {
		t.Errorf("%+v %v", s, err)
	}
	if n := f.store.rows.Load(); n > 200 {
		t.Errorf("%d rows", n)
	}
}

// fill stores rows that look like credentials of f.a, as fast as it can. Nobody opens them. They
// have the size of a credential of 100 bytes.
func (f *fixture) fill(n int) {
	fill(f.t, f.store.guarded, f.log, f.a.Tenant, f.now(), n, func(i int) string { return fmt.Sprint("filled ", i) })
}

func fill(t testing.TB, s store.Store, log *writer.Log, tenant authz.TenantID, now time.Time, n int, name func(i int) string) {
	t.Helper()
	for n > 0 {
		batch := min(n, 500)
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			for i := range batch {
				r := newRecord(tenant, authz.NewID(idPrefix), 1, now, now, SealRequest{Name: name(n - i), Type: fmt.Sprint("type-", i%30), TTLDays: 1 + i%60})
				r.Body, r.Signature, r.Wrap = make([]byte, 1281), make([]byte, dualsig.SignatureSize+64), make([]byte, 129)
				_, _ = rand.Read(r.Body) // not compressible, like a real body
				_, _ = rand.Read(r.Signature)
				if err := tx.Put(record.Key(r.Tenant, r.ID, r.Version), r.Encode()); err != nil {
					return err
				}
			}
			_, err := log.Append(tx, audit.Event{
				Type: audit.CredentialSealed, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
				Resource: audit.Resource{Type: audit.CredentialResource},
			})
			return err
		}))
		n -= batch
	}
}

func TestACursorBelongsToTheListItCameFrom(t *testing.T) {
	f := newFixture(t, time.Minute)
	for range 3 {
		f.sealFor(f.a, "payments", "api_key", 30)
		f.sealFor(f.b, "payments", "api_key", 30)
	}
	filters := map[string]Filter{
		"none": {}, "text": {Text: "pay"}, "another text": {Text: "PAY"}, "type": {Type: "api_key"}, "text in another field": {Type: "pay"},
		"active": {Status: listing.Active}, "expired": {Status: listing.Expired}, "before": {ExpiresBefore: f.now().Add(60 * day)},
		"before a moment later": {ExpiresBefore: f.now().Add(60*day + time.Microsecond)},
	}
	refused := func(what string, p authz.Principal, q ListQuery) {
		t.Helper()
		if list, rest, err := f.vault.List(t.Context(), p, q); !errors.Is(err, fault.Invalid) || list != nil || !reflect.DeepEqual(rest, listing.Rest{}) {
			t.Errorf("%s: %v %v", what, list, err)
		}
	}
	for name, filter := range filters {
		_, rest, err := f.vault.List(t.Context(), f.a, ListQuery{Filter: filter, Limit: 1})
		next := rest.Cursor
		must(t, err)
		if name == "expired" || name == "text in another field" { // these lists have only one page
			next = listing.Cursors{Rows: f.vault.records.Rows}.Encode(f.a.Tenant, filter, listing.ByID, authz.NewID(idPrefix))
		}
		for other, filter := range filters {
			q := ListQuery{Filter: filter, Limit: 1, Cursor: next}
			if other != name {
				refused(name+" for "+other, f.a, q)
				continue
			}
			if _, _, err := f.vault.List(t.Context(), f.a, q); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			refused(name+" for another tenant", f.b, q)
			for i := range next {
				q.Cursor = next[:i] + string(rune(next[i]^1)) + next[i+1:]
				refused(fmt.Sprintf("%s changed at %d", name, i), f.a, q)
			}
			for _, bad := range []string{next + "A", next[:len(next)-1], next + "=", " " + next, "x", f.sealFor(f.b, "n", "t", 1).ID} {
				q.Cursor = bad
				refused(name+" as "+bad, f.a, q)
			}
		}
	}
	for _, bad := range []Filter{{Text: strings.Repeat("ü", 256)}, {Text: "a\xff"}, {Status: "gone"}} {
		refused(fmt.Sprint(bad), f.a, ListQuery{Filter: bad})
	}
	if list, _, err := f.vault.List(t.Context(), f.a, ListQuery{Filter: Filter{Text: strings.Repeat("ü", 255)}}); err != nil || len(list) != 0 {
		t.Error(list, err)
	}
}

// A page may end at a credential that does not exist for the caller. The caller learns no id of
// such a credential.
func TestListsAndSummariesShowAServiceAccountNothingOfOtherNamespaces(t *testing.T) {
	f := newFixture(t, time.Minute)
	var hidden []string
	for i := range 5 {
		hidden = append(hidden, f.object("billing", fmt.Sprint("db-", i), 0, 2, 0).ID)
	}
	own, free := f.object("shop", "db-own", 0, 20, 0).ID, f.sealFor(f.a, "db-free", "database", 30).ID
	want := []string{own, free}
	slices.Sort(want)
	shop := f.pod("cluster", "shop")
	for _, left := range []listing.Budget{listing.PageBudget(), {Records: 1, Bytes: 1 << 20}, {Records: 12, Bytes: 1 << 20}} {
		f.vault.pageBudget = left
		for _, filter := range []Filter{{}, {Text: "DB"}, {Status: listing.Active}} {
			if got, _ := f.pages(shop, ListQuery{Filter: filter, Limit: 1}); !slices.Equal(got, want) {
				t.Errorf("%+v with %v: %v, want %v", filter, left, got, want)
			}
		}
		if got, _ := f.pages(f.a, ListQuery{Filter: Filter{Text: "db"}, Limit: 1}); len(got) != 7 {
			t.Errorf("a key sees %d", len(got))
		}
	}
	f.vault.pageBudget = listing.Budget{Records: 1, Bytes: 1 << 20}
	q := ListQuery{Filter: Filter{Text: "db"}, Limit: 1}
	for {
		_, rest, err := f.vault.List(t.Context(), shop, q)
		next := rest.Cursor
		must(t, err)
		if q.Cursor = next; next == "" {
			break
		}
		b, err := base64.RawURLEncoding.DecodeString(next)
		must(t, err)
		for _, id := range hidden {
			raw, _ := authz.IDBytes(idPrefix, id)
			if strings.Contains(next, id) || strings.Contains(string(b), string(raw[:])) {
				t.Error("a cursor names a credential of another namespace")
			}
		}
	}
	s, err := f.vault.Summary(t.Context(), shop, 7*day)
	must(t, err)
	if s.Total != 2 || s.ExpiringSoon != 0 || len(s.NextToExpire) != 2 || s.NextToExpire[0].ID != own || !s.NextToExpire[0].Owned || s.NextToExpire[1].Owned ||
		!slices.Equal(s.Types, []listing.TypeCount{{Type: "database", Count: 2}}) {
		t.Errorf("%+v", s)
	}
	if s, err = f.vault.Summary(t.Context(), f.a, 7*day); err != nil || s.Total != 7 || s.ExpiringSoon != 5 {
		t.Errorf("%+v %v", s, err)
	}
	f.vault.summaryBudget = listing.Budget{Records: 12, Bytes: 1 << 20} // reads of owners count too
	if s, err = f.vault.Summary(t.Context(), shop, 7*day); err != nil || s.Complete {
		t.Errorf("%+v %v", s, err)
	}
}

func TestASummaryCounts(t *testing.T) {
	f := newUnboundFixture(t, time.Minute)
	if s, err := f.vault.Summary(t.Context(), f.a, day); err != nil || !reflect.DeepEqual(s, Summary{Complete: true}) {
		t.Fatalf("%+v %v", s, err)
	}
	var all []Credential
	for i := range 30 { // the ones with a TTL of at most 5 days expire
		all = append(all, f.sealFor(f.a, fmt.Sprint(i), fmt.Sprintf("type-%02d", i%25), 1+i%15))
		f.sealFor(f.b, fmt.Sprint(i), "foreign", 1)
	}
	f.advance(5 * day)
	now := f.now()
	var want Summary
	soon := now.Add(3 * day)
	var next []Credential
	for _, c := range all {
		want.Total++
		if !now.Before(c.ExpiresAt) {
			want.Expired++
			continue
		}
		want.Active++
		if c.ExpiresAt.Before(soon) {
			want.ExpiringSoon++
		}
		next = append(next, c)
	}
	slices.SortFunc(next, func(a, b Credential) int { return cmp.Or(a.ExpiresAt.Compare(b.ExpiresAt), cmp.Compare(a.ID, b.ID)) })
	want.NextToExpire, want.Complete = next[:listing.MaxNextToExpire], true
	for i := range 5 {
		want.Types = append(want.Types, listing.TypeCount{Type: fmt.Sprintf("type-%02d", i), Count: 2})
	}
	for i := range 15 {
		want.Types = append(want.Types, listing.TypeCount{Type: fmt.Sprintf("type-%02d", 5+i), Count: 1})
	}
	want.OtherTypes = 5
	got, err := f.vault.Summary(t.Context(), f.a, 3*day)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v (%v)", got, want, err)
	}
	e := f.last(f.a)
	if e.EventType != audit.CredentialListed || e.Outcome != audit.Success || e.Attributes["count"] != "30" || e.Attributes["summary"] != "true" || e.Resource.ID != "" {
		t.Errorf("recorded as %+v", e)
	}
	f.tamper(func(tx store.Tx) error { return tx.Put(record.Key(f.a.Tenant, all[0].ID, 1), []byte("junk")) })
	if got, err = f.vault.Summary(t.Context(), f.a, 3*day); err != nil || got.Total != 29 {
		t.Errorf("beside a damaged record: %+v %v", got, err)
	}
	if e := f.last(f.a); e.Outcome != audit.Failure || e.Attributes["damaged"] != "1" {
		t.Errorf("recorded as %+v", e)
	}
}

func TestMetadataIsWhatTheListSays(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.sealFor(f.a, "Jürgen", "api_key", 5)
	f.object("shop", "db", 0, 30, 0)
	for range 2 {
		list, _, err := f.vault.List(t.Context(), f.a, ListQuery{})
		must(t, err)
		for _, c := range list {
			got, err := f.vault.Metadata(t.Context(), f.a, c.ID)
			if err != nil || got != c {
				t.Errorf("%+v, the list says %+v (%v)", got, c, err)
			}
			e := f.last(f.a)
			if e.EventType != audit.CredentialListed || e.Outcome != audit.Success || e.Resource.ID != c.ID || e.Attributes[audit.AttributeVersion] != "1" {
				t.Errorf("recorded as %+v", e)
			}
		}
		f.advance(6 * day) // in the second round some have expired
	}
	c := f.sealFor(f.a, "n", "t", 1)
	f.tamper(func(tx store.Tx) error { return tx.Put(record.Key(f.a.Tenant, c.ID, 1), []byte("junk")) })
	if got, err := f.vault.Metadata(t.Context(), f.a, c.ID); !errors.Is(err, fault.Forbidden) || got != (Credential{}) {
		t.Errorf("a damaged one: %+v %v", got, err)
	}
	if e := f.last(f.a); e.Outcome != audit.Failure || e.Attributes[audit.AttributeReason] != reasonIntegrity {
		t.Errorf("recorded as %+v", e)
	}
}
