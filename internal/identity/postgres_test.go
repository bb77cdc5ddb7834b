package identity

import (
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// Replicas that share only a PostgreSQL database start together. What one of them does takes effect
// at the others from the next request on.
func TestReplicasOnPostgreSQLAreOneDeployment(t *testing.T) {
	url := pgtest.Shared(t).URL()
	dir := t.TempDir()
	must(t, kms.CreateLocal(filepath.Join(dir, "kms.key")))
	k, err := kms.OpenLocal(filepath.Join(dir, "kms.key"))
	must(t, err)
	var all [3]*Service
	var wg sync.WaitGroup
	for i, ahead := range []time.Duration{0, 3 * time.Minute, -time.Minute} {
		now := func() time.Time { return time.Now().Add(ahead) }
		wg.Go(func() {
			bound := state.New(func(e *state.RowError) { t.Error(e) })
			log := writer.New(now, bound)
			database, err := postgres.Open(t.Context(), url, postgres.Options{Hook: log.Commit, Head: state.HeadKey})
			if err != nil {
				t.Error(err)
				return
			}
			s := bound.Guard(database)
			t.Cleanup(func() { _ = s.Close() })
			if all[i], _, err = Open(t.Context(), s, log, guard.New(log), k, keyring.Config{CacheTTL: time.Minute, Now: now}); err != nil {
				t.Error("starting:", err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	one, two, three := all[0], all[1], all[2]
	if one.keys.ChainID() != two.keys.ChainID() || one.keys.ChainID() != three.keys.ChainID() {
		t.Fatal("more than one deployment")
	}
	u, _, err := one.Register(t.Context(), stranger, "ada@example.com", secret.Bytes(goodPassword), "Example Ltd")
	must(t, err)
	tokens, err := two.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(goodPassword))
	must(t, err)
	for i, s := range all {
		if c, err := s.AuthenticateToken(t.Context(), tokens.Access); err != nil || c.ID != u.ID || !c.May(authz.SealCredential) {
			t.Errorf("replica %d: %v", i, err)
		}
	}
	c, err := three.AuthenticateToken(t.Context(), tokens.Access)
	must(t, err)
	must(t, three.SignOut(t.Context(), c))
	for i, s := range all {
		if _, err := s.AuthenticateToken(t.Context(), tokens.Access); !errors.Is(err, fault.Unauthenticated) {
			t.Errorf("replica %d: signed out, and still in: %v", i, err)
		}
	}
	for i := range freeFailures {
		if _, err := all[i%3].SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(otherPassword)); !errors.Is(err, fault.Unauthenticated) {
			t.Fatal(err)
		}
	}
	for i, s := range []*Service{one, three} { // the clock of the last guess's replica sets the end of the wait
		if _, err := s.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(goodPassword)); !errors.Is(err, fault.Unauthenticated) {
			t.Errorf("replica %d lets in who waits: %v", i, err)
		}
	}
	if _, err := verify.Store(t.Context(), one.store, verify.Options{}); err != nil {
		t.Error(err)
	}
}
