package server_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/servertest"
)

// losses returns what a dry run says, as "actor credential verb", with how often it was done, from all pages.
func (s *service) losses(owner servertest.Account, change fields) (all map[string]int, status int) {
	s.T.Helper()
	all = map[string]int{}
	for {
		reply := s.Send("POST", "/api/v2/access/dry-run", owner.Access, change)
		if reply.Status != http.StatusOK {
			return nil, reply.Status
		}
		page := reply.Want(s.T, http.StatusOK)
		for _, one := range page["losses"].([]any) {
			l := one.(fields)
			all[fmt.Sprint(l["actor"].(fields)["id"], " ", l["credential_id"], " ", l["verb"])] += int(l["uses"].(float64))
		}
		next, more := page["next_cursor"].(string)
		if !more {
			return all, http.StatusOK
		}
		change = maps.Clone(change)
		change["cursor"] = next
	}
}

// What a dry run says is what is lost when the change is made: of everything that somebody did, and of
// nothing else. What the change is refused for, it is refused for.
func TestADryRunSaysWhatAChangeTakesAway(t *testing.T) {
	s := newService(t)
	owner := s.RegisterVerified("ada@example.org")
	ann, annID := s.joined(owner, "ann@example.org", "limited")
	bob, bobID := s.joined(owner, "bob@example.org", "member")
	key := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "kim", "scopes": []string{"vault:read", "vault:write"}}).Want(t, http.StatusCreated)
	actors := map[string]servertest.Request{
		annID: {Bearer: ann.Access}, bobID: {Bearer: bob.Access}, key["key_id"].(string): {Key: key["api_key"].(string)},
	}
	var credentials []string
	for _, name := range []string{"a/x", "a/y", "b/x", "c"} {
		made := s.Send("POST", "/api/v2/vault/seal", owner.Access, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}})
		credentials = append(credentials, made.Want(t, http.StatusCreated)["credential_id"].(string))
	}
	// works returns what everybody may do now, by doing it.
	works := func() (allowed []string) {
		for actor, as := range actors {
			for _, id := range credentials {
				for verb, r := range map[string]servertest.Request{
					"list": {Method: "GET", Path: "/metadata"}, "read": {Method: "GET"}, "write": {Method: "PUT", Body: `{"values":{"k":"v"}}`},
				} {
					r.Path, r.Bearer, r.Key = "/api/v2/vault/"+id+r.Path, as.Bearer, as.Key
					if s.Call(r).Status == http.StatusOK {
						allowed = append(allowed, fmt.Sprint(actor, " ", id, " ", verb))
					}
				}
			}
		}
		slices.Sort(allowed)
		return allowed
	}
	random := rand.New(rand.NewPCG(7, 7))
	some := func(of []string) (chosen []string) {
		for _, one := range of {
			if random.IntN(2) == 0 {
				chosen = append(chosen, one)
			}
		}
		return append([]string{}, chosen...)
	}
	rules := func() (all []fields) {
		for _, path := range some([]string{"a/*", "b/**", "**", "c", "a/x"}) {
			if verbs := some([]string{"list", "read", "write"}); len(verbs) > 0 {
				all = append(all, fields{"path": path, "verbs": verbs})
			}
		}
		return append([]fields{}, all...)
	}
	var policies, groups []string
	for i := range 4 {
		made := s.Send("POST", "/api/v2/access/policies", owner.Access, fields{"name": fmt.Sprint("p", i), "rules": rules()})
		policies = append(policies, made.Want(t, http.StatusCreated)["policy"].(fields)["policy_id"].(string))
	}
	for i := range 2 {
		made := s.Send("POST", "/api/v2/groups", owner.Access, fields{"name": fmt.Sprint("g", i)}).Want(t, http.StatusCreated)
		groups = append(groups, made["group"].(fields)["group_id"].(string))
	}
	subjects := append(slices.Sorted(maps.Keys(actors)), groups...)
	kinds, refused, lost := map[string]int{}, 0, 0
	for round := range 40 {
		for _, group := range groups { // members, and what a group adds, come back
			for _, id := range []string{annID, bobID} {
				s.Send("PUT", "/api/v2/groups/"+group+"/members/"+id, owner.Access, nil)
			}
		}
		subject := subjects[random.IntN(len(subjects))]
		group, policy := groups[random.IntN(2)], policies[random.IntN(4)]
		var change fields
		var apply func() servertest.Reply
		switch random.IntN(6) {
		case 0:
			to := rules()
			change = fields{"change": "change_policy", "policy_id": policy, "rules": to}
			apply = func() servertest.Reply {
				return s.Send("PUT", "/api/v2/access/policies/"+policy, owner.Access, fields{"name": "q" + policy, "rules": to})
			}
		case 1, 2:
			to := some(policies)
			change = fields{"change": "bind_policies", "subject": subject, "policies": to}
			apply = func() servertest.Reply {
				return s.Send("PUT", "/api/v2/access/bindings/"+subject, owner.Access, fields{"policies": to})
			}
		case 3:
			change = fields{"change": "unbind_policies", "subject": subject}
			apply = func() servertest.Reply {
				return s.Send("DELETE", "/api/v2/access/bindings/"+subject, owner.Access, nil)
			}
		case 4:
			change = fields{"change": "remove_member", "group_id": group, "subject": annID}
			apply = func() servertest.Reply {
				return s.Send("DELETE", "/api/v2/groups/"+group+"/members/"+annID, owner.Access, nil)
			}
		default:
			change = fields{"change": "delete_group", "group_id": group}
			apply = func() servertest.Reply { // it stays for the other rounds, without what it adds
				return s.Send("PUT", "/api/v2/access/bindings/"+group, owner.Access, fields{"policies": []any{}})
			}
		}
		before := works()
		said, status := s.losses(owner, change)
		if again := works(); !slices.Equal(again, before) {
			t.Fatalf("round %d: the dry run of %v changed something", round, change)
		}
		if made := apply().Status; made != status {
			t.Fatalf("round %d: %v is answered with %d, and its dry run with %d", round, change, made, status)
		}
		kinds[change["change"].(string)]++
		after := works()
		var want []string
		for _, one := range before {
			if status == http.StatusOK && !slices.Contains(after, one) {
				want = append(want, one)
			}
		}
		if got := slices.Sorted(maps.Keys(said)); !slices.Equal(got, want) {
			t.Errorf("round %d: %v: the dry run says\n%s\nand lost is\n%s", round, change, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		if lost += len(want); status != http.StatusOK {
			refused++
		}
	}
	if len(kinds) != 5 || refused == 0 || lost < 20 {
		t.Errorf("too little was tried: %v, %d refused, %d lost", kinds, refused, lost)
	}
	s.VerifyLog()
}

// A dry run is an entry of its own, counts no use of what is gone or long ago, says what it cannot judge,
// and tells names only to those who may know them.
func TestADryRunTellsNoMoreThanItsCallerMayKnow(t *testing.T) {
	s := newService(t)
	owner := s.RegisterVerified("ada@example.org")
	tenant := s.TenantOf(owner)
	s.UsePods(tenant).Allow(servertest.AllowAll)
	made := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "kim", "scopes": []string{"vault:read"}}).Want(t, http.StatusCreated)
	kim, key := made["key_id"].(string), made["api_key"].(string)
	admin := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "admin", "scopes": []string{"account:admin"}, "expires_in_days": 60}).Want(t, http.StatusCreated)["api_key"].(string)
	namer := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "namer", "scopes": []string{"account:admin", "audit:names"}}).Want(t, http.StatusCreated)["api_key"].(string)
	var ids []string
	for _, name := range []string{"canary/a", "canary/gone"} {
		ids = append(ids, s.Send("POST", "/api/v2/vault/seal", owner.Access, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}}).Want(t, http.StatusCreated)["credential_id"].(string))
	}
	for _, id := range ids {
		for range 2 {
			s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + id, Key: key}).Want(t, http.StatusOK)
		}
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + ids[0], Bearer: servertest.ShopToken}).Want(t, http.StatusOK)
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + ids[0], Key: admin}).Want(t, http.StatusForbidden)
	s.Send("DELETE", "/api/v2/vault/"+ids[1], owner.Access, nil).Want(t, http.StatusOK)
	try := func(key string, change fields) servertest.Reply {
		return s.Call(servertest.Request{Method: "POST", Path: "/api/v2/access/dry-run", Key: key, Body: servertest.Marshal(t, change)})
	}
	change := fields{"change": "bind_policies", "subject": kim, "policies": []string{}}
	for key, name := range map[string]any{admin: nil, namer: "canary/a"} {
		page := try(key, change).Want(t, http.StatusOK)
		losses := page["losses"].([]any)
		if len(losses) != 1 || page["unjudged"] != 0.0 || page["next_cursor"] != nil {
			t.Fatalf("%v", page)
		}
		l := losses[0].(fields)
		if l["credential_id"] != ids[0] || l["uses"] != 2.0 || l["verb"] != "read" || l["name"] != name || l["actor"].(fields)["type"] != "api_key" {
			t.Errorf("%v", l)
		}
		e := s.AllEntries(s.NextSequence() - 1)[0]
		if e.EventType != "ACCESS_CHECKED" || e.Resource.ID != kim || e.Attributes["tried"] != "bind_policy" || e.Attributes["losses"] != "1" {
			t.Errorf("%+v", e)
		}
	}
	pod := fields{"change": "bind_policies", "subject": "system:serviceaccount:shop:app", "policies": []string{}}
	page := try(namer, pod).Want(t, http.StatusOK)
	if losses := page["losses"].([]any); len(losses) != 1 || losses[0].(fields)["actor"].(fields)["type"] != "service_account" || losses[0].(fields)["uses"] != 1.0 {
		t.Errorf("of a ServiceAccount: %v", page)
	}
	account := page["losses"].([]any)[0].(fields)["actor"].(fields)["id"].(string)
	called := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/audit/names", Key: namer, Body: servertest.Marshal(t, fields{"ids": []string{account}})}).Want(t, http.StatusOK)
	if n := called["names"].([]any)[0].(fields); n["type"] != "service_account" || n["name"] != pod["subject"] || n["gone"] != nil {
		t.Errorf("%v", n)
	}
	s.Send("DELETE", "/api/v2/audit/names/"+account, owner.Access, nil).Want(t, http.StatusOK)
	if page := try(namer, pod).Want(t, http.StatusOK); page["unjudged"] != 1.0 || len(page["losses"].([]any)) != 0 {
		t.Errorf("without the name of the ServiceAccount: %v", page)
	}
	for scopes, told := range map[string]int{"account:admin audit:names": 0, "account:admin audit:names audit:read": 1} {
		narrow := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "narrow", "scopes": strings.Fields(scopes)}).Want(t, http.StatusCreated)
		s.Send("PUT", "/api/v2/access/bindings/"+narrow["key_id"].(string), owner.Access, fields{"policies": []any{}}).Want(t, http.StatusOK)
		losses := try(narrow["api_key"].(string), change).Want(t, http.StatusOK)["losses"].([]any)
		if len(losses) != told || told == 1 && losses[0].(fields)["name"] != nil {
			t.Errorf("to somebody with %s whom policies limit: %v", scopes, losses)
		}
	}
	try(key, change).Want(t, http.StatusForbidden)
	for _, bad := range []fields{
		{"change": "bind_policies", "subject": kim}, {"change": "unbind_policies", "subject": kim, "group_id": "grp_x"}, {"change": "delete_group"}, {"change": "rename"}, {},
	} {
		if status := try(admin, bad).Status; status != http.StatusBadRequest && status != http.StatusUnprocessableEntity {
			t.Errorf("%v: %d", bad, status)
		}
	}
	s.Clock.Advance(31 * 24 * time.Hour)
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/system/tenants/" + string(tenant) + "/activate", Key: s.SystemKey()}).Want(t, http.StatusOK)
	if page := try(admin, change).Want(t, http.StatusOK); len(page["losses"].([]any)) != 0 {
		t.Errorf("after a month: %v", page)
	}
}
