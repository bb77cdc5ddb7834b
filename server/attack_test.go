package server_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// attack is a service whose database somebody writes who does not have the KMS key.
type attack struct {
	*service
	neighbour string // API key of another tenant
	stored    string // credential of that tenant
	rows      map[string][]byte
}

func newAttack(t *testing.T, open servertest.Open) *attack {
	t.Helper()
	a := &attack{service: &service{servertest.StartOn(t, open)}}
	a.neighbour = a.GrantKeyIn(a.Stranger().Tenant, authz.TenantScopes()...)
	a.stored = a.seal(a.neighbour, "theirs", "v")
	return a
}

func (a *attack) seal(key, name, value string) string {
	a.T.Helper()
	body := servertest.Marshal(a.T, fields{"name": name, "credential_type": "t", "values": fields{"k": value}, "ttl_days": 10})
	return a.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: key, Body: body}).Want(a.T, http.StatusCreated)["credential_id"].(string)
}

// ask sends a request. Its answer must not tell of rows.
func (a *attack) ask(r servertest.Request) servertest.Reply {
	a.T.Helper()
	reply := a.Call(r)
	servertest.WantNoRowIn(a.T, reply, a.rows)
	return reply
}

// same fails the test unless both requests have one answer: the first, which the attack is for, and
// the second, whose caller never had anything.
func (a *attack) same(status int, r, never servertest.Request) {
	a.T.Helper()
	got, want := a.ask(r), a.ask(never)
	if got.Status != status || got.Mask(a.T) != want.Mask(a.T) {
		a.T.Errorf("%s %s\ngot:  %s\nwant: %d, %s", r.Method, r.Path, got.Mask(a.T), status, want.Mask(a.T))
	}
}

// refused fails the test unless a known caller is refused, and the log says so once.
func (a *attack) refused(r servertest.Request) {
	a.T.Helper()
	next := a.NextSequence()
	a.ask(r).Want(a.T, http.StatusForbidden)
	entries := a.AllEntries(next)
	if len(entries) != 1 || entries[0].Outcome != audit.Failure || entries[0].Attributes[audit.AttributeReason] != "integrity" {
		a.T.Errorf("%s %s leaves %v", r.Method, r.Path, servertest.Summaries(entries))
	}
}

// unknown fails the test unless nobody is known by the key or token of r.
func (a *attack) unknown(requests ...servertest.Request) {
	a.T.Helper()
	for _, r := range requests {
		never := r
		switch {
		case r.Key != "":
			never.Key = "lk_live_" + strings.Repeat("a", 52)
		case strings.HasPrefix(r.Bearer, "lk_live_"):
			never.Bearer = "lk_live_" + strings.Repeat("a", 52)
		default:
			never.Bearer = "x"
		}
		a.same(http.StatusUnauthorized, r, never)
	}
}

// of returns requests of a caller with an API key.
func of(key string) []servertest.Request {
	return []servertest.Request{
		{Method: "GET", Path: "/api/v2/vault/list", Key: key},
		{Method: "GET", Path: "/api/v2/auth/me", Key: key},
		{Method: "GET", Path: "/api/v2/vault/list", Bearer: key},
		{Method: "GET", Path: "/v1/keys", Bearer: key},
		{Method: "POST", Path: "/api/v2/api-keys", Key: key, Body: `{"name":"n","scopes":["vault:read"]}`},
	}
}

// ofUser returns requests of a user with an access token.
func ofUser(access string) []servertest.Request {
	return []servertest.Request{
		{Method: "GET", Path: "/api/v2/auth/me", Bearer: access},
		{Method: "GET", Path: "/api/v2/auth/sessions", Bearer: access},
		{Method: "GET", Path: "/api/v2/members", Bearer: access},
		{Method: "GET", Path: "/api/v2/vault/list", Bearer: access},
		{Method: "POST", Path: "/api/v2/api-keys", Bearer: access, Body: `{"name":"n","scopes":["vault:read"]}`},
	}
}

func login(t testing.TB, email, password string) servertest.Request {
	return servertest.Request{Method: "POST", Path: "/api/v2/auth/login", Body: servertest.Marshal(t, fields{"email": email, "password": password})}
}

