package chaos

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// Replicas whose clocks differ by minutes write one history and one log.
func TestClocksMayBeMinutesApart(t *testing.T) {
	beside(t)
	url := pgtest.Shared(t).URL()
	s := newSite(t, func(hook store.Hook, now func() time.Time) (store.Database, error) {
		return postgres.Open(t.Context(), url, postgres.Options{Hook: hook, Now: now})
	})
	var vaults []*vault.Vault
	var db store.Database
	for _, ahead := range []time.Duration{0, 7 * time.Minute, -5 * time.Minute} {
		var v *vault.Vault
		v, db = s.vault(func() time.Time { return time.Now().Add(ahead) }, unchanged)
		vaults = append(vaults, v)
	}
	t.Log(run(s.principal, vaults...).check(t))
	report, err := verify.Store(t.Context(), db, verify.Options{})
	must(t, err)
	t.Logf("%d entries hold", report.Entries)
}

// Tests the history of several replicas on one healthy PostgreSQL, and on one where a tenth of the
// commits fails.
func TestVaultsOnPostgreSQLAreLinearisable(t *testing.T) {
	beside(t)
	url := pgtest.Shared(t).URL()
	s := newSite(t, func(hook store.Hook, _ func() time.Time) (store.Database, error) {
		return postgres.Open(t.Context(), url, postgres.Options{Hook: hook})
	})
	var vaults []*vault.Vault
	for _, change := range []func(store.Database) store.Store{unchanged, unchanged, func(db store.Database) store.Store { return unreliable{db} }} {
		v, _ := s.vault(time.Now, change)
		vaults = append(vaults, v)
	}
	t.Log(run(s.principal, vaults...).check(t))
}
