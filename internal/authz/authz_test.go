package authz

import (
	"slices"
	"strings"
	"testing"
)

// The truth table of every action and every scope, written out on its own: a
// change of the table in the code must be a change here.
func TestActionsTakeExactlyTheirScope(t *testing.T) {
	want := map[Action]Scope{
		SealCredential: "vault:write", ListCredentials: "vault:read", UnsealCredential: "vault:read",
		RotateCredential: "vault:write", DeleteCredential: "vault:write", ReadAudit: "audit:read",
	}
	if len(want) != len(required) {
		t.Fatalf("the table names %d actions, the code %d", len(want), len(required))
	}
	for action, scope := range want {
		for _, held := range append(TenantScopes(), SystemAdmin) {
			p := Principal{Tenant: "ten_x", Kind: APIKey, Scopes: []Scope{held}}
			if got := p.May(action); got != (held == scope) {
				t.Errorf("%s with %s: %v", action, held, got)
			}
		}
		if (Principal{Tenant: "ten_x"}).May(action) {
			t.Errorf("%s without any scope", action)
		}
		if (Principal{Scopes: TenantScopes()}).May(action) {
			t.Errorf("%s without a tenant", action)
		}
	}
	if (Principal{Tenant: "ten_x", Scopes: TenantScopes()}).May("format_disk") {
		t.Error("an unknown action was allowed")
	}
	if slices.Contains(TenantScopes(), SystemAdmin) {
		t.Error("a tenant can be given system:admin")
	}
}

func TestIDs(t *testing.T) {
	id := NewID("cred")
	if !ValidID("cred", id) || id == NewID("cred") {
		t.Fatal(id)
	}
	last := id[:len(id)-1]
	for _, bad := range []string{
		"", "cred_", id + "a", id[:len(id)-1], strings.ToUpper(id), "ten" + id[4:], id[5:],
		last + "b", // spare bits set
		last + "\x00", strings.Replace(id, "_", "-", 1), "cred_" + strings.Repeat("1", idLength),
	} {
		if bad != id && ValidID("cred", bad) {
			t.Errorf("%q accepted", bad)
		}
	}
	if ValidID("ten", string(SystemTenant)) {
		t.Error("the system tenant is a well-formed tenant id")
	}
}
