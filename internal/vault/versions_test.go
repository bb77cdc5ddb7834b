package vault

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/compare"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/nameindex"
	"github.com/latticekeep/latticekeep/internal/vault/pathindex"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

func (f *fixture) replace(id string, ttl int, values map[string]string) Credential {
	f.t.Helper()
	c, err := f.vault.Replace(f.t.Context(), f.a, id, ReplaceRequest{Values: secrets(values), TTLDays: ttl})
	must(f.t, err)
	return c
}

func (f *fixture) versions(id string) []history.Version {
	f.t.Helper()
	list, err := f.vault.Versions(f.t.Context(), f.a, id)
	must(f.t, err)
	return list
}

func TestReplaceStoresNewValuesAsTheNextVersion(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	f.advance(day)
	next := f.replace(c.ID, 0, map[string]string{"password": "new"})
	if next.Version != 2 || next.Name != c.Name || next.Type != c.Type || !next.CreatedAt.Equal(c.CreatedAt) || !next.ExpiresAt.Equal(f.now().Add(30*day)) {
		t.Fatalf("%+v", next)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialRotated || e.Outcome != audit.Success || e.Resource.ID != c.ID || e.Attributes[audit.AttributeVersion] != "2" {
		t.Fatalf("%+v", e)
	}
	got, err := f.vault.Read(t.Context(), f.a, ByID(c.ID))
	must(t, err)
	if !maps.Equal(plain(got.Values), map[string]string{"password": "new"}) || got.Credential != next {
		t.Fatal(plain(got.Values), got.Credential)
	}
	if longer := f.replace(c.ID, 60, login); !longer.ExpiresAt.Equal(f.now().Add(60 * day)) {
		t.Fatal(longer.ExpiresAt)
	}
	if kept, err := f.vault.Rotate(t.Context(), f.a, c.ID); err != nil || !kept.ExpiresAt.Equal(f.now().Add(60*day)) {
		t.Fatal("the new TTL is not kept:", kept.ExpiresAt, err)
	}
	f.verify()
}

func TestABadReplacementIsRefusedWhateverTheID(t *testing.T) {
	f := newFixture(t, time.Minute)
	c, foreign := f.seal(f.a, login), f.seal(f.b, login)
	before := f.verify().Entries
	for says, req := range map[string]ReplaceRequest{
		"values must have":   {},
		"ttl_days must":      {Values: secrets(login), TTLDays: 3651},
		"ttl_days must be 1": {Values: secrets(login), TTLDays: -1},
		"the keys of values": {Values: secrets(map[string]string{"a b": ""})},
		"256 KiB":            {Values: secrets(map[string]string{"k": strings.Repeat("x", bounds.MaxValuesBytes)})},
	} {
		for _, id := range []string{c.ID, foreign.ID, "junk"} {
			_, err := f.vault.Replace(t.Context(), f.a, id, req)
			if !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), says) {
				t.Errorf("%q: %v", says, err)
			}
		}
	}
	if f.verify().Entries != before {
		t.Error("a bad request left an entry")
	}
}

func TestReplacedValuesAreGoneFromEveryFile(t *testing.T) {
	t.Parallel() // it mostly waits
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	_, rows := f.rows("credential/")
	old, err := record.Decode(rows[0])
	must(t, err)
	f.replace(c.ID, 0, login)
	must(t, f.store.Scrubbed(t.Context()))
	files := string(f.files())
	if strings.Contains(files, string(old.Body[:64])) || strings.Contains(files, string(old.Wrap)) {
		t.Fatal("the replaced version is still in a file")
	}
}

