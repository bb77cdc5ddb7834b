package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// indistinct sends every case of a question several times, in an order drawn
// anew each time, and fails unless all are answered with one status, one body
// but for the request's id, and the same headers. The clock stands still.
func (s *service) indistinct(t *testing.T, question string, status int, cases map[string]request) {
	t.Helper()
	const rounds = 3
	var order []string
	for range rounds {
		for name := range cases {
			order = append(order, name)
		}
	}
	rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	want, wanted, remaining := "", "", 0
	for i, name := range order {
		r := s.call(cases[name])
		if r.status != status {
			t.Errorf("%s, %s: %d, want %d: %s", question, name, r.status, status, r.body)
			continue
		}
		left, err := strconv.Atoi(r.header.Get("X-RateLimit-Remaining"))
		if err != nil || i > 0 && left != remaining-1 {
			t.Errorf("%s, %s: %d requests remain after %d: %v", question, name, left, remaining, err)
		}
		remaining = left
		if got := r.mask(t); want == "" {
			want, wanted = got, name
		} else if got != want {
			t.Errorf("%s\n%s: %s\n%s: %s", question, name, got, wanted, want)
		}
	}
}

// mask returns the whole answer without what is of its own in every answer.
func (r reply) mask(t testing.TB) string {
	t.Helper()
	id := r.header.Get("X-Request-ID")
	header := r.header.Clone()
	for _, own := range []string{"X-Request-ID", "X-RateLimit-Remaining", "Date"} {
		if header.Get(own) == "" {
			t.Errorf("no header %s", own)
		}
		header.Del(own)
	}
	return fmt.Sprint(r.status, header, strings.ReplaceAll(string(r.body), id, "its own"))
}

// denials returns how many attempts of a kind are recorded as denied.
func (s *service) denials(event string) (n int) {
	s.t.Helper()
	for cursor := ""; ; {
		page := s.get("/api/v2/audit/logs?limit=100&event_type="+event+cursor).want(s.t, http.StatusOK)
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
	s.t.Helper()
	body := marshal(s.t, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}, "ttl_days": 10})
	return s.post("/api/v2/vault/seal", body).want(s.t, http.StatusCreated)["credential_id"].(string)
}

// Foreign, deleted, expired, never existing and malformed credentials are one
// case, on every operation that names one; each attempt leaves one entry.
func TestNothingTellsWhyACredentialIsNotThere(t *testing.T) {
	s := newService(t)
	foreign, err := s.vault.Seal(context.Background(), s.stranger(), vault.SealRequest{
		Name: "foreign", Type: "t", Values: map[string]secret.Bytes{"k": secret.Bytes("v")},
	})
	if err != nil {
		t.Fatal(err)
	}
	deleted, expired := s.sealNamed("deleted"), s.sealNamed("expired")
	s.remove("/api/v2/vault/"+deleted).want(t, http.StatusOK)
	ended := s.rotatedTo(s.operator(), "old", "new").ID
	s.clock.advance(11 * 24 * time.Hour)
	there, replaced := s.sealNamed("there"), s.sealNamed("replaced")
	s.call(request{method: "PUT", path: "/api/v2/vault/" + replaced, key: s.key, body: `{"values":{"k":"w"}}`}).want(t, http.StatusOK)
	neighbours := s.rotatedTo(s.stranger(), "old", "new").ID
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
	} {
		cases := make(map[string]request)
		for name, id := range op.cases {
			if name != "expired" || op.name != "delete" && op.name != "metadata" { // what has expired can be deleted, and is listed
				cases[name] = request{method: op.method, path: op.before + id + op.after, key: s.key, body: op.body}
			}
		}
		before := s.denials(op.event)
		s.indistinct(t, op.name, http.StatusForbidden, cases)
		if n := s.denials(op.event) - before; n != 3*len(cases) {
			t.Errorf("%s: %d entries of %d attempts", op.name, n, 3*len(cases))
		}
	}
	for _, path := range []string{there, there + "?version=1", replaced + "?version=2", ended, ended + "?version=2", "by-name/there", expired + "/metadata"} {
		s.get("/api/v2/vault/"+path).want(t, http.StatusOK)
	}
	if got, err := s.vault.Unseal(context.Background(), s.stranger(), foreign.ID); err != nil || got.Version != 1 {
		t.Errorf("the neighbour's credential: %v", err)
	}
}

