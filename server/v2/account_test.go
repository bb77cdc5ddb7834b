package v2_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

func (s *service) refresh(token string) servertest.Reply {
	s.T.Helper()
	return s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/refresh", Header: servertest.Cookies("refreshToken", token)})
}

type fields = map[string]any

func TestAnAccountFromRegistrationToLogout(t *testing.T) {
	s := newService(t)
	const email = "ada@example.org"
	owner := s.Register(" Ada@Example.ORG")
	if user := s.Me(owner.Access)["user"].(fields); user["email"] != email || user["role"] != "owner" || user["email_verified"] != false {
		t.Errorf("registered %v", user)
	}
	invite := func() servertest.Reply {
		return s.Send("POST", "/api/v2/members/invite", owner.Access, fields{"email": "bob@example.org", "role": "member"})
	}
	invite().Message(t, http.StatusForbidden) // not before the address is verified
	verify := fields{"token": s.TokenMailedTo(email, 1)}
	s.Send("POST", "/api/v2/auth/verify-email", "", verify).Want(t, http.StatusOK)
	s.Send("POST", "/api/v2/auth/verify-email", "", verify).Message(t, http.StatusBadRequest)
	if s.Me(owner.Access)["user"].(fields)["email_verified"] != true {
		t.Error("the address is not verified")
	}

	s.Clock.Advance(time.Minute)
	r := s.refresh(owner.Refresh)
	renewed := servertest.Account{Access: r.Want(t, http.StatusOK)["access_token"].(string), Refresh: r.Cookie(t, "refreshToken").Value}
	if renewed.Access == owner.Access || renewed.Refresh == owner.Refresh {
		t.Error("a refresh answers the same tokens")
	}
	second := s.Login(email, servertest.Password)
	sessions := s.Send("GET", "/api/v2/auth/sessions", renewed.Access, nil).Want(t, http.StatusOK)["sessions"].([]any)
	if len(sessions) != 2 || sessions[0].(fields)["current"] != true || sessions[0].(fields)["last_used_at"] != "2026-11-21T10:01:00Z" {
		t.Errorf("sessions %v", sessions)
	}

	change := func(current string) servertest.Reply {
		return s.Send("POST", "/api/v2/auth/change-password", renewed.Access, fields{"current_password": current, "new_password": servertest.OtherPassword})
	}
	change("not the password").Message(t, http.StatusForbidden)
	change(servertest.Password).Want(t, http.StatusOK)
	s.Send("GET", "/api/v2/auth/me", second.Access, nil).Message(t, http.StatusUnauthorized) // the other session
	s.refresh(second.Refresh).Message(t, http.StatusUnauthorized)
	s.Me(renewed.Access)

	s.Send("POST", "/api/v2/auth/forgot-password", "", fields{"email": email}).Want(t, http.StatusOK)
	reset := fields{"token": s.ResetTokenMailedTo(email), "new_password": servertest.Password}
	s.Send("POST", "/api/v2/auth/reset-password", "", reset).Want(t, http.StatusOK)
	s.Send("POST", "/api/v2/auth/reset-password", "", reset).Message(t, http.StatusBadRequest)
	s.Send("GET", "/api/v2/auth/me", renewed.Access, nil).Message(t, http.StatusUnauthorized) // every session
	s.Send("POST", "/api/v2/auth/login", "", fields{"email": email, "password": servertest.OtherPassword}).Message(t, http.StatusUnauthorized)

	owner = s.Login(email, servertest.Password)
	out := s.Send("POST", "/api/v2/auth/logout", owner.Access, nil)
	out.Want(t, http.StatusOK)
	for _, name := range []string{"accessToken", "refreshToken"} {
		if c := out.Cookie(t, name); c.Value != "" || c.MaxAge >= 0 {
			t.Errorf("logout leaves %v", c)
		}
	}
	s.Send("GET", "/api/v2/auth/me", owner.Access, nil).Message(t, http.StatusUnauthorized)
	s.refresh(owner.Refresh).Message(t, http.StatusUnauthorized)
}

