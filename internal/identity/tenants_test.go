package identity

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestATrialEndsInReadOnlyUntilItIsActivated(t *testing.T) {
	f := newPeople(t)
	u := f.verified("ada@example.com")
	_, secretKey, _ := f.newKey(u.Principal, 0, authz.VaultWrite)
	session := f.signIn("ada@example.com", goodPassword)
	check := func(status string, readOnly bool) {
		t.Helper()
		c, err := f.Authenticate(t.Context(), secretKey)
		if err != nil || c.ReadOnly != readOnly || c.May(authz.SealCredential) == readOnly || !c.May(authz.DeleteCredential) {
			t.Errorf("%s: %+v, %v", status, c, err)
		}
		list, _, err := f.Tenants(t.Context(), operator(), 0, "")
		if err != nil || len(list) != 1 || list[0].Status(f.time()) != status {
			t.Errorf("%s: %+v, %v", status, list, err)
		}
	}
	check("trial", false)
	f.advance(14*24*time.Hour - time.Nanosecond)
	check("trial", false)
	f.advance(time.Nanosecond)
	check("read_only", true)
	if f.alive(session) {
		t.Error("a session outlived its week")
	}
	session = f.signIn("ada@example.com", goodPassword) // the session still works
	if c := f.caller(session); !c.ReadOnly {
		t.Error("a user of an ended trial is not read-only")
	}
	n, system := len(f.history(u.Tenant)), len(f.history(authz.SystemTenant))
	for range 2 { // the second changes nothing
		tenant, err := f.ActivateTenant(t.Context(), operator(), u.Tenant)
		if err != nil || tenant.Status(f.time()) != "active" || tenant.Name != "Example Ltd" || !tenant.TrialEnds.IsZero() {
			t.Errorf("%+v, %v", tenant, err)
		}
	}
	f.recorded(u.Tenant, n, "TENANT_ACTIVATED success", "TENANT_ACTIVATED success")
	f.recorded(authz.SystemTenant, system)
	check("active", false)
	if c := f.caller(session); c.ReadOnly {
		t.Error("a user of an active tenant is read-only")
	}
}

func TestATenantHasLimitsOfItsOwn(t *testing.T) {
	f := newPeople(t)
	tenant, admin := f.newTenantOf("Example Ltd")
	_, secretKey, err := f.CreateAPIKey(t.Context(), admin, APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}})
	must(t, err)
	for _, l := range []Limits{{V1: 1}, {V1: 1_000_000, V2: 7}, {}} {
		changed, err := f.LimitTenant(t.Context(), operator(), tenant, l)
		if err != nil || changed.Limits != l || changed.ID != tenant || changed.Name != "Example Ltd" {
			t.Errorf("%+v, %v", changed, err)
		}
		if c, err := f.Authenticate(t.Context(), secretKey); err != nil || c.Limits != l {
			t.Errorf("%+v, %v", c.Limits, err)
		}
	}
	e := f.newest(tenant, audit.TenantLimited)
	if e.Resource.ID != string(tenant) || e.Actor.Type != "api_key" || e.Attributes["v1"] != "0" || e.Attributes["v2"] != "0" {
		t.Errorf("%+v", e)
	}
	n := len(f.history(authz.SystemTenant))
	for _, l := range []Limits{{V1: -1}, {V2: -1}, {V1: 1_000_001}, {V2: 1_000_001}, {V1: -1, V2: 1}} {
		if _, err := f.LimitTenant(t.Context(), operator(), tenant, l); !errors.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", l, err)
		}
	}
	f.recorded(authz.SystemTenant, n)
}

