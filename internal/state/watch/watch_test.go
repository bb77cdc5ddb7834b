package watch_test

import (
	"context"
	"crypto/rand"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/state/watch"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// A row of the deployment itself that nobody reads is found by the scan, and nobody is served then.
func TestAScanHaltsForARowOfTheDeployment(t *testing.T) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	w := watch.New(slog.New(slog.DiscardHandler))
	log := writer.New(time.Now, w.State)
	raw, err := bolt.Open(filepath.Join(t.TempDir(), "s.db"), bolt.Options{Hook: log.Commit})
	must(err)
	t.Cleanup(func() { _ = raw.Close() })
	seed, key := make([]byte, dualsig.SeedSize), make([]byte, 64)
	_, _ = rand.Read(seed)
	_, _ = rand.Read(key)
	signer, err := dualsig.NewPrivateKey(seed)
	must(err)
	must(log.Use(t.Context(), raw, signer, "chain_test"))
	must(log.BindState(t.Context(), key))
	must(w.Open(t.Context(), raw, log, nil, nil))
	own := []byte("key/system/current")
	for n, value := range []string{"old", "new"} {
		must(w.State.Guard(raw).Update(t.Context(), func(tx store.Tx) error {
			e := audit.Event{Type: audit.ChainStarted, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant), Resource: audit.Resource{Type: audit.ChainResource, ID: "chain_test"}}
			if n > 0 {
				e.Type = audit.KeyRotated
			}
			if _, err := log.Append(tx, e); err != nil {
				return err
			}
			return tx.Put(own, []byte(value))
		}))
	}
	must(raw.Update(t.Context(), func(tx store.Tx) error { return tx.Put(own, []byte("old")) }))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx) }()
	defer func() { cancel(); <-done }()
	for end := time.Now().Add(time.Minute); w.State.Halted() == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the scan has found the row, and others are served")
		}
	}
	if log.CheckNotHalted() == nil {
		t.Error("the log takes entries")
	}
}
