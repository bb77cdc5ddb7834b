package vault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

const day = 24 * time.Hour

var login = map[string]string{"user": "app", "password": "s3cret-canary-0123456789", "empty": "", "binary": "\x00\xff\xfe"}

func TestACredentialLivesFromSealToDelete(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	if c.Version != 1 || c.Expired || !c.ExpiresAt.Equal(f.now().Add(30*day)) || !authz.ValidID("cred", c.ID) {
		t.Fatalf("%+v", c)
	}
	got, err := f.vault.Read(t.Context(), f.a, ByID(c.ID))
	must(t, err)
	if !maps.Equal(plain(got.Values), login) || got.Credential != c {
		t.Fatalf("%+v", got.Credential)
	}
	f.advance(5 * day)
	rotated, err := f.vault.Rotate(t.Context(), f.a, c.ID)
	must(t, err)
	if rotated.Version != 2 || !rotated.ExpiresAt.Equal(f.now().Add(30*day)) || !rotated.CreatedAt.Equal(c.CreatedAt) {
		t.Fatalf("%+v", rotated)
	}
	got, err = f.vault.Read(t.Context(), f.a, ByID(c.ID))
	must(t, err)
	if !maps.Equal(plain(got.Values), login) {
		t.Fatal("the values changed")
	}
	list, _, err := f.vault.List(t.Context(), f.a, ListQuery{})
	must(t, err)
	if len(list) != 1 || list[0] != rotated {
		t.Fatalf("%+v", list)
	}
	must(t, f.vault.Delete(t.Context(), f.a, c.ID))
	if _, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)); !errors.Is(err, fault.Forbidden) {
		t.Fatal(err)
	}
	if keys, _ := f.rows("credential/"); len(keys) != 0 {
		t.Fatal("a row is left")
	}
	f.verify()
}

// Promise 1: a change and its entry are one transaction.
func TestAChangeAndItsEntryAreOneCommit(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	before := f.verify()
	f.store.full.Store(true)
	if _, err := f.vault.Seal(t.Context(), f.a, SealRequest{Name: "n", Type: "t", Values: secrets(login)}); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	if _, err := f.vault.Rotate(t.Context(), f.a, c.ID); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	if _, err := f.vault.Replace(t.Context(), f.a, c.ID, ReplaceRequest{Values: secrets(login)}); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	if err := f.vault.Delete(t.Context(), f.a, c.ID); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	f.store.full.Store(false)
	after := f.verify()
	if before.Hash != after.Hash {
		t.Fatal("an entry without its change")
	}
	for _, change := range []func() error{
		func() error { f.seal(f.a, login); return nil },
		func() error { _, err := f.vault.Rotate(t.Context(), f.a, c.ID); return err },
		func() error {
			_, err := f.vault.Replace(t.Context(), f.a, c.ID, ReplaceRequest{Values: secrets(login)})
			return err
		},
		func() error { return f.vault.Delete(t.Context(), f.a, c.ID) },
	} {
		n := f.verify().Entries
		commits := f.store.Commits()
		must(t, change())
		if f.verify().Entries != n+1 || f.store.Commits() != commits+1 {
			t.Fatal("a change is not exactly one entry in one commit")
		}
	}
}

