package vault

import (
	"errors"
	"strconv"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// changes are the operations that take a condition.
func (f *fixture) changes() map[string]func(p authz.Principal, id string, c Condition) error {
	ctx := f.t.Context()
	return map[string]func(p authz.Principal, id string, c Condition) error{
		"Replace": func(p authz.Principal, id string, c Condition) error {
			_, err := f.vault.Replace(ctx, p, id, ReplaceRequest{Values: secrets(login), IfMatch: c})
			return err
		},
		"Rotate": func(p authz.Principal, id string, c Condition) error {
			_, err := f.vault.Rotate(ctx, p, id, c)
			return err
		},
		"Delete": func(p authz.Principal, id string, c Condition) error { return f.vault.Delete(ctx, p, id, c) },
	}
}

func TestAnEntityTagIsOfOneVersion(t *testing.T) {
	f := newFixture(t, 0)
	c, other := f.seal(f.a, login), f.seal(f.a, login)
	next, err := f.vault.Rotate(t.Context(), f.a, c.ID)
	must(t, err)
	seen, err := f.vault.Metadata(t.Context(), f.a, c.ID)
	must(t, err)
	if c.EntityTag() == other.EntityTag() || c.EntityTag() == next.EntityTag() || seen.EntityTag() != next.EntityTag() {
		t.Error(c.EntityTag(), other.EntityTag(), next.EntityTag(), seen.EntityTag())
	}
	if got := (Credential{ID: "cred_mfrggzdfmztwq2lknnwg23tpoa", Version: 7}).EntityTag(); got != `"4bcec594dc79645e2bc62c1c0b7c11c7"` {
		t.Error(got) // clients keep tags
	}
}

// Promise: a change that names a version is made on that version or not at all.
func TestAChangeStartsOnlyFromTheVersionThatItNames(t *testing.T) {
	f := newFixture(t, 0)
	for operation, do := range f.changes() {
		old := f.seal(f.a, login)
		c, err := f.vault.Rotate(t.Context(), f.a, old.ID)
		must(t, err)
		for _, condition := range []string{
			old.EntityTag(), `"x"`, `""`, "W/" + c.EntityTag(), old.EntityTag() + `, "x"`, f.seal(f.a, login).EntityTag(), c.EntityTag()[1:33],
		} {
			err := do(f.a, c.ID, Condition(condition))
			if !errors.Is(err, ErrCondition) {
				t.Errorf("%s if %s: %v", operation, condition, err)
			}
			if e := f.last(f.a); e.Outcome != audit.Denied || e.Attributes[audit.AttributeReason] != "condition_failed" || e.Resource.ID != c.ID {
				t.Errorf("%s if %s left %+v", operation, condition, e)
			}
		}
		if now, err := f.vault.Metadata(t.Context(), f.a, c.ID); err != nil || now.Version != 2 {
			t.Fatalf("%s: the refused changes made version %d: %v", operation, now.Version, err)
		}
		must(t, do(f.a, c.ID, Condition(old.EntityTag()+" ,\t"+c.EntityTag())))
		must(t, do(f.a, f.seal(f.a, login).ID, "*"))
	}
	f.verify()
}

// Whoever may not unseal the credential learns nothing from a condition: the answer and the work are
// those of a credential that is not there.
func TestAConditionTellsOnlyReaders(t *testing.T) {
	f := newFixture(t, 0)
	writer := f.a
	writer.Scopes = []authz.Scope{authz.VaultWrite}
	expired := f.sealNamed(f.a, "expired", login)
	f.advance(31 * day)
	c := f.seal(f.a, login)
	_, err := f.vault.Read(t.Context(), f.a, ByID(c.ID)) // makes the decoy
	must(t, err)
	op := f.operator()
	op.Tenant = f.a.Tenant
	owned := f.generate(op, 0, 0, map[string]string{"p": "1"})
	for operation, do := range f.changes() {
		none, want := f.measured(func() error { return do(f.a, authz.NewID("cred"), `"x"`) })
		for name, refused := range map[string]func() error{
			"a writer":              func() error { return do(writer, c.ID, `"x"`) },
			"a writer, none":        func() error { return do(writer, authz.NewID("cred"), `"x"`) },
			"expired":               func() error { return do(f.a, expired.ID, `"x"`) },
			"an object's":           func() error { return do(f.a, owned.ID, `"x"`) },
			"another tenant's":      func() error { return do(f.b, c.ID, `"x"`) },
			"another tenant's, any": func() error { return do(f.b, c.ID, "*") },
		} {
			work, err := f.measured(refused)
			if err == nil || err.Error() != want.Error() || !errors.Is(err, fault.Forbidden) {
				t.Errorf("%s, %s: %v", operation, name, err)
			}
			if name != "another tenant's" && name != "another tenant's, any" && work != none { // that tenant has a decoy of its own
				t.Errorf("%s, %s: did %+v, for none %+v", operation, name, work, none)
			}
		}
	}
	_, err = f.vault.Replace(t.Context(), writer, c.ID, ReplaceRequest{Values: secrets(login), IfMatch: Condition(c.EntityTag())})
	must(t, err)
	must(t, f.vault.Delete(t.Context(), f.a, expired.ID, Condition(expired.EntityTag())))
}

// Promise: no update is lost. Many read a number, add one and store it under the tag of what they read.
func TestNoConditionalUpdateIsLost(t *testing.T) {
	f := newFixture(t, day)
	ctx := t.Context()
	c := f.seal(f.a, map[string]string{"n": "0"})
	const writers, each = 4, 5
	var all sync.WaitGroup
	for range writers {
		all.Go(func() {
			for added := 0; added < each; {
				read, err := f.vault.Read(ctx, f.a, ByID(c.ID))
				if err != nil {
					t.Error(err)
					return
				}
				n, _ := strconv.Atoi(string(read.Values["n"]))
				next := secrets(map[string]string{"n": strconv.Itoa(n + 1)})
				switch _, err = f.vault.Replace(ctx, f.a, c.ID, ReplaceRequest{Values: next, IfMatch: Condition(read.EntityTag())}); {
				case err == nil:
					added++
				case !errors.Is(err, ErrCondition):
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	last, err := f.vault.Read(ctx, f.a, ByID(c.ID))
	must(t, err)
	if string(last.Values["n"]) != strconv.Itoa(writers*each) || last.Version != writers*each+1 {
		t.Errorf("%s after %d additions, version %d", last.Values["n"], writers*each, last.Version)
	}
	f.verify()
}