func TestVersionsTellHowACredentialCameToBe(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	sealed := f.now()
	f.advance(day)
	_, err := f.vault.Rotate(t.Context(), f.a, c.ID)
	must(t, err)
	f.advance(day)
	f.replace(c.ID, 7, login)
	want := []history.Version{
		{Number: 3, Change: "rotated", Current: true, Readable: true, SealedAt: sealed.Add(2 * day), ExpiresAt: sealed.Add(9 * day)},
		{Number: 2, Change: "reencrypted", Current: false, SealedAt: sealed.Add(day), ExpiresAt: sealed.Add(31 * day)},
		{Number: 1, Change: "sealed", Current: false, SealedAt: sealed, ExpiresAt: sealed.Add(30 * day)},
	}
	if got := f.versions(c.ID); !slices.Equal(got, want) {
		t.Fatalf("%+v", got)
	}
	e := f.last(f.a)
	if e.EventType != audit.CredentialListed || e.Outcome != audit.Success || e.Resource.ID != c.ID || e.Attributes["count"] != "3" {
		t.Fatalf("%+v", e)
	}
	must(t, f.vault.Delete(t.Context(), f.a, c.ID))
	if keys, _ := f.rows("credential-"); len(keys) != 0 {
		t.Fatalf("left behind: %q", keys)
	}
	f.verify()
}

func TestTheVersionsOfAnObjectsCredentialAreKept(t *testing.T) {
	f := newFixture(t, time.Minute)
	op := f.operator()
	o, err := f.vault.Apply(t.Context(), op, uid, 0, f.desired(login, "a"))
	must(t, err)
	_, err = f.vault.Apply(t.Context(), op, uid, 1, f.desired(map[string]string{"p": "2"}, "b"))
	must(t, err)
	_, err = f.vault.Reencrypt(t.Context(), op, uid, 2, "now")
	must(t, err)
	var got []string
	for _, v := range f.versions(o.ID) {
		got = append(got, fmt.Sprintf("%d %s %t", v.Number, v.Change, v.Current))
	}
	if want := []string{"3 reencrypted true", "2 rotated false", "1 sealed false"}; !slices.Equal(got, want) {
		t.Fatal(got)
	}
	must(t, f.end(op, uid, true))
	if keys, _ := f.rows("credential-"); len(keys) != 0 {
		t.Fatalf("left behind: %q", keys)
	}
}

func TestOnlySoManyVersionsAreRemembered(t *testing.T) {
	f := newFixture(t, time.Hour)
	c := f.seal(f.a, login)
	for range history.MaxVersions + 5 {
		_, err := f.vault.Rotate(t.Context(), f.a, c.ID)
		must(t, err)
	}
	list := f.versions(c.ID)
	if len(list) != history.MaxVersions || list[0].Number != history.MaxVersions+6 || !list[0].Current || list[len(list)-1].Number != 7 {
		t.Fatal(len(list), list[0], list[len(list)-1])
	}
}

func TestAChangedHistoryIsNotShown(t *testing.T) {
	changes := map[string]func(tx store.Tx, key, value []byte) error{
		"a changed row": func(tx store.Tx, key, value []byte) error {
			return tx.Put(key, []byte(strings.Replace(string(value), "sealed", "Sealed", 1)))
		},
		"junk":   func(tx store.Tx, key, _ []byte) error { return tx.Put(key, []byte("junk")) },
		"no row": func(tx store.Tx, key, _ []byte) error { return tx.Delete(key) },
		"a moved row": func(tx store.Tx, key, value []byte) error {
			key = slices.Clone(key)
			key[len(key)-1]++
			return tx.Put(key, value)
		},
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			inBothStores(t, func(t *testing.T, f *fixture) {
				c := f.seal(f.a, login)
				keys, values := f.rows("credential-version/")
				f.tamper(func(tx store.Tx) error { return change(tx, keys[0], values[0]) })
				refused := func(what string, err error) {
					t.Helper()
					if !errors.Is(err, fault.Forbidden) {
						t.Errorf("%s: %v", what, err)
					}
					if e := f.last(f.a); e.Outcome != audit.Failure || e.Attributes[audit.AttributeReason] != reasonIntegrity || e.Resource.ID != c.ID {
						t.Errorf("%s: recorded as %+v", what, e)
					}
				}
				list, err := f.vault.Versions(t.Context(), f.a, c.ID)
				if refused("history", err); list != nil {
					t.Error(list)
				}
				if !f.unbound { // the history also says where the index of names has the credential
					_, err := f.vault.Rotate(t.Context(), f.a, c.ID)
					refused("rotation", err)
					refused("deletion", f.vault.Delete(t.Context(), f.a, c.ID))
					return
				}
				// The credential itself is intact, and can be changed and deleted.
				_, err = f.vault.Rotate(t.Context(), f.a, c.ID)
				must(t, err)
				must(t, f.vault.Delete(t.Context(), f.a, c.ID))
				if keys, _ := f.rows("credential-"); len(keys) != 0 && name != "a changed row" {
					t.Errorf("left behind: %q", keys)
				}
			})
		})
	}
}