// Promise 2: while the read cannot be recorded or the key cannot be unwrapped, nothing is looked up
// and nothing secret leaves, whatever the id.
func TestNothingIsReadThatCannotBeRecorded(t *testing.T) {
	f := newFixture(t, 0)
	c := f.seal(f.a, login)
	foreign := f.seal(f.b, login)
	ids := []string{c.ID, foreign.ID, authz.NewID("cred"), "junk"}
	for name, broken := range map[string]func(bool){"full disk": f.store.full.Store, "KMS down": f.kms.down.Store} {
		broken(true)
		for _, id := range ids {
			began, views := time.Now(), f.store.views.Load()
			got, err := f.vault.Read(t.Context(), f.a, ByID(id))
			if name == "full disk" && f.store.views.Load() != views {
				t.Errorf("%s: something was looked up", name)
			}
			if !errors.Is(err, fault.Unavailable) || got.Values != nil {
				t.Errorf("%s: %v %v", name, got.Values, err)
			}
			if d := time.Since(began); d > time.Minute || readTimeout > time.Second { // a busy machine is slow, but the limit is fixed
				t.Errorf("%s: it took %v, with a limit of %v", name, d, readTimeout)
			}
		}
		if list, _, err := f.vault.List(t.Context(), f.a, ListQuery{}); !errors.Is(err, fault.Unavailable) || list != nil {
			t.Errorf("%s: %v %v", name, list, err)
		}
		if list, err := f.vault.Versions(t.Context(), f.a, c.ID); !errors.Is(err, fault.Unavailable) || list != nil {
			t.Errorf("%s: %v %v", name, list, err)
		}
		if got, err := f.vault.Metadata(t.Context(), f.a, c.ID); !errors.Is(err, fault.Unavailable) || got != (Credential{}) {
			t.Errorf("%s: %v %v", name, got, err)
		}
		if got, err := f.vault.Summary(t.Context(), f.a, day); !errors.Is(err, fault.Unavailable) || got.Total != 0 {
			t.Errorf("%s: %v %v", name, got, err)
		}
		if got, err := f.vault.Read(t.Context(), f.a, ByName(c.Name)); !errors.Is(err, fault.Unavailable) || got.Values != nil {
			t.Errorf("%s: %v %v", name, got.Values, err)
		}
		broken(false)
		if _, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)); err != nil {
			t.Errorf("%s: no recovery: %v", name, err)
		}
	}
	f.verify()
}

// The entry of a read is durable when the read returns. Here the log fails between the lookup and
// the record.
func TestAReadWhoseEntryFailsReturnsNothing(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	readOnly := &lateStore{watchedStore: f.store}
	v := New(readOnly, guard.New(f.log), f.keys, f.now)
	must(t, f.log.Use(t.Context(), readOnly, f.keys.Audit(), f.keys.ChainID()))
	if got, err := v.Read(t.Context(), f.a, ByID(c.ID)); !errors.Is(err, fault.Unavailable) || got.Values != nil {
		t.Fatal(got.Values, err)
	}
	if got, err := v.Read(t.Context(), f.a, ByName(c.Name)); !errors.Is(err, fault.Unavailable) || got.Values != nil {
		t.Fatal(got.Values, err)
	}
	if list, _, err := v.List(t.Context(), f.a, ListQuery{}); !errors.Is(err, fault.Unavailable) || list != nil {
		t.Fatal(list, err)
	}
	if list, err := v.Versions(t.Context(), f.a, c.ID); !errors.Is(err, fault.Unavailable) || list != nil {
		t.Fatal(list, err)
	}
	if got, err := v.Metadata(t.Context(), f.a, c.ID); !errors.Is(err, fault.Unavailable) || got != (Credential{}) {
		t.Fatal(got, err)
	}
	if got, err := v.Summary(t.Context(), f.a, day); !errors.Is(err, fault.Unavailable) || got.Total != 0 {
		t.Fatal(got, err)
	}
}

// lateStore reports that it is ready, and then fails to write.
type lateStore struct{ *watchedStore }

func (s *lateStore) Update(context.Context, func(store.Tx) error) error {
	return fault.New(fault.Unavailable, "no space left")
}

// Promise 3: a principal without the scope is refused, and the refusal is recorded.
func TestDenialsAreRecorded(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	weak := f.a
	weak.Scopes = []authz.Scope{authz.AuditRead}
	attempts := []struct {
		what audit.EventType
		do   func() error
	}{
		{audit.CredentialSealed, func() error {
			_, err := f.vault.Seal(t.Context(), weak, SealRequest{Name: "n", Type: "t", Values: secrets(login)})
			return err
		}},
		{audit.CredentialListed, func() error { _, _, err := f.vault.List(t.Context(), weak, ListQuery{}); return err }},
		{audit.CredentialListed, func() error { _, err := f.vault.Versions(t.Context(), weak, c.ID); return err }},
		{audit.CredentialListed, func() error { _, err := f.vault.Metadata(t.Context(), weak, c.ID); return err }},
		{audit.CredentialListed, func() error { _, err := f.vault.Summary(t.Context(), weak, day); return err }},
		{audit.CredentialUnsealed, func() error { _, err := f.vault.Read(t.Context(), weak, ByID(c.ID)); return err }},
		{audit.CredentialUnsealed, func() error { _, err := f.vault.Read(t.Context(), weak, ByName(c.Name)); return err }},
		{audit.CredentialReencrypted, func() error { _, err := f.vault.Rotate(t.Context(), weak, c.ID); return err }},
		{audit.CredentialRotated, func() error {
			_, err := f.vault.Replace(t.Context(), weak, c.ID, ReplaceRequest{Values: secrets(login)})
			return err
		}},
		{audit.CredentialDeleted, func() error { return f.vault.Delete(t.Context(), weak, c.ID) }},
	}
	for _, attempt := range attempts {
		n := f.verify().Entries
		if err := attempt.do(); !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s: %v", attempt.what, err)
		}
		e := f.last(f.a)
		if e.EventType != attempt.what || e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != "missing_scope" || e.Actor.ID != weak.ID {
			t.Errorf("%s: recorded as %+v", attempt.what, e)
		}
		if f.verify().Entries != n+2 { // the refusal, and the query of f.last
			t.Errorf("%s: not exactly one entry", attempt.what)
		}
	}
	if _, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)); err != nil {
		t.Error("a refused attempt changed something:", err)
	}
}

