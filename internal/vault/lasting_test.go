package vault

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/settings"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault/bounds"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// allow sets the paths on which credentials may never expire.
func (f *fixture) allow(paths ...string) {
	f.t.Helper()
	if _, err := f.vault.Settings.Change(f.t.Context(), f.a, settings.Change{NeverExpires: &paths}); err != nil {
		f.t.Fatal(err)
	}
}

// lasting seals a credential that never expires.
func (f *fixture) lasting(name string) (Credential, error) {
	return f.vault.Seal(f.t.Context(), f.a, SealRequest{Name: name, Type: "t", TTLDays: bounds.NeverExpires, Values: map[string]secret.Bytes{"k": secret.Bytes("0")}})
}

// Promise: a credential never expires only where a setting of the tenant allows its path, however it is
// asked for and whoever asks. Nothing allows it before somebody has said so.
func TestOnlyASettingLetsACredentialNeverExpire(t *testing.T) {
	f := newFixture(t, 0)
	ctx := t.Context()
	there := f.sealNamed(f.a, "prod/db", login)
	begins := map[string]func(name, id string) (Credential, error){
		"seal": func(name, _ string) (Credential, error) { return f.lasting(name + "/sealed") },
		"put": func(name, _ string) (Credential, error) {
			r := put(name+"/put", login)
			r.TTLDays = bounds.NeverExpires
			c, _, err := f.vault.Put(ctx, f.a, r)
			return c, err
		},
		"put again": func(name, _ string) (Credential, error) {
			r := put(name, login)
			r.TTLDays = bounds.NeverExpires
			c, _, err := f.vault.Put(ctx, f.a, r)
			return c, err
		},
		"replace": func(_, id string) (Credential, error) {
			return f.vault.Replace(ctx, f.a, id, ReplaceRequest{Values: map[string]secret.Bytes{"k": secret.Bytes("1")}, TTLDays: bounds.NeverExpires})
		},
		"patch": func(_, id string) (Credential, error) {
			return f.vault.Patch(ctx, f.a, id, PatchRequest{Set: map[string]secret.Bytes{"k": secret.Bytes("2")}, TTLDays: bounds.NeverExpires})
		},
		"renew": func(_, id string) (Credential, error) {
			return f.vault.Renew(ctx, f.a, id, bounds.NeverExpires, "")
		},
	}
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "never_expires_paths") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, paths := range [][]string{nil, {"ci/**"}, {"prod/*/deeper"}} {
		if paths != nil {
			f.allow(paths...)
		}
		for what, begin := range begins {
			_, err := begin("prod/db", there.ID)
			refused(what, err)
		}
	}
	if m, err := f.vault.Metadata(ctx, f.a, there.ID); err != nil || m.Version != 1 || m.NeverExpires() {
		t.Errorf("%+v %v", m, err)
	}

	f.allow("ci/**", "ci/**")
	if e := f.last(f.a); e.EventType != audit.SettingsChanged || e.Attributes["never_expires_paths"] != "1" {
		t.Errorf("%+v", e)
	}
	here := f.sealNamed(f.a, "ci/db", login)
	for what, begin := range begins {
		c, err := begin("ci/db", here.ID)
		if err != nil || !c.NeverExpires() || c.ExpiresAt.Format(time.RFC3339) != "9999-12-31T23:59:59Z" || c.Expired {
			t.Errorf("%s: %+v %v", what, c, err)
		}
	}
	// A name outside is another path, and a lifetime that begins again is a new one.
	_, err := f.vault.Rename(ctx, f.a, here.ID, "prod/moved", "")
	refused("rename", err)
	moved, err := f.vault.Rename(ctx, f.a, here.ID, "ci/moved", "")
	if err != nil || !moved.NeverExpires() {
		t.Errorf("%+v %v", moved, err)
	}
	ended, err := f.vault.Renew(ctx, f.a, here.ID, 5, "")
	if err != nil || ended.NeverExpires() || !ended.ExpiresAt.Equal(f.now().AddDate(0, 0, 5)) {
		t.Errorf("%+v %v", ended, err)
	}
	f.verify()

	// Another tenant has settings of its own.
	if _, err := f.vault.Seal(ctx, f.b, SealRequest{Name: "ci/x", Type: "t", TTLDays: bounds.NeverExpires, Values: map[string]secret.Bytes{"k": secret.Bytes("0")}}); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
	// What an object owns always expires.
	d := f.desired(login, "spec")
	d.Name, d.TTLDays = "ci/owned", bounds.NeverExpires
	if _, err := f.vault.Apply(ctx, f.operator(), "uid", 0, d); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
}

