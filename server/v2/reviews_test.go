package v2_test

import (
	"encoding/json"
	"net/http"
	"testing"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// A denial waits for a member who did not cause it, whatever reads the log meanwhile.
func TestDenialsWaitForAnotherMember(t *testing.T) {
	s := newService(t)
	p := careful(s)
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/x", Key: p.machine}).Message(t, http.StatusForbidden)
	p.do("GET", "/api/v2/audit/logs", nil)
	waiting := func(bearer string) v2.ReviewsWaiting {
		return servertest.Decode[v2.ReviewsWaiting](t, s.Call(servertest.Request{Method: "GET", Path: "/api/v2/audit/reviews", Bearer: bearer}))
	}
	send := func(bearer string, body object) servertest.Reply {
		return s.Call(servertest.Request{Method: "POST", Path: "/api/v2/audit/reviews", Bearer: bearer, Body: servertest.Marshal(t, body)})
	}
	review := func(bearer string, body object) (r v2.Review) {
		t.Helper()
		got := send(bearer, body)
		if got.Status != http.StatusCreated {
			t.Fatalf("%v: %d %s", body, got.Status, got.Body)
		}
		if err := json.Unmarshal(got.Body, &r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	auditor := s.Login(p.auditor, servertest.Password).Access
	w := waiting(p.owner.Access)
	if w.Denials != 0 || w.OwnDenials != 1 || w.Oldest != nil || w.LogReviewedAt != nil {
		t.Errorf("for the owner of the API key: %+v", w)
	}
	all := object{"subject": "denials", "from": w.From, "to": w.To}
	if got := review(p.owner.Access, all); got.Denials != 0 || got.OwnDenials != 1 {
		t.Errorf("by the owner: %+v", got)
	}
	w = waiting(auditor)
	if w.Denials != 1 || w.OwnDenials != 0 || w.Oldest == nil || w.LogReviewedAt == nil {
		t.Errorf("for the auditor: %+v", w)
	}
	if got := review(auditor, object{"subject": "denials", "from": w.From, "to": w.To}); got.Denials != 1 || got.Sequence == 0 || len(got.Digest) != 64 {
		t.Errorf("by the auditor: %+v", got)
	}
	if w := waiting(p.owner.Access); w.OwnDenials != 0 {
		t.Errorf("afterwards: %+v", w)
	}
	for _, body := range []object{
		{"subject": "denials"}, {"subject": "denials", "from": 1}, {"subject": "denials", "from": 2, "to": 1}, {"subject": "denials", "from": 0, "to": 1},
		{"subject": "denials", "from": 1, "to": 1 << 40}, {"subject": "access", "from": 1, "to": 2}, {"subject": "log"}, {},
	} {
		send(p.owner.Access, body).Message(t, http.StatusUnprocessableEntity)
	}
	send(auditor, object{"subject": "access"}).Message(t, http.StatusForbidden) // an auditor does not see API keys
	if got := review(auditor, object{"subject": "inventory"}); got.Count == 0 || len(got.Digest) != 64 {
		t.Errorf("inventory: %+v", got)
	}
	if got := review(p.owner.Access, object{"subject": "access"}); got.Count != 3 {
		t.Errorf("access of an API key and two members: %+v", got)
	}
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/audit/reviews", Key: s.Key, Body: servertest.Marshal(t, all)}).Message(t, http.StatusForbidden)
}