func TestAMemberFromInvitationToRemoval(t *testing.T) {
	s := newService(t)
	owner := s.RegisterVerified("ada@example.org")
	const guest = "bob@example.org"
	invite := func(role string) fields {
		return s.Send("POST", "/api/v2/members/invite", owner.Access, fields{"email": guest, "role": role}).Want(t, http.StatusCreated)
	}
	invite("owner")
	first := s.TokenMailedTo(guest, 1)
	s.Send("POST", "/api/v2/members/invite", owner.Access, fields{"email": guest, "role": "member"}).Message(t, http.StatusConflict) // a moment ago
	s.Clock.Advance(time.Minute)
	if invited := invite("member"); invited["email"] != guest || invited["expires_at"] != "2026-11-28T10:01:00Z" {
		t.Errorf("invited %v", invited)
	}
	accept := func(token string) servertest.Reply {
		return s.Send("POST", "/api/v2/auth/accept-invitation", "", fields{"token": token, "password": servertest.Password})
	}
	accept(first).Message(t, http.StatusBadRequest) // replaced
	joined := accept(s.TokenMailedTo(guest, 2)).Want(t, http.StatusCreated)
	accept(s.TokenMailedTo(guest, 2)).Message(t, http.StatusBadRequest)
	bob := s.Login(guest, servertest.Password)
	tenantOf := func(access string) any { return s.Me(access)["tenant"].(fields)["tenant_id"] }
	if joined["user"].(fields)["role"] != "member" || tenantOf(bob.Access) != tenantOf(owner.Access) {
		t.Errorf("joined %v", joined)
	}
	id, ownID := joined["user"].(fields)["user_id"].(string), s.Me(owner.Access)["user"].(fields)["user_id"].(string)

	// What a role may do counts from the next request on, with the same token.
	scopes := func(access string) (held []string) {
		for _, scope := range s.Me(access)["principal"].(fields)["scopes"].([]any) {
			held = append(held, scope.(string))
		}
		return held
	}
	role := func(access, user, role string) servertest.Reply {
		return s.Send("PUT", "/api/v2/members/"+user, access, fields{"role": role})
	}
	role(bob.Access, id, "owner").Message(t, http.StatusForbidden)
	for name, may := range map[string]bool{"auditor": false, "admin": true, "member": false} {
		role(owner.Access, id, name).Want(t, http.StatusOK)
		if got := slices.Contains(scopes(bob.Access), "account:admin"); got != may {
			t.Errorf("as %s: account:admin %v", name, got)
		}
	}
	role(owner.Access, id, "admin").Want(t, http.StatusOK)
	role(bob.Access, id, "owner").Message(t, http.StatusForbidden)     // only owners make owners
	role(bob.Access, ownID, "member").Message(t, http.StatusForbidden) // and change them
	s.Send("DELETE", "/api/v2/members/"+ownID, bob.Access, nil).Message(t, http.StatusForbidden)
	role(owner.Access, ownID, "member").Message(t, http.StatusConflict) // the last one
	s.Send("DELETE", "/api/v2/members/"+ownID, owner.Access, nil).Message(t, http.StatusConflict)

	s.Send("DELETE", "/api/v2/members/"+id, owner.Access, nil).Want(t, http.StatusOK)
	s.Send("GET", "/api/v2/auth/me", bob.Access, nil).Message(t, http.StatusUnauthorized)
	s.refresh(bob.Refresh).Message(t, http.StatusUnauthorized)
	s.Send("POST", "/api/v2/auth/login", "", fields{"email": guest, "password": servertest.Password}).Message(t, http.StatusUnauthorized)
	s.Send("DELETE", "/api/v2/members/"+id, owner.Access, nil).Message(t, http.StatusNotFound)
	s.Register(guest) // the address is free again
}

func TestOfAHundredRefreshesOneIsAnsweredAndTheSessionIsOver(t *testing.T) {
	s := newService(t)
	user := s.Register("ada@example.org")
	bystander := s.Login("ada@example.org", servertest.Password)
	answers := make(chan servertest.Reply, 100)
	var calls sync.WaitGroup
	for range cap(answers) {
		calls.Go(func() { answers <- s.refresh(user.Refresh) })
	}
	calls.Wait()
	close(answers)
	var won []servertest.Account
	for r := range answers {
		switch r.Status {
		case http.StatusOK:
			won = append(won, servertest.Account{Access: r.Want(t, http.StatusOK)["access_token"].(string), Refresh: r.Cookie(t, "refreshToken").Value})
		case http.StatusUnauthorized:
			if c := r.Cookie(t, "refreshToken"); c.MaxAge >= 0 {
				t.Errorf("a refused token is kept: %v", c)
			}
		default:
			t.Errorf("status %d: %s", r.Status, r.Body)
		}
	}
	if len(won) != 1 {
		t.Fatalf("%d of a hundred won", len(won))
	}
	s.refresh(won[0].Refresh).Message(t, http.StatusUnauthorized)
	for _, access := range []string{user.Access, won[0].Access} {
		s.Send("GET", "/api/v2/auth/me", access, nil).Message(t, http.StatusUnauthorized)
	}
	s.refresh(bystander.Refresh).Want(t, http.StatusOK)
}

