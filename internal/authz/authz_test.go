package authz

import (
	"slices"
	"strings"
	"testing"
)

// table is the truth table of every action, written a second time, so a change of the table in the
// code must be made here, too. A "!" means that the action stays allowed after a trial, and "+user"
// that only a user may do it.
var table = map[Action]string{
	SealCredential: "vault:write", ListCredentials: "vault:read!", ListVersions: "vault:read!", UnsealCredential: "vault:read!",
	ReplaceCredential: "vault:write", RotateCredential: "vault:write", RenameCredential: "vault:write", DescribeCredential: "vault:write", TrashCredential: "vault:write!", RenewCredential: "vault:write", DeleteCredential: "vault:write!",
	EncryptData: "crypto:encrypt", DecryptData: "crypto:decrypt!", RewrapData: "crypto:encrypt", SignData: "crypto:sign",
	VerifyData: "crypto:verify!", ReadPublicKeys: "crypto:verify!",
	CreateKey: "keys:write", ListKeys: "keys:read!", RotateKey: "keys:write", ReadAudit: "audit:read!", ReadProof: "audit:read!", ReadNames: "audit:names!", RecordNodeLog: "audit:write",
	ReadScore: "compliance:read!", ReadScoreHistory: "compliance:read!", ReadReport: "compliance:read!", ReadInventory: "compliance:read!",
	ExportAudit: "system:admin", AcceptRollback: "system:admin", ListKMSKeys: "system:admin", RewrapKeys: "system:admin", DestroyKMSKey: "system:admin",
	ReviewLog: "audit:read+user!", ReviewAccess: "account:admin+user!", ReviewInventory: "compliance:read+user!",
	EraseReviewNote: "account:admin!", EraseNames: "account:admin!", ApproveAPIKey: "account:admin+user",
	ListHistoryRules: "account:admin!", ChangeHistoryRule: "account:admin",
	ListWebhooks: "account:admin!", CreateWebhook: "account:admin", DeleteWebhook: "account:admin!", SendWebhook: "account:admin",
	ReadSettings: "account:admin!", ChangeSettings: "account:admin",
	ListPolicies: "account:admin!", CreatePolicy: "account:admin", ChangePolicy: "account:admin", DeletePolicy: "account:admin!",
	ListGroups: "account:admin!", CreateGroup: "account:admin", ChangeGroup: "account:admin", DeleteGroup: "account:admin!",
	BindPolicy: "account:admin", UnbindPolicy: "account:admin", CheckAccess: "any!", ListPermitted: "account:admin!", TryAccess: "account:admin!",
	CreateAPIKey: "account:admin", ListAPIKeys: "account:admin!", RevokeAPIKey: "account:admin!",
	InviteMember: "account:admin", ListMembers: "account:admin!", ChangeMember: "account:admin", RemoveMember: "account:admin!",
	RevokeInvitation: "account:admin!",
	ReadAccount:      "any!", ReadOverview: "any!", ListSessions: "user!", EndSession: "user!", SignOut: "user!", ChangePassword: "user!", ResendVerification: "user!",
	ListTenants: "system:admin", CreateTenant: "system:admin", ActivateTenant: "system:admin", LimitTenant: "system:admin",
	CreateTenantAPIKey: "system:admin",
	ListSealingKeys:    "system:admin", RotateSealingKey: "system:admin", RetireSealingKey: "system:admin", RestoreSealingKey: "system:admin",
	BackUp: "system:admin", ResealManifest: "vault:write", CheckManifest: "vault:write", ListSealedCredentials: "vault:read!",
	ReadMetrics: "metrics:read",
}

