package identity

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/store"
)

// newTenantOf returns an active tenant's id and a principal that administers it.
func (f *people) newTenantOf(name string) (authz.TenantID, authz.Principal) {
	f.t.Helper()
	tenant, err := f.CreateTenant(f.t.Context(), operator(), name)
	must(f.t, err)
	return tenant.ID, authz.SystemPrincipal(tenant.ID)
}

func operator() authz.Principal {
	return key(authz.SystemTenant, authz.SystemAdmin, authz.AccountAdmin, authz.AuditRead)
}

func (f *people) works(apiKey string) bool {
	f.t.Helper()
	_, err := f.Authenticate(f.t.Context(), apiKey)
	if err != nil && !errors.Is(err, fault.Unauthenticated) {
		f.t.Fatal(err)
	}
	return err == nil
}

// newest returns a tenant's newest entry of a type.
func (f *people) newest(tenant authz.TenantID, event audit.EventType) (newest audit.Entry) {
	f.t.Helper()
	for _, e := range f.entries(tenant) {
		if e.EventType == event {
			newest = e
		}
	}
	return newest
}

func TestAnAPIKeyIsWhoItWasMadeFor(t *testing.T) {
	f := newPeople(t)
	tenant, admin := f.newTenantOf("Example Ltd")
	n := len(f.history(tenant))
	made, secretKey, err := f.CreateAPIKey(t.Context(), admin, APIKeyRequest{
		Name: "ci: données", Scopes: []authz.Scope{authz.KeysRead, authz.VaultRead, authz.KeysRead}, ExpiresInDays: 30,
	})
	must(t, err)
	f.recorded(tenant, n, "API_KEY_CREATED success")
	want := []authz.Scope{authz.VaultRead, authz.KeysRead}
	if made.Name != "ci: données" || made.Tenant != tenant || !slices.Equal(made.Scopes, want) || made.CreatedBy != admin.ID ||
		!made.CreatedAt.Equal(f.time()) || !made.ExpiresAt.Equal(f.time().Add(30*24*time.Hour)) || !made.LastUsedAt.IsZero() {
		t.Errorf("%+v", made)
	}
	c, err := f.Authenticate(t.Context(), secretKey)
	if err != nil || c.Tenant != tenant || c.Kind != authz.APIKey || c.ID != made.ID || !slices.Equal(c.Scopes, want) || c.ReadOnly ||
		c.Session != "" || c.Limits != (Limits{}) {
		t.Errorf("%+v, %v", c, err)
	}
	for prefix := range f.rows("") {
		if strings.Contains(prefix, "ci: ") {
			t.Errorf("the name stands in the row key %q", prefix)
		}
	}
	for _, e := range f.entries(tenant) {
		e.Signature = "" // random base64 can contain any few letters
		b, _ := json.Marshal(e)
		for _, secret := range []string{"ci: donn", "Example Ltd", secretKey[len(apikey.Prefix):]} {
			if strings.Contains(string(b), secret) {
				t.Errorf("%q stands in %s", secret, b)
			}
		}
	}
}

// This is the truth table of the scopes that each principal may give to a key.
func TestNobodyGivesAKeyMoreThanTheyHold(t *testing.T) {
	f := newPeople(t)
	tenant, _ := f.newTenantOf("Example Ltd")
	all := append(authz.TenantScopes(), authz.SystemAdmin)
	for _, owner := range []authz.TenantID{tenant, authz.SystemTenant} {
		n := len(f.history(owner))
		var recorded []string
		for _, held := range all {
			for _, asked := range all {
				p := f.key(owner, authz.AccountAdmin, held)
				_, secretKey, err := f.CreateAPIKey(t.Context(), p, APIKeyRequest{Name: "k", Scopes: []authz.Scope{asked}})
				allowed := (asked == held || asked == authz.AccountAdmin) && (asked != authz.SystemAdmin || owner == authz.SystemTenant)
				if allowed != (err == nil) || !allowed && (!errors.Is(err, fault.Forbidden) || secretKey != "") {
					t.Errorf("%s with %s asked for %s: %v", owner, held, asked, err)
				}
				if allowed {
					recorded = append(recorded, "API_KEY_CREATED success")
				} else {
					recorded = append(recorded, "API_KEY_CREATED denied scopes_beyond_own")
				}
			}
		}
		f.recorded(owner, n, recorded...)
	}
}

