package server_test

import (
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/disktest"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// On a full disk the reserve serves reads and removals. Afterwards nothing is served, and every value
// that left has its entry.
func TestReadsAndRemovalsSurviveAFullDisk(t *testing.T) {
	dir := disktest.Mount(t, disktest.Ext4, 64<<20)
	var log atomic.Pointer[writer.Log]
	s := servertest.StartOn(t, func(t testing.TB, hook store.Hook) store.Database {
		t.Helper()
		db, err := bolt.Open(filepath.Join(dir, "store.db"), bolt.Options{
			Hook: hook, Reserve: 1 << 30, Spared: func(e any) bool { return log.Load().Spared(e) },
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close() })
		return db
	})
	log.Store(s.Audit)
	kept, removed := s.Seal("kept"), s.Seal("removed")
	account := s.RegisterVerified("owner@example.org")
	reader := s.GrantKey(authz.VaultRead)
	revoked := s.Post("/api/v2/api-keys", `{"name":"n","scopes":["vault:read"]}`).Want(t, http.StatusCreated)

	free := disktest.Fill(t, dir)
	seal := func() servertest.Reply {
		return s.Post("/api/v2/vault/seal", `{"name":"n","credential_type":"api_key","values":{"key":"`+strings.Repeat("x", 16<<10)+`"},"ttl_days":10}`)
	}
	for n := 0; ; n++ {
		r := seal()
		if r.Status == http.StatusServiceUnavailable {
			break
		}
		r.Want(t, http.StatusCreated)
		if n == 1000 {
			t.Fatal("changes are never refused")
		}
	}

	eventually := time.After(time.Minute) // the line is written after the answer
	for named := false; !named; {
		for _, line := range s.LogLines("request") {
			why, _ := line["error"].(string)
			named = named || strings.Contains(why, "the disk of the database is full")
		}
		select {
		case <-eventually:
			t.Fatal("the log does not name the reason")
		case <-time.After(time.Millisecond):
		}
	}

	unseals := 0
	unseal := func(id string) servertest.Reply {
		r := s.Get("/api/v2/vault/" + id)
		if r.Status == http.StatusOK {
			unseals++
		}
		return r
	}
	unseal(kept).Want(t, http.StatusOK)
	s.Post("/api/v2/vault/rotate/"+kept, "").Want(t, http.StatusServiceUnavailable)
	s.Post("/api/v2/api-keys", `{"name":"m","scopes":["vault:read"]}`).Want(t, http.StatusServiceUnavailable)
	if r := s.Delete("/api/v2/vault/" + removed); r.Status >= 300 {
		t.Errorf("deleting: %d %s", r.Status, r.Body)
	}
	unseal(removed).Want(t, http.StatusForbidden)
	if r := s.Delete("/api/v2/api-keys/" + revoked["key_id"].(string)); r.Status >= 300 {
		t.Errorf("revoking: %d %s", r.Status, r.Body)
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + kept, Key: revoked["api_key"].(string)}).Want(t, http.StatusUnauthorized)
	if r := s.Send("POST", "/api/v2/auth/logout", account.Access, nil); r.Status >= 300 {
		t.Errorf("signing out: %d %s", r.Status, r.Body)
	}

	// One principal's denials do not use up the reserve.
	denied := 0
	for range 20 {
		r := s.Call(servertest.Request{Method: "DELETE", Path: "/api/v2/vault/" + kept, Key: reader})
		if r.Status == http.StatusForbidden {
			denied++
			continue
		}
		r.Want(t, http.StatusServiceUnavailable)
	}
	if denied != 10 {
		t.Errorf("%d denials of one principal were recorded", denied)
	}
	unseal("cred_00000000000000000000000000").Want(t, http.StatusForbidden)

	for n := 0; ; n++ {
		r := unseal(kept)
		if r.Status != http.StatusOK {
			r.Want(t, http.StatusServiceUnavailable)
			break
		}
		if n == 5000 {
			t.Fatal("the reserve is endless")
		}
	}
	for range 3 {
		unseal(kept).Want(t, http.StatusServiceUnavailable)
	}

	free()
	deadline := time.After(time.Minute)
	for r := seal(); r.Status != http.StatusCreated; r = seal() {
		select {
		case <-deadline:
			t.Fatalf("no recovery: %d %s", r.Status, r.Body)
		case <-time.After(10 * time.Millisecond):
		}
	}
	unseal(kept).Want(t, http.StatusOK)
	recorded := 0
	for _, e := range s.AllEntries(0) {
		if e.EventType == audit.CredentialUnsealed && e.Outcome == audit.Success {
			recorded++
		}
	}
	if recorded != unseals {
		t.Errorf("%d values left, with %d entries", unseals, recorded)
	}
	s.VerifyLog()
}