// Promise: a permission that is withdrawn changes nothing that is there. A change goes on with the lifetime,
// and only a renewal asks again.
func TestAWithdrawnPermissionLeavesWhatIsThere(t *testing.T) {
	f := newFixture(t, 0)
	ctx := t.Context()
	f.keep("**", 3)
	f.allow("ci/*")
	c, err := f.lasting("ci/db")
	must(t, err)
	f.allow()
	stays := func(what string, c Credential, err error) {
		t.Helper()
		if err != nil || !c.NeverExpires() {
			t.Errorf("%s: %+v %v", what, c, err)
		}
	}
	f.change(c.ID, "1")
	r, err := f.vault.Rotate(ctx, f.a, c.ID)
	stays("rotate", r, err)
	r, err = f.vault.Undo(ctx, f.a, c.ID, 1, "")
	stays("undo", r, err)
	r, _, err = f.vault.Put(ctx, f.a, put("ci/db", map[string]string{"k": "2"}))
	stays("put", r, err)
	r, err = f.vault.Patch(ctx, f.a, c.ID, PatchRequest{Set: map[string]secret.Bytes{"k": secret.Bytes("3")}})
	stays("patch", r, err)
	if _, err := f.vault.Rename(ctx, f.a, c.ID, "ci/other", ""); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
	trashed := f.trash(c.ID)
	if trashed.NeverExpires() || !trashed.Trashed {
		t.Errorf("%+v", trashed)
	}
	if _, err := f.vault.Renew(ctx, f.a, c.ID, 0, ""); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
	f.allow("**")
	r, err = f.vault.Renew(ctx, f.a, c.ID, 0, "")
	stays("out of the trash", r, err)
	f.verify()
}

// What never expires is listed and counted as such, is never reminded of, and stays for centuries.
func TestWhatNeverExpiresIsInNoOnesWay(t *testing.T) {
	f := newFixture(t, 0)
	ctx := t.Context()
	f.allow("**")
	c, err := f.lasting("ci/db")
	must(t, err)
	soon := f.sealFor(f.a, "soon", "t", 1)
	s, err := f.vault.Summary(ctx, f.a, 200*365*day)
	if err != nil || s.Active != 2 || s.NeverExpire != 1 || s.ExpiringSoon != 1 || len(s.NextToExpire) != 1 || s.NextToExpire[0].ID != soon.ID {
		t.Errorf("%+v %v", s, err)
	}
	late := record.Never().Add(time.Nanosecond)
	if ids, _ := f.pages(f.a, ListQuery{Filter: listing.Filter{ExpiresBefore: late}}); len(ids) != 1 || ids[0] != soon.ID {
		t.Errorf("expire before %v: %v", late, ids)
	}
	if ids, _ := f.pages(f.a, ListQuery{Filter: listing.Filter{Status: listing.Active}}); len(ids) != 2 {
		t.Errorf("active: %v", ids)
	}
	f.sweep()
	f.advance(250 * 365 * day)
	f.sweep()
	f.pass(60 * day)
	if got, err := f.named("ci/db"); err != nil || got.ID != c.ID || got.Expired {
		t.Errorf("%+v %v", got, err)
	}
	if _, err := f.vault.Metadata(ctx, f.a, soon.ID); !errors.Is(err, fault.Forbidden) {
		t.Errorf("the sweep did not come by: %v", err)
	}
	f.verify()
}

