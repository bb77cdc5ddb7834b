package server_test

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// denials returns how many attempts of a kind are recorded as denied.
func (s *service) denials(event string) (n int) {
	s.T.Helper()
	for cursor := ""; ; {
		page := s.Get("/api/v2/audit/logs?limit=100&event_type="+event+cursor).Want(s.T, http.StatusOK)
		for _, e := range page["entries"].([]any) {
			if e := e.(fields); e["outcome"] == "denied" {
				n++
			}
		}
		next, more := page["next_cursor"].(string)
		if !more {
			return n
		}
		cursor = "&cursor=" + url.QueryEscape(next)
	}
}

func (s *service) sealNamed(name string) string {
	s.T.Helper()
	body := servertest.Marshal(s.T, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}, "ttl_days": 10})
	return s.Post("/api/v2/vault/seal", body).Want(s.T, http.StatusCreated)["credential_id"].(string)
}

// Foreign, deleted, expired, never existing and malformed credentials are one
// case, on every operation that names one; each attempt leaves one entry.
func TestNothingTellsWhyACredentialIsNotThere(t *testing.T) {
	s := newService(t)
	foreign, err := s.Vault.Seal(context.Background(), s.Stranger(), vault.SealRequest{
		Name: "foreign", Type: "t", Values: map[string]secret.Bytes{"k": secret.Bytes("v")},
	})
	if err != nil {
		t.Fatal(err)
	}
	deleted, expired := s.sealNamed("deleted"), s.sealNamed("expired")
	s.Delete("/api/v2/vault/"+deleted).Want(t, http.StatusOK)
	ended := s.SealOwnedVersions(s.Operator(), "old", "new").ID
	s.Clock.Advance(11 * 24 * time.Hour)
	there, replaced := s.sealNamed("there"), s.sealNamed("replaced")
	s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/" + replaced, Key: s.Key, Body: `{"values":{"k":"w"}}`}).Want(t, http.StatusOK)
	neighbours := s.SealOwnedVersions(s.Stranger(), "old", "new").ID
	ids := map[string]string{
		"foreign": foreign.ID, "deleted": deleted, "expired": expired, "never existing": authz.NewID("cred"), "malformed": "x",
		"upper case": strings.ToUpper(there), "another spelling": "%20" + there, "too long": strings.Repeat("a", 3000), "NUL": "%00", "not UTF-8": "%ff",
		"of another kind": authz.NewID("key"), "slash": there + "%2F", "dots": "%2e%2e",
	}
	names := map[string]string{
		"foreign": "foreign", "deleted": "deleted", "expired": "expired", "never existing": "never", "NUL": "%00", "not UTF-8": "%ff",
		"too long": strings.Repeat("n", 256), "upper case": "There", "white space": "there%20", "slash": "there%2F", "an id": there,
	}
	versions := map[string]string{
		"a neighbour's former": neighbours + "?version=1", "a neighbour's current": neighbours + "?version=2",
		"ended": ended + "?version=1", "of an object, never made": ended + "?version=3",
		"replaced": replaced + "?version=1", "never made": there + "?version=2", "the largest": there + "?version=9223372036854775807",
	}
	for name, id := range ids {
		versions[name] = id + "?version=1"
	}
	const replacement = `{"values":{"k":"w"}}`
	writer := s.GrantKey(authz.VaultWrite)
	for _, op := range []struct {
		name, method, before, after, body, event string
		cases                                    map[string]string
	}{
		{"unseal", "GET", "/api/v2/vault/", "", "", "CREDENTIAL_UNSEALED", ids},
		{"unseal a version", "GET", "/api/v2/vault/", "", "", "CREDENTIAL_UNSEALED", versions},
		{"unseal by name", "GET", "/api/v2/vault/by-name/", "", "", "CREDENTIAL_UNSEALED", names},
		{"versions", "GET", "/api/v2/vault/", "/versions", "", "CREDENTIAL_LISTED", ids},
		{"metadata", "GET", "/api/v2/vault/", "/metadata", "", "CREDENTIAL_LISTED", ids},
		{"replace", "PUT", "/api/v2/vault/", "", replacement, "CREDENTIAL_ROTATED", ids},
		{"rotate", "POST", "/api/v2/vault/rotate/", "", "", "CREDENTIAL_REENCRYPTED", ids},
		{"delete", "DELETE", "/api/v2/vault/", "", "", "CREDENTIAL_DELETED", ids},
		{"replace if", "PUT", "/api/v2/vault/", "", replacement, "CREDENTIAL_ROTATED", ids},
		{"rotate if", "POST", "/api/v2/vault/rotate/", "", "", "CREDENTIAL_REENCRYPTED", ids},
		{"delete if", "DELETE", "/api/v2/vault/", "", "", "CREDENTIAL_DELETED", ids},
	} {
		cases := make(map[string]servertest.Request)
		for name, id := range op.cases {
			if name != "expired" || op.name != "delete" && op.name != "metadata" { // what has expired can be deleted, and is listed
				cases[name] = servertest.Request{Method: op.method, Path: op.before + id + op.after, Key: s.Key, Body: op.body}
			}
		}
		if strings.HasSuffix(op.name, " if") { // to a writer, a credential that is there is another such case
			cases["no reader"] = servertest.Request{Method: op.method, Path: op.before + there + op.after, Key: writer, Body: op.body}
			for name, r := range cases {
				r.Header = http.Header{"If-Match": {`"x"`}}
				cases[name] = r
			}
		}
		before := s.denials(op.event)
		s.WantIndistinct(t, op.name, http.StatusForbidden, cases)
		if n := s.denials(op.event) - before; n != 3*len(cases) {
			t.Errorf("%s: %d entries of %d attempts", op.name, n, 3*len(cases))
		}
	}
	for _, path := range []string{there, there + "?version=1", replaced + "?version=2", ended, ended + "?version=2", "by-name/there", expired + "/metadata"} {
		s.Get("/api/v2/vault/"+path).Want(t, http.StatusOK)
	}
	if got, err := s.Vault.Read(context.Background(), s.Stranger(), vault.ByID(foreign.ID)); err != nil || got.Version != 1 {
		t.Errorf("the neighbour's credential: %v", err)
	}
}

