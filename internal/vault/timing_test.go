package vault

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/timing"
)

const timedUnseals = 2000 // number per kind

// BenchmarkTimingOfMisses unseals credentials of another tenant, deleted, expired and unknown ones
// in turns, in a new random order each time. It reports Welch's t between the times of every two
// kinds: over all times, and over the fastest nine tenths, which contain little besides the work.
// It fails when a t over all times is 4.5 or more. It takes long whatever -benchtime says, so it
// runs only when -bench names Timing.
func BenchmarkTimingOfMisses(b *testing.B) {
	timing.Asked(b)
	f := newFixture(b, time.Hour)
	sorts := []string{"foreign", "deleted", "expired", "never existing"}
	const each = 20 // ids per kind, so a place in the store does not stand for a kind
	ids := make(map[string][]string)
	for range each {
		deleted := f.seal(f.a, login).ID
		must(b, f.vault.Delete(b.Context(), f.a, deleted))
		ids["deleted"] = append(ids["deleted"], deleted)
		ids["foreign"] = append(ids["foreign"], f.seal(f.b, login).ID)
		ids["expired"] = append(ids["expired"], f.seal(f.a, login).ID)
		ids["never existing"] = append(ids["never existing"], authz.NewID("cred"))
	}
	f.advance(31 * day)
	f.seal(f.a, login)
	must(b, f.store.Scrubbed(b.Context()))
	times := make(map[string][]float64)
	unseal := func(sort string, i int) float64 {
		began := time.Now()
		_, err := f.vault.Read(b.Context(), f.a, ByID(ids[sort][i%each]))
		took := time.Since(began)
		if !errors.Is(err, fault.Forbidden) {
			b.Fatal(sort, err)
		}
		return float64(took.Microseconds())
	}
	for i := range 200 { // warms up the decoy, the cache and the branch predictors
		unseal(sorts[i%len(sorts)], i)
	}
	b.ResetTimer()
	for i := range timedUnseals {
		for _, at := range rand.Perm(len(sorts)) {
			times[sorts[at]] = append(times[sorts[at]], unseal(sorts[at], i))
		}
	}
	b.StopTimer()
	worst, worstFast := 0.0, 0.0
	var medians, table strings.Builder
	for i, one := range sorts {
		mean, _ := timing.MeanAndVariance(times[one])
		fmt.Fprintf(&medians, "%s %.0f (mean %.0f) us; ", one, timing.Fastest(times[one], 0.5)[timedUnseals/2-1], mean)
		for _, other := range sorts[i+1:] {
			t, fast := timing.Welch(times[one], times[other]), timing.Welch(timing.Fastest(times[one], 0.9), timing.Fastest(times[other], 0.9))
			fmt.Fprintf(&table, "\n%-14s and %-14s t = %+.2f, fastest nine tenths t = %+.2f", one, other, t, fast)
			worst, worstFast = max(worst, math.Abs(t)), max(worstFast, math.Abs(fast))
		}
	}
	b.Log("medians: " + medians.String() + table.String())
	b.ReportMetric(worst, "welch-t")
	b.ReportMetric(worstFast, "welch-t-fast")
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(timedUnseals*len(sorts)), "us/unseal")
	if worst >= timing.MaxT {
		b.Errorf("Welch's t is %.2f: what is not there can be told apart by its time", worst)
	}
}
