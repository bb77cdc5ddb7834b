package vault

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha512"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// The hash as docs/formats.md defines it, with the frame written out.
func TestValuesAreHashedAsTheFormatSays(t *testing.T) {
	f := newFixture(t, time.Minute)
	h := hmac.New(sha512.New, f.keys.APIKeyHash())
	h.Write([]byte("\x00\x00\x00\x1blatticekeep/owned-values/v1" +
		"\x00\x00\x00\x06tenant" + "\x00\x00\x00\x03uid" +
		"\x00\x00\x00\x01a" + "\x00\x00\x00\x02\x00\xff" + "\x00\x00\x00\x02ab" + "\x00\x00\x00\x00"))
	if got := f.vault.records.owners.hashValues("tenant", "uid", secrets(map[string]string{"ab": "", "a": "\x00\xff"})); !bytes.Equal(got, h.Sum(nil)[:32]) {
		t.Errorf("%x", got)
	}
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
	// Holds is false for the same values of another object or tenant.
	foreign := op
	foreign.Tenant = f.b.Tenant
	if f.vault.Holds(op, "other", o, secrets(values)) || f.vault.Holds(foreign, uid, o, secrets(values)) || f.vault.Holds(op, uid, nil, nil) || f.vault.Holds(op, uid, &Owned{}, nil) {
		t.Fatal("they hold elsewhere")
	}
	// Sealing the same values again after a loss keeps the time of their change.
	changed := o.ValuesChangedAt
	f.commit(func(tx store.Tx) error { return mac.DeleteAll(tx, record.TenantPrefix(f.a.Tenant)) })
	if o, what := apply(values); what != audit.CredentialSealed || !o.ValuesChangedAt.Equal(changed) {
		t.Fatal(what, o.ValuesChangedAt, changed)
	}
	f.verify()
}
