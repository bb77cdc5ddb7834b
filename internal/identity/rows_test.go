package identity

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/store"
)

// An attacker who can write the database and has a key of one tenant must not become another
// tenant.
func TestRowsThatDecideWhoIsWhoCannotBeRewritten(t *testing.T) {
	for _, unbound := range []bool{false, true} {
		testRowsThatDecideWhoIsWho(t, makeService(t, unbound))
	}
}

func testRowsThatDecideWhoIsWho(t *testing.T, s *Service) {
	t.Helper()
	tenant, key, err := s.Dev(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other, err := s.NamespaceTenant(t.Context(), "cluster", "namespace")
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := s.NamespaceTenant(t.Context(), "cluster", "other")
	if err != nil {
		t.Fatal(err)
	}
	rewrite := func(prefix string, change func(row []byte) []byte) {
		t.Helper()
		s.bound().tamper(t, func(tx store.Tx) error {
			var failed error
			err := tx.Scan(store.Prefix([]byte(prefix)), func(k, v []byte) bool {
				failed = tx.Put(k, change(bytes.Clone(v)))
				return failed == nil
			})
			return errors.Join(err, failed)
		})
	}
	toOther := func(row []byte) []byte {
		return bytes.ReplaceAll(row, []byte(tenant), []byte(other))
	}

	rewrite("apikey/hash/", toOther)
	if p, err := s.Authenticate(t.Context(), key); !s.bound().isChanged(err) || p.Tenant != "" {
		t.Errorf("a key of %s became one of %s: %v", tenant, p.Tenant, err)
	}
	rewrite("apikey/hash/", func([]byte) []byte { // no MAC
		row, _ := json.Marshal(apikey.Row{Tenant: other, Scopes: authz.TenantScopes()})
		return row
	})
	if _, err := s.Authenticate(t.Context(), key); !s.bound().isChanged(err) {
		t.Error(err)
	}
	rewrite("dev", toOther)
	if got, _, err := s.Dev(t.Context()); !s.bound().isChanged(err) && !errors.Is(err, fault.Unavailable) {
		t.Errorf("the development server became %s: %v", got, err)
	}
	var moved []byte
	rewrite("namespace/cluster/other", func(row []byte) []byte { moved = row; return row })
	rewrite("namespace/cluster/namespace", func([]byte) []byte { return moved }) // the row of another key
	if got, err := s.NamespaceTenant(t.Context(), "cluster", "namespace"); !s.bound().isChanged(err) {
		t.Errorf("the namespace of %s became part of %s, %s: %v", other, foreign, got, err)
	}
}
