package identity

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
)

// openIn opens the deployment in a folder and makes it at first.
func openIn(t *testing.T, dir string) *Service {
	t.Helper()
	return openServiceIn(t, dir, false)
}

func openServiceIn(t *testing.T, dir string, unbound bool) *Service {
	t.Helper()
	file := filepath.Join(dir, "kms.key")
	k, err := kms.OpenLocal(file)
	if err != nil {
		must(t, kms.CreateLocal(file))
		k, err = kms.OpenLocal(file)
	}
	must(t, err)
	s, log := openStore(t, dir, time.Now, unbound)
	guard := guard.New(log)
	service, _, err := Open(t.Context(), s, log, guard, k, keyring.Config{})
	must(t, err)
	if service.guard != guard { // a second one would count refusals by itself
		t.Error("identity does not use the guard that it is given")
	}
	return service
}

func (s *Service) count(t *testing.T, prefix string) (n int) {
	t.Helper()
	must(t, s.store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte(prefix)), func(_, _ []byte) bool { n++; return true })
	}))
	return n
}

func TestADeploymentThatNobodyOperatesGetsOneKey(t *testing.T) {
	dir := t.TempDir()
	s := openIn(t, dir)
	var delivered []string
	deliver := func(key string) error {
		delivered = append(delivered, key)
		if _, err := s.Authenticate(t.Context(), key); !errors.Is(err, fault.Unauthenticated) {
			t.Error("the key works before it is delivered")
		}
		return nil
	}
	full := errors.New("no space left")
	if err := s.FirstSystemKey(t.Context(), func(string) error { return full }); !errors.Is(err, full) {
		t.Error(err)
	}
	if n := s.count(t, "apikey/"); n != 0 {
		t.Errorf("%d rows of a key that nobody has", n)
	}
	for range 2 {
		must(t, s.FirstSystemKey(t.Context(), deliver))
	}
	must(t, s.store.Close())
	s = openIn(t, dir)
	must(t, s.FirstSystemKey(t.Context(), deliver))
	if len(delivered) != 1 {
		t.Fatalf("%d keys", len(delivered))
	}

	c, err := s.Authenticate(t.Context(), delivered[0])
	if err != nil || c.Tenant != authz.SystemTenant || !slices.Equal(c.Scopes, []authz.Scope{authz.AuditRead, authz.AccountAdmin, authz.SystemAdmin}) {
		t.Fatalf("%+v, %v", c, err)
	}
	tenant, _, err := s.Account(t.Context(), c)
	if err != nil || tenant.ID != authz.SystemTenant || tenant.Name != "system" || tenant.CreatedAt.IsZero() || tenant.Status(time.Now()) != "active" {
		t.Errorf("%+v, %v", tenant, err)
	}
	if list, _, err := s.Tenants(t.Context(), c.Principal, 0, ""); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}

	// An auditor's key does not make a deployment operable. The next start makes a key that does.
	if _, _, err := s.CreateAPIKey(t.Context(), c.Principal, APIKeyRequest{Name: "auditor", Scopes: []authz.Scope{authz.AuditRead}}); err != nil {
		t.Error(err)
	}
	must(t, s.RevokeAPIKey(t.Context(), c.Principal, c.ID))
	must(t, s.FirstSystemKey(t.Context(), deliver))
	if len(delivered) != 2 || delivered[0] == delivered[1] {
		t.Errorf("%d keys", len(delivered))
	}
	if _, err := verify.Store(t.Context(), s.bound().raw, verify.Options{}); err != nil {
		t.Error(err)
	}
}

// A release that stored the system's tenant later than the deployment may have stopped in between.
func TestTheSystemsTenantIsMadeWhenItIsMissing(t *testing.T) {
	dir := t.TempDir()
	s := openServiceIn(t, dir, true)
	s.bound().tamper(t, func(tx store.Tx) error { return tx.Delete([]byte("tenant/system")) })
	must(t, s.store.Close())
	s = openServiceIn(t, dir, true)
	if s.count(t, "tenant/system") != 1 {
		t.Error("the system has no tenant")
	}
	report, err := verify.Store(t.Context(), s.bound().raw, verify.Options{})
	must(t, err)
	must(t, VerifyStore(t.Context(), s.bound().raw, report))
}

func TestAnExpiredSystemKeyOperatesNothing(t *testing.T) {
	f := newPeople(t)
	delivered := 0
	start := func() {
		t.Helper()
		must(t, f.FirstSystemKey(t.Context(), func(string) error { delivered++; return nil }))
	}
	admin := APIKeyRequest{Name: "short", Scopes: []authz.Scope{authz.SystemAdmin}, ExpiresInDays: 1}
	p := operator()
	p.Kind = authz.System // leaves no key that could operate the deployment
	if _, _, err := f.CreateAPIKey(t.Context(), p, admin); err != nil {
		t.Fatal(err)
	}
	start()
	if delivered != 0 {
		t.Error("a second key was made")
	}
	f.advance(24 * time.Hour)
	start()
	start()
	if delivered != 1 {
		t.Errorf("%d keys", delivered)
	}
}
