package app

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/metrics"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A sealing key's row from before its retirement is put back.
func TestAStartTellsOfASealingKeyThatWasPutBack(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	open := func() *deployment {
		t.Helper()
		d, err := openDeployment(t.Context(), deploymentOptions{
			evidence: devProving(), calls: metrics.NewCalls(),
			dir: dir, kms: keyFileIn(dir), logger: slog.New(slog.NewTextHandler(&log, nil)), now: time.Now,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = d.store.Close() })
		return d
	}
	d := open()
	admin := authz.Principal{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: "admin", Scopes: []authz.Scope{authz.SystemAdmin}}
	first, err := d.keys.CurrentSealingKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	key, row := []byte("sealing/key/"+first), []byte(nil)
	err = d.store.View(t.Context(), func(r store.Reader) error {
		b, err := r.Get(key)
		row = bytes.Clone(b)
		return err
	})
	if err != nil || row == nil {
		t.Fatal(err)
	}
	if _, err := d.sealing.Rotate(t.Context(), admin); err != nil {
		t.Fatal(err)
	}
	if _, err := d.sealing.Retire(t.Context(), admin, first); err != nil {
		t.Fatal(err)
	}
	if err := d.store.Close(); err != nil {
		t.Fatal(err)
	}
	d = open()
	if strings.Contains(log.String(), "sealing key") {
		t.Fatalf("without a reason: %s", log.String())
	}
	if err := d.store.(*state.Store).Database.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, row) }); err != nil {
		t.Fatal(err)
	}
	if err := d.store.Close(); err != nil {
		t.Fatal(err)
	}
	open()
	if got := log.String(); !strings.Contains(got, "level=ERROR") || !strings.Contains(got, "the sealing keys are not as the audit log says") || !strings.Contains(got, first) {
		t.Errorf("the log says: %s", got)
	}
}
