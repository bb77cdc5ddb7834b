package app

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/metrics"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
)

// A metric whose value is unknown is absent, and the other metrics stay.
func TestObjectsOfASealingKeyAreCountedOrAbsent(t *testing.T) {
	dir := t.TempDir()
	d, err := openDeployment(t.Context(), deploymentOptions{
		evidence: devProving(), calls: metrics.NewCalls(),
		dir: dir, kms: keyFileIn(dir), logger: slog.New(slog.DiscardHandler), now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.store.Close() })
	document, err := d.keys.SealingDocument(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		use  map[string]int
		err  error
		want []float64
	}{
		"counted":     {use: map[string]int{document.Key().ID(): 7, "unknown": 1}, want: []float64{7}},
		"not needed":  {want: []float64{0}},
		"not known":   {err: errors.New("the cluster does not answer")},
		"not in time": {err: context.DeadlineExceeded},
	} {
		service := sealingkey.New(d.store, d.guard, d.reader, d.keys, sealingkey.Options{
			InUse: func(context.Context) (map[string]int, error) { return tc.use, tc.err }, Now: time.Now,
		})
		registry := prometheus.NewRegistry()
		registry.MustRegister(metrics.SealingKeys(service))
		families, err := registry.Gather()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var got []float64
		for _, family := range families {
			for _, m := range family.GetMetric() {
				got = append(got, m.GetGauge().GetValue())
				if family.GetName() != "latticekeep_sealing_key_objects" || len(m.GetLabel()) != 2 || m.GetLabel()[0].GetValue() != document.Key().ID() {
					t.Errorf("%s: %v %v", name, family.GetName(), m)
				}
			}
		}
		if len(got) != len(tc.want) || len(got) == 1 && got[0] != tc.want[0] {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}
