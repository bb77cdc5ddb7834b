package server

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
)

const otherTestPassword = "staple battery, horse correct"

// resetTokenTo waits for a mail to an address that resets its password.
func (s *service) resetTokenTo(address string) string {
	s.t.Helper()
	for n := 1; ; n++ {
		if m := mailedToken.FindStringSubmatch(s.mailTo(address, n).Text); m != nil && strings.HasPrefix(m[1], "lk_reset_") {
			return m[1]
		}
	}
}

// send calls as the bearer of an access token, or as nobody.
func (s *service) send(method, path, access string, body any) reply {
	s.t.Helper()
	r := request{method: method, path: path, bearer: access}
	if body != nil {
		r.body = marshal(s.t, body)
	}
	return s.call(r)
}

func (s *service) refresh(token string) reply {
	s.t.Helper()
	return s.call(request{method: "POST", path: "/api/v2/auth/refresh", header: cookies("refreshToken", token)})
}

// verified registers a user and takes the token that it is mailed.
func (s *service) verified(email string) account {
	s.t.Helper()
	a := s.register(email)
	s.send("POST", "/api/v2/auth/verify-email", "", map[string]string{"token": s.tokenTo(email, 1)}).want(s.t, http.StatusOK)
	return a
}

func (s *service) me(access string) map[string]any {
	s.t.Helper()
	return s.send("GET", "/api/v2/auth/me", access, nil).want(s.t, http.StatusOK)
}

type fields = map[string]any

func TestAnAccountFromRegistrationToLogout(t *testing.T) {
	s := newService(t)
	const email = "ada@example.org"
	owner := s.register(" Ada@Example.ORG")
	if user := s.me(owner.access)["user"].(fields); user["email"] != email || user["role"] != "owner" || user["email_verified"] != false {
		t.Errorf("registered %v", user)
	}
	invite := func() reply {
		return s.send("POST", "/api/v2/members/invite", owner.access, fields{"email": "bob@example.org", "role": "member"})
	}
	invite().message(t, http.StatusForbidden) // not before the address is verified
	verify := fields{"token": s.tokenTo(email, 1)}
	s.send("POST", "/api/v2/auth/verify-email", "", verify).want(t, http.StatusOK)
	s.send("POST", "/api/v2/auth/verify-email", "", verify).message(t, http.StatusBadRequest)
	if s.me(owner.access)["user"].(fields)["email_verified"] != true {
		t.Error("the address is not verified")
	}

	s.clock.advance(time.Minute)
	r := s.refresh(owner.refresh)
	renewed := account{access: r.want(t, http.StatusOK)["access_token"].(string), refresh: r.cookie(t, "refreshToken").Value}
	if renewed.access == owner.access || renewed.refresh == owner.refresh {
		t.Error("a refresh answers the same tokens")
	}
	second := s.login(email, testPassword)
	sessions := s.send("GET", "/api/v2/auth/sessions", renewed.access, nil).want(t, http.StatusOK)["sessions"].([]any)
	if len(sessions) != 2 || sessions[0].(fields)["current"] != true || sessions[0].(fields)["last_used_at"] != "2026-11-21T10:01:00Z" {
		t.Errorf("sessions %v", sessions)
	}

	change := func(current string) reply {
		return s.send("POST", "/api/v2/auth/change-password", renewed.access, fields{"current_password": current, "new_password": otherTestPassword})
	}
	change("not the password").message(t, http.StatusForbidden)
	change(testPassword).want(t, http.StatusOK)
	s.send("GET", "/api/v2/auth/me", second.access, nil).message(t, http.StatusUnauthorized) // the other session
	s.refresh(second.refresh).message(t, http.StatusUnauthorized)
	s.me(renewed.access)

	s.send("POST", "/api/v2/auth/forgot-password", "", fields{"email": email}).want(t, http.StatusOK)
	reset := fields{"token": s.resetTokenTo(email), "new_password": testPassword}
	s.send("POST", "/api/v2/auth/reset-password", "", reset).want(t, http.StatusOK)
	s.send("POST", "/api/v2/auth/reset-password", "", reset).message(t, http.StatusBadRequest)
	s.send("GET", "/api/v2/auth/me", renewed.access, nil).message(t, http.StatusUnauthorized) // every session
	s.send("POST", "/api/v2/auth/login", "", fields{"email": email, "password": otherTestPassword}).message(t, http.StatusUnauthorized)

	owner = s.login(email, testPassword)
	out := s.send("POST", "/api/v2/auth/logout", owner.access, nil)
	out.want(t, http.StatusOK)
	for _, name := range []string{"accessToken", "refreshToken"} {
		if c := out.cookie(t, name); c.Value != "" || c.MaxAge >= 0 {
			t.Errorf("logout leaves %v", c)
		}
	}
	s.send("GET", "/api/v2/auth/me", owner.access, nil).message(t, http.StatusUnauthorized)
	s.refresh(owner.refresh).message(t, http.StatusUnauthorized)
}

