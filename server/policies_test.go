package server_test

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// joined returns a new member of a tenant that has the role.
func (s *service) joined(owner servertest.Account, email, role string) (a servertest.Account, id string) {
	s.T.Helper()
	s.Send("POST", "/api/v2/members/invite", owner.Access, fields{"email": email, "role": role}).Want(s.T, http.StatusCreated)
	s.Send("POST", "/api/v2/auth/accept-invitation", "", fields{"token": s.TokenMailedTo(email, 1), "password": servertest.Password}).Want(s.T, http.StatusCreated)
	a = s.Login(email, servertest.Password)
	return a, s.Me(a.Access)["user"].(fields)["user_id"].(string)
}

// policy makes a policy with all verbs on a path and binds it.
func (s *service) policy(owner servertest.Account, path string, subjects ...string) {
	s.T.Helper()
	rules := []fields{{"path": path, "verbs": []string{"list", "read", "write", "delete"}}}
	made := s.Send("POST", "/api/v2/access/policies", owner.Access, fields{"name": path, "rules": rules}).Want(s.T, http.StatusCreated)
	id := made["policy"].(fields)["policy_id"]
	for _, subject := range subjects {
		s.Send("PUT", "/api/v2/access/bindings/"+subject, owner.Access, fields{"policies": []any{id}}).Want(s.T, http.StatusOK)
	}
}