// What is another tenant's is like what was never there.
func TestNothingTellsOfANeighboursObjects(t *testing.T) {
	s := newService(t)
	a, b := s.RegisterVerified("ada@example.org"), s.RegisterVerified("bob@example.org")
	made := func(u servertest.Account) map[string]string {
		t.Helper()
		invitation := s.Send("POST", "/api/v2/members/invite", u.Access, fields{"email": "of-" + u.Email, "role": "member"}).Want(t, http.StatusCreated)
		scopes := []string{"keys:read", "keys:write", "crypto:encrypt", "crypto:decrypt"}
		key := s.Send("POST", "/api/v2/api-keys", u.Access, fields{"name": "n", "scopes": scopes}).Want(t, http.StatusCreated)
		named := s.Call(servertest.Request{Method: "POST", Path: "/v1/keys/generate", Bearer: key["api_key"].(string), Body: `{"algorithm":"ML-KEM-768","name":"n"}`})
		sessions := s.Send("GET", "/api/v2/auth/sessions", u.Access, nil).Want(t, http.StatusOK)["sessions"].([]any)
		return map[string]string{
			"user": s.Me(u.Access)["user"].(fields)["user_id"].(string), "invitation": invitation["invitation_id"].(string),
			"api key": key["key_id"].(string), "secret": key["api_key"].(string),
			"key": named.Want(t, http.StatusCreated)["key_id"].(string), "session": sessions[0].(fields)["session_id"].(string),
		}
	}
	own, foreign := made(a), made(b)
	for _, kind := range []string{"invitation", "api key"} { // gone
		path := map[string]string{"invitation": "/api/v2/members/invitations/", "api key": "/api/v2/api-keys/"}[kind]
		gone := made(servertest.Account{Access: a.Access, Email: kind[:1] + "@example.org"})
		s.Send("DELETE", path+gone[kind], a.Access, nil).Want(t, http.StatusOK)
		own["gone "+kind] = gone[kind]
	}
	body := servertest.Marshal(t, fields{"data": "x", "algorithm": "ML-KEM-768", "key_id": own["key"]})
	data := s.Call(servertest.Request{Method: "POST", Path: "/v1/encrypt", Bearer: own["secret"], Body: body}).Want(t, http.StatusOK)["encrypted_data"]
	for _, op := range []struct{ kind, prefix, method, path, body string }{
		{"user", "usr", "PUT", "/api/v2/members/ID", `{"role":"member"}`},
		{"user", "usr", "DELETE", "/api/v2/members/ID", ""},
		{"invitation", "inv", "DELETE", "/api/v2/members/invitations/ID", ""},
		{"api key", "key", "DELETE", "/api/v2/api-keys/ID", ""},
		{"session", "ses", "DELETE", "/api/v2/auth/sessions/ID", ""},
		{"key", "tkey", "POST", "/v1/keys/ID/rotate", ""},
		{"key", "tkey", "GET", "/api/v2/keys/ID", ""},
		{"key", "tkey", "POST", "/api/v2/keys/ID/rotate", ""},
		{"key", "tkey", "POST", "/v1/encrypt", `{"data":"x","algorithm":"ML-KEM-768","key_id":"ID"}`},
		{"key", "tkey", "POST", "/api/v2/encryption/encrypt", `{"data":"x","key_id":"ID"}`},
		{"key", "tkey", "POST", "/api/v2/encryption/encrypt/batch", `{"key_id":"ID","items":[{"data":"x"}]}`},
		{"key", "tkey", "POST", "/v1/decrypt", servertest.Marshal(t, fields{"encrypted_data": data, "key_id": "ID"})},
		{"key", "tkey", "POST", "/v1/rewrap", servertest.Marshal(t, fields{"encrypted_data": data, "key_id": "ID"})},
	} {
		cases := make(map[string]servertest.Request)
		for name, id := range map[string]string{
			"foreign": foreign[op.kind], "never existing": authz.NewID(op.prefix), "malformed": "x", "gone": own["gone "+op.kind],
			"of another kind": authz.NewID("cred"), "upper case": strings.ToUpper(own[op.kind]),
		} {
			if id == "" {
				continue
			}
			r := servertest.Request{Method: op.method, Path: strings.Replace(op.path, "ID", id, 1), Body: strings.Replace(op.body, "ID", id, 1), Bearer: a.Access}
			if op.kind == "key" {
				r.Bearer = own["secret"]
			}
			if op.kind == "key" && strings.HasPrefix(op.path, "/api/v2/") {
				r.Bearer, r.Key = "", own["secret"]
			}
			cases[name] = r
		}
		s.WantIndistinct(t, op.method+" "+op.path, http.StatusNotFound, cases)
	}
	if after := s.Me(b.Access); after["user"].(fields)["role"] != "owner" {
		t.Errorf("the neighbour is now %v", after)
	}
	s.Call(servertest.Request{Method: "POST", Path: "/v1/keys/" + foreign["key"] + "/rotate", Bearer: foreign["secret"]}).Want(t, http.StatusOK)
	s.Send("DELETE", "/api/v2/members/invitations/"+foreign["invitation"], b.Access, nil).Want(t, http.StatusOK)
}

