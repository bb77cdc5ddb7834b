package identity

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

func TestEntriesOfAPIKeysSayWhatTheyMayDo(t *testing.T) {
	f := newPeople(t)
	tenant, admin := f.newTenantOf("Example Ltd")
	made, _, err := f.CreateAPIKey(t.Context(), admin, APIKeyRequest{Name: "ci", Scopes: []authz.Scope{authz.KeysRead, authz.VaultRead}, ExpiresInDays: 30})
	must(t, err)
	e := f.newest(tenant, audit.APIKeyCreated)
	at, err := time.Parse(time.RFC3339Nano, e.Attributes[audit.AttributeExpiresAt])
	if err != nil || !at.Equal(made.ExpiresAt) || e.Attributes[audit.AttributeScopes] != "vault:read keys:read" || e.Attributes[audit.AttributeUser] != "" {
		t.Errorf("%v %v", e.Attributes, err)
	}
	_, _, err = f.CreateTenantAPIKey(t.Context(), operator(), tenant, APIKeyRequest{Name: "ops", Scopes: []authz.Scope{authz.AuditRead}})
	must(t, err)
	e = f.newest(tenant, audit.APIKeyCreated)
	if _, ends := e.Attributes[audit.AttributeExpiresAt]; ends || e.Attributes[audit.AttributeScopes] != "audit:read" {
		t.Errorf("%v", e.Attributes)
	}
	me := f.verified("ada@example.com")
	_, secretKey, by := f.newKey(me.Principal, 5, authz.AccountAdmin)
	f.newKey(by, 0, authz.AccountAdmin) // also through a chain of keys, the same user answers for it
	e = f.newest(me.Tenant, audit.APIKeyCreated)
	if e.Attributes[audit.AttributeUser] != me.ID || e.Attributes[audit.AttributeExpiresAt] == "" || secretKey == "" {
		t.Errorf("%v", e.Attributes)
	}
}
