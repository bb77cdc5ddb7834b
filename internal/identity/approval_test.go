package identity

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// The operator's key opens nothing in a tenant with an owner until an owner approves it, and the
// owners hear of it.
func TestTheOperatorsKeyWaitsForAnOwner(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	second := f.join(owner, "cleo@example.com", authz.Owner)
	f.join(owner, "bob@example.com", authz.Admin)
	f.mails()
	tenant, p := owner.Tenant, operator()
	n := len(f.history(tenant))
	ask := func(scopes ...authz.Scope) (APIKey, string) {
		t.Helper()
		made, secretKey, err := f.CreateTenantAPIKey(t.Context(), p, tenant, APIKeyRequest{Name: "ops", Scopes: scopes, ExpiresInDays: 30})
		must(t, err)
		return made, secretKey
	}
	made, secretKey := ask(authz.VaultRead, authz.AuditRead)
	if !made.Pending || len(made.Scopes) != 2 || f.works(secretKey) {
		t.Errorf("%+v, and it works: %v", made, f.works(secretKey))
	}
	f.recorded(tenant, n, "API_KEY_CREATED success")
	e := f.newest(tenant, audit.APIKeyCreated)
	if e.Actor.ID != p.ID || e.Attributes[audit.AttributePending] != "true" || e.Attributes[audit.AttributeScopes] != "vault:read audit:read" {
		t.Errorf("%+v", e)
	}
	mailed := map[string]bool{}
	for _, m := range f.mails() {
		mailed[m.To] = true
		if !strings.Contains(m.Text, "/settings/api-keys\n") || strings.Contains(m.Text, secretKey) || strings.Contains(m.Text, "curl") {
			t.Error(m.Text)
		}
	}
	if len(mailed) != 2 || !mailed["ada@example.com"] || !mailed["cleo@example.com"] {
		t.Error("mails went to", mailed)
	}
	if list, err := f.APIKeys(t.Context(), owner.Principal); err != nil || len(list) != 1 || !list[0].Pending || list[0].CreatedBy != p.ID {
		t.Error(list, err)
	}

	admin := f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	stolen := f.key(tenant, authz.TenantScopes()...)
	for name, by := range map[string]authz.Principal{"an admin": admin, "an API key": stolen, "the operator": p} {
		if err := f.ApproveAPIKey(t.Context(), by, made.ID); !errors.Is(err, fault.Forbidden) {
			t.Errorf("approved by %s: %v", name, err)
		}
	}
	stranger := f.verified("eve@example.com")
	if err := f.ApproveAPIKey(t.Context(), stranger.Principal, made.ID); !errors.Is(err, fault.NotFound) {
		t.Error("by an owner of another tenant:", err)
	}
	if f.works(secretKey) {
		t.Fatal("it works before its approval")
	}
	n = len(f.history(tenant))
	must(t, f.ApproveAPIKey(t.Context(), f.caller(f.signIn("cleo@example.com", goodPassword)).Principal, made.ID))
	c, err := f.Authenticate(t.Context(), secretKey)
	if err != nil || !c.Holds([]authz.Scope{authz.VaultRead, authz.AuditRead}) || c.Holds([]authz.Scope{authz.VaultWrite}) {
		t.Errorf("%+v, %v", c, err)
	}
	f.recorded(tenant, n, "USER_SIGNED_IN success", "API_KEY_APPROVED success")
	if e := f.newest(tenant, audit.APIKeyApproved); e.Actor.ID != second.ID || e.Resource.ID != made.ID || e.Attributes[audit.AttributeUser] != second.ID {
		t.Errorf("%+v", e)
	}
	if err := f.ApproveAPIKey(t.Context(), owner.Principal, made.ID); !errors.Is(err, fault.Conflict) {
		t.Error("approved twice:", err)
	}
	must(t, f.RemoveMember(t.Context(), owner.Principal, second.ID)) // second answers for the key
	if f.works(secretKey) {
		t.Error("it outlives the owner who approved it")
	}

	refused, secretKey := ask(authz.VaultRead)
	must(t, f.RevokeAPIKey(t.Context(), owner.Principal, refused.ID))
	if err := f.ApproveAPIKey(t.Context(), owner.Principal, refused.ID); !errors.Is(err, fault.NotFound) || f.works(secretKey) {
		t.Error("approved after it was refused:", err)
	}
}

// An owner whose address is not verified may not approve, as they may make no key, and the operator
// cannot use the time before.
func TestAnOwnerWithoutAVerifiedAddressIsAnOwner(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	made, secretKey, err := f.CreateTenantAPIKey(t.Context(), operator(), u.Tenant, APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}})
	must(t, err)
	if !made.Pending {
		t.Errorf("%+v", made)
	}
	me := f.caller(f.signIn("ada@example.com", goodPassword))
	if err := f.ApproveAPIKey(t.Context(), me.Principal, made.ID); !errors.Is(err, fault.Forbidden) || f.works(secretKey) {
		t.Error(err)
	}
}