func TestExpiredCredentialsAreListedAsSuch(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	f.advance(30*day - time.Second)
	if _, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)); err != nil {
		t.Fatal(err)
	}
	f.advance(time.Second)
	if _, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)); !errors.Is(err, fault.Forbidden) {
		t.Fatal(err)
	}
	if e := f.last(f.a); e.Attributes[audit.AttributeReason] != reasonExpired || e.Outcome != audit.Denied {
		t.Fatalf("%+v", e)
	}
	list, _, err := f.vault.List(t.Context(), f.a, ListQuery{})
	if err != nil || len(list) != 1 || !list[0].Expired {
		t.Fatal(list, err)
	}
}

func TestListPages(t *testing.T) {
	f := newFixture(t, time.Minute)
	all := make(map[string]bool)
	for range 7 {
		all[f.seal(f.a, login).ID] = true
	}
	f.seal(f.b, login)
	for _, limit := range []int{0, 1, 3, 7, 100} {
		seen := make(map[string]bool)
		for cursor := ""; ; {
			list, rest, err := f.vault.List(t.Context(), f.a, ListQuery{Limit: limit, Cursor: cursor})
			next := rest.Cursor
			must(t, err)
			for _, c := range list {
				seen[c.ID] = true
			}
			if cursor = next; cursor == "" {
				break
			}
		}
		if !maps.Equal(seen, all) {
			t.Errorf("pages of %d: %d of %d", limit, len(seen), len(all))
		}
	}
	if _, _, err := f.vault.List(t.Context(), f.a, ListQuery{Cursor: "x"}); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
}

func TestBadRequestsAreRefusedWithTheRemedy(t *testing.T) {
	f := newFixture(t, time.Minute)
	good := func() SealRequest { return SealRequest{Name: "n", Type: "t", Values: secrets(login)} }
	many := make(map[string]string)
	for i := range 65 {
		many[strings.Repeat("k", i+1)] = "v"
	}
	before := f.verify().Entries
	for says, change := range map[string]func(*SealRequest){
		"name must":            func(r *SealRequest) { r.Name = "" },
		"name must ":           func(r *SealRequest) { r.Name = strings.Repeat("n", 256) },
		"name must have":       func(r *SealRequest) { r.Name = "a\x00b" },
		"name must have 1":     func(r *SealRequest) { r.Name = "\xff" },
		"credential_type":      func(r *SealRequest) { r.Type = "" },
		"credential_type must": func(r *SealRequest) { r.Type = "a/b" },
		"ttl_days":             func(r *SealRequest) { r.TTLDays = -1 },
		"ttl_days must":        func(r *SealRequest) { r.TTLDays = 3651 },
		"values must":          func(r *SealRequest) { r.Values = nil },
		"values must have":     func(r *SealRequest) { r.Values = secrets(many) },
		"the keys of values":   func(r *SealRequest) { r.Values = secrets(map[string]string{"a b": ""}) },
		"the keys of":          func(r *SealRequest) { r.Values = secrets(map[string]string{"": ""}) },
		"256 KiB": func(r *SealRequest) {
			r.Values = map[string]secret.Bytes{"k": make(secret.Bytes, bounds.MaxValuesBytes)}
		},
	} {
		req := good()
		change(&req)
		_, err := f.vault.Seal(t.Context(), f.a, req)
		if !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), strings.TrimSpace(says)) {
			t.Errorf("%q: %v", says, err)
		}
	}
	largest := good()
	largest.Values = map[string]secret.Bytes{"k": make(secret.Bytes, bounds.MaxValuesBytes-1)}
	if _, err := f.vault.Seal(t.Context(), f.a, largest); err != nil {
		t.Error(err)
	}
	if f.verify().Entries != before+1 {
		t.Error("a refused request was recorded as a seal")
	}
}