func TestOnlyTheOperatorKnowsTheTenants(t *testing.T) {
	f := newPeople(t)
	tenant, admin := f.newTenantOf("Example Ltd")
	for event, do := range map[string]func(p authz.Principal, id authz.TenantID) error{
		"TENANT_ACTIVATED": func(p authz.Principal, id authz.TenantID) error {
			_, err := f.ActivateTenant(t.Context(), p, id)
			return err
		},
		"TENANT_LIMITED": func(p authz.Principal, id authz.TenantID) error {
			_, err := f.LimitTenant(t.Context(), p, id, Limits{V1: 5})
			return err
		},
	} {
		for _, id := range []authz.TenantID{authz.TenantID(authz.NewID("ten")), authz.SystemTenant, "", "ten_", "x/../system"} {
			n := len(f.history(authz.SystemTenant))
			if err := do(operator(), id); !errors.Is(err, fault.NotFound) {
				t.Errorf("%s %q: %v", event, id, err)
			}
			f.recorded(authz.SystemTenant, n, event+" denied no_such_tenant")
			if got := f.newest(authz.SystemTenant, audit.EventType(event)).Resource.ID; got != "" && got != string(id) || !authz.ValidID("ten", string(id)) && got != "" {
				t.Errorf("%s %q is recorded as %q", event, id, got)
			}
		}
		n := len(f.history(tenant))
		if err := do(admin, tenant); !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s by the tenant: %v", event, err)
		}
		f.recorded(tenant, n, event+" denied missing_scope")
	}
	n := len(f.history(tenant))
	if _, _, err := f.Tenants(t.Context(), admin, 0, ""); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	if _, err := f.CreateTenant(t.Context(), admin, "Another"); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	f.recorded(tenant, n, "TENANT_LISTED denied missing_scope", "TENANT_CREATED denied missing_scope")
}

func TestTenantsAreMadeAndListedPageByPage(t *testing.T) {
	f := newPeople(t)
	p := operator()
	p.RequestID, p.SourceIP = "req_9", "192.0.2.9"
	var made []Tenant
	for _, name := range []string{"one", "two", "two", "four"} { // names need not be unique
		tenant, err := f.CreateTenant(t.Context(), p, name)
		if err != nil || tenant.Name != name || tenant.Status(f.time()) != "active" || !tenant.CreatedAt.Equal(f.time()) {
			t.Fatal(tenant, err)
		}
		made = append(made, tenant)
	}
	entries := f.entries(made[0].ID)
	if e := entries[0]; len(entries) != 1 || e.EventType != audit.TenantCreated || e.Resource.ID != string(made[0].ID) ||
		e.Actor.ID != p.ID || e.RequestID != "req_9" || e.SourceIP != "192.0.2.9" {
		t.Errorf("%+v", entries)
	}
	if _, err := f.keys.Current(t.Context(), made[0].ID); err != nil {
		t.Error("a tenant without keys:", err)
	}
	slices.SortFunc(made, func(a, b Tenant) int { return strings.Compare(string(a.ID), string(b.ID)) })
	for limit := range 6 {
		var got []Tenant
		for cursor := ""; ; {
			page, next, err := f.Tenants(t.Context(), p, limit, cursor)
			if err != nil || limit > 0 && len(page) > limit {
				t.Fatal(page, err)
			}
			got = append(got, page...)
			if cursor = next; cursor == "" {
				break
			}
		}
		if !slices.Equal(got, made) {
			t.Errorf("%d a page: %+v", limit, got)
		}
	}
	n := len(f.history(authz.SystemTenant))
	for _, cursor := range []string{"x", "system", "ten_", string(made[0].ID) + "a"} {
		if _, _, err := f.Tenants(t.Context(), p, 0, cursor); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", cursor, err)
		}
	}
	for _, name := range []string{"", strings.Repeat("a", 256), "a\x00b", "\xff"} {
		if _, err := f.CreateTenant(t.Context(), p, name); !errors.Is(err, fault.Invalid) {
			t.Errorf("%.10q: %v", name, err)
		}
	}
	f.recorded(authz.SystemTenant, n)
}

// An attacker who can write the database must not prolong a trial.
func TestATrialCannotBeProlongedInTheDatabase(t *testing.T) {
	inBothStores(t, testATrialCannotBeProlongedInTheDatabase)
}

func testATrialCannotBeProlongedInTheDatabase(t *testing.T, f *people) {
	active, _ := f.newTenantOf("Example Ltd")
	u := f.verified("ada@example.com")
	_, secretKey, _ := f.newKey(u.Principal, 0, authz.VaultWrite)
	for name, row := range map[string]string{
		"another tenant's": f.rows("tenant/" + string(active))["tenant/"+string(active)],
		"without a MAC":    `{"created_at":"2026-01-01T00:00:00Z"}`,
		"none":             "",
	} {
		f.store.tamper(t, func(tx store.Tx) error {
			if row == "" {
				return tx.Delete([]byte("tenant/" + string(u.Tenant)))
			}
			return tx.Put([]byte("tenant/"+string(u.Tenant)), []byte(row))
		})
		if c, err := f.Authenticate(t.Context(), secretKey); !f.store.isChanged(err) || c.Tenant != "" {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
}