// Promise: an idempotency key answers with what it made, which never expires.
func TestARepeatedSealNeverExpiresEither(t *testing.T) {
	f := newFixture(t, 0)
	f.allow("ci/*")
	r := SealRequest{Name: "ci/db", Type: "t", TTLDays: bounds.NeverExpires, IdempotencyKey: "x", Values: map[string]secret.Bytes{"k": secret.Bytes("0")}}
	first, err := f.vault.Seal(t.Context(), f.a, r)
	must(t, err)
	again, err := f.vault.Seal(t.Context(), f.a, r)
	if err != nil || again.ID != first.ID || !again.NeverExpires() {
		t.Errorf("%+v %v", again, err)
	}
	r.TTLDays = 0
	if _, err := f.vault.Seal(t.Context(), f.a, r); !errors.Is(err, fault.Invalid) {
		t.Errorf("the same key with another lifetime: %v", err)
	}
}

// Promise: nobody whom a policy limits changes a setting, and no glob passes that a policy refuses.
func TestSettingsAreForAdminsWithAllPaths(t *testing.T) {
	f := newFixture(t, 0)
	all := []string{"**"}
	limited := f.limited(anyVerb("**"))
	_, err := f.vault.Settings.Change(t.Context(), limited, settings.Change{NeverExpires: &all})
	_, reads := f.vault.Settings.Read(t.Context(), limited)
	if !errors.Is(err, fault.Forbidden) || !errors.Is(reads, fault.Forbidden) {
		t.Errorf("change %v, read %v", err, reads)
	}
	if e := f.last(f.a); e.EventType != audit.SettingsRead || e.Outcome != audit.Denied {
		t.Errorf("%+v", e)
	}
	for _, bad := range []string{"", "a//b", "a*", "../x", "**/x"} {
		if _, err := f.vault.Settings.Change(t.Context(), f.a, settings.Change{NeverExpires: &[]string{bad}}); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if s, err := f.vault.Settings.Read(t.Context(), f.a); err != nil || len(s.NeverExpires) != 0 {
		t.Errorf("%+v %v", s, err)
	}
}

// Promise: a release that does not know what never expires opens no store with settings, and none is made
// beside one that runs.
func TestSettingsKeepEarlierReleasesAway(t *testing.T) {
	f := newFixture(t, 0)
	f.vault.Settings.Ready = func(context.Context) (bool, error) { return false, nil }
	_, err := f.vault.Settings.Change(t.Context(), f.a, settings.Change{NeverExpires: &[]string{"**"}})
	if !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	if is, err := format.Of(t.Context(), f.store); err != nil || is.Writer >= format.Settings {
		t.Errorf("%+v %v", is, err)
	}
	f.vault.Settings.Ready = nil
	f.allow("**")
	if is, err := format.Of(t.Context(), f.store); err != nil || is.Reader != format.Settings || is.Writer != format.Settings {
		t.Errorf("%+v %v", is, err)
	}
}

// Promise: what an object owns always expires, also what it adopts.
func TestNoObjectAdoptsWhatNeverExpires(t *testing.T) {
	f := newFixture(t, 0)
	f.allow("**")
	c, err := f.lasting("db")
	must(t, err)
	op, uid, o := f.operator(), "8c2b1c1e-0000-4000-8000-000000000009", Object{Cluster: "c", Namespace: "ns", Name: "db"}
	if _, err := f.vault.Adopt(t.Context(), op, uid, o, c.ID, nil); !errors.Is(err, fault.NotFound) {
		t.Error(err)
	}
	_, err = f.vault.Renew(t.Context(), f.a, c.ID, 30, "")
	must(t, err)
	if _, err := f.vault.Adopt(t.Context(), op, uid, o, c.ID, nil); err != nil {
		t.Error(err)
	}
}
