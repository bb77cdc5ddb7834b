package identity

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// newKey makes an API key and returns it with its principal.
func (f *people) newKey(by authz.Principal, days int, scopes ...authz.Scope) (APIKey, string, authz.Principal) {
	f.t.Helper()
	made, secretKey, err := f.CreateAPIKey(f.t.Context(), by, APIKeyRequest{Name: "k", Scopes: scopes, ExpiresInDays: days})
	must(f.t, err)
	c, err := f.Authenticate(f.t.Context(), secretKey)
	must(f.t, err)
	return made, secretKey, c.Principal
}

func (f *people) invite(by authz.Principal, email string, role authz.Role) (Invitation, string) {
	f.t.Helper()
	i, err := f.Invite(f.t.Context(), by, email, role)
	must(f.t, err)
	return i, f.token(email)
}

// resetByMail does what the owner of an address does without knowing its password.
func (f *people) resetByMail(email string) {
	f.t.Helper()
	must(f.t, f.RequestPasswordReset(f.t.Context(), stranger, email))
	must(f.t, f.ResetPassword(f.t.Context(), stranger, f.token(email), secret.Bytes(otherPassword)))
	f.mails()
}

// accept reports whether an invitation's token is valid.
func (f *people) accept(token string) bool {
	f.t.Helper()
	_, _, err := f.AcceptInvitation(f.t.Context(), stranger, token, secret.Bytes(goodPassword))
	if err != nil && !errors.Is(err, ErrTicket) {
		f.t.Fatal(err)
	}
	return err == nil
}

func TestAnAPIKeyTakesAVerifiedAddress(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	me := f.caller(f.signIn("ada@example.com", goodPassword))
	n := len(f.history(u.Tenant))
	r := APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}}
	if _, secretKey, err := f.CreateAPIKey(t.Context(), me.Principal, r); !errors.Is(err, fault.Forbidden) || secretKey != "" {
		t.Error(err)
	}
	f.recorded(u.Tenant, n, "API_KEY_CREATED denied email_not_verified")
	if left := f.rows("apikey/"); len(left) != 0 {
		t.Error(left)
	}
	must(t, f.VerifyEmail(t.Context(), stranger, f.token("ada@example.com")))
	if _, _, err := f.CreateAPIKey(t.Context(), me.Principal, r); err != nil {
		t.Error(err)
	}
}

// A stranger registered the address. The owner of the mailbox resets the password and must not
// share the account.
func TestWhoProvesTheMailboxIsAlone(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	verify := f.token("ada@example.com")
	theirs := f.signIn("ada@example.com", goodPassword)
	n := len(f.history(u.Tenant))

	f.resetByMail("ada@example.com")
	f.recorded(u.Tenant, n, "PASSWORD_RESET_REQUESTED success", "PASSWORD_RESET success")
	if a := f.newest(u.Tenant, audit.PasswordReset).Attributes; a["sessions_ended"] != "1" || a["email_verified"] != "true" {
		t.Error(a)
	}
	if f.alive(theirs) {
		t.Error("the stranger's session goes on")
	}
	if err := f.VerifyEmail(t.Context(), stranger, verify); !errors.Is(err, ErrTicket) {
		t.Error("the previous mail still counts:", err)
	}
	me := f.caller(f.signIn("ada@example.com", otherPassword))
	if _, user, err := f.Account(t.Context(), me); err != nil || !user.EmailVerified {
		t.Error(user, err)
	}

	_, mine, _ := f.newKey(me.Principal, 0, authz.VaultRead)
	_, token := f.invite(me.Principal, "bob@example.com", authz.Member)
	f.resetByMail("ada@example.com") // verified before: the keys belong to programs that continue
	if !f.works(mine) || !f.accept(token) {
		t.Error("a reset of a verified user revoked what it had made")
	}
}

func TestAKeyInvitesForNobodyUnverified(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	verify := f.token("ada@example.com")
	p := f.key(u.Tenant, authz.TenantScopes()...)
	n := len(f.history(u.Tenant))
	if _, err := f.Invite(t.Context(), p, "bob@example.com", authz.Member); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	f.recorded(u.Tenant, n, "MEMBER_INVITED denied email_not_verified")
	if len(f.rows("invitation/")) != 0 || len(f.rows("mail/")) != 0 {
		t.Error("there is an invitation")
	}
	must(t, f.VerifyEmail(t.Context(), stranger, verify))
	f.invite(p, "bob@example.com", authz.Member)
}

