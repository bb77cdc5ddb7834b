package server_test

import (
	"bytes"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// Whoever reads the log learns what was called how, also of what is gone: as long as the settings say, within
// their policies, and nowhere in clear in the store.
func TestTheLogsReadersLearnPastNames(t *testing.T) {
	s := newService(t)
	owner := s.RegisterVerified("ada@example.org")
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/system/tenants/" + string(s.TenantOf(owner)) + "/activate", Key: s.SystemKey()}).Want(t, http.StatusOK)
	_, bob := s.joined(owner, "bob@example.org", "member")
	named := func(reply servertest.Reply, fields ...string) string {
		id := any(reply.Want(t, http.StatusCreated))
		for _, f := range fields {
			id = id.(map[string]any)[f]
		}
		return id.(string)
	}
	key := named(s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "canary key", "scopes": []string{"vault:read"}}), "key_id")
	group := named(s.Send("POST", "/api/v2/groups", owner.Access, fields{"name": "canary group"}), "group", "group_id")
	seal := func(name string) string {
		return named(s.Send("POST", "/api/v2/vault/seal", owner.Access, fields{"name": name, "credential_type": "t", "values": fields{"k": "v"}}), "credential_id")
	}
	moved, deleted := seal("canary/first"), seal("canary/deleted")

	reader := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "reader", "scopes": []string{"audit:names"}, "expires_in_days": 900}).Want(t, http.StatusCreated)
	narrow := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "narrow", "scopes": []string{"audit:names", "vault:read"}, "expires_in_days": 900}).Want(t, http.StatusCreated)
	s.policy(owner, "shop/**", narrow["key_id"].(string))
	names := func(with fields, ids ...string) (told string) {
		t.Helper()
		page := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/audit/names", Key: with["api_key"].(string), Body: servertest.Marshal(t, fields{"ids": ids})}).Want(t, http.StatusOK)
		for _, n := range page["names"].([]any) {
			told += fmt.Sprintln(n.(fields)["type"], n.(fields)["name"], n.(fields)["past_names"], n.(fields)["gone"])
		}
		return told
	}
	for _, to := range []string{"shop/second", "canary/third", "shop/second"} {
		s.Clock.Advance(time.Second)
		s.Send("POST", "/api/v2/vault/"+moved+"/rename", owner.Access, fields{"name": to}).Want(t, http.StatusOK)
	}
	s.Send("DELETE", "/api/v2/vault/"+deleted, owner.Access, nil).Want(t, http.StatusOK)
	s.Send("DELETE", "/api/v2/api-keys/"+key, owner.Access, nil).Want(t, http.StatusOK)
	s.Send("DELETE", "/api/v2/members/"+bob, owner.Access, nil).Want(t, http.StatusOK)
	s.Send("PATCH", "/api/v2/groups/"+group, owner.Access, fields{"name": "canary team"}).Want(t, http.StatusOK)
	s.Clock.Advance(time.Second)
	s.Send("DELETE", "/api/v2/groups/"+group, owner.Access, nil).Want(t, http.StatusOK)

	for id, want := range map[string]string{
		moved:   "credential shop/second [canary/third canary/first] <nil>\n",
		deleted: "credential canary/deleted <nil> true\n",
		key:     "api_key canary key <nil> true\n",
		bob:     "user bob@example.org <nil> true\n",
		group:   "group canary team [canary group] true\n",
	} {
		if got := names(reader, id); got != want {
			t.Errorf("%s is told as %q, want %q", id, got, want)
		}
	}
	admin := s.Send("POST", "/api/v2/api-keys", owner.Access, fields{"name": "narrow admin", "scopes": []string{"account:admin"}}).Want(t, http.StatusCreated)
	s.policy(owner, "canary/**", admin["key_id"].(string))
	erase := func(id string) int {
		return s.Call(servertest.Request{Method: "DELETE", Path: "/api/v2/audit/names/" + id, Key: admin["api_key"].(string)}).Status
	}
	if status := erase(key); status != http.StatusForbidden {
		t.Errorf("somebody whom a policy limits erases names: %d", status)
	}
	extra := seal("canary/extra")
	s.Send("DELETE", "/api/v2/vault/"+extra, owner.Access, nil).Want(t, http.StatusOK)
	s.Send("DELETE", "/api/v2/audit/names/"+extra, owner.Access, nil).Want(t, http.StatusOK)
	if e := s.AllEntries(s.NextSequence() - 1)[0]; e.EventType != "NAMES_ERASED" || e.Attributes["names_of"] != extra {
		t.Errorf("%+v", e)
	}
	s.Send("DELETE", "/api/v2/audit/names/"+extra, owner.Access, nil).Message(t, http.StatusNotFound)
	if got := names(reader, extra); got != "" {
		t.Errorf("erased, and told: %q", got)
	}
	// Policies hold for each name: a past one outside is not told, nor one of what is outside now.
	if got := names(narrow, moved, deleted); got != "credential shop/second <nil> <nil>\n" {
		t.Errorf("to somebody with shop/** only: %q", got)
	}
	s.Send("POST", "/api/v2/vault/"+moved+"/rename", owner.Access, fields{"name": "canary/end"}).Want(t, http.StatusOK)
	if got := names(narrow, moved); got != "" {
		t.Errorf("to somebody with shop/** only, of what is outside now: %q", got)
	}
	other := s.RegisterVerified("eve@example.org")
	foreign := s.Send("POST", "/api/v2/api-keys", other.Access, fields{"name": "reader", "scopes": []string{"audit:names"}}).Want(t, http.StatusCreated)
	if got := names(foreign, moved, deleted, key, bob, group); got != "" {
		t.Errorf("in another tenant: %q", got)
	}
	if rows := s.pastNames(t); len(rows) != 9 || bytes.Contains(bytes.Join(rows, nil), []byte("canary")) || bytes.Contains(bytes.Join(rows, nil), []byte("bob")) {
		t.Errorf("%d rows: %q", len(rows), rows)
	}

	sweeper := &past.Sweeper{Names: past.New(s.Keys, s.Clock.Now), Store: s.Store}
	sweep := func(want int) {
		t.Helper()
		if n, err := sweeper.Sweep(t.Context()); err != nil || n != want {
			t.Errorf("erased %d, want %d: %v", n, want, err)
		}
	}
	s.Clock.Advance(399 * 24 * time.Hour)
	sweep(0)
	if got := names(reader, key); got == "" {
		t.Error("a name is told no more after 399 days")
	}
	s.Clock.Advance(24 * time.Hour)
	if got := names(reader, key); got != "" {
		t.Errorf("after 400 days %q is told", got)
	}
	sweep(9)
	owner = s.Login("ada@example.org", servertest.Password)
	again := seal("canary/again")
	s.Send("DELETE", "/api/v2/vault/"+again, owner.Access, nil).Want(t, http.StatusOK)
	set := s.Send("PATCH", "/api/v2/settings", owner.Access, fields{"names_kept_days": 0}).Want(t, http.StatusOK)
	if set["names_kept_days"] != 0.0 {
		t.Errorf("%v", set)
	}
	if got := names(reader, again); got != "" {
		t.Errorf("without any days %q is told", got)
	}
	sweep(1)
	none := seal("canary/none")
	s.Send("DELETE", "/api/v2/vault/"+none, owner.Access, nil).Want(t, http.StatusOK)
	if rows := s.pastNames(t); len(rows) != 0 {
		t.Errorf("kept although none is to be: %q", rows)
	}
	s.VerifyLog()
}