func refresh(token string) servertest.Request {
	return servertest.Request{Method: "POST", Path: "/api/v2/auth/refresh", Header: servertest.Cookies("refreshToken", token)}
}

func reset(t testing.TB, token string) servertest.Request {
	return servertest.Request{Method: "POST", Path: "/api/v2/auth/reset-password", Body: servertest.Marshal(t, fields{"token": token, "new_password": servertest.OtherPassword})}
}

const wrongPassword = "no horse, no battery at all"

// putBack are the families whose rows somebody puts back. With exactly, the rows that are newer than
// the copy are removed too.
type putBack struct {
	exactly  bool
	families string
}

func (p putBack) String() string {
	if p.exactly {
		return "exactly " + p.families
	}
	return p.families
}

// Somebody who can write the database puts rows back that a change through the interface has
// replaced or deleted. Nothing is gained by it, no answer tells of it, whoever has another tenant
// works on, and the operator hears which rows they are.
func TestRowsThatAreReadBackFromACopyGiveNothing(t *testing.T) {
	type database struct {
		name string
		open servertest.Open
	}
	// A few stories run on PostgreSQL too: all reads take the same way there, and each story takes time.
	both := []database{{"a file", servertest.Bolt}, {"PostgreSQL", servertest.Postgres}}
	file := both[:1]
	for _, story := range []struct {
		name    string
		on      []database
		attacks []putBack
		// begin makes rows. change is made after they were copied, and check is called after they
		// were put back.
		begin func(a *attack) (change, check func())
	}{
		{"an API key was revoked", both, []putBack{{false, "apikey/hash/"}, {false, "apikey/hash/ apikey/tenant/"}}, revokedKey},
		{"a user has a lower role", both, []putBack{{false, "user/row/"}}, demotedUser},
		{"a password was changed", file, []putBack{{false, "user/row/ user/password/"}, {true, "user/row/ user/password/"}, {false, "user/row/"}}, changedPassword},
		{"a session was ended", file, []putBack{{false, "session/row/"}, {false, "session/row/ session/selector/"}}, endedSession},
		{"a refresh token was used", file, []putBack{{false, "session/row/"}}, usedRefreshToken},
		{"a password was reset", file, []putBack{{false, "ticket/hash/"}, {true, "ticket/hash/ ticket/of/"}}, usedReset},
		{"an invitation was accepted", file, []putBack{{false, "ticket/hash/ ticket/of/ invitation/"}}, acceptedInvitation},
		{"an invitation was withdrawn", file, []putBack{{false, "ticket/hash/ ticket/of/ invitation/"}, {false, "invitation/ ticket/hash/"}}, withdrawnInvitation},
		{"a tenant has another limit", file, []putBack{{false, "tenant/"}}, limitedTenant},
		{"a named key was rotated", file, []putBack{{false, "transit/key/"}, {true, "transit/key/ transit/default/ transit/seed/ transit/version/"}}, rotatedKey},
		{"a credential was deleted", both, []putBack{{false, credentialRows}, {false, "credential/"}}, deletedCredential},
		{"a credential was replaced", file, []putBack{{false, credentialRows}, {true, credentialRows}, {true, "credential/"}}, replacedCredential},
		{"a newer credential has the name", both, []putBack{{true, "credential-name/"}}, newerCredential},
	} {
		for _, put := range story.attacks {
			for _, db := range story.on {
				t.Run(fmt.Sprintf("%s, put back %v, in %s", story.name, put, db.name), func(t *testing.T) {
					t.Parallel()
					a := newAttack(t, db.open)
					change, check := story.begin(a)
					a.putBack(put, change, check)
				})
			}
		}
	}
}