func TestAnAddressIsInvitedOnceAMinute(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	first, token := f.invite(owner.Principal, "bob@example.com", authz.Member)
	f.advance(ticket.MailInterval - time.Nanosecond)
	n := len(f.history(owner.Tenant))
	if _, err := f.Invite(t.Context(), owner.Principal, "BOB@example.com", authz.Auditor); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	f.recorded(owner.Tenant, n, "MEMBER_INVITED denied mailed_a_moment_ago")
	if _, open, _ := f.Members(t.Context(), owner.Principal); len(open) != 1 || open[0].ID != first.ID || len(f.mails()) != 0 {
		t.Error("the refused invitation counts")
	}
	f.advance(time.Nanosecond)
	_, second := f.invite(owner.Principal, "bob@example.com", authz.Auditor)
	if f.accept(token) || !f.accept(second) {
		t.Error("not the second invitation counts")
	}
}

func TestRevokingInvitationsMakesNoRoomForMoreMails(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	other := f.verified("eve@example.com")
	invite := func(i int) error {
		made, err := f.Invite(t.Context(), owner.Principal, fmt.Sprintf("guest-%d@example.com", i), authz.Member)
		if err == nil {
			must(t, f.RevokeInvitation(t.Context(), owner.Principal, made.ID))
		}
		return err
	}
	for i := range maxInvitationMails {
		must(t, invite(i))
	}
	f.advance(invitationPeriod - time.Nanosecond)
	n := len(f.history(owner.Tenant))
	if err := invite(maxInvitationMails); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	f.recorded(owner.Tenant, n, "MEMBER_INVITED denied too_many_mails")
	if _, err := f.Invite(t.Context(), other.Principal, "guest@example.com", authz.Member); err != nil {
		t.Error("another tenant is refused:", err)
	}
	f.advance(time.Nanosecond)
	if err := invite(maxInvitationMails); err != nil {
		t.Error(err)
	}
}

// take makes the owner invite an address, and accepts the invitation.
func take(f *people, owner Caller) (User, error) {
	if _, err := f.Invite(f.t.Context(), owner.Principal, "ada@example.com", authz.Member); err != nil {
		return User{}, err
	}
	u, _, err := f.AcceptInvitation(f.t.Context(), stranger, f.token("ada@example.com"), secret.Bytes(otherPassword))
	return u, err
}

func TestAnAddressIsKeptForTwoDaysUnlessItIsVerified(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("owner@example.com")
	previous := f.register("ada@example.com")
	f.mails()
	tokens := f.signIn("ada@example.com", goodPassword)
	f.advance(verifyPeriod - time.Nanosecond)
	if _, err := take(f, owner); !errors.Is(err, fault.Conflict) {
		t.Fatal(err)
	}
	n := len(f.history(previous.Tenant))
	f.advance(time.Nanosecond)
	u, err := take(f, owner)
	must(t, err)
	if u.ID == previous.ID || u.Tenant == previous.Tenant || u.Email != "ada@example.com" {
		t.Errorf("%+v", u)
	}
	f.recorded(previous.Tenant, n, "MEMBER_REMOVED success")
	if e := f.newest(previous.Tenant, audit.MemberRemoved); e.Resource.ID != previous.ID || e.Actor.Type != "system" || e.Attributes["cause"] != reasonUnverified {
		t.Errorf("%+v", e)
	}
	if f.alive(tokens) {
		t.Error("the previous user's session goes on")
	}
	if l := f.login("ada@example.com"); l.account != (account{u.Tenant, u.ID}) {
		t.Errorf("%+v", l.account)
	}
	if _, err := f.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(goodPassword)); !errors.Is(err, fault.Unauthenticated) {
		t.Error("the previous password counts:", err)
	}
	f.signIn("ada@example.com", otherPassword)
	if users := f.rows("user/row/" + string(previous.Tenant)); len(users) != 0 {
		t.Error(users)
	}
	if _, err := verify.Store(t.Context(), f.store, verify.Options{}); err != nil {
		t.Error(err)
	}
}

func TestAnAddressIsKeptForGoodWhenItIsVerifiedOrItsTenantActivated(t *testing.T) {
	for name, prepare := range map[string]func(f *people){
		"verified": func(f *people) { f.verified("ada@example.com") },
		"activated": func(f *people) {
			_, err := f.ActivateTenant(t.Context(), operator(), f.register("ada@example.com").Tenant)
			must(t, err)
			f.mails() // clears the mails
		},
	} {
		f := newPeople(t)
		prepare(f)
		f.verified("owner@example.com")
		f.advance(100 * verifyPeriod)
		_, err := f.ActivateTenant(t.Context(), operator(), f.login("owner@example.com").Tenant)
		must(t, err)
		if _, err := take(f, f.caller(f.signIn("owner@example.com", goodPassword))); !errors.Is(err, fault.Conflict) {
			t.Errorf("%s: %v", name, err)
		}
		f.signIn("ada@example.com", goodPassword)
	}
}