func TestActionsTakeExactlyWhatTheTableSays(t *testing.T) {
	if len(table) != len(Actions()) {
		t.Fatalf("the table names %d actions, the code %d", len(table), len(Actions()))
	}
	for action, rule := range table {
		takes, trialed := strings.CutSuffix(rule, "!")
		takes, users := strings.CutSuffix(takes, "+user")
		for _, held := range Scopes() {
			for _, kind := range []Kind{APIKey, User, Operator, ServiceAccount} {
				for _, ended := range []bool{false, true} {
					p := Principal{Tenant: "ten_x", Kind: kind, Scopes: []Scope{held}, ReadOnly: ended}
					want := takes == string(held) && (kind == User || !users) || takes == "any" || takes == "user" && kind == User
					if got := p.May(action); got != (want && (trialed || !ended)) {
						t.Errorf("%s by a %s with %s, trial ended %v: %v", action, kind, held, ended, got)
					}
					if why := p.Denies(action); want && ended && !trialed && why != TrialEnded || !want && why != MissingScope {
						t.Errorf("%s by a %s with %s, trial ended %v: %q", action, kind, held, ended, why)
					}
				}
			}
		}
		if (Principal{Tenant: "ten_x", Kind: APIKey}).May(action) != (takes == "any") {
			t.Errorf("%s without any scope", action)
		}
		if (Principal{Kind: User, Scopes: Scopes()}).May(action) {
			t.Errorf("%s without a tenant", action)
		}
	}
	if (Principal{Tenant: "ten_x", Scopes: TenantScopes()}).May("format_disk") {
		t.Error("an unknown action was allowed")
	}
	for _, scope := range SystemScopes() {
		if slices.Contains(TenantScopes(), scope) {
			t.Errorf("a tenant can be given %s", scope)
		}
	}
}

func TestRoles(t *testing.T) {
	for role, want := range map[Role]string{
		Owner:   "vault:read vault:write crypto:encrypt crypto:decrypt crypto:sign crypto:verify keys:read keys:write audit:read audit:names audit:write compliance:read account:admin",
		Admin:   "vault:read vault:write crypto:encrypt crypto:decrypt crypto:sign crypto:verify keys:read keys:write audit:read audit:names audit:write compliance:read account:admin",
		Member:  "vault:read vault:write crypto:encrypt crypto:decrypt crypto:sign crypto:verify keys:read",
		Limited: "vault:read vault:write",
		Auditor: "crypto:verify keys:read audit:read audit:names compliance:read",
		"root":  "",
	} {
		var got []string
		for _, s := range role.Scopes() {
			got = append(got, string(s))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v", role, got)
		}
	}
	if len(Roles()) != 5 {
		t.Error(Roles())
	}
}

func TestNobodyHoldsWhatItHasNot(t *testing.T) {
	p := Principal{Scopes: []Scope{VaultRead, AuditRead}}
	admin := Principal{Scopes: []Scope{SystemAdmin}}
	if !admin.Holds([]Scope{SystemAdmin, MetricsRead}) || admin.Holds([]Scope{AuditRead}) || p.Holds([]Scope{MetricsRead}) || admin.May(ReadMetrics) {
		t.Error("whoever administers the deployment may grant metrics:read, and nothing else that it does not hold")
	}
	if !p.Holds([]Scope{AuditRead}) || !p.Holds(nil) || p.Holds([]Scope{AuditRead, VaultWrite}) {
		t.Error(p)
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

func TestAnIDAndItsBytesAreTheSameInTwoSpellings(t *testing.T) {
	raw := [16]byte{0: 0xff, 7: 1, 15: 0x80}
	id := IDFromBytes("cred", raw)
	if id != "cred_74aaaaaaaaaacaaaaaaaaaaaqa" {
		t.Error(id)
	}
	if b, ok := IDBytes("cred", id); !ok || b != raw || !ValidID("cred", id) {
		t.Error(b, ok)
	}
	for _, bad := range []string{"", "cred_", id[:len(id)-1], id + "a", "ten" + id[4:], id[:len(id)-1] + "b"} {
		if b, ok := IDBytes("cred", bad); ok || b != [16]byte{} {
			t.Errorf("%q has bytes %x", bad, b)
		}
	}
}
