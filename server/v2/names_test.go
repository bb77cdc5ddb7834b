package v2_test

import (
	"net/http"
	"strings"
	"testing"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// An auditor finds out what the ids in the log are called, and sees no value by that. Nobody else does, and
// nobody in another tenant.
func TestAnAuditorReadsNames(t *testing.T) {
	s := newService(t)
	p := careful(s)
	auditor := s.Login(p.auditor, servertest.Password).Access

	list := servertest.Decode[v2.AuditEntryList](t, s.Call(servertest.Request{Method: "GET", Path: "/api/v2/audit/logs?limit=100", Bearer: auditor}))
	var ids []string
	for _, e := range list.Entries {
		for _, id := range []string{e.Actor.Id, e.Resource.Id} {
			if id != "" && len(ids) < 190 {
				ids = append(ids, id)
			}
		}
	}
	ids = append(ids, "cred_mfrggzdfmztwq2lknnwg23tpoa", "x")
	ask := func(r servertest.Request, ids ...string) servertest.Reply {
		r.Method, r.Path, r.Body = "POST", "/api/v2/audit/names", servertest.Marshal(t, object{"ids": ids})
		return s.Call(r)
	}
	found := func(r servertest.Request, ids ...string) map[string]string {
		t.Helper()
		names := map[string]string{}
		for _, n := range servertest.Decode[v2.NameList](t, ask(r, ids...)).Names {
			names[n.Name] = string(n.Type) + " " + n.Id
		}
		return names
	}
	names := found(servertest.Request{Bearer: auditor}, ids...)
	if names["db"] != "credential "+p.credential || names["orders"] != "key "+p.key || !strings.HasPrefix(names[p.auditor], "user ") || len(names) < 5 {
		t.Errorf("names: %v", names)
	}
	last := servertest.Decode[v2.AuditEntryList](t, s.Call(servertest.Request{Method: "GET", Path: "/api/v2/audit/logs?limit=1", Bearer: auditor})).Entries[0]
	if last.EventType != "AUDIT_READ" || last.Attributes["names"] == "" {
		t.Errorf("the read of names left %+v", last)
	}
	if other := found(servertest.Request{Key: s.GrantKey(authz.AuditNames)}, ids...); len(other) != 0 {
		t.Errorf("in another tenant: %v", other)
	}
	ask(servertest.Request{Key: s.GrantKey(authz.AuditRead, authz.VaultRead, authz.AccountAdmin)}, p.credential).Message(t, http.StatusForbidden)
	ask(servertest.Request{Bearer: auditor}).Message(t, http.StatusUnprocessableEntity)

	s.Call(servertest.Request{Method: "DELETE", Path: "/api/v2/vault/" + p.credential, Bearer: p.owner.Access}).Want(t, http.StatusOK)
	if names := found(servertest.Request{Bearer: auditor}, p.credential); names["db"] != "credential "+p.credential {
		t.Errorf("after it was deleted: %v", names)
	}
}
