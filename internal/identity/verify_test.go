package identity

import (
	"bytes"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Rows of API keys and namespaces that are put back, made up or exchanged are reported. Rows that
// the service itself writes are not.
func TestRowsThatTheLogContradictsAreReported(t *testing.T) {
	s := newService(t)
	dev, _, err := s.Dev(t.Context())
	must(t, err)
	previous := make(map[string][]byte) // rows of the key that the next start revokes
	must(t, audit.ScanAll(t.Context(), s.bound().raw, store.Prefix([]byte("apikey/")), func(key, value []byte) error {
		previous[string(key)] = value
		return nil
	}))
	_, _, err = s.Dev(t.Context())
	must(t, err)
	other, err := s.NamespaceTenant(t.Context(), "cluster", "namespace")
	must(t, err)
	must(t, s.MapNamespace(t.Context(), "cluster", "name", "mapped", dev))
	verify := func() error {
		report, err := verify.Store(t.Context(), s.bound().raw, verify.Options{})
		must(t, err)
		return VerifyStore(t.Context(), s.bound().raw, report)
	}
	must(t, verify())
	change := func(key string, value []byte) {
		t.Helper()
		s.bound().tamper(t, func(tx store.Tx) error {
			if value == nil {
				return tx.Delete([]byte(key))
			}
			return tx.Put([]byte(key), value)
		})
	}
	read := func(key string) (value []byte) {
		must(t, s.bound().raw.View(t.Context(), func(r store.Reader) error {
			b, err := r.Get([]byte(key))
			value = bytes.Clone(b)
			return err
		}))
		return value
	}
	rowOf := func(prefix string) (key string) { // of the API key of the second start
		t.Helper()
		must(t, audit.ScanAll(t.Context(), s.bound().raw, store.Prefix([]byte(prefix)), func(k, _ []byte) error {
			key = string(k)
			return nil
		}))
		return key
	}
	listed, hashed := rowOf("apikey/tenant/"), rowOf("apikey/hash/")
	mapped := "namespace/cluster/mapped"
	made := string(apikey.NameKey(apikey.Name{Tenant: dev, ID: authz.NewID(apikey.IDPrefix)}))
	whole := read(mapped)
	for name, c := range map[string]struct {
		key   string
		value []byte
		says  string
	}{
		"a made-up key":       {made, []byte("anything"), "never recorded"},
		"a made-up namespace": {"namespace/cluster/made-up", whole, "never recorded"},
		"another tenant's":    {mapped, append(bytes.Clone(whole[:32]), other...), "not part of the tenant"},
		"no tenant":           {mapped, []byte{}, "not part of the tenant"},

		"a key that is not listed":   {listed, nil, "is not in the list"},
		"a key without its own row":  {hashed, nil, "no row under its hash"},
		"a list with another hash":   {listed, append(make([]byte, 32), `"0a"`...), "is not in the list"},
		"a damaged row in a list":    {listed, []byte("junk"), "is damaged"},
		"a damaged row under a hash": {"apikey/hash/1/0a", append(make([]byte, 32), "junk"...), "is damaged"},
		"a key under another hash":   {hashed + "0", read(hashed), "is not in the list"},
	} {
		was := read(c.key)
		change(c.key, c.value)
		if broken, ok := audit.IsBroken(verify()); !ok || !strings.Contains(broken.Reason, c.says) || broken.Sequence == 0 {
			t.Errorf("%s: %v", name, broken)
		}
		change(c.key, was)
		must(t, verify())
	}
	// A revoked key authenticates by the row under its hash alone.
	for key, value := range previous {
		was := read(key)
		change(key, value)
		if broken, ok := audit.IsBroken(verify()); strings.HasPrefix(key, "apikey/used/") != !ok ||
			ok && (!strings.Contains(broken.Reason, "its revocation here") || broken.Sequence == 0) {
			t.Errorf("the row %s of a revoked key is back: %v", key, broken)
		}
		change(key, was)
	}
	for key, value := range previous {
		change(key, value)
	}
	if broken, ok := audit.IsBroken(verify()); !ok || !strings.Contains(broken.Reason, "its revocation here") || broken.Sequence == 0 {
		t.Error("a revoked key is back: ", broken)
	}
}