func TestAMemberFromInvitationToRemoval(t *testing.T) {
	s := newService(t)
	owner := s.verified("ada@example.org")
	const guest = "bob@example.org"
	invite := func(role string) fields {
		return s.send("POST", "/api/v2/members/invite", owner.access, fields{"email": guest, "role": role}).want(t, http.StatusCreated)
	}
	invite("owner")
	first := s.tokenTo(guest, 1)
	s.send("POST", "/api/v2/members/invite", owner.access, fields{"email": guest, "role": "member"}).message(t, http.StatusConflict) // a moment ago
	s.clock.advance(time.Minute)
	if invited := invite("member"); invited["email"] != guest || invited["expires_at"] != "2026-11-28T10:01:00Z" {
		t.Errorf("invited %v", invited)
	}
	accept := func(token string) reply {
		return s.send("POST", "/api/v2/auth/accept-invitation", "", fields{"token": token, "password": testPassword})
	}
	accept(first).message(t, http.StatusBadRequest) // replaced
	joined := accept(s.tokenTo(guest, 2)).want(t, http.StatusCreated)
	accept(s.tokenTo(guest, 2)).message(t, http.StatusBadRequest)
	bob := s.login(guest, testPassword)
	tenantOf := func(access string) any { return s.me(access)["tenant"].(fields)["tenant_id"] }
	if joined["user"].(fields)["role"] != "member" || tenantOf(bob.access) != tenantOf(owner.access) {
		t.Errorf("joined %v", joined)
	}
	id, ownID := joined["user"].(fields)["user_id"].(string), s.me(owner.access)["user"].(fields)["user_id"].(string)

	// What a role may do counts from the next request on, with the same token.
	scopes := func(access string) (held []string) {
		for _, scope := range s.me(access)["principal"].(fields)["scopes"].([]any) {
			held = append(held, scope.(string))
		}
		return held
	}
	role := func(access, user, role string) reply {
		return s.send("PUT", "/api/v2/members/"+user, access, fields{"role": role})
	}
	role(bob.access, id, "owner").message(t, http.StatusForbidden)
	for name, may := range map[string]bool{"auditor": false, "admin": true, "member": false} {
		role(owner.access, id, name).want(t, http.StatusOK)
		if got := slices.Contains(scopes(bob.access), "account:admin"); got != may {
			t.Errorf("as %s: account:admin %v", name, got)
		}
	}
	role(owner.access, id, "admin").want(t, http.StatusOK)
	role(bob.access, id, "owner").message(t, http.StatusForbidden)     // only owners make owners
	role(bob.access, ownID, "member").message(t, http.StatusForbidden) // and change them
	s.send("DELETE", "/api/v2/members/"+ownID, bob.access, nil).message(t, http.StatusForbidden)
	role(owner.access, ownID, "member").message(t, http.StatusConflict) // the last one
	s.send("DELETE", "/api/v2/members/"+ownID, owner.access, nil).message(t, http.StatusConflict)

	s.send("DELETE", "/api/v2/members/"+id, owner.access, nil).want(t, http.StatusOK)
	s.send("GET", "/api/v2/auth/me", bob.access, nil).message(t, http.StatusUnauthorized)
	s.refresh(bob.refresh).message(t, http.StatusUnauthorized)
	s.send("POST", "/api/v2/auth/login", "", fields{"email": guest, "password": testPassword}).message(t, http.StatusUnauthorized)
	s.send("DELETE", "/api/v2/members/"+id, owner.access, nil).message(t, http.StatusNotFound)
	s.register(guest) // the address is free again
}

func TestOfAHundredRefreshesOneIsAnsweredAndTheSessionIsOver(t *testing.T) {
	s := newService(t)
	user := s.register("ada@example.org")
	bystander := s.login("ada@example.org", testPassword)
	answers := make(chan reply, 100)
	var calls sync.WaitGroup
	for range cap(answers) {
		calls.Go(func() { answers <- s.refresh(user.refresh) })
	}
	calls.Wait()
	close(answers)
	var won []account
	for r := range answers {
		switch r.status {
		case http.StatusOK:
			won = append(won, account{access: r.want(t, http.StatusOK)["access_token"].(string), refresh: r.cookie(t, "refreshToken").Value})
		case http.StatusUnauthorized:
			if c := r.cookie(t, "refreshToken"); c.MaxAge >= 0 {
				t.Errorf("a refused token is kept: %v", c)
			}
		default:
			t.Errorf("status %d: %s", r.status, r.body)
		}
	}
	if len(won) != 1 {
		t.Fatalf("%d of a hundred won", len(won))
	}
	s.refresh(won[0].refresh).message(t, http.StatusUnauthorized)
	for _, access := range []string{user.access, won[0].access} {
		s.send("GET", "/api/v2/auth/me", access, nil).message(t, http.StatusUnauthorized)
	}
	s.refresh(bystander.refresh).want(t, http.StatusOK)
}