func (f *fixture) named(name string) (Unsealed, error) {
	return f.vault.Read(f.t.Context(), f.a, ByName(name))
}

func TestANameStandsForItsNewestActiveCredential(t *testing.T) {
	f := newFixture(t, time.Minute)
	is := func(when string, want Credential) {
		t.Helper()
		got, err := f.named("db")
		if err != nil || got.ID != want.ID || got.Version != want.Version || !maps.Equal(plain(got.Values), login) {
			t.Fatalf("%s: %v %+v", when, err, got.Credential)
		}
		if e := f.last(f.a); e.EventType != audit.CredentialUnsealed || e.Outcome != audit.Success || e.Resource.ID != want.ID {
			t.Fatalf("%s: recorded as %+v", when, e)
		}
	}
	first := f.seal(f.a, login)
	f.sealNamed(f.a, "db2", map[string]string{"other": "name"})
	f.sealNamed(f.b, "db", map[string]string{"other": "tenant"})
	is("alone", first)
	f.advance(day)
	second, err := f.vault.Seal(t.Context(), f.a, SealRequest{Name: "db", Type: "database", TTLDays: 2, Values: secrets(login)})
	must(t, err)
	is("a second", second)
	f.advance(day)
	first, err = f.vault.Rotate(t.Context(), f.a, first.ID)
	must(t, err)
	is("a rotation makes no credential newer", second)
	f.advance(2 * day)
	is("the second has expired", first)
	third := f.seal(f.a, login)
	is("a third", third)
	must(t, f.vault.Delete(t.Context(), f.a, third.ID))
	is("the third is deleted", first)
	f.advance(31 * day)
	if _, err := f.named("db"); !errors.Is(err, fault.Forbidden) {
		t.Fatal("all have expired:", err)
	}
	if e := f.last(f.a); e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != reasonExpired || e.Resource.ID != first.ID {
		t.Fatalf("recorded as %+v", e)
	}
	f.verify()
}

func TestAnObjectsCredentialIsFoundByItsNewName(t *testing.T) {
	f := newFixture(t, time.Minute)
	_, err := f.vault.Apply(t.Context(), f.operator(), uid, 0, f.desired(login, "a"))
	must(t, err)
	renamed := f.desired(login, "b")
	renamed.Name = "renamed"
	o, err := f.vault.Apply(t.Context(), f.operator(), uid, 1, renamed)
	must(t, err)
	if got, err := f.named("renamed"); err != nil || got.ID != o.ID || !got.Owned {
		t.Fatal(err)
	}
	if _, err := f.named("db"); !errors.Is(err, fault.Forbidden) {
		t.Fatal(err)
	}
	if keys, _ := f.rows("credential-name/"); len(keys) != 2 {
		t.Fatalf("%q", keys)
	}
}

// An attacker who can write the database cannot make a name mean another credential.
func TestANameCannotBePointedElsewhere(t *testing.T) {
	f := newFixture(t, time.Minute)
	db := f.seal(f.a, login)
	other := f.sealNamed(f.a, "other", login)
	prefix := string(nameindex.Prefix(f.a.Tenant, f.vault.records.names.Hash(f.a.Tenant, "db")))
	keys, values := f.rows(prefix)
	moved := []byte(string(keys[0][:len(prefix)+16]) + other.ID)
	f.tamper(func(tx store.Tx) error {
		return errors.Join(tx.Delete(keys[0]), tx.Put(moved, values[0]))
	})
	if got, err := f.named("db"); !errors.Is(err, fault.Forbidden) || got.Values != nil {
		t.Error("a moved row:", err)
	}
	if e := f.last(f.a); e.Outcome != audit.Failure || e.Attributes[audit.AttributeReason] != reasonIntegrity {
		t.Errorf("recorded as %+v", e)
	}
	// A well-formed row for a credential with another name, like the old row of a renamed one.
	f.tamper(func(tx store.Tx) error { return tx.Put(moved, f.keys.SealRow(moved, nil)) })
	if got, err := f.named("db"); !errors.Is(err, fault.Forbidden) || got.Values != nil {
		t.Error("another name:", err)
	}
	if e := f.last(f.a); e.Outcome != audit.Failure {
		t.Errorf("recorded as %+v", e)
	}
	// Rows without a MAC that would be the newest. One is for a credential with that name.
	f.tamper(func(tx store.Tx) error { return errors.Join(tx.Delete(moved), tx.Put(keys[0], values[0])) })
	for _, key := range []string{prefix + "\x7f", prefix + strings.Repeat("\x7f", 16) + db.ID} {
		f.tamper(func(tx store.Tx) error { return tx.Put([]byte(key), nil) })
		if got, err := f.named("db"); !errors.Is(err, fault.Forbidden) || got.Values != nil {
			t.Errorf("%q: %v", key, err)
		}
		f.tamper(func(tx store.Tx) error { return tx.Delete([]byte(key)) })
	}
	if got, err := f.named("db"); err != nil || got.ID != db.ID {
		t.Error("the index as it was:", err)
	}
}