// putBack copies rows before a change and puts them back after it. check is called afterwards.
func (a *attack) putBack(put putBack, change, check func()) {
	a.T.Helper()
	families := strings.Fields(put.families)
	a.rows = a.Rows.Copy(families...)
	change()
	if put.exactly {
		for key := range a.Rows.Copy(families...) {
			if _, older := a.rows[key]; !older {
				a.rows[key] = nil
			}
		}
	}
	changed := a.Rows.Attack(a.rows)
	if len(changed) == 0 {
		a.T.Fatal("the attack changes nothing")
	}
	check()
	a.wantNeighbour()
	refused := a.Rows.Refused()
	if len(refused) == 0 || slices.ContainsFunc(refused, func(f string) bool { return !slices.Contains(changed, f) }) {
		a.T.Errorf("reads refused rows of %v, and those of %v were put back", refused, changed)
	}
	if found := a.Rows.Scan(); !slices.Equal(found, changed) {
		a.T.Errorf("a scan finds rows of %v, and those of %v were put back", found, changed)
	}
}

// wantNeighbour fails the test unless the other tenant reads and writes.
func (a *attack) wantNeighbour() {
	a.T.Helper()
	if got := a.ask(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + a.stored, Key: a.neighbour}); got.Status != http.StatusOK {
		a.T.Errorf("the neighbour: %d %s", got.Status, got.Body)
	}
	a.seal(a.neighbour, "theirs, too", "v")
	a.ask(servertest.Request{Method: "POST", Path: "/api/v2/api-keys", Key: a.neighbour, Body: `{"name":"n","scopes":["vault:read"]}`}).Want(a.T, http.StatusCreated)
}

func revokedKey(a *attack) (change, check func()) {
	made := a.Post("/api/v2/api-keys", servertest.Marshal(a.T, fields{"name": "n", "scopes": strings.Fields(servertest.EveryScope)})).Want(a.T, http.StatusCreated)
	key, path := made["api_key"].(string), "/api/v2/api-keys/"+made["key_id"].(string)
	a.ask(of(key)[0]).Want(a.T, http.StatusOK)
	return func() { a.Delete(path).Want(a.T, http.StatusOK) },
		func() { a.unknown(of(key)...) }
}

// join has a member join the tenant of a new owner.
func (a *attack) join(role string) (owner, member servertest.Account, id string) {
	a.T.Helper()
	owner = a.RegisterVerified("ada@example.org")
	a.Send("POST", "/api/v2/members/invite", owner.Access, fields{"email": "bob@example.org", "role": role}).Want(a.T, http.StatusCreated)
	joined := a.Call(a.accept()).Want(a.T, http.StatusCreated)
	return owner, a.Login("bob@example.org", servertest.Password), joined["user"].(fields)["user_id"].(string)
}

// accept returns the request that accepts the invitation of bob.
func (a *attack) accept() servertest.Request {
	a.T.Helper()
	body := servertest.Marshal(a.T, fields{"token": a.TokenMailedTo("bob@example.org", 1), "password": servertest.Password})
	return servertest.Request{Method: "POST", Path: "/api/v2/auth/accept-invitation", Body: body}
}

func demotedUser(a *attack) (change, check func()) {
	ada, bob, id := a.join("admin")
	a.Send("POST", "/api/v2/auth/forgot-password", "", fields{"email": bob.Email}).Want(a.T, http.StatusOK)
	token := a.ResetTokenMailedTo(bob.Email)
	return func() {
			a.Send("PUT", "/api/v2/members/"+id, ada.Access, fields{"role": "auditor"}).Want(a.T, http.StatusOK)
		}, func() {
			a.unknown(ofUser(bob.Access)...)
			a.same(http.StatusUnauthorized, login(a.T, bob.Email, bob.Password), login(a.T, "nobody@example.org", bob.Password))
			a.same(http.StatusUnauthorized, refresh(bob.Refresh), refresh("lk_refresh_"+strings.Repeat("a", 77)))
			a.same(http.StatusBadRequest, reset(a.T, token), reset(a.T, "lk_reset_"+strings.Repeat("a", 52)))
			a.refused(servertest.Request{Method: "GET", Path: "/api/v2/members", Bearer: ada.Access})
			a.refused(servertest.Request{Method: "PUT", Path: "/api/v2/members/" + id, Bearer: ada.Access, Body: `{"role":"auditor"}`})
		}
}

func changedPassword(a *attack) (change, check func()) {
	ada := a.Register("ada@example.org")
	return func() {
			body := fields{"current_password": ada.Password, "new_password": servertest.OtherPassword}
			a.Send("POST", "/api/v2/auth/change-password", ada.Access, body).Want(a.T, http.StatusOK)
		}, func() {
			a.same(http.StatusUnauthorized, login(a.T, ada.Email, ada.Password), login(a.T, ada.Email, wrongPassword))
			a.unknown(ofUser(ada.Access)...)
		}
}