// pastNames returns the contents of the rows.
func (s *service) pastNames(t *testing.T) (rows [][]byte) {
	t.Helper()
	err := s.Store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte(past.Family)), func(_, stored []byte) bool {
			rows = append(rows, bytes.Clone(stored))
			return true
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// A row counts only where it was written, and only as it was written.
func TestAPastNameIsBoundToItsPlace(t *testing.T) {
	s := newService(t)
	names := past.New(s.Keys, s.Clock.Now)
	keep := func(do func(tx store.Tx) error) {
		t.Helper()
		if err := s.Store.Update(t.Context(), do); err != nil {
			t.Fatal(err)
		}
	}
	keep(func(tx store.Tx) error { return names.Keep(tx, "ten_a", "credential", "cred_a", "name") })
	of := func(tenant, id string) (all []past.Name) {
		t.Helper()
		err := s.Store.View(t.Context(), func(r store.Reader) (err error) {
			all, err = names.Of(r, authz.TenantID(tenant), id)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	if all := of("ten_a", "cred_a"); len(all) != 1 || all[0].Name != "name" {
		t.Fatalf("%v", all)
	}
	var key, stored []byte
	err := s.Store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte(past.Family)), func(k, v []byte) bool {
			key, stored = bytes.Clone(k), bytes.Clone(v)
			return false
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range [][2]string{{"ten_b", "cred_a"}, {"ten_a", "cred_b"}} {
		keep(func(tx store.Tx) error {
			at := bytes.Replace(bytes.Replace(key, []byte("ten_a"), []byte(to[0]), 1), []byte("cred_a"), []byte(to[1]), 1)
			return tx.Put(at, stored)
		})
		if all := of(to[0], to[1]); len(all) != 0 {
			t.Errorf("moved to %v: %v", to, all)
		}
	}
	for i := range stored {
		keep(func(tx store.Tx) error {
			changed := bytes.Clone(stored)
			changed[i] ^= 1
			return tx.Put(key, changed)
		})
		if all := of("ten_a", "cred_a"); len(all) != 0 {
			t.Fatalf("with byte %d changed: %v", i, all)
		}
	}
	keep(func(tx store.Tx) error { return tx.Put(key, stored[:5]) })
	if all := of("ten_a", "cred_a"); len(all) != 0 {
		t.Errorf("cut: %v", all)
	}
}