// Registering an address proves nothing about it.
func TestRegisteringTakesNoAddressOver(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	f.advance(100 * verifyPeriod)
	if _, _, err := f.Register(t.Context(), stranger, "Ada@example.com", secret.Bytes(otherPassword), "Another Ltd"); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	f.signIn("ada@example.com", goodPassword)
}

func TestWhatARemovedMemberMadeGoesWithIt(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	bob := f.join(owner, "bob@example.com", authz.Admin)
	him := f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	_, first, parent := f.newKey(him, 0, authz.AccountAdmin, authz.VaultRead)
	_, second, child := f.newKey(parent, 0, authz.AccountAdmin, authz.VaultRead)
	_, third, _ := f.newKey(child, 0, authz.VaultRead)
	_, others, _ := f.newKey(owner.Principal, 0, authz.VaultRead)
	must(t, f.RevokeAPIKey(t.Context(), owner.Principal, child.ID)) // breaks the chain to the third key
	_, own := f.invite(him, "one@example.com", authz.Admin)
	f.advance(time.Second)
	all := f.key(owner.Tenant, authz.TenantScopes()...)
	_, operators := f.invite(all, "two@example.com", authz.Member)
	n := len(f.history(owner.Tenant))

	must(t, f.RemoveMember(t.Context(), owner.Principal, bob.ID))
	f.recorded(owner.Tenant, n, "MEMBER_REMOVED success")
	if a := f.newest(owner.Tenant, audit.MemberRemoved).Attributes; a["api_keys_revoked"] != "2" || a["invitations_revoked"] != "1" {
		t.Error(a)
	}
	for name, secretKey := range map[string]string{"first": first, "second": second, "third": third} {
		if f.works(secretKey) {
			t.Errorf("the %s key works", name)
		}
	}
	if f.accept(own) {
		t.Error("its invitation counts")
	}
	if !f.works(others) || !f.accept(operators) {
		t.Error("what others made is gone")
	}
	// A request that was admitted before makes nothing afterwards.
	for name, p := range map[string]authz.Principal{"user": him, "API key": parent} {
		if _, _, err := f.CreateAPIKey(t.Context(), p, APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}}); !errors.Is(err, fault.Unauthenticated) {
			t.Errorf("%s makes a key: %v", name, err)
		}
		if _, err := f.Invite(t.Context(), p, "three@example.com", authz.Auditor); err == nil {
			t.Errorf("%s invites", name)
		}
	}
}

func TestWhatIsBeyondANewRoleIsRevoked(t *testing.T) {
	member := authz.Member.Scopes()
	for _, c := range []struct {
		from, to                      authz.Role
		keys                          [3]bool // the keys that still work: all scopes, a member's scopes, audit:read
		owner, admin, member, auditor bool    // the invitations that still work
	}{
		{authz.Owner, authz.Admin, [3]bool{true, true, true}, false, true, true, true},
		{authz.Owner, authz.Member, [3]bool{false, true, false}, false, false, false, false},
		{authz.Admin, authz.Member, [3]bool{false, true, false}, false, false, false, false},
		{authz.Admin, authz.Auditor, [3]bool{false, false, true}, false, false, false, false},
		{authz.Admin, authz.Owner, [3]bool{true, true, true}, false, true, true, true},
	} {
		t.Run(fmt.Sprintf("%s to %s", c.from, c.to), func(t *testing.T) {
			f := newPeople(t)
			owner := f.verified("ada@example.com")
			bob := f.join(owner, "bob@example.com", c.from)
			him := f.caller(f.signIn("bob@example.com", goodPassword)).Principal
			_, all, parent := f.newKey(him, 0, authz.TenantScopes()...)
			_, some, _ := f.newKey(parent, 0, member...)
			_, audits, _ := f.newKey(parent, 0, authz.AuditRead)
			invitations := make(map[authz.Role]string)
			for _, role := range authz.Roles() {
				by := him
				if role == authz.Auditor {
					by = parent // the user answers for what its key makes
				}
				if role != authz.Owner || c.from == authz.Owner {
					_, invitations[role] = f.invite(by, string(role)+"@example.com", role)
				}
			}
			_, err := f.ChangeMember(t.Context(), owner.Principal, bob.ID, c.to)
			must(t, err)
			if got := [3]bool{f.works(all), f.works(some), f.works(audits)}; got != c.keys {
				t.Errorf("keys that work: %v, want %v", got, c.keys)
			}
			for role, want := range map[authz.Role]bool{authz.Owner: c.owner, authz.Admin: c.admin, authz.Member: c.member, authz.Auditor: c.auditor} {
				if token := invitations[role]; token != "" && f.accept(token) != want {
					t.Errorf("the invitation of an %s counts: %v", role, !want)
				}
			}
			a := f.newest(owner.Tenant, audit.MemberChanged).Attributes
			if a["role"] != string(c.to) || a["former_role"] != string(c.from) || a["api_keys_revoked"] == "" || a["invitations_revoked"] == "" {
				t.Error(a)
			}
		})
	}
}

