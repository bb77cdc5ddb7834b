package vault

import (
	"errors"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// A new name moves a credential with its values and its time, in one commit with one entry.
func TestARenameMovesACredential(t *testing.T) {
	f := newFixture(t, 0)
	c := f.seal(f.a, map[string]string{"k": "v"})
	f.advance(24 * time.Hour)
	moved, err := f.vault.Rename(t.Context(), f.a, c.ID, "shop/prod/db", "")
	must(t, err)
	if moved.ID != c.ID || moved.Name != "shop/prod/db" || moved.Version != 2 || !moved.ExpiresAt.Equal(c.ExpiresAt) || !moved.CreatedAt.Equal(c.CreatedAt) {
		t.Errorf("%+v became %+v", c, moved)
	}
	if e := f.last(f.a); e.EventType != audit.CredentialReencrypted || e.Attributes[audit.AttributeRenamed] != "true" || e.Attributes[audit.AttributeVersion] != "2" {
		t.Errorf("%+v", e)
	}
	got, err := f.vault.Read(t.Context(), f.a, ByName("shop/prod/db"))
	must(t, err)
	if got.ID != c.ID || string(got.Values["k"]) != "v" {
		t.Errorf("by its new name: %+v", got)
	}
	if _, err := f.vault.Read(t.Context(), f.a, ByName(c.Name)); fault.Of(err) != fault.Forbidden {
		t.Errorf("by its former name: %v", err)
	}
	f.verify()
}

// Nobody shadows what another one reads by that name; whoever may not know of it makes a second one,
// as with a new credential.
func TestARenameLeavesATakenName(t *testing.T) {
	f := newFixture(t, 0)
	one, other := f.sealNamed(f.a, "one", map[string]string{"k": "v"}), f.sealNamed(f.a, "other", map[string]string{"k": "v"})
	if _, err := f.vault.Rename(t.Context(), f.a, one.ID, "other", ""); !errors.Is(err, ErrTaken) {
		t.Errorf("a taken name: %v", err)
	}
	if e := f.last(f.a); e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != reasonTaken {
		t.Errorf("%+v", e)
	}
	if _, err := f.vault.Rename(t.Context(), f.a, one.ID, "one", ""); err != nil {
		t.Errorf("its own name: %v", err)
	}
	p := f.limited(authz.Rule{Path: "one", Verbs: authz.Verbs()}, authz.Rule{Path: "other", Verbs: []authz.Verb{authz.WritePath}})
	if _, err := f.vault.Rename(t.Context(), p, one.ID, "other", ""); err != nil {
		t.Errorf("without the right to read the taken one: %v", err)
	}
	f.advance(100 * 24 * time.Hour) // all have expired
	late := f.sealNamed(f.a, "late", map[string]string{"k": "v"})
	if _, err := f.vault.Rename(t.Context(), f.a, late.ID, other.Name, ""); err != nil {
		t.Errorf("the name of an expired one: %v", err)
	}
	f.verify()
}

// A rename carries no values from a path that the caller does not read to one that he reads.
func TestARenameNeedsTheRightToRead(t *testing.T) {
	f := newFixture(t, 0)
	c := f.sealNamed(f.a, "secret/db", map[string]string{"k": "v"})
	writer := f.a
	writer.Scopes = []authz.Scope{authz.VaultWrite}
	for name, p := range map[string]authz.Principal{
		"the policy":  f.limited(anyVerb("mine/**"), authz.Rule{Path: "secret/**", Verbs: []authz.Verb{authz.WritePath, authz.ListPath}}),
		"the API key": writer,
	} {
		if _, err := f.vault.Rename(t.Context(), p, c.ID, "mine/db", ""); fault.Of(err) != fault.Forbidden || fault.Message(err) != fault.Message(errDenied) {
			t.Errorf("%s does not allow to read: %v", name, err)
		}
	}
	if got, err := f.vault.Read(t.Context(), f.a, ByName("secret/db")); err != nil || got.ID != c.ID {
		t.Error(err)
	}
}

// A rename needs the right to write at both ends, and tells nothing at either.
func TestARenameNeedsBothPaths(t *testing.T) {
	f := newFixture(t, 0)
	here, there := f.sealNamed(f.a, "shop/db", map[string]string{"k": "v"}), f.sealNamed(f.a, "bank/db", map[string]string{"k": "v"})
	p := f.limited(anyVerb("shop/**"))
	for name, call := range map[string]func() error{
		"out":            func() error { _, err := f.vault.Rename(t.Context(), p, here.ID, "bank/new", ""); return err },
		"onto another's": func() error { _, err := f.vault.Rename(t.Context(), p, here.ID, "bank/db", ""); return err },
		"in":             func() error { _, err := f.vault.Rename(t.Context(), p, there.ID, "shop/new", ""); return err },
	} {
		if err := call(); fault.Of(err) != fault.Forbidden || fault.Message(err) != fault.Message(errDenied) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := f.vault.Rename(t.Context(), p, here.ID, "shop/new", ""); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"", "a//b", "../x", "a\x00"} {
		if _, err := f.vault.Rename(t.Context(), f.a, here.ID, name, ""); fault.Of(err) != fault.Invalid {
			t.Errorf("%q: %v", name, err)
		}
	}
	if _, err := f.vault.Rename(t.Context(), f.a, here.ID, "x", Condition(there.EntityTag())); !errors.Is(err, ErrCondition) {
		t.Error(err)
	}
}