// Sign-in, the request of a reset and the tokens of mails tell nobody who has
// an account.
func TestNothingTellsWhoHasAnAccount(t *testing.T) {
	s := newService(t)
	s.Register("ada@example.org")
	s.Register("slow@example.org")
	login := func(email, password string) servertest.Request {
		return servertest.Request{Method: "POST", Path: "/api/v2/auth/login", Body: servertest.Marshal(t, fields{"email": email, "password": password})}
	}
	for range 5 {
		s.Call(login("slow@example.org", "wrong")).Message(t, http.StatusUnauthorized)
	}
	s.WantIndistinct(t, "login", http.StatusUnauthorized, map[string]servertest.Request{
		"unknown": login("nobody@example.org", servertest.Password), "wrong password": login("ada@example.org", "wrong"),
		"slowed down": login("slow@example.org", "wrong"), "slowed down, right password": login("slow@example.org", servertest.Password),
		"no address": login("nobody", servertest.Password), "no domain": login("ada@", servertest.Password), "two addresses": login("a@b@example.org", servertest.Password),
		"longest password": login("ada@example.org", strings.Repeat("x", 1024)), "NUL": login("ada@example.org\x00", servertest.Password),
	})

	forgot := func(email string) servertest.Request {
		return servertest.Request{Method: "POST", Path: "/api/v2/auth/forgot-password", Body: servertest.Marshal(t, fields{"email": email})}
	}
	s.WantIndistinct(t, "forgot-password", http.StatusOK, map[string]servertest.Request{ // the second of the known address was mailed a moment ago
		"known": forgot("ada@example.org"), "unknown": forgot("nobody@example.org"), "slowed down": forgot("slow@example.org"),
		"no address": forgot("nobody"), "another spelling": forgot(" ADA@example.ORG"),
	})

	never := strings.Repeat("a", 52)
	verify, reset := s.TokenMailedTo("ada@example.org", 1), s.ResetTokenMailedTo("ada@example.org")
	for path, kind := range map[string]string{"verify-email": "verify", "reset-password": "reset", "accept-invitation": "invite"} {
		cases := make(map[string]servertest.Request)
		for name, token := range map[string]string{"never existing": "lk_" + kind + "_" + never, "malformed": "x", "verification": verify, "reset": reset} {
			if strings.HasPrefix(token, "lk_"+kind) && name != "never existing" {
				token += "a"
			}
			body := fields{"token": token}
			switch kind {
			case "reset":
				body["new_password"] = servertest.OtherPassword
			case "invite":
				body["password"] = servertest.OtherPassword
			}
			cases[name] = servertest.Request{Method: "POST", Path: "/api/v2/auth/" + path, Body: servertest.Marshal(t, body)}
		}
		s.WantIndistinct(t, path, http.StatusBadRequest, cases)
	}
	use := func() servertest.Request {
		return servertest.Request{Method: "POST", Path: "/api/v2/auth/reset-password", Body: servertest.Marshal(t, fields{"token": reset, "new_password": servertest.OtherPassword})}
	}
	s.Call(use()).Want(t, http.StatusOK)
	expired := s.ResetTokenMailedTo("slow@example.org")
	s.Clock.Advance(time.Hour)
	s.WantIndistinct(t, "used and expired", http.StatusBadRequest, map[string]servertest.Request{
		"used": use(), "never existing": {Method: "POST", Path: use().Path, Body: strings.Replace(use().Body, reset, "lk_reset_"+never, 1)},
		"expired": {Method: "POST", Path: use().Path, Body: strings.Replace(use().Body, reset, expired, 1)},
	})
}