// The owners are asked about keys that exist.
func TestAKeyThatIsRefusedAsksNobody(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	f.commit(func(tx store.Tx) (err error) {
		for range maxAPIKeys {
			k := f.grants.apiKeys.New(owner.Tenant, "test", APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}})
			err = errors.Join(err, f.grants.apiKeys.Put(tx, k))
		}
		return err
	})
	f.mails()
	r := APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}}
	if _, _, err := f.CreateTenantAPIKey(t.Context(), operator(), owner.Tenant, r); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	if sent := f.mails(); len(sent) > 0 {
		t.Errorf("%d mails about a key that does not exist", len(sent))
	}
}

// The operator's key neither fills a tenant's list nor its owners' mailboxes.
func TestFewKeysWaitForAnOwnerAndNotForever(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	_, err := f.ActivateTenant(t.Context(), operator(), owner.Tenant) // a trial ends earlier
	must(t, err)
	ask := func() (APIKey, error) {
		k, _, err := f.CreateTenantAPIKey(t.Context(), operator(), owner.Tenant, APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}})
		return k, err
	}
	var made []APIKey
	for range 20 {
		k, err := ask()
		must(t, err)
		made = append(made, k)
	}
	f.mails()
	refused := func(name string) {
		t.Helper()
		if _, err := ask(); !errors.Is(err, fault.Conflict) || len(f.mails()) > 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	refused("a 21st")
	must(t, f.ApproveAPIKey(t.Context(), owner.Principal, made[0].ID))
	if _, err := ask(); err != nil {
		t.Error("after an approval:", err)
	}
	f.mails()
	refused("a 22nd")

	f.advance(14*24*time.Hour - time.Second)
	refused("a moment before they lapse")
	f.advance(time.Second)
	me := f.caller(f.signIn("ada@example.com", goodPassword)).Principal
	if err := f.ApproveAPIKey(t.Context(), me, made[1].ID); !errors.Is(err, fault.Conflict) || !strings.Contains(err.Error(), "14 days") {
		t.Error("approved too late:", err)
	}
	if _, err := ask(); err != nil {
		t.Error("after they lapsed:", err)
	}
	list, err := f.APIKeys(t.Context(), me)
	if err != nil || len(list) != 2 || list[0].ID != made[0].ID || list[0].Pending || !list[1].Pending {
		t.Errorf("%+v, %v", list, err)
	}
	revoked := 0
	for _, e := range f.entries(owner.Tenant) {
		if e.EventType == audit.APIKeyRevoked && e.Attributes[audit.AttributeReason] == reasonLapsed {
			revoked++
		}
	}
	if revoked != 20 {
		t.Errorf("%d keys lapsed with an entry", revoked)
	}
}

// An operator makes the first owner of a tenant with a key of it, and not another one afterwards.
func TestAnInvitationFromBeforeTheFirstOwnerMakesNoSecondOne(t *testing.T) {
	f := newPeople(t)
	tenant, key := f.newTenantOf("Ada's")
	_, meant := f.invite(key, "ada@example.com", authz.Owner)
	_, kept := f.invite(key, "ops@example.com", authz.Owner)
	_, lesser := f.invite(key, "bob@example.com", authz.Member)
	if !f.accept(meant) {
		t.Fatal("the first owner could not join")
	}
	n := len(f.history(tenant))
	if f.accept(kept) {
		t.Error("the operator's second invitation made an owner")
	}
	f.recorded(tenant, n, "MEMBER_JOINED denied role_beyond_own")
	if !f.accept(lesser) {
		t.Error("an invitation to another role was lost")
	}
	owner := f.caller(f.signIn("ada@example.com", goodPassword))
	if u := f.join(owner, "cleo@example.com", authz.Owner); u.Role != authz.Owner {
		t.Errorf("the owner's own invitation made a %s", u.Role)
	}
}

// Owners, and nobody else of the tenant, are reminded of what expires.
func TestOwnersAreReminded(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	f.join(owner, "cleo@example.com", authz.Owner)
	f.join(owner, "bob@example.com", authz.Admin)
	f.verified("other@example.com") // owns another tenant
	f.mails()
	put, err := f.RemindOwners(t.Context(), owner.Tenant)
	must(t, err)
	must(t, f.store.Update(t.Context(), put))
	mailed := map[string]bool{}
	for _, m := range f.mails() {
		mailed[m.To] = true
		if !strings.Contains(m.Text, "/vault\n") {
			t.Error(m.Text)
		}
	}
	if len(mailed) != 2 || !mailed["ada@example.com"] || !mailed["cleo@example.com"] {
		t.Error("mails went to", mailed)
	}
}
