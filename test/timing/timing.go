// Package timing supports benchmarks that test whether two kinds of request can be told apart by
// their time. Nothing in the product imports it.
package timing

import (
	"flag"
	"math"
	"slices"
	"strings"
	"testing"
)

// MaxT is the limit of Welch's t. Beyond it two distributions count as different.
const MaxT = 4.5

// Asked skips the benchmark unless -bench names Timing, because it takes minutes whatever
// -benchtime says.
func Asked(b *testing.B) {
	b.Helper()
	if pattern := flag.Lookup("test.bench"); pattern == nil || !strings.Contains(pattern.Value.String(), "Timing") {
		b.Skip("run with -bench Timing")
	}
}

// Fastest returns the smallest part of the times in ascending order. part is a fraction from 0 to
// 1.
func Fastest(times []float64, part float64) []float64 {
	return slices.Sorted(slices.Values(times))[:int(part*float64(len(times)))]
}

// Welch returns Welch's t of two samples.
func Welch(a, b []float64) float64 {
	meanA, varA := MeanAndVariance(a)
	meanB, varB := MeanAndVariance(b)
	return (meanA - meanB) / math.Sqrt(varA/float64(len(a))+varB/float64(len(b)))
}

// MeanAndVariance returns the mean and the variance of a sample.
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