func endedSession(a *attack) (change, check func()) {
	ada := a.Register("ada@example.org")
	sessions := a.Send("GET", "/api/v2/auth/sessions", ada.Access, nil).Want(a.T, http.StatusOK)["sessions"].([]any)
	return func() {
			a.Send("DELETE", "/api/v2/auth/sessions/"+sessions[0].(fields)["session_id"].(string), ada.Access, nil).Want(a.T, http.StatusOK)
		}, func() {
			a.unknown(ofUser(ada.Access)...)
			a.same(http.StatusUnauthorized, refresh(ada.Refresh), refresh("lk_refresh_"+strings.Repeat("a", 77)))
		}
}

func usedRefreshToken(a *attack) (change, check func()) {
	ada := a.Register("ada@example.org")
	return func() { a.Clock.Advance(time.Second); a.Call(refresh(ada.Refresh)).Want(a.T, http.StatusOK) },
		func() {
			a.same(http.StatusUnauthorized, refresh(ada.Refresh), refresh("lk_refresh_"+strings.Repeat("a", 77)))
			a.unknown(ofUser(ada.Access)...)
		}
}

func usedReset(a *attack) (change, check func()) {
	ada := a.Register("ada@example.org")
	a.Send("POST", "/api/v2/auth/forgot-password", "", fields{"email": ada.Email}).Want(a.T, http.StatusOK)
	token := a.ResetTokenMailedTo(ada.Email)
	return func() { a.Call(reset(a.T, token)).Want(a.T, http.StatusOK) },
		func() {
			a.same(http.StatusBadRequest, reset(a.T, token), reset(a.T, "lk_reset_"+strings.Repeat("a", 52)))
			a.ask(login(a.T, ada.Email, servertest.Password)).Message(a.T, http.StatusUnauthorized)
			a.Login(ada.Email, servertest.OtherPassword)
			forgot := func(email string) servertest.Request {
				return servertest.Request{Method: "POST", Path: "/api/v2/auth/forgot-password", Body: servertest.Marshal(a.T, fields{"email": email})}
			}
			a.Clock.Advance(time.Hour)
			a.same(http.StatusOK, forgot(ada.Email), forgot("nobody@example.org"))
		}
}

func acceptedInvitation(a *attack) (change, check func()) {
	ada := a.RegisterVerified("ada@example.org")
	a.Send("POST", "/api/v2/members/invite", ada.Access, fields{"email": "bob@example.org", "role": "admin"}).Want(a.T, http.StatusCreated)
	return func() {
			joined := a.Call(a.accept()).Want(a.T, http.StatusCreated)
			a.Send("DELETE", "/api/v2/members/"+joined["user"].(fields)["user_id"].(string), ada.Access, nil).Want(a.T, http.StatusOK)
		}, func() {
			a.wantNotInvited()
			a.Me(ada.Access)
		}
}

func withdrawnInvitation(a *attack) (change, check func()) {
	ada := a.RegisterVerified("ada@example.org")
	made := a.Send("POST", "/api/v2/members/invite", ada.Access, fields{"email": "bob@example.org", "role": "admin"}).Want(a.T, http.StatusCreated)
	return func() {
			a.Send("DELETE", "/api/v2/members/invitations/"+made["invitation_id"].(string), ada.Access, nil).Want(a.T, http.StatusOK)
		}, func() {
			a.wantNotInvited()
			a.Me(ada.Access)
		}
}

func (a *attack) wantNotInvited() {
	a.T.Helper()
	never := a.accept()
	never.Body = strings.Replace(never.Body, a.TokenMailedTo("bob@example.org", 1), "lk_invite_"+strings.Repeat("a", 52), 1)
	a.same(http.StatusBadRequest, a.accept(), never)
	a.ask(login(a.T, "bob@example.org", servertest.Password)).Message(a.T, http.StatusUnauthorized)
}

