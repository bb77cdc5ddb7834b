package identity

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// key returns an API key that is in no store.
func key(tenant authz.TenantID, scopes ...authz.Scope) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.APIKey, ID: authz.NewID("key"), Scopes: scopes}
}

// key returns an API key that the operator made.
func (f *people) key(tenant authz.TenantID, scopes ...authz.Scope) authz.Principal {
	f.t.Helper()
	k := f.grants.apiKeys.New(tenant, "test", APIKeyRequest{Name: "test", Scopes: scopes})
	f.commit(func(tx store.Tx) error { return f.grants.apiKeys.Put(tx, k) })
	return authz.Principal{Tenant: tenant, Kind: authz.APIKey, ID: k.Row.ID, Scopes: scopes}
}

func TestAnInvitationSaysWhoInvitesToWhat(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	_, err := f.Invite(t.Context(), owner.Principal, "bob@example.com", authz.Auditor)
	must(t, err)
	mails := f.mails()
	if len(mails) != 1 {
		t.Fatalf("%d mails", len(mails))
	}
	for _, line := range []string{"Organisation:  Example Ltd\n", "Invited by:    ada@example.com\n", "Your role:     auditor\n"} {
		if text := mails[0].Text; !strings.Contains(text, line) {
			t.Errorf("%s\nlacks %q", text, line)
		}
	}
}

func TestAnInvitedPersonBecomesAMember(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	n := len(f.history(owner.Tenant))
	invitation, err := f.Invite(t.Context(), owner.Principal, " Bob@Example.com", authz.Auditor)
	must(t, err)
	if invitation.Email != "bob@example.com" || invitation.Role != authz.Auditor || !invitation.ExpiresAt.Equal(f.time().Add(7*24*time.Hour)) {
		t.Fatalf("%+v", invitation)
	}
	users, open, err := f.Members(t.Context(), owner.Principal)
	if err != nil || len(users) != 1 || len(open) != 1 || !reflect.DeepEqual(open[0], invitation) {
		t.Fatal(users, open, err)
	}
	f.advance(time.Hour)
	bob, tenant, err := f.AcceptInvitation(t.Context(), stranger, f.token("bob@example.com"), secret.Bytes(otherPassword))
	must(t, err)
	if bob.Tenant != owner.Tenant || tenant.ID != owner.Tenant || tenant.Name != "Example Ltd" || bob.Role != authz.Auditor || !bob.EmailVerified {
		t.Fatalf("%+v of %+v", bob, tenant)
	}
	if c := f.caller(f.signIn("bob@example.com", otherPassword)); c.Tenant != owner.Tenant || c.ID != bob.ID {
		t.Errorf("%+v", c)
	}
	users, open, err = f.Members(t.Context(), owner.Principal)
	if err != nil || len(users) != 2 || users[1] != bob || len(open) != 0 {
		t.Error(users, open, err)
	}
	f.recorded(owner.Tenant, n, "MEMBER_INVITED success", "MEMBER_LISTED success", "MEMBER_JOINED success", "USER_SIGNED_IN success", "MEMBER_LISTED success")
}

func TestATenantSeesItsOwnMembersOnly(t *testing.T) {
	f := newPeople(t)
	ada, eve := f.verified("ada@example.com"), f.verified("eve@example.com")
	bob := f.join(ada, "bob@example.com", authz.Member)
	f.advance(time.Minute)
	invitation, err := f.Invite(t.Context(), ada.Principal, "carol@example.com", authz.Member)
	must(t, err)
	users, open, err := f.Members(t.Context(), eve.Principal)
	if err != nil || len(users) != 1 || users[0].ID != eve.ID || len(open) != 0 {
		t.Error(users, open, err)
	}
	n := len(f.history(eve.Tenant))
	for _, id := range []string{bob.ID, authz.NewID("usr"), "", "usr_x", "../" + bob.ID, invitation.ID} {
		if _, err := f.ChangeMember(t.Context(), eve.Principal, id, authz.Auditor); !errors.Is(err, fault.NotFound) {
			t.Errorf("changing %q: %v", id, err)
		}
		if err := f.RemoveMember(t.Context(), eve.Principal, id); !errors.Is(err, fault.NotFound) {
			t.Errorf("removing %q: %v", id, err)
		}
		n = f.recorded(eve.Tenant, n, "MEMBER_CHANGED denied no_such_member", "MEMBER_REMOVED denied no_such_member")
	}
	for _, id := range []string{invitation.ID, authz.NewID("inv"), "", bob.ID, "../" + invitation.ID} {
		if err := f.RevokeInvitation(t.Context(), eve.Principal, id); !errors.Is(err, fault.NotFound) {
			t.Errorf("revoking %q: %v", id, err)
		}
		n = f.recorded(eve.Tenant, n, "INVITATION_REVOKED denied no_such_invitation")
	}
	if users, open, _ = f.Members(t.Context(), ada.Principal); len(users) != 2 || users[1].Role != authz.Member || len(open) != 1 {
		t.Error("something of the other tenant changed:", users, open)
	}
}