func TestATrialEndsAndIsActivated(t *testing.T) {
	s := newService(t)
	const email = "ada@example.org"
	user := s.verified(email)
	tenant := s.me(user.access)["tenant"].(fields)
	if tenant["status"] != "trial" || tenant["trial_ends_at"] != "2026-12-05T10:00:00Z" {
		t.Errorf("registered %v", tenant)
	}
	made := s.send("POST", "/api/v2/api-keys", user.access, fields{"name": "ci", "scopes": []string{"vault:read", "vault:write"}})
	key := made.want(t, http.StatusCreated)["api_key"].(string)
	seal := func() reply {
		return s.call(request{method: "POST", path: "/api/v2/vault/seal", key: key, body: `{"name":"n","credential_type":"t","values":{"k":"v"}}`})
	}
	id := seal().want(t, http.StatusCreated)["credential_id"].(string)
	s.clock.advance(14*24*time.Hour - time.Second)
	seal().want(t, http.StatusCreated)
	s.clock.advance(time.Second)

	user = s.login(email, testPassword)
	for _, r := range []reply{seal(), s.send("POST", "/api/v2/encryption/encrypt", user.access, fields{"data": "x"})} {
		if m := r.message(t, http.StatusForbidden); !strings.Contains(m, "trial") {
			t.Errorf("after the trial: %q", m)
		}
	}
	s.call(request{method: "GET", path: "/api/v2/vault/" + id, key: key}).want(t, http.StatusOK)
	tenant = s.me(user.access)["tenant"].(fields)
	if tenant["status"] != "read_only" {
		t.Errorf("after the trial: %v", tenant)
	}
	path := "/api/v2/system/tenants/" + tenant["tenant_id"].(string) + "/activate"
	s.send("POST", path, user.access, nil).message(t, http.StatusForbidden)
	activated := s.call(request{method: "POST", path: path, key: s.systemKey()}).want(t, http.StatusOK)["tenant"].(fields)
	if _, ends := activated["trial_ends_at"]; activated["status"] != "active" || ends {
		t.Errorf("activated: %v", activated)
	}
	seal().want(t, http.StatusCreated)
	s.clock.advance(365 * 24 * time.Hour)
	seal().want(t, http.StatusCreated)
}

func TestAnAPIKeyFromMakingToItsEnd(t *testing.T) {
	s := newService(t)
	owner := s.verified("ada@example.org")
	create := func(access string, body fields) reply { return s.send("POST", "/api/v2/api-keys", access, body) }
	list := func() (keys []fields) {
		r := s.send("GET", "/api/v2/api-keys", owner.access, nil)
		for _, k := range r.want(t, http.StatusOK)["api_keys"].([]any) {
			keys = append(keys, k.(fields))
		}
		if strings.Contains(string(r.body), "lk_live_") {
			t.Error("a list shows a key")
		}
		return keys
	}
	two := []string{"vault:read", "account:admin"}
	made := create(owner.access, fields{"name": "ci", "scopes": two, "expires_in_days": 1}).want(t, http.StatusCreated)
	key, id := made["api_key"].(string), made["key_id"].(string)
	s.clock.advance(time.Second) // keys are listed in the order in which they were made
	forever := create(owner.access, fields{"name": "forever", "scopes": []string{"vault:read"}}).want(t, http.StatusCreated)
	if _, expires := forever["expires_at"]; expires || made["expires_at"] != "2026-11-22T10:00:00Z" {
		t.Errorf("made %v and %v", made, forever)
	}
	first := list()[0]
	if _, used := first["last_used_at"]; used || first["key_id"] != id || first["status"] != "active" ||
		first["created_by"] != s.me(owner.access)["user"].(fields)["user_id"] {
		t.Errorf("listed %v", first)
	}

	use := func() reply { return s.call(request{method: "GET", path: "/api/v2/vault/list", key: key}) }
	s.clock.advance(59 * time.Second)
	use().want(t, http.StatusOK)
	if used := list()[0]["last_used_at"]; used != "2026-11-21T10:01:00Z" {
		t.Errorf("last used %v", used)
	}
	// Nobody gives a key more than they hold.
	byKey := func(scopes ...string) reply {
		return s.call(request{method: "POST", path: "/api/v2/api-keys", key: key, body: marshal(t, fields{"name": "n", "scopes": scopes})})
	}
	byKey("vault:read").want(t, http.StatusCreated)
	byKey("vault:read", "account:admin").want(t, http.StatusCreated)
	byKey("vault:write").message(t, http.StatusForbidden)
	byKey("vault:read", "audit:read").message(t, http.StatusForbidden)
	create(owner.access, fields{"name": "n", "scopes": []string{"system:admin"}}).message(t, http.StatusForbidden)
	s.clock.advance(24*time.Hour - time.Minute - time.Second)
	use().want(t, http.StatusOK)
	s.clock.advance(time.Second)
	use().message(t, http.StatusUnauthorized)
	s.call(request{method: "GET", path: "/v1/keys", bearer: key}).want(t, http.StatusUnauthorized)

	owner = s.login(owner.email, testPassword)
	if expired := list()[0]; expired["status"] != "expired" || expired["key_id"] != id {
		t.Errorf("expired: %v", expired)
	}
	revoke := func(id string) reply { return s.send("DELETE", "/api/v2/api-keys/"+id, owner.access, nil) }
	for _, gone := range []string{id, forever["key_id"].(string)} {
		revoke(gone).want(t, http.StatusOK)
		revoke(gone).message(t, http.StatusNotFound)
	}
	s.call(request{method: "GET", path: "/api/v2/vault/list", key: forever["api_key"].(string)}).message(t, http.StatusUnauthorized)
}

