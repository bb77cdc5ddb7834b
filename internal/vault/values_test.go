package vault

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha512"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
)

// The hash as docs/formats.md has it, with the frame written out.
func TestValuesAreHashedAsTheFormatSays(t *testing.T) {
	f := newFixture(t, time.Minute)
	h := hmac.New(sha512.New, f.keys.APIKeyHash())
	h.Write([]byte("\x00\x00\x00\x1blatticekeep/owned-values/v1" +
		"\x00\x00\x00\x06tenant" + "\x00\x00\x00\x03uid" +
		"\x00\x00\x00\x01a" + "\x00\x00\x00\x02\x00\xff" + "\x00\x00\x00\x02ab" + "\x00\x00\x00\x00"))
	if got := f.vault.hashValues("tenant", "uid", secrets(map[string]string{"ab": "", "a": "\x00\xff"})); !bytes.Equal(got, h.Sum(nil)[:32]) {
		t.Errorf("%x", got)
	}
}

// A row of the release before says nothing of values: once they count as new.
func TestARowOfTheReleaseBeforeCountsAsChangedOnce(t *testing.T) {
	f := newFixture(t, time.Minute)
	op := f.operator()
	sealedAt := f.now().Add(-day)
	d := f.desired(login, "a")
	for key := range d.SealedAt {
		d.SealedAt[key] = sealedAt
	}
	o, err := f.vault.Apply(t.Context(), op, uid, 0, d)
	must(t, err)
	f.tamper(func(tx store.Tx) error {
		row, err := json.Marshal(map[string]any{
			"credential": o.ID, "version": 1, "spec_digest": d.SpecDigest[:], "values_digest": make([]byte, 32),
			"sealed_at": d.SealedAt, "trigger": "t", "object": Object{"c1", "ns", "db"},
		})
		key := ownedKey(f.a.Tenant, uid)
		return errors.Join(err, tx.Put(key, f.keys.SealRow(key, row)))
	})
	seen, err := f.vault.Owned(t.Context(), op, uid)
	must(t, err)
	if seen.Version != 1 || seen.SpecDigest != d.SpecDigest || seen.Trigger != "t" || seen.Object.Name != "db" ||
		!seen.ValuesChangedAt.Equal(sealedAt) || seen.SealingKey != "" || seen.Former != nil || f.vault.Holds(op, uid, seen, secrets(login)) {
		t.Fatalf("%+v", seen)
	}
	_, err = f.vault.Reencrypt(t.Context(), op, uid, 1, "t")
	must(t, err)
	for version, want := range []audit.EventType{2: audit.CredentialRotated, 3: audit.CredentialReencrypted} {
		if want == "" {
			continue
		}
		o, err := f.vault.Apply(t.Context(), op, uid, uint64(version), d)
		must(t, err)
		if e := f.last(f.a); e.EventType != want || !f.vault.Holds(op, uid, o, secrets(login)) {
			t.Errorf("version %d: %s", version+1, e.EventType)
		}
	}
	f.verify()
}

func TestValuesAreComparedWhateverTheyWereSealedWith(t *testing.T) {
	f := newFixture(t, time.Minute)
	op, started := f.operator(), f.now()
	version := uint64(0)
	apply := func(values map[string]string) (*Owned, audit.EventType) {
		t.Helper()
		f.advance(time.Hour)
		d := f.desired(values, fmt.Sprint(version))
		d.SealingKey = fmt.Sprint("key", version)
		o, err := f.vault.Apply(t.Context(), op, uid, version, d)
		must(t, err)
		version++
		if o.SealingKey != d.SealingKey || !f.vault.Holds(op, uid, o, secrets(values)) {
			t.Fatalf("%+v", o)
		}
		seen, err := f.vault.Owned(t.Context(), op, uid)
		must(t, err)
		if seen.SealingKey != o.SealingKey || !seen.ValuesChangedAt.Equal(o.ValuesChangedAt) || !f.vault.Holds(op, uid, seen, secrets(values)) {
			t.Fatalf("applied %+v, holds %+v", o, seen)
		}
		return o, f.last(f.a).EventType
	}
	values := map[string]string{"a": "bc", "b": ""}
	if o, what := apply(values); what != audit.CredentialSealed || !o.ValuesChangedAt.Equal(started.Add(time.Hour)) {
		t.Fatal(what, o.ValuesChangedAt)
	}
	o, what := apply(maps.Clone(values))
	if what != audit.CredentialReencrypted || !o.ValuesChangedAt.Equal(started.Add(time.Hour)) {
		t.Fatal(what, o.ValuesChangedAt)
	}
	for _, other := range []map[string]string{
		{"a": "b", "b": "c"}, {"ab": "c", "b": ""}, {"a": "bc"}, {"a": "", "b": "bc"}, {"a": "bc", "b": "\x00"}, values,
	} {
		if f.vault.Holds(op, uid, o, secrets(other)) {
			t.Fatalf("%v are the values", other)
		}
		if o, what = apply(other); what != audit.CredentialRotated || !o.ValuesChangedAt.Equal(f.now()) {
			t.Fatal(what, o.ValuesChangedAt)
		}
		values = other
		o, err := f.vault.Reencrypt(t.Context(), op, uid, version, "t")
		must(t, err)
		version++
		if !f.vault.Holds(op, uid, o, secrets(values)) || !o.ValuesChangedAt.Equal(f.now()) || o.SealingKey != fmt.Sprint("key", version-2) {
			t.Fatalf("%+v", o)
		}
	}
	// The same values say nothing under another object or in another tenant.
	foreign := op
	foreign.Tenant = f.b.Tenant
	if f.vault.Holds(op, "other", o, secrets(values)) || f.vault.Holds(foreign, uid, o, secrets(values)) || f.vault.Holds(op, uid, nil, nil) || f.vault.Holds(op, uid, &Owned{}, nil) {
		t.Fatal("they hold elsewhere")
	}
	// Made again, they are the ones they were.
	changed := o.ValuesChangedAt
	f.tamper(func(tx store.Tx) error { return deleteAll(tx, credentialPrefix(f.a.Tenant)) })
	if o, what := apply(values); what != audit.CredentialSealed || !o.ValuesChangedAt.Equal(changed) {
		t.Fatal(what, o.ValuesChangedAt, changed)
	}
	f.verify()
}
