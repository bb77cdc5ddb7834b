package timing

import (
	"math"
	"slices"
	"testing"
)

func TestWelch(t *testing.T) {
	// Equal variances and sizes: the difference of the means, 1, over sqrt(2.5/5 + 2.5/5).
	if got := Welch([]float64{2, 3, 4, 5, 6}, []float64{1, 2, 3, 4, 5}); math.Abs(got-1) > 1e-12 {
		t.Error(got)
	}
	if got := Fastest([]float64{3, 1, 2, 4}, 0.5); !slices.Equal(got, []float64{1, 2}) {
		t.Error(got)
	}
}