func TestConcurrentRotationsAllCount(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			if _, err := f.vault.Rotate(t.Context(), f.a, c.ID); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	got, err := f.vault.Read(t.Context(), f.a, ByID(c.ID))
	must(t, err)
	if got.Version != 7 || !maps.Equal(plain(got.Values), login) {
		t.Fatal(got.Version)
	}
	f.verify()
}

// Promise 8: no file holds the old ciphertext and its wrapped seed.
func TestDeletedIsGoneFromEveryFile(t *testing.T) {
	t.Parallel() // it mostly waits
	f := newFixture(t, time.Minute)
	large := map[string]string{"k": strings.Repeat("0123456789abcdef", 8<<10)}
	for range 20 { // neighbours, so that pages are shared, split and copied
		f.seal(f.a, login)
	}
	gone := func(what string, r *record.Record) {
		t.Helper()
		must(t, f.store.Scrubbed(t.Context()))
		files := f.files()
		for name, blob := range map[string][]byte{"wrapped seed": r.Wrap, "ciphertext": r.Body, "signature": r.Signature} {
			for at := 0; at+32 <= len(blob); at += max(32, len(blob)/64) {
				if piece := blob[at : at+32]; !bytes.Equal(piece, make([]byte, 32)) && bytes.Contains(files, piece) {
					t.Fatalf("%s: bytes %d of the %s are still in a file", what, at, name)
				}
			}
		}
	}
	read := func(id string) *record.Record {
		t.Helper()
		_, values := f.rows("credential/" + string(f.a.Tenant) + "/" + id)
		r, err := record.Decode(values[0])
		must(t, err)
		if !bytes.Contains(f.files(), r.Wrap) {
			t.Fatal("the search would not find what is there")
		}
		return r
	}
	for what, values := range map[string]map[string]string{"small": login, "large": large} {
		c := f.seal(f.a, values)
		old := read(c.ID)
		_, err := f.vault.Rotate(t.Context(), f.a, c.ID)
		must(t, err)
		gone(what+" after a rotation", old)
		f.seal(f.a, login)
		current := read(c.ID)
		must(t, f.vault.Delete(t.Context(), f.a, c.ID))
		gone(what+" after a deletion", current)
	}
	f.verify()
}

// Promise 6, for the vault: no entry contains a value, a key name or a credential name.
func TestNoEntryHoldsAnythingSecret(t *testing.T) {
	f := newFixture(t, time.Minute)
	c, err := f.vault.Seal(t.Context(), f.a, SealRequest{Name: "name-canary", Type: "type-canary", Values: secrets(map[string]string{"key-canary": "value-canary"})})
	must(t, err)
	_, err = f.vault.Read(t.Context(), f.a, ByID(c.ID))
	must(t, err)
	_, err = f.vault.Read(t.Context(), f.a, ByID("id-canary"))
	if err == nil || strings.Contains(err.Error(), "canary") {
		t.Fatal(err)
	}
	_, err = f.vault.Read(t.Context(), f.a, ByName("name-canary"))
	must(t, err)
	_, err = f.vault.Read(t.Context(), f.a, ByName("no-such-canary"))
	if err == nil || strings.Contains(err.Error(), "canary") {
		t.Fatal(err)
	}
	_, err = f.vault.Rotate(t.Context(), f.a, c.ID)
	must(t, err)
	_, err = f.vault.Replace(t.Context(), f.a, c.ID, ReplaceRequest{Values: secrets(map[string]string{"key-canary": "value-canary"})})
	must(t, err)
	_, err = f.vault.Versions(t.Context(), f.a, c.ID)
	must(t, err)
	for range 2 {
		_, err = f.vault.Seal(t.Context(), f.a, SealRequest{
			Name: "name-canary", Type: "type-canary", Values: secrets(map[string]string{"key-canary": "value-canary"}), IdempotencyKey: "idem-canary",
		})
		must(t, err)
	}
	must(t, f.vault.Delete(t.Context(), f.a, c.ID))
	_, entries := f.rows("audit/")
	if bytes.Contains(bytes.Join(entries, nil), []byte("canary")) {
		t.Fatal("an entry holds what it must not")
	}
}

