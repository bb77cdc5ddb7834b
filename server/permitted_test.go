package server_test

import (
	"net/http"
	"slices"
	"testing"
)

// Everybody who is listed for a path is allowed by the check of that subject, and nobody else is, whatever
// policies, groups, roles and keys there are. Nobody of another tenant is named.
func TestWhoIsPermittedIsWhomTheCheckAllows(t *testing.T) {
	s := newService(t)
	owner := s.RegisterVerified("ada@example.org")
	other := s.RegisterVerified("eve@example.org")
	send := func(method, path string, body any) fields {
		t.Helper()
		r := s.Send(method, "/api/v2/"+path, owner.Access, body)
		if r.Status == http.StatusCreated {
			return r.Want(t, http.StatusCreated)
		}
		return r.Want(t, http.StatusOK)
	}
	const pod = "system:serviceaccount:shop:api"
	_, ann := s.joined(owner, "ann@example.org", "limited")
	_, bob := s.joined(owner, "bob@example.org", "member")
	_, aud := s.joined(owner, "aud@example.org", "auditor")
	reader := send("POST", "api-keys", fields{"name": "reader", "scopes": []string{"vault:read"}})["key_id"].(string)
	writer := send("POST", "api-keys", fields{"name": "writer", "scopes": []string{"vault:write"}})["key_id"].(string)
	gone := send("POST", "api-keys", fields{"name": "gone", "scopes": []string{"vault:read"}})["key_id"].(string)
	send("DELETE", "api-keys/"+gone, nil)
	policy := func(name, path string, verbs ...string) string {
		made := send("POST", "access/policies", fields{"name": name, "rules": []fields{{"path": path, "verbs": verbs}}})
		return made["policy"].(fields)["policy_id"].(string)
	}
	shop, mail := policy("shop", "shop/**", "list", "read"), policy("mail", "mail/*", "read", "write", "delete")
	group := send("POST", "groups", fields{"name": "mailers"})["group"].(fields)["group_id"].(string)
	send("PUT", "access/bindings/"+group, fields{"policies": []string{mail}})
	send("PUT", "groups/"+group+"/members/"+ann, nil)
	send("PUT", "access/bindings/"+ann, fields{"policies": []string{shop}})
	send("PUT", "access/bindings/"+reader, fields{"policies": []string{mail}})
	send("PUT", "access/bindings/"+pod, fields{"policies": []string{shop}})

	me := send("GET", "auth/me", nil)["principal"].(fields)["id"].(string)
	subjects := []string{me, ann, bob, aud, reader, writer, pod}
	for _, path := range []string{"shop/db", "mail/a", "mail/a/b", "elsewhere"} {
		for _, verb := range []string{"list", "read", "write", "delete"} {
			var want []string
			for _, subject := range subjects {
				judged := send("POST", "access/check", fields{"path": path, "verb": verb, "subject": subject})
				if judged["allowed"] == true {
					want = append(want, subject)
				}
			}
			var got []string
			for _, one := range send("POST", "access/permitted", fields{"path": path, "verb": verb})["subjects"].([]any) {
				got = append(got, one.(fields)["subject"].(string))
				if one.(fields)["subject"] == ann && path == "mail/a" && !slices.Equal(one.(fields)["groups"].([]any), []any{group}) {
					t.Errorf("%s on %s: ann is there by %v", verb, path, one)
				}
			}
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("%s on %s: %v, want %v", verb, path, got, want)
			}
		}
	}
	for _, one := range s.Send("POST", "/api/v2/access/permitted", other.Access, fields{"path": "shop/db", "verb": "read"}).Want(t, http.StatusOK)["subjects"].([]any) {
		if slices.Contains(subjects, one.(fields)["subject"].(string)) {
			t.Errorf("another tenant is told of %v", one)
		}
	}
}