// What is another tenant's is like what was never there.
func TestNothingTellsOfANeighboursObjects(t *testing.T) {
	s := newService(t)
	a, b := s.verified("ada@example.org"), s.verified("bob@example.org")
	made := func(u account) map[string]string {
		t.Helper()
		invitation := s.send("POST", "/api/v2/members/invite", u.access, fields{"email": "of-" + u.email, "role": "member"}).want(t, http.StatusCreated)
		scopes := []string{"keys:read", "keys:write", "crypto:encrypt", "crypto:decrypt"}
		key := s.send("POST", "/api/v2/api-keys", u.access, fields{"name": "n", "scopes": scopes}).want(t, http.StatusCreated)
		named := s.call(request{method: "POST", path: "/v1/keys/generate", bearer: key["api_key"].(string), body: `{"algorithm":"ML-KEM-768","name":"n"}`})
		sessions := s.send("GET", "/api/v2/auth/sessions", u.access, nil).want(t, http.StatusOK)["sessions"].([]any)
		return map[string]string{
			"user": s.me(u.access)["user"].(fields)["user_id"].(string), "invitation": invitation["invitation_id"].(string),
			"api key": key["key_id"].(string), "secret": key["api_key"].(string),
			"key": named.want(t, http.StatusCreated)["key_id"].(string), "session": sessions[0].(fields)["session_id"].(string),
		}
	}
	own, foreign := made(a), made(b)
	for _, kind := range []string{"invitation", "api key"} { // gone
		path := map[string]string{"invitation": "/api/v2/members/invitations/", "api key": "/api/v2/api-keys/"}[kind]
		gone := made(account{access: a.access, email: kind[:1] + "@example.org"})
		s.send("DELETE", path+gone[kind], a.access, nil).want(t, http.StatusOK)
		own["gone "+kind] = gone[kind]
	}
	body := marshal(t, fields{"data": "x", "algorithm": "ML-KEM-768", "key_id": own["key"]})
	data := s.call(request{method: "POST", path: "/v1/encrypt", bearer: own["secret"], body: body}).want(t, http.StatusOK)["encrypted_data"]
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
		{"key", "tkey", "POST", "/v1/decrypt", marshal(t, fields{"encrypted_data": data, "key_id": "ID"})},
		{"key", "tkey", "POST", "/v1/rewrap", marshal(t, fields{"encrypted_data": data, "key_id": "ID"})},
	} {
		cases := make(map[string]request)
		for name, id := range map[string]string{
			"foreign": foreign[op.kind], "never existing": authz.NewID(op.prefix), "malformed": "x", "gone": own["gone "+op.kind],
			"of another kind": authz.NewID("cred"), "upper case": strings.ToUpper(own[op.kind]),
		} {
			if id == "" {
				continue
			}
			r := request{method: op.method, path: strings.Replace(op.path, "ID", id, 1), body: strings.Replace(op.body, "ID", id, 1), bearer: a.access}
			if op.kind == "key" {
				r.bearer = own["secret"]
			}
			if op.kind == "key" && strings.HasPrefix(op.path, "/api/v2/") {
				r.bearer, r.key = "", own["secret"]
			}
			cases[name] = r
		}
		s.indistinct(t, op.method+" "+op.path, http.StatusNotFound, cases)
	}
	if after := s.me(b.access); after["user"].(fields)["role"] != "owner" {
		t.Errorf("the neighbour is now %v", after)
	}
	s.call(request{method: "POST", path: "/v1/keys/" + foreign["key"] + "/rotate", bearer: foreign["secret"]}).want(t, http.StatusOK)
	s.send("DELETE", "/api/v2/members/invitations/"+foreign["invitation"], b.access, nil).want(t, http.StatusOK)
}