func TestWhatIsNoRequestForAKeyIsInvalid(t *testing.T) {
	f := newPeople(t)
	tenant, admin := f.newTenantOf("Example Ltd")
	read := []authz.Scope{authz.VaultRead}
	n, system := len(f.history(tenant)), len(f.history(authz.SystemTenant))
	for name, r := range map[string]APIKeyRequest{
		"no name":         {Scopes: read},
		"long name":       {Name: strings.Repeat("é", 128), Scopes: read},
		"control in name": {Name: "a\nb", Scopes: read},
		"name not UTF-8":  {Name: "\xff", Scopes: read},
		"no scope":        {Name: "k"},
		"unknown scope":   {Name: "k", Scopes: []authz.Scope{authz.VaultRead, "vault:*"}},
		"empty scope":     {Name: "k", Scopes: []authz.Scope{""}},
		"negative expiry": {Name: "k", Scopes: read, ExpiresInDays: -1},
		"far expiry":      {Name: "k", Scopes: read, ExpiresInDays: 3651},
	} {
		if _, _, err := f.CreateAPIKey(t.Context(), admin, r); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := f.CreateTenantAPIKey(t.Context(), operator(), tenant, r); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s, by the operator: %v", name, err)
		}
	}
	f.recorded(tenant, n) // nothing: the server that handles the request records it
	f.recorded(authz.SystemTenant, system)
	if _, _, err := f.CreateAPIKey(t.Context(), admin, APIKeyRequest{Name: strings.Repeat("a", 255), Scopes: read, ExpiresInDays: 3650}); err != nil {
		t.Error(err)
	}
}

func TestAKeyEndsWhenItExpiresOrIsRevoked(t *testing.T) {
	f := newPeople(t)
	tenant, admin := f.newTenantOf("Example Ltd")
	_, other := f.newTenantOf("Another Ltd")
	short, shortKey, err := f.CreateAPIKey(t.Context(), admin, APIKeyRequest{Name: "short", Scopes: []authz.Scope{authz.VaultRead}, ExpiresInDays: 1})
	must(t, err)
	f.advance(time.Second)
	long, longKey, err := f.CreateAPIKey(t.Context(), admin, APIKeyRequest{Name: "long", Scopes: []authz.Scope{authz.VaultRead}})
	must(t, err)
	f.advance(24*time.Hour - time.Second - time.Nanosecond)
	if !f.works(shortKey) || !f.works(longKey) {
		t.Fatal("a key ended too early")
	}
	f.advance(time.Nanosecond)
	if f.works(shortKey) || !f.works(longKey) {
		t.Fatal("expiry")
	}
	n := len(f.history(tenant))
	list, err := f.APIKeys(t.Context(), admin)
	if err != nil || len(list) != 2 || list[0].ID != short.ID || list[1].ID != long.ID {
		t.Errorf("%v, %v", list, err)
	}
	if list, err := f.APIKeys(t.Context(), other); err != nil || len(list) != 0 {
		t.Errorf("another tenant's: %v, %v", list, err)
	}
	foreign := len(f.history(other.Tenant))
	for _, id := range []string{long.ID, authz.NewID("key"), "", "key_", "x/../y", strings.Repeat("x", 2000)} {
		if err := f.RevokeAPIKey(t.Context(), other, id); !errors.Is(err, fault.NotFound) {
			t.Errorf("%.20q: %v", id, err)
		}
	}
	f.recorded(other.Tenant, foreign, slices.Repeat([]string{"API_KEY_REVOKED denied no_such_api_key"}, 6)...)
	if !f.works(longKey) {
		t.Fatal("another tenant revoked the key")
	}
	must(t, f.RevokeAPIKey(t.Context(), admin, long.ID))
	must(t, f.RevokeAPIKey(t.Context(), admin, short.ID)) // an expired key
	if f.works(longKey) {
		t.Error("a revoked key works")
	}
	if err := f.RevokeAPIKey(t.Context(), admin, long.ID); !errors.Is(err, fault.NotFound) {
		t.Error(err)
	}
	f.recorded(tenant, n, "API_KEY_LISTED success", "API_KEY_REVOKED success", "API_KEY_REVOKED success", "API_KEY_REVOKED denied no_such_api_key")
	if left := f.rows("apikey/"); len(left) != 0 {
		t.Errorf("revoked keys left %v", left)
	}
}

func TestATenantHasAThousandKeys(t *testing.T) {
	f := newPeople(t)
	tenant, admin := f.newTenantOf("Example Ltd")
	r := APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}}
	f.commit(func(tx store.Tx) (err error) {
		for range maxAPIKeys - 1 {
			err = errors.Join(err, f.grants.apiKeys.Put(tx, f.grants.apiKeys.New(tenant, "x", r)))
		}
		return err
	})
	n := len(f.history(tenant))
	last, _, err := f.CreateAPIKey(t.Context(), admin, r)
	must(t, err)
	if _, _, err := f.CreateAPIKey(t.Context(), admin, r); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	f.recorded(tenant, n, "API_KEY_CREATED success", "API_KEY_CREATED denied too_many_api_keys")
	if f.newest(tenant, audit.APIKeyCreated).Resource.ID != "" {
		t.Error("the refusal names a key that was not made")
	}
	must(t, f.RevokeAPIKey(t.Context(), admin, last.ID))
	if _, _, err := f.CreateAPIKey(t.Context(), admin, r); err != nil {
		t.Error(err)
	}
}