// Two tenants, and two users, two API keys and two ServiceAccounts of one of them: through no route and
// no reference does anything of one cross to another, or is told by a status, a header, a body, a count
// or a cursor.
func TestNothingCrossesBetweenPolicies(t *testing.T) {
	s := newService(t)
	owner, stranger := s.RegisterVerified("ada@example.org"), s.RegisterVerified("bob@example.org")
	tenant := s.TenantOf(owner)
	pods := s.UsePods(tenant)
	pods.Allow(servertest.AllowAll)
	second := servertest.PodToken("second")
	account := pods.Accounts[servertest.ShopToken]
	account.Name, account.UID, account.Pod = "second", "account-second", "pod-second"
	pods.Accounts[second] = account

	bearers := map[string]string{} // by path and kind
	var subjects = map[string][]string{}
	for i, team := range []string{"red", "blue"} {
		user, id := s.joined(owner, team+"@example.org", "limited")
		key := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": team, "scopes": []string{"vault:read", "vault:write"}}).Want(t, http.StatusCreated)
		pod := []struct{ name, token string }{{"app", servertest.ShopToken}, {"second", second}}[i]
		bearers[team+" user"], bearers[team+" pod"], bearers[team+" key"] = user.Access, pod.token, key["api_key"].(string)
		subjects[team] = []string{id, key["key_id"].(string), "system:serviceaccount:shop:" + pod.name}
	}
	call := func(who, method, path string, body any) servertest.Request {
		r := servertest.Request{Method: method, Path: path}
		if body != nil {
			r.Body = servertest.Marshal(t, body)
		}
		if strings.HasSuffix(who, "key") {
			r.Key = bearers[who]
		} else {
			r.Bearer = bearers[who]
		}
		return r
	}
	sealed := func(access, name string) string {
		return s.Send("POST", "/api/v2/vault/seal", access, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}}).Want(t, http.StatusCreated)["credential_id"].(string)
	}

	// Before anything is bound, a limited user has nothing, and the others have everything.
	first := sealed(owner.Access, "red/first")
	for who := range bearers {
		want := http.StatusOK
		if strings.HasSuffix(who, "user") {
			want = http.StatusForbidden
		}
		s.Call(call(who, "GET", "/api/v2/vault/"+first, nil)).Want(t, want)
	}
	s.policy(owner, "red/**", subjects["red"]...)
	s.policy(owner, "blue/*", subjects["blue"]...)
	own := map[string][]string{"red": {first}}
	for i := range 3 {
		for _, team := range []string{"red", "blue"} {
			own[team] = append(own[team], sealed(owner.Access, fmt.Sprint(team, "/", i)))
		}
	}
	foreign := sealed(stranger.Access, "red/foreign")

	// view is what lists and totals tell somebody.
	view := func(who string) (told string) {
		for _, path := range []string{"/api/v2/vault/list", "/api/v2/vault/list?limit=2", "/api/v2/vault/list?q=0", "/api/v2/vault/list?limit=1&credential_type=t", "/api/v2/vault/list?q=blue&limit=2", "/api/v2/vault/summary"} {
			for next := ""; ; {
				at := path
				if next != "" {
					at += "&cursor=" + url.QueryEscape(next)
				}
				page := s.Call(call(who, "GET", at, nil)).Want(t, http.StatusOK)
				told += fmt.Sprintln(path, page["credentials"], page["total"], page["complete"], page["credential_types"], page["next_to_expire"])
				more, ok := page["next_cursor"].(string)
				if next = more; !ok {
					break
				}
			}
		}
		return told
	}
	before := map[string]string{}
	for who := range bearers {
		team, _, _ := strings.Cut(who, " ")
		before[who] = view(who)
		for _, id := range own[team] {
			if !strings.Contains(before[who], id) {
				t.Errorf("%s does not see %s", who, id)
			}
		}
		if other := map[string]string{"red": "blue", "blue": "red"}[team]; strings.Contains(before[who], "name:"+other) || strings.Contains(before[who], "foreign") {
			t.Errorf("%s sees %s", who, before[who])
		}
	}
	outside := []string{sealed(owner.Access, "blue/deep/x"), sealed(owner.Access, "red"), sealed(owner.Access, "redx"), sealed(owner.Access, "Red/x"), sealed(owner.Access, "other")}
	for range 20 {
		outside = append(outside, sealed(owner.Access, "zzz"))
	}
	for who := range bearers {
		if now := view(who); now != before[who] {
			t.Errorf("%s is told of what is outside:\n%s\nand before:\n%s", who, now, before[who])
		}
	}

	s.Clock.Advance(time.Minute)
	routes := operations(t)
	for who := range bearers {
		team, _, _ := strings.Cut(who, " ")
		other := map[string]string{"red": "blue", "blue": "red"}[team]
		ids := map[string]string{"never existing": authz.NewID("cred"), "of another tenant": foreign, "of the other": own[other][0], "outside both": outside[4], "odd": outside[2], "odd too": outside[3]}
		names := map[string]string{"never existing": team + "%2Fnone", "of the other": other + "%2F0", "none of the other": other + "%2Fnone", "outside both": "other", "odd": "red%2F%2Fx", "odd too": "red%2F..%2Fblue"}
		for _, o := range routes { // each that names a credential, by its id or by its name
			references := ids
			if strings.Contains(o.path, "/by-name/") {
				references = names
			}
			if o.v1() || !strings.Contains(o.path, "{credential_id}") && o.name != "v2 unsealCredentialByName" {
				continue // another puts by name
			}
			body, ok := map[string]string{
				"v2 replaceCredential": `{"values":{"k":"w"}}`, "v2 patchCredential": `{"values":{"k":"w"}}`,
				"v2 renameCredential": `{"name":"` + team + `/moved"}`, "v2 undoCredential": `{"version":1}`, "v2 describeCredential": `{"tags":["t"]}`, "v2 renewCredential": `{"ttl_days":30}`,
			}[o.name]
			if o.RequestBody != nil && o.RequestBody.Value.Required && !ok {
				t.Errorf("%s takes a body: give it one here", o.name)
			}
			for _, suffix := range []string{"", "?version=1", " if"} {
				condition := suffix == " if"
				if suffix == "?version=1" && o.name != "v2 unsealCredential" || condition && o.method == "GET" {
					continue
				}
				cases := make(map[string]servertest.Request)
				for what, reference := range references {
					r := call(who, o.method, strings.TrimSuffix(o.at(reference)+suffix, " if"), nil)
					if r.Body = body; condition {
						r.Header = http.Header{"If-Match": {`"x"`}}
					}
					cases[what] = r
				}
				s.WantIndistinct(t, who+": "+o.name+suffix, http.StatusForbidden, cases)
			}
		}
		// A name that is taken is refused like a free one, and so is the name of a manifest.
		cases, manifests := make(map[string]servertest.Request), make(map[string]servertest.Request)
		for _, name := range []string{other + "/0", other + "/none", "other", "free"} {
			cases[name] = call(who, "POST", "/api/v2/vault/seal", fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}})
			manifests[name] = call(who, "POST", "/api/v2/sealing-key/check", fields{"namespace": "shop", "name": name, "credential_type": "t"})
		}
		s.WantIndistinct(t, who+" seals", http.StatusForbidden, cases)
		puts := make(map[string]servertest.Request)
		for name := range names {
			if name != "never existing" && !strings.HasPrefix(name, "odd") {
				puts[name] = call(who, "PUT", "/api/v2/vault/by-name/"+names[name], fields{"credential_type": "t", "values": fields{"k": "v"}})
			}
		}
		s.WantIndistinct(t, who+" puts", http.StatusForbidden, puts)
		s.WantIndistinct(t, who+" checks a manifest", http.StatusForbidden, manifests)

		// Its own goes on working.
		mine := s.Call(call(who, "POST", "/api/v2/vault/seal", fields{"name": team + "/own", "credential_type": "t", "values": fields{"k": "v"}})).Want(t, http.StatusCreated)["credential_id"].(string)
		for _, r := range []servertest.Request{
			call(who, "GET", "/api/v2/vault/"+mine, nil), call(who, "GET", "/api/v2/vault/by-name/"+team+"%2Fown", nil), call(who, "GET", "/api/v2/vault/"+mine+"/metadata", nil),
			call(who, "GET", "/api/v2/vault/"+mine+"/versions", nil), call(who, "PUT", "/api/v2/vault/"+mine, fields{"values": fields{"k": "w"}}),
			call(who, "POST", "/api/v2/vault/rotate/"+mine, nil), call(who, "DELETE", "/api/v2/vault/"+mine, nil),
		} {
			s.Call(r).Want(t, http.StatusOK)
		}
		s.Clock.Advance(time.Minute)
	}
	for _, id := range slices.Concat(own["red"], own["blue"], outside) {
		if c := s.Send("GET", "/api/v2/vault/"+id+"/metadata", owner.Access, nil).Want(t, http.StatusOK); c["version"] != 1.0 {
			t.Errorf("%s was changed: %v", id, c)
		}
	}
	// Who may read names in the log reads those of no other path.
	made := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "names", "scopes": []string{"audit:names"}}).Want(t, http.StatusCreated)
	policies := s.Send("GET", "/api/v2/access/policies", owner.Access, nil).Want(t, http.StatusOK)["policies"].([]any)
	red := policies[slices.IndexFunc(policies, func(p any) bool { return p.(fields)["name"] == "red/**" })].(fields)["policy_id"]
	s.Send("PUT", "/api/v2/access/bindings/"+made["key_id"].(string), owner.Access, fields{"policies": []any{red}}).Want(t, http.StatusOK)
	names := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/audit/names", Key: made["api_key"].(string),
		Body: servertest.Marshal(t, fields{"ids": []string{own["red"][1], own["blue"][1], outside[0]}})}).Want(t, http.StatusOK)["names"].([]any)
	if len(names) != 1 || names[0].(fields)["name"] != "red/0" {
		t.Error("names of other paths:", names)
	}
	s.VerifyLog()
}