// Sign-in, the request of a reset and the tokens of mails tell nobody who has
// an account.
func TestNothingTellsWhoHasAnAccount(t *testing.T) {
	s := newService(t)
	s.register("ada@example.org")
	s.register("slow@example.org")
	login := func(email, password string) request {
		return request{method: "POST", path: "/api/v2/auth/login", body: marshal(t, fields{"email": email, "password": password})}
	}
	for range 5 {
		s.call(login("slow@example.org", "wrong")).message(t, http.StatusUnauthorized)
	}
	s.indistinct(t, "login", http.StatusUnauthorized, map[string]request{
		"unknown": login("nobody@example.org", testPassword), "wrong password": login("ada@example.org", "wrong"),
		"slowed down": login("slow@example.org", "wrong"), "slowed down, right password": login("slow@example.org", testPassword),
		"no address": login("nobody", testPassword), "no domain": login("ada@", testPassword), "two addresses": login("a@b@example.org", testPassword),
		"longest password": login("ada@example.org", strings.Repeat("x", 1024)), "NUL": login("ada@example.org\x00", testPassword),
	})

	forgot := func(email string) request {
		return request{method: "POST", path: "/api/v2/auth/forgot-password", body: marshal(t, fields{"email": email})}
	}
	s.indistinct(t, "forgot-password", http.StatusOK, map[string]request{ // the second of the known address was mailed a moment ago
		"known": forgot("ada@example.org"), "unknown": forgot("nobody@example.org"), "slowed down": forgot("slow@example.org"),
		"no address": forgot("nobody"), "another spelling": forgot(" ADA@example.ORG"),
	})

	never := strings.Repeat("a", 52)
	verify, reset := s.tokenTo("ada@example.org", 1), s.resetTokenTo("ada@example.org")
	for path, kind := range map[string]string{"verify-email": "verify", "reset-password": "reset", "accept-invitation": "invite"} {
		cases := make(map[string]request)
		for name, token := range map[string]string{"never existing": "lk_" + kind + "_" + never, "malformed": "x", "verification": verify, "reset": reset} {
			if strings.HasPrefix(token, "lk_"+kind) && name != "never existing" {
				token += "a"
			}
			body := marshal(t, fields{"token": token, "password": otherTestPassword, "new_password": otherTestPassword})
			cases[name] = request{method: "POST", path: "/api/v2/auth/" + path, body: body}
		}
		s.indistinct(t, path, http.StatusBadRequest, cases)
	}
	use := func() request {
		return request{method: "POST", path: "/api/v2/auth/reset-password", body: marshal(t, fields{"token": reset, "new_password": otherTestPassword})}
	}
	s.call(use()).want(t, http.StatusOK)
	expired := s.resetTokenTo("slow@example.org")
	s.clock.advance(time.Hour)
	s.indistinct(t, "used and expired", http.StatusBadRequest, map[string]request{
		"used": use(), "never existing": {method: "POST", path: use().path, body: strings.Replace(use().body, reset, "lk_reset_"+never, 1)},
		"expired": {method: "POST", path: use().path, body: strings.Replace(use().body, reset, expired, 1)},
	})
}

// Guesses slow an account down, wherever they come from and however many come
// at once, and never another account; the wait grows and ends.
func TestGuessesSlowAnAccountDown(t *testing.T) {
	s := newService(t)
	s.register("ada@example.org")
	s.register("bob@example.org")
	try := func(email, password string) int {
		return s.send("POST", "/api/v2/auth/login", "", fields{"email": email, "password": password}).status
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
		s.clock.advance(wait - time.Millisecond)
		if status := try("ADA@example.org", testPassword); status != http.StatusUnauthorized {
			t.Errorf("wait %d: the right password: %d", i, status)
		}
		if status := try("bob@example.org", testPassword); status != http.StatusOK {
			t.Errorf("wait %d: another account: %d", i, status)
		}
		s.clock.advance(time.Millisecond)
		if i < 2 {
			try("ada@example.org", "wrong")
		}
	}
	if status := try("ada@example.org", testPassword); status != http.StatusOK {
		t.Errorf("after the wait: %d", status)
	}
}