func limitedTenant(a *attack) (change, check func()) {
	ada, system := a.RegisterVerified("ada@example.org"), a.SystemKey()
	a.Send("POST", "/api/v2/members/invite", ada.Access, fields{"email": "bob@example.org", "role": "member"}).Want(a.T, http.StatusCreated)
	tenant := a.TenantOf(ada)
	key := a.GrantKeyIn(tenant, authz.TenantScopes()...)
	return func() {
			r := servertest.Request{Method: "PUT", Path: "/api/v2/system/tenants/" + string(tenant) + "/limits", Key: system, Body: `{"v1":10,"v2":10}`}
			a.Call(r).Want(a.T, http.StatusOK)
		}, func() {
			next := a.NextSequence()
			a.same(http.StatusUnauthorized, login(a.T, ada.Email, ada.Password), login(a.T, ada.Email, wrongPassword))
			if entries := a.AllEntries(next); len(entries) != 1 || entries[0].EventType != audit.UserSignedIn || entries[0].Outcome != audit.Denied {
				a.T.Errorf("two sign-ins in a minute leave %v", servertest.Summaries(entries))
			}
			a.same(http.StatusUnauthorized, refresh(ada.Refresh), refresh("lk_refresh_"+strings.Repeat("a", 77)))
			a.unknown(of(key)...)
			a.unknown(ofUser(ada.Access)...)
			a.wantNotInvited()
		}
}

func rotatedKey(a *attack) (change, check func()) {
	id := a.Post("/api/v2/keys", `{"name":"n"}`).Want(a.T, http.StatusCreated)["key"].(fields)["key_id"].(string)
	other := a.Post("/api/v2/keys", `{"name":"other"}`).Want(a.T, http.StatusCreated)["key"].(fields)["key_id"].(string)
	encrypt := func(id string) servertest.Request {
		return servertest.Request{Method: "POST", Path: "/v1/encrypt", Bearer: a.Key, Body: servertest.Marshal(a.T, fields{"data": "x", "algorithm": "ML-KEM-768", "key_id": id})}
	}
	return func() { a.Post("/api/v2/keys/"+id+"/rotate", "").Want(a.T, http.StatusOK) },
		func() {
			for _, r := range []servertest.Request{
				encrypt(id), {Method: "GET", Path: "/api/v2/keys/" + id, Key: a.Key}, {Method: "POST", Path: "/api/v2/keys/" + id + "/rotate", Key: a.Key},
			} {
				a.refused(r)
			}
			a.ask(encrypt(other)).Want(a.T, http.StatusOK)
		}
}

// credentialRows are all rows of a credential.
const credentialRows = "credential/ credential-name/ credential-version/ former/ owner/"

// wantNoCredential fails the test unless the first version of a credential is on no way to be had.
func (a *attack) wantNoCredential(id, name string) {
	a.T.Helper()
	never := authz.NewID("cred")
	for _, op := range []struct{ method, path, body string }{
		{"GET", "/api/v2/vault/ID", ""},
		{"GET", "/api/v2/vault/ID?version=1", ""},
		{"GET", "/api/v2/vault/ID/metadata", ""},
		{"GET", "/api/v2/vault/ID/versions", ""},
		{"PUT", "/api/v2/vault/ID", `{"values":{"k":"w"}}`},
		{"POST", "/api/v2/vault/rotate/ID", ""},
		{"DELETE", "/api/v2/vault/ID", ""},
	} {
		at := func(id string) servertest.Request {
			return servertest.Request{Method: op.method, Path: strings.Replace(op.path, "ID", id, 1), Key: a.Key, Body: op.body}
		}
		a.same(http.StatusForbidden, at(id), at(never))
	}
	a.wantNoName(name)
	for path, list := range map[string]string{"/api/v2/vault/list": "credentials", "/api/v2/vault/summary": "next_to_expire"} {
		for _, c := range a.ask(servertest.Request{Method: "GET", Path: path, Key: a.Key}).Want(a.T, http.StatusOK)[list].([]any) {
			if c := c.(fields); c["credential_id"] == id && c["version"] == 1.0 {
				a.T.Errorf("%s has %v", path, c)
			}
		}
	}
}

