package vault

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

const (
	timedUnseals = 2000 // of each sort
	maxWelchT    = 4.5  // beyond it two distributions are taken to differ
)

// BenchmarkTimingOfMisses unseals foreign, deleted, expired and never-existing
// credentials in turns, in an order drawn anew each time, and reports Welch's t
// between the times of every two sorts, over all of them and over the fastest
// nine tenths, where little but the work is measured. It fails when a t over
// all is 4.5 or more. It takes long whatever -benchtime says, so it runs only
// when -bench names Timing.
func BenchmarkTimingOfMisses(b *testing.B) {
	if pattern := flag.Lookup("test.bench"); !strings.Contains(pattern.Value.String(), "Timing") {
		b.Skip("run with -bench Timing")
	}
	f := newFixture(b, time.Hour)
	sorts := []string{"foreign", "deleted", "expired", "never existing"}
	const each = 20 // ids, so that no place in the store stands for its sort
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
		_, err := f.vault.Unseal(b.Context(), f.a, ids[sort][i%each])
		took := time.Since(began)
		if !errors.Is(err, fault.Forbidden) {
			b.Fatal(sort, err)
		}
		return float64(took.Microseconds())
	}
	for i := range 200 { // the decoy, the cache, the branch predictors
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
		mean, _ := meanAndVariance(times[one])
		fmt.Fprintf(&medians, "%s %.0f (mean %.0f) us; ", one, fastest(times[one], 0.5)[timedUnseals/2-1], mean)
		for _, other := range sorts[i+1:] {
			t, fast := welch(times[one], times[other]), welch(fastest(times[one], 0.9), fastest(times[other], 0.9))
			fmt.Fprintf(&table, "\n%-14s and %-14s t = %+.2f, fastest nine tenths t = %+.2f", one, other, t, fast)
			worst, worstFast = max(worst, math.Abs(t)), max(worstFast, math.Abs(fast))
		}
	}
	b.Log("medians: " + medians.String() + table.String())
	b.ReportMetric(worst, "welch-t")
	b.ReportMetric(worstFast, "welch-t-fast")
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(timedUnseals*len(sorts)), "us/unseal")
	if worst >= maxWelchT {
		b.Errorf("Welch's t is %.2f: what is not there can be told apart by its time", worst)
	}
}

// fastest returns the smallest part of the times, in order.
func fastest(times []float64, part float64) []float64 {
	return slices.Sorted(slices.Values(times))[:int(part*float64(len(times)))]
}

// welch returns Welch's t of two samples.
func welch(a, b []float64) float64 {
	meanA, varA := meanAndVariance(a)
	meanB, varB := meanAndVariance(b)
	return (meanA - meanB) / math.Sqrt(varA/float64(len(a))+varB/float64(len(b)))
}

func meanAndVariance(x []float64) (mean, variance float64) {
	for _, v := range x {
		mean += v
	}
	mean /= float64(len(x))
	for _, v := range x {
		variance += (v - mean) * (v - mean)
	}
	return mean, variance / float64(len(x)-1)
}

func TestWelch(t *testing.T) {
	// Equal variances and sizes: the difference of the means, 1, over sqrt(2.5/5 + 2.5/5).
	if got := welch([]float64{2, 3, 4, 5, 6}, []float64{1, 2, 3, 4, 5}); math.Abs(got-1) > 1e-12 {
		t.Error(got)
	}
}