func TestASealWithAnIdempotencyKeyIsCarriedOutOnce(t *testing.T) {
	s := newService(t)
	sealAs := func(key, own, name string) reply {
		body := marshal(t, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}})
		return s.call(request{method: "POST", path: "/api/v2/vault/seal", key: key, body: body, header: http.Header{"Idempotency-Key": {own}}})
	}
	first := sealAs(s.key, "own", "n").want(t, http.StatusCreated)
	answers := make(chan reply, 20)
	var calls sync.WaitGroup
	for range cap(answers) {
		calls.Go(func() { answers <- sealAs(s.key, "parallel", "n") })
	}
	calls.Wait()
	close(answers)
	ids := make(map[any]bool)
	for r := range answers {
		ids[r.want(t, http.StatusCreated)["credential_id"]] = true
	}
	if len(ids) != 1 || ids[first["credential_id"]] {
		t.Errorf("one key made the credentials %v", ids)
	}
	again := sealAs(s.key, "own", "n").want(t, http.StatusCreated)
	if marshal(t, again) != marshal(t, first) {
		t.Errorf("first %v, then %v", first, again)
	}
	sealAs(s.key, "own", "another").message(t, http.StatusUnprocessableEntity)
	other := s.grantIn(s.stranger().Tenant, authz.VaultWrite) // another tenant's keys are others
	if sealAs(other, "own", "another").want(t, http.StatusCreated)["credential_id"] == first["credential_id"] {
		t.Error("two tenants share a credential")
	}
	for _, wrong := range []string{"", "a b", "ü", "\t", strings.Repeat("x", 256)} {
		sealAs(s.key, wrong, "n").message(t, http.StatusBadRequest)
	}
	s.clock.advance(24 * time.Hour)
	if sealAs(s.key, "own", "n").want(t, http.StatusCreated)["credential_id"] == first["credential_id"] {
		t.Error("the key is remembered for more than a day")
	}
	if n := len(s.get("/api/v2/vault/list").want(t, http.StatusOK)["credentials"].([]any)); n != 3 {
		t.Errorf("%d credentials", n)
	}
}

// A cookie alone is enough for a browser, in every step of a session.
func TestASessionLivesInCookies(t *testing.T) {
	s := newService(t)
	user := s.register("ada@example.org")
	with := func(method, path string, pairs ...string) reply {
		return s.call(request{method: method, path: path, header: cookies(pairs...)})
	}
	var me struct{ User struct{ Email string } }
	if err := json.Unmarshal(with("GET", "/api/v2/auth/me", "accessToken", user.access).body, &me); err != nil || me.User.Email != user.email {
		t.Errorf("me %+v, %v", me, err)
	}
	s.clock.advance(30 * time.Minute)
	with("GET", "/api/v2/auth/me", "accessToken", user.access).message(t, http.StatusUnauthorized)
	r := with("POST", "/api/v2/auth/refresh", "accessToken", user.access, "refreshToken", user.refresh)
	r.want(t, http.StatusOK)
	s.clock.advance(30 * time.Minute) // the access token has expired: the refresh token signs out
	access, refresh := r.cookie(t, "accessToken").Value, r.cookie(t, "refreshToken").Value
	with("POST", "/api/v2/auth/logout", "accessToken", access, "refreshToken", refresh).want(t, http.StatusOK)
	s.refresh(refresh).message(t, http.StatusUnauthorized)
}