func (a *attack) wantNoName(name string) {
	a.T.Helper()
	at := func(name string) servertest.Request {
		return servertest.Request{Method: "GET", Path: "/api/v2/vault/by-name/" + name, Key: a.Key}
	}
	a.same(http.StatusForbidden, at(name), at("never"))
}

func deletedCredential(a *attack) (change, check func()) {
	id, other := a.seal(a.Key, "pay", "gone"), a.seal(a.Key, "other", "v")
	return func() { a.Delete("/api/v2/vault/"+id).Want(a.T, http.StatusOK) },
		func() {
			a.wantNoCredential(id, "pay")
			a.ask(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + other, Key: a.Key}).Want(a.T, http.StatusOK)
		}
}

func replacedCredential(a *attack) (change, check func()) {
	id, other := a.seal(a.Key, "pay", "older"), a.seal(a.Key, "other", "v")
	return func() {
			a.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/" + id, Key: a.Key, Body: `{"values":{"k":"newer"}}`}).Want(a.T, http.StatusOK)
		}, func() {
			a.wantNoCredential(id, "pay")
			a.ask(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + other, Key: a.Key}).Want(a.T, http.StatusOK)
		}
}

func newerCredential(a *attack) (change, check func()) {
	older, newer := a.seal(a.Key, "pay", "older"), ""
	return func() {
			a.Clock.Advance(time.Minute)
			newer = a.seal(a.Key, "pay", "newer")
		}, func() {
			a.wantNoName("pay")
			for _, id := range []string{older, newer} {
				a.ask(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + id, Key: a.Key}).Want(a.T, http.StatusOK)
			}
		}
}

// A row of the deployment itself decides for all tenants. When a retired sealing key is put back,
// nothing is answered until the row is mended, whoever asks for what.
func TestAServerWhoseOwnRowsArePutBackAnswersNothing(t *testing.T) {
	w := newWorld(t, "plain")
	all := operations(t)
	requests := make(map[string]servertest.Request)
	for name, o := range all {
		if name != "v2 acceptRollback" { // it is for a log that lost entries
			requests[name] = w.authorized(o, examples[name](w, o))
		}
	}
	system := w.SystemKey()
	retired := w.Call(servertest.Request{Method: "GET", Path: "/api/v2/sealing-key"}).Want(t, http.StatusOK)["key_id"].(string)
	w.Call(servertest.Request{Method: "POST", Path: "/api/v2/system/sealing-keys/rotate", Key: system}).Want(t, http.StatusCreated)
	rows := w.Rows.Copy("sealing/")
	w.Call(servertest.Request{Method: "POST", Path: "/api/v2/system/sealing-keys/" + retired + "/retire", Key: system}).Want(t, http.StatusOK)
	changed := w.Rows.Attack(rows)
	if !slices.Equal(changed, []string{"sealing/key/"}) {
		t.Fatalf("the attack changes %v", changed)
	}
	listed := w.Call(servertest.Request{Method: "GET", Path: "/api/v2/system/sealing-keys", Key: system})
	listed.Message(t, http.StatusServiceUnavailable)
	servertest.WantNoRowIn(t, listed, rows)
	if refused := w.Rows.Refused(); !slices.Equal(refused, changed) {
		t.Errorf("a read refused rows of %v", refused)
	}
	head := w.NextSequence()
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		r := w.Call(requests[name])
		if r.Status != http.StatusServiceUnavailable {
			t.Errorf("%s: %d %.300s", name, r.Status, r.Body)
		}
		servertest.WantNoRowIn(t, r, rows)
	}
	if next := w.NextSequence(); next != head {
		t.Errorf("%d entries were written", next-head)
	}
	for path, status := range map[string]int{"/healthz": 200, "/diagnosis": 200, "/metrics": 200, "/readyz": 200} {
		r := w.Call(servertest.Request{Method: "GET", Path: path, Key: w.keys["metrics:read"]})
		if r.Status != status {
			t.Errorf("%s: %d %s", path, r.Status, r.Body)
		}
		servertest.WantNoRowIn(t, r, rows)
	}
	if found := w.Rows.Scan(); !slices.Equal(found, changed) {
		t.Errorf("a scan finds rows of %v", found)
	}
}