// Whoever deletes or puts back rows of the index of names makes a name mean an earlier credential.
// The verification needs no key to find that.
func TestTheVerificationComparesTheIndexOfNames(t *testing.T) {
	f := newFixture(t, time.Minute)
	type rows map[string][]byte
	index := func() rows {
		all := make(rows)
		keys, values := f.rows("credential-name/")
		for i, key := range keys {
			all[string(key)] = values[i]
		}
		return all
	}
	put := func(remove, add rows) {
		t.Helper()
		f.tamper(func(tx store.Tx) (err error) {
			for key := range remove {
				err = errors.Join(err, tx.Delete([]byte(key)))
			}
			for key, value := range add {
				err = errors.Join(err, tx.Put([]byte(key), value))
			}
			return err
		})
	}
	since := func(before rows) rows { // rows that are new
		after := index()
		maps.DeleteFunc(after, func(key string, _ []byte) bool { return before[key] != nil })
		return after
	}
	gone := func(before rows) rows {
		before, after := maps.Clone(before), index()
		maps.DeleteFunc(before, func(key string, _ []byte) bool { return after[key] != nil })
		return before
	}

	f.seal(f.a, login)
	f.advance(day)
	second := f.seal(f.a, login)
	deleted := f.seal(f.a, login)
	before := index()
	must(t, f.vault.Delete(t.Context(), f.a, deleted.ID))
	ofDeleted := gone(before)
	f.advance(day)
	before = index()
	_, err := f.vault.Rotate(t.Context(), f.a, second.ID)
	must(t, err)
	replaced := gone(before)
	newer := since(before)
	other := make(rows) // in the section of another name
	for key, value := range newer {
		section := f.vault.records.names.Hash(f.a.Tenant, "other")
		other[string(nameindex.Prefix(f.a.Tenant, section))+key[len(nameindex.Prefix(f.a.Tenant, section)):]] = value
	}
	before = index()
	_, err = f.vault.Apply(t.Context(), f.operator(), uid, 0, f.desired(login, "a"))
	must(t, err)
	ofObject := since(before)
	_, err = f.vault.Apply(t.Context(), f.operator(), "second-uid", 0, f.desired(login, "a"))
	must(t, err)
	before = index()
	must(t, f.end(f.operator(), "second-uid", false))
	ofReleased := gone(before)
	released := since(before)
	junk, one, owner := make(rows), make(rows), make(rows)
	for key := range newer {
		junk[key] = []byte("junk")
	}
	for key, value := range ofObject {
		one[key] = value
		break
	}
	keys, values := f.rows("owner/")
	owner[string(keys[0])] = values[0]
	lines := make(rows)
	keys, values = f.rows(string(history.Prefix(f.a.Tenant, second.ID)))
	lines[string(keys[1])] = values[1]
	if len(newer) != 1 || len(ofDeleted) != 1 || len(replaced) != 1 || len(ofObject) != 2 || len(ofReleased) != 2 || len(released) != 1 {
		t.Fatal(newer, ofDeleted, replaced, ofObject, ofReleased, released)
	}
	f.verify()
	for name, c := range map[string]struct {
		remove, add rows
		says        string
	}{
		"the newest credential is not found":      {newer, nil, "has 0 rows"},
		"a deleted credential is back":            {nil, ofDeleted, "does not exist"},
		"a replaced version is back":              {nil, replaced, "as another version"},
		"the current version is replaced by it":   {newer, replaced, "as another version"},
		"another name":                            {newer, other, "under another name"},
		"a row without a MAC":                     {newer, junk, "damaged"},
		"an object's credential in one section":   {one, nil, "has 1 rows"},
		"an object's credential has no object":    {owner, nil, "under another name"},
		"a released credential is an object's":    {released, ofReleased, "under another name"},
		"a released credential is also an object": {nil, ofReleased, "under another name"},
		"a version without a line in the history": {lines, nil, "no line in its history"},
	} {
		put(c.remove, c.add)
		_, err := compare.Store(t.Context(), f.store.Store, verify.Options{})
		if broken, ok := audit.IsBroken(err); !ok || !strings.Contains(broken.Reason, c.says) || broken.Sequence == 0 {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
		put(c.add, c.remove)
		f.verify()
	}
}

// However many credentials have expired, a search for a name reads the same number of rows, whether
// it finds an active one or none.
func TestExpiredNamesakesCostNothing(t *testing.T) {
	f := newFixture(t, time.Minute)
	wanted := []string{"expired", "active"}
	f.sealNamed(f.a, "expired", login)
	f.advance(31 * day)
	active := f.sealNamed(f.a, "active", login)
	f.advance(day)
	read := func(name string) int64 {
		t.Helper()
		before := f.store.rows.Load()
		got, err := f.named(name)
		if (name == "active") != (err == nil) || err == nil && got.ID != active.ID {
			t.Fatal(name, got.ID, err)
		}
		return f.store.rows.Load() - before
	}
	namesakes := func(n int) { // younger than the active one
		f.commit(func(tx store.Tx) (err error) {
			for i := range n {
				for _, name := range wanted {
					at := f.now().Add(time.Duration(-i) * time.Second)
					key := nameindex.Key(f.a.Tenant, f.vault.records.names.Hash(f.a.Tenant, name), at, at, authz.NewID(idPrefix))
					err = errors.Join(err, tx.Put(key, f.keys.SealRow(key, nil)))
				}
			}
			return err
		})
	}
	namesakes(1)
	read("active") // unwraps the tenant's keys
	few := []int64{read("expired"), read("active")}
	namesakes(2000)
	if many := []int64{read("expired"), read("active")}; !slices.Equal(many, few) {
		t.Errorf("beside one namesake %d rows are read, beside 2000 %d", few, many)
	}
}

// Both the record and the history of a credential know its place in the index.
func TestDamageLeavesNoOldPlaceInTheIndex(t *testing.T) {
	f := newUnboundFixture(t, time.Minute)
	c := f.seal(f.a, login)
	keys, _ := f.rows("credential-version/")
	f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], []byte("junk")) })
	f.advance(day)
	_, err := f.vault.Rotate(t.Context(), f.a, c.ID)
	must(t, err)
	if keys, _ := f.rows("credential-name/"); len(keys) != 1 {
		t.Fatalf("%q", keys)
	}
	keys, _ = f.rows("credential/")
	f.tamper(func(tx store.Tx) error { return tx.Put(keys[0], []byte("junk")) })
	must(t, f.vault.Delete(t.Context(), f.a, c.ID))
	if keys, _ := f.rows("credential-name/"); len(keys) != 0 {
		t.Fatalf("after the deletion: %q", keys)
	}
}

// Keys of rows stand in logs and in what doctor prints. Only the index of paths, whose rows decide
// nothing and are printed by nobody, has names in its keys.
func TestNamesAndKeysAreInNoKeyOfTheStore(t *testing.T) {
	f := newFixture(t, time.Minute)
	sealed := f.sealOnce("idem-canary", "name-canary", login)
	keys, _ := f.rows("")
	for _, key := range keys {
		if strings.Contains(string(key), "canary") && string(key) != string(pathindex.Key(f.a.Tenant, "name-canary", sealed.ID)) {
			t.Errorf("%q", key)
		}
	}
}