func TestTheLastUseOfAKeyIsKnown(t *testing.T) {
	f := newPeople(t)
	_, admin := f.newTenantOf("Example Ltd")
	made, secretKey, err := f.CreateAPIKey(t.Context(), admin, APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}})
	must(t, err)
	lastUsed := func() time.Time {
		t.Helper()
		list, err := f.APIKeys(t.Context(), admin)
		if err != nil || len(list) != 1 {
			t.Fatal(list, err)
		}
		return list[0].LastUsedAt
	}
	if used := lastUsed(); !used.IsZero() {
		t.Error(used)
	}
	for _, flush := range []bool{false, true, false} {
		f.advance(time.Hour)
		if !f.works(secretKey) {
			t.Fatal("the key does not work")
		}
		if flush {
			must(t, f.FlushLastUsed(t.Context()))
			if len(f.used.All()) != 0 {
				t.Error("a use is remembered after it was written")
			}
		}
		if used := lastUsed(); !used.Equal(f.time()) {
			t.Errorf("flushed %v: %v at %v", flush, used, f.time())
		}
	}

	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.FlushLastUsed(gone); err == nil {
		t.Error("flushed without a store")
	}
	if used := lastUsed(); !used.Equal(f.time()) {
		t.Error("a failed flush forgot a use:", used)
	}
	n := f.store.updates.Load()
	must(t, f.FlushLastUsed(t.Context()))
	must(t, f.FlushLastUsed(t.Context()))
	if got := f.store.updates.Load() - n; got != 1 {
		t.Errorf("%d commits for one use", got)
	}

	if !f.works(secretKey) {
		t.Fatal("the key does not work")
	}
	must(t, f.RevokeAPIKey(t.Context(), admin, made.ID))
	must(t, f.FlushLastUsed(t.Context()))
	if left := f.rows("apikey/"); len(left) != 0 {
		t.Errorf("a revoked key came back: %v", left)
	}
	if _, err := verify.Store(t.Context(), f.store, verify.Options{}); err != nil {
		t.Error(err)
	}
}

func TestTheOperatorMakesKeysOfATenant(t *testing.T) {
	f := newPeople(t)
	tenant, admin := f.newTenantOf("Example Ltd")
	p := operator() // has no vault scope
	n, own := len(f.history(authz.SystemTenant)), len(f.history(tenant))
	made, secretKey, err := f.CreateTenantAPIKey(t.Context(), p, tenant, APIKeyRequest{Name: "first", Scopes: authz.TenantScopes()})
	must(t, err)
	if c, err := f.Authenticate(t.Context(), secretKey); err != nil || c.Tenant != tenant || !c.Holds(authz.TenantScopes()) {
		t.Errorf("%+v, %v", c, err)
	}
	if list, err := f.APIKeys(t.Context(), admin); err != nil || len(list) != 1 || list[0].ID != made.ID || list[0].CreatedBy != p.ID {
		t.Errorf("the tenant sees %v, %v", list, err)
	}
	f.recorded(authz.SystemTenant, n)
	f.recorded(tenant, own, "API_KEY_CREATED success", "API_KEY_LISTED success")
	if e := f.newest(tenant, audit.APIKeyCreated); e.Resource.ID != made.ID || e.Actor.ID != p.ID {
		t.Errorf("%+v", e)
	}
	r := APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}}
	for _, id := range []authz.TenantID{authz.TenantID(authz.NewID("ten")), authz.SystemTenant, "", "ten_", "../system"} {
		n := len(f.history(authz.SystemTenant))
		if _, _, err := f.CreateTenantAPIKey(t.Context(), p, id, r); !errors.Is(err, fault.NotFound) {
			t.Errorf("%q: %v", id, err)
		}
		f.recorded(authz.SystemTenant, n, "API_KEY_CREATED denied no_such_tenant")
	}
	n = len(f.history(authz.SystemTenant))
	r.Scopes = append(r.Scopes, authz.SystemAdmin)
	if _, _, err := f.CreateTenantAPIKey(t.Context(), p, tenant, r); !errors.Is(err, fault.Forbidden) {
		t.Error("a tenant was given system:admin:", err)
	}
	f.recorded(authz.SystemTenant, n, "API_KEY_CREATED denied scopes_beyond_own")
	own = len(f.history(tenant))
	if _, _, err := f.CreateTenantAPIKey(t.Context(), admin, tenant, r); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	f.recorded(tenant, own, "API_KEY_CREATED denied missing_scope")
}
