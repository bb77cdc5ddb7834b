package app

import (
	"log/slog"
	"testing"

	"github.com/latticekeep/latticekeep/internal/metrics"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestOnlyAProductionServerKeepsAReserve(t *testing.T) {
	for _, dev := range []bool{false, true} {
		p := deploymentOptions{dir: t.TempDir(), dev: dev, evidence: new(evidence), calls: metrics.NewCalls(), logger: slog.New(slog.DiscardHandler)}
		s, err := openDatabase(t.Context(), p, nil, func(any) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("a"), nil) }); err != nil {
			t.Fatal(err)
		}
		u, err := s.Usage(t.Context())
		if err != nil || u.Reserve > 0 == dev || u.Reserve > diskReserve {
			t.Errorf("dev %v: %+v %v", dev, u, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
