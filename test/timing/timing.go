// Package timing is for benchmarks that ask whether two sorts of request can be
// told apart by the time they take. Nothing in the product imports it.
package timing

import (
	"flag"
	"math"
	"slices"
	"strings"
	"testing"
)

// MaxT is the Welch's t beyond which two distributions are taken to differ.
const MaxT = 4.5

// Asked skips a benchmark that takes minutes whatever -benchtime says, unless
// -bench names Timing.
func Asked(b *testing.B) {
	b.Helper()
	if pattern := flag.Lookup("test.bench"); pattern == nil || !strings.Contains(pattern.Value.String(), "Timing") {
		b.Skip("run with -bench Timing")
	}
}

// Fastest returns the smallest part of the times, in order.
func Fastest(times []float64, part float64) []float64 {
	return slices.Sorted(slices.Values(times))[:int(part*float64(len(times)))]
}

// Welch returns Welch's t of two samples.
func Welch(a, b []float64) float64 {
	meanA, varA := MeanAndVariance(a)
	meanB, varB := MeanAndVariance(b)
	return (meanA - meanB) / math.Sqrt(varA/float64(len(a))+varB/float64(len(b)))
}

// MeanAndVariance returns those of a sample.
func MeanAndVariance(x []float64) (mean, variance float64) {
	for _, v := range x {
		mean += v
	}
	mean /= float64(len(x))
	for _, v := range x {
		variance += (v - mean) * (v - mean)
	}
	return mean, variance / float64(len(x)-1)
}