func TestAKeyOutlivesNotTheKeyThatMadeIt(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	made, _, parent := f.newKey(owner.Principal, 10, authz.AccountAdmin)
	f.advance(24 * time.Hour)
	for days, want := range map[int]time.Time{0: made.ExpiresAt, 10: made.ExpiresAt, 3: f.time().AddDate(0, 0, 3)} {
		child, secretKey, _ := f.newKey(parent, days, authz.AccountAdmin)
		if !child.ExpiresAt.Equal(want) {
			t.Errorf("%d days: %v, want %v", days, child.ExpiresAt, want)
		}
		if days == 0 {
			defer func() {
				if f.works(secretKey) {
					t.Error("it works after its maker expired")
				}
			}()
		}
	}
	if child, _, _ := f.newKey(owner.Principal, 0, authz.VaultRead); !child.ExpiresAt.IsZero() {
		t.Error("a user's key expires:", child.ExpiresAt)
	}
	f.advance(9 * 24 * time.Hour)
}

func TestTheOperatorsDoingsAreInTheTenantsHistory(t *testing.T) {
	f := newPeople(t)
	tenant, _ := f.newTenantOf("Example Ltd")
	p := operator()
	p.RequestID = "req_7"
	n, system := len(f.history(tenant)), len(f.history(authz.SystemTenant))
	_, _, err := f.CreateTenantAPIKey(t.Context(), p, tenant, APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}})
	must(t, err)
	_, err = f.ActivateTenant(t.Context(), p, tenant)
	must(t, err)
	_, err = f.LimitTenant(t.Context(), p, tenant, Limits{V2: 7})
	must(t, err)
	f.recorded(tenant, n, "API_KEY_CREATED success", "TENANT_ACTIVATED success", "TENANT_LIMITED success")
	f.recorded(authz.SystemTenant, system)
	for _, event := range []audit.EventType{audit.APIKeyCreated, audit.TenantActivated, audit.TenantLimited} {
		if e := f.newest(tenant, event); e.Actor.ID != p.ID || e.RequestID != "req_7" {
			t.Errorf("%s names %+v", event, e.Actor)
		}
	}
}

func TestAStrangerDoesNotSpoilAResetThatWasAskedFor(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	f.mails()
	must(t, f.RequestPasswordReset(t.Context(), stranger, "ada@example.com"))
	token := f.token("ada@example.com")
	n := len(f.history(u.Tenant))
	f.advance(15*time.Minute - time.Nanosecond)
	must(t, f.RequestPasswordReset(t.Context(), from("192.0.2.66"), "ada@example.com"))
	if sent := f.mails(); len(sent) != 0 {
		t.Errorf("%d mails", len(sent))
	}
	f.recorded(u.Tenant, n) // recorded in the system's history, like an address without an account
	must(t, f.ResetPassword(t.Context(), stranger, token, secret.Bytes(otherPassword)))
	f.mails()
	must(t, f.RequestPasswordReset(t.Context(), stranger, "ada@example.com")) // the previous token is used up
	first := f.token("ada@example.com")
	f.advance(15 * time.Minute)
	must(t, f.RequestPasswordReset(t.Context(), stranger, "ada@example.com"))
	second := f.token("ada@example.com")
	if err := f.ResetPassword(t.Context(), stranger, first, secret.Bytes(goodPassword)); !errors.Is(err, ErrTicket) {
		t.Error(err)
	}
	must(t, f.ResetPassword(t.Context(), stranger, second, secret.Bytes(goodPassword)))
}

func TestFailedSignInsOfStrangersDoNotKeepOutWhoIsIn(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	me := f.caller(f.signIn("ada@example.com", goodPassword))
	for range 3 * freeFailures {
		_, _ = f.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes("wrong"))
	}
	if _, err := f.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(goodPassword)); !errors.Is(err, fault.Unauthenticated) {
		t.Fatal("the account is not slowed down:", err)
	}
	if err := f.ChangePassword(t.Context(), me, secret.Bytes(goodPassword), secret.Bytes(otherPassword)); err != nil {
		t.Error(err)
	}
	f.signIn("ada@example.com", otherPassword) // the right password clears the failures
}
