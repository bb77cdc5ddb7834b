package vault

import (
	"bytes"
	"crypto/sha3"
	"errors"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// TestUnaskedValuesStayInTheirForm follows a credential that an object adopted unasked: only values
// that are all new, or somebody's word, end the bound.
func TestUnaskedValuesStayInTheirForm(t *testing.T) {
	f := newFixture(t, time.Minute)
	op, object := f.operator(), Object{Cluster: "c", Namespace: "ns", Name: "db"}
	kept, other := sha3.Sum256([]byte("kept")), sha3.Sum256([]byte("other"))
	in := func(form [32]byte, values map[string]string) Desired {
		d := f.desired(values, "a")
		d.Form, d.Object = form, object
		return d
	}
	const before, after = "8c2b1c1e-0000-4000-8000-000000000002", "8c2b1c1e-0000-4000-8000-000000000003"
	first, err := f.vault.Apply(t.Context(), op, before, 0, in(kept, map[string]string{"p": "old p", "q": "old q"}))
	must(t, err)
	id, uid := first.ID, after
	// Each step begins with an object that has adopted the credential unasked, and releases it again.
	for _, step := range []struct {
		behaviour string
		do        func(o *Owned) (*Owned, error)
		bound     bool
	}{
		{"new keys", func(o *Owned) (*Owned, error) { return f.vault.Reencrypt(t.Context(), op, uid, o.Version, "now") }, true},
		{"one new value of two", func(o *Owned) (*Owned, error) {
			return f.vault.Generate(t.Context(), op, uid, o.Version, in(other, nil), func(current map[string]secret.Bytes) (map[string]secret.Bytes, error) {
				return secrets(map[string]string{"p": "new p", "renamed": string(current["q"])}), nil
			})
		}, true},
		{"somebody's word", func(*Owned) (*Owned, error) { return f.vault.Adopt(t.Context(), op, uid, object, id, nil) }, false},
		{"all new values", func(o *Owned) (*Owned, error) {
			return f.vault.Generate(t.Context(), op, uid, o.Version, in(kept, nil), func(map[string]secret.Bytes) (map[string]secret.Bytes, error) {
				return secrets(map[string]string{"p": "newer p", "q": "newer q"}), nil
			})
		}, false},
		{"values of the object", func(o *Owned) (*Owned, error) {
			return f.vault.Apply(t.Context(), op, uid, o.Version, in(kept, map[string]string{"p": "newer p"}))
		}, false},
	} {
		must(t, f.leave(op, before, kept))
		must(t, f.leave(op, after, kept))
		for _, form := range []*[32]byte{&other, new([32]byte)} {
			if o, err := f.vault.Adopt(t.Context(), op, uid, object, id, form); !errors.Is(err, fault.NotFound) {
				t.Fatalf("unasked, another form adopts: %v, %v", o, err)
			}
		}
		o, err := f.vault.Adopt(t.Context(), op, uid, object, id, &kept)
		must(t, err)
		if !bytes.Equal(o.Bound, kept[:]) || o.AdoptedFrom == "" {
			t.Fatalf("%s: adopted unasked, it is bound to %x", step.behaviour, o.Bound)
		}
		o, err = step.do(o)
		must(t, err)
		if (o.Bound != nil) != step.bound || step.bound && !bytes.Equal(o.Bound, kept[:]) {
			t.Errorf("%s: it is bound to %x", step.behaviour, o.Bound)
		}
		if again, err := f.vault.Owned(t.Context(), op, uid); err != nil || !bytes.Equal(again.Bound, o.Bound) || again.AdoptedFrom != o.AdoptedFrom {
			t.Errorf("%s: the vault remembers %+v, %v", step.behaviour, again, err)
		}
		if !step.bound {
			if _, err := f.vault.Adopt(t.Context(), op, uid, object, id, nil); !errors.Is(err, fault.NotFound) {
				t.Errorf("%s: a free object can ask for its own credential: %v", step.behaviour, err)
			}
			continue
		}
		must(t, f.leave(op, uid, other))
		_, left, err := f.vault.Objects(t.Context(), "c")
		must(t, err)
		if len(left) != 1 || !bytes.Equal(left[0].Form, kept[:]) {
			t.Errorf("%s: bound, it leaves another form: %+v", step.behaviour, left)
		}
	}
	f.verify()
}