// granted reports whether err is nil for a principal that may act, and fault.Forbidden for one that
// may not.
func granted(err error, may bool) bool {
	return may && err == nil || !may && errors.Is(err, fault.Forbidden)
}

// Members grant only what they hold, and only owners make, change and remove owners.
func TestWhoMayGrantWhichRole(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("owner@example.com")
	f.join(owner, "second@example.com", authz.Owner)
	actors := map[string]authz.Principal{
		"owner":            owner.Principal,
		"all scopes key":   f.key(owner.Tenant, authz.TenantScopes()...),
		"account:admin":    f.key(owner.Tenant, authz.AccountAdmin),
		"auditor's scopes": f.key(owner.Tenant, append(authz.Auditor.Scopes(), authz.AccountAdmin)...),
	}
	for _, role := range authz.Roles()[1:] {
		f.join(owner, string(role)+"@example.com", role)
		actors[string(role)] = f.caller(f.signIn(string(role)+"@example.com", goodPassword)).Principal
	}
	may := map[string][]authz.Role{
		"owner":            authz.Roles(),
		"admin":            {authz.Admin, authz.Member, authz.Limited, authz.Auditor},
		"all scopes key":   {authz.Admin, authz.Member, authz.Limited, authz.Auditor},
		"auditor's scopes": {authz.Auditor},
	}
	target := f.join(owner, "target@example.com", authz.Member)
	i := 0
	for name, p := range actors {
		for _, role := range authz.Roles() {
			want := slices.Contains(may[name], role)
			reset := func(r authz.Role) {
				_, err := f.ChangeMember(t.Context(), owner.Principal, target.ID, r)
				must(t, err)
			}
			reset(authz.Member)
			i++
			if _, err := f.Invite(t.Context(), p, fmt.Sprintf("guest-%d@example.com", i), role); !granted(err, want) {
				t.Errorf("%s invites %s: %v", name, role, err)
			}
			if u, err := f.ChangeMember(t.Context(), p, target.ID, role); !granted(err, want) || want && u.Role != role {
				t.Errorf("%s makes a member %s: %v", name, role, err)
			}
			reset(authz.Owner)
			want = want && name == "owner"
			if _, err := f.ChangeMember(t.Context(), p, target.ID, role); !granted(err, want) {
				t.Errorf("%s makes an owner %s: %v", name, role, err)
			}
		}
	}
	if _, err := f.ChangeMember(t.Context(), owner.Principal, target.ID, authz.Owner); err != nil {
		t.Fatal(err)
	}
	for name, p := range actors {
		if err := f.RemoveMember(t.Context(), p, target.ID); name != "owner" && !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s removes an owner: %v", name, err)
		}
		if name == "owner" {
			f.mails()
			target = f.join(owner, "target@example.com", authz.Owner)
		}
	}
	if _, err := f.ChangeMember(t.Context(), owner.Principal, target.ID, "root"); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
	if _, err := f.Invite(t.Context(), owner.Principal, "x@example.com", ""); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
}

