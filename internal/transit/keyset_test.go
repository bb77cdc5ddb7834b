package transit

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Without a cache an operation asks the KMS once for each version of the tenant's keys that it
// needs, however many items name the version.
func TestABatchAsksTheKMSOnceForEachVersion(t *testing.T) {
	f := newFixture(t, 0)
	k, other := f.create(f.a, "one", 30), f.create(f.a, "two", 30)
	const n = 5
	data := make([]secret.Bytes, n)
	old, err := f.Encrypt(t.Context(), f.a, other.ID, data)
	must(t, err)
	signed, err := f.Sign(t.Context(), f.a, data)
	must(t, err)
	signatures := make([]Signed, n)
	for i, s := range signed {
		signatures[i] = Signed{data[i], s.PQC, s.HMAC}
	}
	f.rotate(f.a, other.ID, false)
	f.rotate(f.a, k.ID, true) // the tenant's keys have version 2; the other key's two seeds are still under version 1
	for name, call := range map[string]struct {
		asks int64
		do   func() error
	}{
		"encrypt": {2, func() error { _, err := f.Encrypt(t.Context(), f.a, other.ID, data); return err }},
		"decrypt": {2, func() error {
			opened, err := f.Decrypt(t.Context(), f.a, "", old)
			for _, o := range opened {
				err = errors.Join(err, o.Err)
			}
			return err
		}},
		"rewrap": {2, func() error { _, err := f.Rewrap(t.Context(), f.a, "", old[0]); return err }},
		"sign":   {1, func() error { _, err := f.Sign(t.Context(), f.a, data); return err }},
		"verify": {2, func() error {
			valid, err := f.Verify(t.Context(), f.a, signatures)
			if slices.Contains(valid, false) {
				return errors.New("does not verify")
			}
			return err
		}},
	} {
		f.kms.calls.Store(0)
		if err := call.do(); err != nil || f.kms.calls.Load() != call.asks {
			t.Errorf("%s: %d calls of the KMS, want %d (%v)", name, f.kms.calls.Load(), call.asks, err)
		}
	}
	f.kms.calls.Store(0)
	if _, n := f.rotate(f.a, other.ID, true); n != 2 || f.kms.calls.Load() != 2 {
		t.Errorf("encrypting %d versions anew: %d calls of the KMS, want 2", n, f.kms.calls.Load())
	}
	f.commit(func(tx store.Tx) error {
		return tx.Put([]byte("key/"+string(f.a.Tenant)+"/00000001/signing"), []byte("damaged"))
	})
	f.kms.calls.Store(0)
	opened, err := f.Decrypt(t.Context(), f.a, "", old)
	if err != nil || opened[0].Err != ErrDecrypt || f.kms.calls.Load() != 2 {
		t.Errorf("a version that does not open: %d calls of the KMS, want 2 (%v)", f.kms.calls.Load(), err)
	}
}

func TestABatchHasNoMoreTimeThanOneItem(t *testing.T) {
	const few = 5 // a slow machine is done with them in time
	f := newFixture(t, time.Minute)
	for name, do := range map[string]func() error{
		"encrypt": func() error { _, err := f.Encrypt(t.Context(), f.a, "", make([]secret.Bytes, few)); return err },
		"decrypt": func() error { _, err := f.Decrypt(t.Context(), f.a, "", make([]Ciphertext, few)); return err },
		"sign":    func() error { _, err := f.Sign(t.Context(), f.a, make([]secret.Bytes, few)); return err },
		"verify":  func() error { _, err := f.Verify(t.Context(), f.a, make([]Signed, few)); return err },
	} {
		f.db.patience.Store(0)
		if err := do(); err != nil {
			t.Error(name, err)
		}
		if d := time.Duration(f.db.patience.Load()); d <= 0 || d > 900*time.Millisecond {
			t.Errorf("%s has %v", name, d)
		}
	}
}