func TestATrialEndsAndIsActivated(t *testing.T) {
	s := newService(t)
	const email = "ada@example.org"
	user := s.RegisterVerified(email)
	tenant := s.Me(user.Access)["tenant"].(fields)
	if tenant["status"] != "trial" || tenant["trial_ends_at"] != "2026-12-05T10:00:00Z" {
		t.Errorf("registered %v", tenant)
	}
	made := s.Send("POST", "/api/v2/api-keys", user.Access, fields{"name": "ci", "scopes": []string{"vault:read", "vault:write"}})
	key := made.Want(t, http.StatusCreated)["api_key"].(string)
	seal := func() servertest.Reply {
		return s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: key, Body: `{"name":"n","credential_type":"t","values":{"k":"v"}}`})
	}
	id := seal().Want(t, http.StatusCreated)["credential_id"].(string)
	s.Clock.Advance(14*24*time.Hour - time.Second)
	seal().Want(t, http.StatusCreated)
	s.Clock.Advance(time.Second)

	user = s.Login(email, servertest.Password)
	for _, r := range []servertest.Reply{seal(), s.Send("POST", "/api/v2/encryption/encrypt", user.Access, fields{"data": "x"})} {
		if m := r.Message(t, http.StatusForbidden); !strings.Contains(m, "trial") {
			t.Errorf("after the trial: %q", m)
		}
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + id, Key: key}).Want(t, http.StatusOK)
	tenant = s.Me(user.Access)["tenant"].(fields)
	if tenant["status"] != "read_only" {
		t.Errorf("after the trial: %v", tenant)
	}
	path := "/api/v2/system/tenants/" + tenant["tenant_id"].(string) + "/activate"
	s.Send("POST", path, user.Access, nil).Message(t, http.StatusForbidden)
	activated := s.Call(servertest.Request{Method: "POST", Path: path, Key: s.SystemKey()}).Want(t, http.StatusOK)["tenant"].(fields)
	if _, ends := activated["trial_ends_at"]; activated["status"] != "active" || ends {
		t.Errorf("activated: %v", activated)
	}
	seal().Want(t, http.StatusCreated)
	s.Clock.Advance(365 * 24 * time.Hour)
	seal().Want(t, http.StatusCreated)
}

func TestAnAPIKeyFromMakingToItsEnd(t *testing.T) {
	s := newService(t)
	owner := s.RegisterVerified("ada@example.org")
	create := func(access string, body fields) servertest.Reply {
		return s.Send("POST", "/api/v2/api-keys", access, body)
	}
	list := func() (keys []fields) {
		r := s.Send("GET", "/api/v2/api-keys", owner.Access, nil)
		for _, k := range r.Want(t, http.StatusOK)["api_keys"].([]any) {
			keys = append(keys, k.(fields))
		}
		if strings.Contains(string(r.Body), "lk_live_") {
			t.Error("a list shows a key")
		}
		return keys
	}
	two := []string{"vault:read", "account:admin"}
	made := create(owner.Access, fields{"name": "ci", "scopes": two, "expires_in_days": 1}).Want(t, http.StatusCreated)
	key, id := made["api_key"].(string), made["key_id"].(string)
	s.Clock.Advance(time.Second) // keys are listed in the order in which they were made
	forever := create(owner.Access, fields{"name": "forever", "scopes": []string{"vault:read"}}).Want(t, http.StatusCreated)
	if _, expires := forever["expires_at"]; expires || made["expires_at"] != "2026-11-22T10:00:00Z" {
		t.Errorf("made %v and %v", made, forever)
	}
	first := list()[0]
	if _, used := first["last_used_at"]; used || first["key_id"] != id || first["status"] != "active" ||
		first["created_by"] != s.Me(owner.Access)["user"].(fields)["user_id"] {
		t.Errorf("listed %v", first)
	}

	use := func() servertest.Reply {
		return s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Key: key})
	}
	s.Clock.Advance(59 * time.Second)
	use().Want(t, http.StatusOK)
	if used := list()[0]["last_used_at"]; used != "2026-11-21T10:01:00Z" {
		t.Errorf("last used %v", used)
	}
	// Nobody gives a key more than they hold.
	byKey := func(scopes ...string) servertest.Reply {
		return s.Call(servertest.Request{Method: "POST", Path: "/api/v2/api-keys", Key: key, Body: servertest.Marshal(t, fields{"name": "n", "scopes": scopes})})
	}
	byKey("vault:read").Want(t, http.StatusCreated)
	byKey("vault:read", "account:admin").Want(t, http.StatusCreated)
	byKey("vault:write").Message(t, http.StatusForbidden)
	byKey("vault:read", "audit:read").Message(t, http.StatusForbidden)
	create(owner.Access, fields{"name": "n", "scopes": []string{"system:admin"}}).Message(t, http.StatusForbidden)
	s.Clock.Advance(24*time.Hour - time.Minute - time.Second)
	use().Want(t, http.StatusOK)
	s.Clock.Advance(time.Second)
	use().Message(t, http.StatusUnauthorized)
	s.Call(servertest.Request{Method: "GET", Path: "/v1/keys", Bearer: key}).Want(t, http.StatusUnauthorized)

	owner = s.Login(owner.Email, servertest.Password)
	if expired := list()[0]; expired["status"] != "expired" || expired["key_id"] != id {
		t.Errorf("expired: %v", expired)
	}
	revoke := func(id string) servertest.Reply { return s.Send("DELETE", "/api/v2/api-keys/"+id, owner.Access, nil) }
	for _, gone := range []string{id, forever["key_id"].(string)} {
		revoke(gone).Want(t, http.StatusOK)
		revoke(gone).Message(t, http.StatusNotFound)
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Key: forever["api_key"].(string)}).Message(t, http.StatusUnauthorized)
}