func TestRecordsOfEarlierKeyVersionsKeepOpening(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	set, err := f.keys.NewSet(t.Context(), f.a.Tenant, 2)
	must(t, err)
	f.commit(set.Put)
	if err := f.store.Update(t.Context(), set.Put); !errors.Is(err, fault.Conflict) {
		t.Fatal("a version was stored twice:", err)
	}
	got, err := f.vault.Read(t.Context(), f.a, ByID(c.ID))
	must(t, err)
	if !maps.Equal(plain(got.Values), login) {
		t.Fatal("the values changed")
	}
	_, err = f.vault.Rotate(t.Context(), f.a, c.ID)
	must(t, err)
	_, values := f.rows("credential/")
	r, err := record.Decode(values[0])
	must(t, err)
	if wrapping, signing, err := r.KeyVersions(); err != nil || wrapping != 2 || signing != 2 {
		t.Fatal(wrapping, signing, err)
	}
	f.verify()
}

// When a disk hangs, each read is refused in time, even if its caller would wait for ever.
func TestAHangingStoreDoesNotHangAReader(t *testing.T) {
	t.Parallel() // it mostly waits
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	hanging := &hangingStore{watchedStore: f.store}
	v := New(hanging, guard.New(f.log), f.keys, f.now)
	must(t, f.log.Use(t.Context(), hanging, f.keys.Audit(), f.keys.ChainID()))
	for what, read := range map[string]func() error{
		"unseal": func() error { _, err := v.Read(context.Background(), f.a, ByID(c.ID)); return err },
		"list":   func() error { _, _, err := v.List(context.Background(), f.a, ListQuery{}); return err },
		"audit": func() error {
			_, _, err := reader.New(f.log, guard.New(f.log)).Query(context.Background(), f.a, reader.Query{Limit: 1})
			return err
		},
	} {
		answered := make(chan error, 1)
		go func() { answered <- read() }()
		select {
		case err := <-answered:
			if !errors.Is(err, fault.Unavailable) {
				t.Errorf("%s: %v", what, err)
			}
		case <-time.After(time.Minute): // a second, plus time for a slow machine
			t.Fatalf("%s hangs", what)
		}
	}
}

// hangingStore reports that it is ready, but its commits end only when their caller's context does.
type hangingStore struct{ *watchedStore }

func (s *hangingStore) Update(ctx context.Context, _ func(store.Tx) error) error {
	<-ctx.Done()
	return fault.Wrap(fault.Unavailable, "the disk hangs", ctx.Err())
}

// Without a cache an operation calls the KMS once, not more often.
func TestAnOperationAsksTheKMSOnce(t *testing.T) {
	f := newFixture(t, 0)
	c := f.seal(f.a, login)
	for what, do := range map[string]func() error{
		"seal":   func() error { f.seal(f.a, login); return nil },
		"list":   func() error { _, _, err := f.vault.List(t.Context(), f.a, ListQuery{}); return err },
		"unseal": func() error { _, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)); return err },
		"rotate": func() error { _, err := f.vault.Rotate(t.Context(), f.a, c.ID); return err },
		"replace": func() error {
			_, err := f.vault.Replace(t.Context(), f.a, c.ID, ReplaceRequest{Values: secrets(login)})
			return err
		},
		"versions": func() error { _, err := f.vault.Versions(t.Context(), f.a, c.ID); return err },
		"metadata": func() error { _, err := f.vault.Metadata(t.Context(), f.a, c.ID); return err },
		"summary":  func() error { _, err := f.vault.Summary(t.Context(), f.a, day); return err },
		"by name":  func() error { _, err := f.vault.Read(t.Context(), f.a, ByName(c.Name)); return err },
		"missed": func() error {
			if _, err := f.vault.Read(t.Context(), f.b, ByID(c.ID)); !errors.Is(err, fault.Forbidden) {
				return fmt.Errorf("not refused: %w", err)
			}
			return nil
		},
	} {
		f.kms.calls.Store(0)
		must(t, do())
		if n := f.kms.calls.Load(); n != 1 {
			t.Errorf("%s: %d calls", what, n)
		}
	}
}
