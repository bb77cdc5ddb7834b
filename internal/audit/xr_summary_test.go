package audit

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// A summary names the entries that a loop over the block finds.
func TestASummaryNamesTheEntriesThatMatch(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, shape := range [][2]int{{1, 1}, {3, 2}, {60, 256}, {256, 3}} {
		rows := block(random, shape[0], shape[1])
		summary := summaryOf(rows)
		for _, q := range []Query{{EventType: "TYPE_0"}, {UserID: "usr_1"}, {EventType: "TYPE_2", UserID: "usr_0"}, {EventType: "usr_0"}, {UserID: "TYPE_0"}, {}} {
			at, ok := placesOf(summary, q.keys())
			var got, want []int
			for place, more := at.last(); more; place, more = at.last() {
				got = append(got, place)
			}
			for i, row := range slices.Backward(rows) {
				if q.matches(row) {
					want = append(want, i)
				}
			}
			if !ok || !slices.Equal(got, want) {
				t.Errorf("%v, %+v: %v, want %v", shape, q, got, want)
			}
		}
	}
}