func TestASealWithAnIdempotencyKeyIsCarriedOutOnce(t *testing.T) {
	s := newService(t)
	sealAs := func(key, own, name string) servertest.Reply {
		body := servertest.Marshal(t, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}})
		return s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: key, Body: body, Header: http.Header{"Idempotency-Key": {own}}})
	}
	first := sealAs(s.Key, "own", "n").Want(t, http.StatusCreated)
	answers := make(chan servertest.Reply, 20)
	var calls sync.WaitGroup
	for range cap(answers) {
		calls.Go(func() { answers <- sealAs(s.Key, "parallel", "n") })
	}
	calls.Wait()
	close(answers)
	ids := make(map[any]bool)
	for r := range answers {
		ids[r.Want(t, http.StatusCreated)["credential_id"]] = true
	}
	if len(ids) != 1 || ids[first["credential_id"]] {
		t.Errorf("one key made the credentials %v", ids)
	}
	again := sealAs(s.Key, "own", "n").Want(t, http.StatusCreated)
	if servertest.Marshal(t, again) != servertest.Marshal(t, first) {
		t.Errorf("first %v, then %v", first, again)
	}
	sealAs(s.Key, "own", "another").Message(t, http.StatusUnprocessableEntity)
	other := s.GrantKeyIn(s.Stranger().Tenant, authz.VaultWrite) // another tenant's keys are others
	if sealAs(other, "own", "another").Want(t, http.StatusCreated)["credential_id"] == first["credential_id"] {
		t.Error("two tenants share a credential")
	}
	for _, wrong := range []string{"", "a b", "ü", "\t", strings.Repeat("x", 256)} {
		sealAs(s.Key, wrong, "n").Message(t, http.StatusBadRequest)
	}
	s.Clock.Advance(24 * time.Hour)
	if sealAs(s.Key, "own", "n").Want(t, http.StatusCreated)["credential_id"] == first["credential_id"] {
		t.Error("the key is remembered for more than a day")
	}
	if n := len(s.Get("/api/v2/vault/list").Want(t, http.StatusOK)["credentials"].([]any)); n != 3 {
		t.Errorf("%d credentials", n)
	}
}

// A cookie alone is enough for a browser, in every step of a session.
func TestASessionLivesInCookies(t *testing.T) {
	s := newService(t)
	user := s.Register("ada@example.org")
	with := func(method, path string, pairs ...string) servertest.Reply {
		return s.Call(servertest.Request{Method: method, Path: path, Header: servertest.Cookies(pairs...)})
	}
	var me struct{ User struct{ Email string } }
	if err := json.Unmarshal(with("GET", "/api/v2/auth/me", "accessToken", user.Access).Body, &me); err != nil || me.User.Email != user.Email {
		t.Errorf("me %+v, %v", me, err)
	}
	s.Clock.Advance(30 * time.Minute)
	with("GET", "/api/v2/auth/me", "accessToken", user.Access).Message(t, http.StatusUnauthorized)
	r := with("POST", "/api/v2/auth/refresh", "accessToken", user.Access, "refreshToken", user.Refresh)
	r.Want(t, http.StatusOK)
	s.Clock.Advance(30 * time.Minute) // the access token has expired: the refresh token signs out
	access, refresh := r.Cookie(t, "accessToken").Value, r.Cookie(t, "refreshToken").Value
	with("POST", "/api/v2/auth/logout", "accessToken", access, "refreshToken", refresh).Want(t, http.StatusOK)
	s.refresh(refresh).Message(t, http.StatusUnauthorized)
}