func TestTheLastOwnerStays(t *testing.T) {
	f := newPeople(t)
	ada := f.verified("ada@example.com")
	if err := f.RemoveMember(t.Context(), ada.Principal, ada.ID); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	if _, err := f.ChangeMember(t.Context(), ada.Principal, ada.ID, authz.Admin); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	f.join(ada, "bob@example.com", authz.Owner)
	bob := f.caller(f.signIn("bob@example.com", goodPassword))
	var won atomic.Int64
	var wg sync.WaitGroup
	for _, pair := range [][2]Caller{{ada, bob}, {bob, ada}} { // each removes the other at the same time
		wg.Go(func() {
			err := f.RemoveMember(t.Context(), pair[0].Principal, pair[1].ID)
			switch {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, fault.Conflict) && !errors.Is(err, fault.Forbidden):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 || len(f.rows("user/row/")) != 1 {
		t.Errorf("%d removed the other, %d users are left", won.Load(), len(f.rows("user/row/")))
	}
}

// A tenant that an operator made has keys and no users.
func TestATenantWithoutAnOwnerGetsOne(t *testing.T) {
	f := newPeople(t)
	tenant, _, err := f.Dev(t.Context())
	must(t, err)
	p := f.key(tenant, authz.TenantScopes()...)
	f.join(Caller{Principal: p}, "ada@example.com", authz.Owner)
	if _, err := f.Invite(t.Context(), p, "bob@example.com", authz.Owner); !errors.Is(err, fault.Forbidden) {
		t.Error("a key makes a second owner:", err)
	}
}

func TestInvitingTakesAVerifiedAddress(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	me := f.caller(f.signIn("ada@example.com", goodPassword))
	n := len(f.history(u.Tenant))
	if _, err := f.Invite(t.Context(), me.Principal, "bob@example.com", authz.Member); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	f.recorded(u.Tenant, n, "MEMBER_INVITED denied email_not_verified")
	if n := len(f.rows("invitation/")); n != 0 {
		t.Error(n)
	}
}

func TestTheSystemHasNoMembers(t *testing.T) {
	f := newPeople(t)
	p := key(authz.SystemTenant, authz.SystemAdmin, authz.AccountAdmin)
	for name, do := range map[string]func() error{
		"MEMBER_LISTED":      func() error { _, _, err := f.Members(t.Context(), p); return err },
		"MEMBER_INVITED":     func() error { _, err := f.Invite(t.Context(), p, "a@example.com", authz.Auditor); return err },
		"MEMBER_CHANGED":     func() error { _, err := f.ChangeMember(t.Context(), p, authz.NewID("usr"), authz.Auditor); return err },
		"MEMBER_REMOVED":     func() error { return f.RemoveMember(t.Context(), p, authz.NewID("usr")) },
		"INVITATION_REVOKED": func() error { return f.RevokeInvitation(t.Context(), p, authz.NewID("inv")) },
	} {
		n := len(f.history(authz.SystemTenant))
		if err := do(); !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s: %v", name, err)
		}
		f.recorded(authz.SystemTenant, n, name+" denied system_tenant")
	}
}

func TestAnInvitationIsReplacedRevokedAndExpires(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	invite := func(email string) (Invitation, string) {
		t.Helper()
		i, err := f.Invite(t.Context(), owner.Principal, email, authz.Member)
		must(t, err)
		return i, f.token(email)
	}
	accept := func(token string) error {
		_, _, err := f.AcceptInvitation(t.Context(), stranger, token, secret.Bytes(goodPassword))
		return err
	}
	_, first := invite("bob@example.com")
	f.advance(ticket.MailInterval)
	second, token := invite("bob@example.com")
	if err := accept(first); !errors.Is(err, ErrTicket) {
		t.Error("a replaced invitation counts:", err)
	}
	if _, open, _ := f.Members(t.Context(), owner.Principal); len(open) != 1 || open[0].ID != second.ID {
		t.Error(open)
	}
	must(t, f.RevokeInvitation(t.Context(), owner.Principal, second.ID))
	if err := accept(token); !errors.Is(err, ErrTicket) {
		t.Error("a revoked invitation counts:", err)
	}
	if err := f.RevokeInvitation(t.Context(), owner.Principal, second.ID); !errors.Is(err, fault.NotFound) {
		t.Error(err)
	}
	_, token = invite("carol@example.com")
	f.advance(7 * 24 * time.Hour)
	if _, open, _ := f.Members(t.Context(), owner.Principal); len(open) != 0 {
		t.Error("an expired invitation is open:", open)
	}
	if err := accept(token); !errors.Is(err, ErrTicket) {
		t.Error("an expired invitation counts:", err)
	}
	_, token = invite("dave@example.com")
	if n := len(f.rows("invitation/")); n != 1 {
		t.Errorf("%d invitations are kept", n)
	}
	f.register("dave@example.com")
	if err := accept(token); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	if _, err := f.Invite(t.Context(), owner.Principal, "dave@example.com", authz.Member); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
}

func TestAnInvitationIntoAnEndedTrialIsRefused(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	f.advance(14*24*time.Hour - time.Hour)
	_, err := f.Invite(t.Context(), owner.Principal, "bob@example.com", authz.Member)
	must(t, err)
	token := f.token("bob@example.com")
	f.advance(time.Hour)
	n := len(f.history(owner.Tenant))
	_, _, err = f.AcceptInvitation(t.Context(), stranger, token, secret.Bytes(goodPassword))
	if !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	f.recorded(owner.Tenant, n, "MEMBER_JOINED denied trial_ended")
}

func TestATenantHasABoundedNumberOfOpenInvitations(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	for i := range maxInvitations {
		_, err := f.Invite(t.Context(), owner.Principal, fmt.Sprintf("guest-%d@example.com", i), authz.Member)
		must(t, err)
	}
	f.advance(invitationPeriod)
	if _, err := f.Invite(t.Context(), owner.Principal, "one-more@example.com", authz.Member); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	if _, err := f.Invite(t.Context(), owner.Principal, "guest-7@example.com", authz.Member); err != nil {
		t.Error("replacing one is refused:", err)
	}
}

func TestARemovedMemberLeavesNothing(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	bob := f.join(owner, "bob@example.com", authz.Member)
	f.signIn("bob@example.com", goodPassword)
	must(t, f.RequestPasswordReset(t.Context(), stranger, "bob@example.com"))
	f.mails()
	must(t, f.RemoveMember(t.Context(), owner.Principal, bob.ID))
	for _, prefix := range []string{"user/", "session/", "ticket/", "invitation/"} {
		for k, v := range f.rows(prefix) {
			if strings.Contains(k+v, bob.ID) || strings.Contains(k+v, "bob@") {
				t.Errorf("%q is left", k)
			}
		}
	}
}