// Guesses slow an account down, wherever they come from and however many come
// at once, and never another account; the wait grows and ends.
func TestGuessesSlowAnAccountDown(t *testing.T) {
	s := newService(t)
	s.Register("ada@example.org")
	s.Register("bob@example.org")
	try := func(email, password string) int {
		return s.Send("POST", "/api/v2/auth/login", "", fields{"email": email, "password": password}).Status
	}
	var refused atomic.Int64
	for refused.Load() < 5 { // a slow machine tells some to come again
		var guesses sync.WaitGroup
		for range 5 - refused.Load() {
			guesses.Go(func() {
				switch status := try("ada@example.org", "wrong"); status {
				case http.StatusUnauthorized:
					refused.Add(1)
				case http.StatusServiceUnavailable:
				default:
					t.Errorf("status %d", status)
				}
			})
		}
		guesses.Wait()
	}
	for i, wait := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second} {
		s.Clock.Advance(wait - time.Millisecond)
		if status := try("ADA@example.org", servertest.Password); status != http.StatusUnauthorized {
			t.Errorf("wait %d: the right password: %d", i, status)
		}
		if status := try("bob@example.org", servertest.Password); status != http.StatusOK {
			t.Errorf("wait %d: another account: %d", i, status)
		}
		s.Clock.Advance(time.Millisecond)
		if i < 2 {
			try("ada@example.org", "wrong")
		}
	}
	if status := try("ada@example.org", servertest.Password); status != http.StatusOK {
		t.Errorf("after the wait: %d", status)
	}
}