// A check says nothing that depends on what is there.
func TestACheckTellsNothingOfWhatIsThere(t *testing.T) {
	s := newService(t)
	owner := s.RegisterVerified("ada@example.org")
	user, id := s.joined(owner, "eve@example.org", "limited")
	s.policy(owner, "own/*", id)
	check := func(path string) servertest.Request {
		return servertest.Request{Method: "POST", Path: "/api/v2/access/check", Bearer: user.Access, Body: servertest.Marshal(t, fields{"path": path, "verb": "read"})}
	}
	s.Send("POST", "/api/v2/vault/seal", owner.Access, fields{"name": "other/there", "credential_type": "t", "values": fields{"k": "v"}}).Want(t, http.StatusCreated)
	s.WantIndistinct(t, "check", http.StatusOK, map[string]servertest.Request{"there": check("other/there"), "not there": check("other/not")})
	if a := s.Call(check("other/there")).Want(t, http.StatusOK); a["allowed"] != false || a["reason"] != nil {
		t.Error(a)
	}
	if a := s.Call(check("own/not")).Want(t, http.StatusOK); a["allowed"] != true {
		t.Error(a)
	}
	about := fields{"path": "other", "verb": "read", "subject": id}
	s.Send("POST", "/api/v2/access/check", user.Access, fields{"path": "other", "verb": "read", "subject": s.Me(owner.Access)["user"].(fields)["user_id"]}).Want(t, http.StatusForbidden)
	if a := s.Send("POST", "/api/v2/access/check", owner.Access, about).Want(t, http.StatusOK); a["allowed"] != false || a["reason"] != "outside_policy" {
		t.Error(a)
	}
}
