package reader_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A summary names the entries that a loop over the block finds.
func TestASummaryNamesTheEntriesThatMatch(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, shape := range [][2]int{{1, 1}, {3, 2}, {60, 256}, {256, 3}} {
		rows := audittest.Block(random, shape[0], shape[1])
		summary := audit.SummaryOf(rows)
		for _, q := range []reader.Query{{EventType: "TYPE_0"}, {UserID: "usr_1"}, {EventType: "TYPE_2", UserID: "usr_0"}, {EventType: "usr_0"}, {UserID: "TYPE_0"}, {}} {
			at, ok := audit.PlacesOf(summary, q.Keys())
			var got, want []int
			for place, more := at.Last(); more; place, more = at.Last() {
				got = append(got, place)
			}
			for i, row := range slices.Backward(rows) {
				if q.Matches(row) {
					want = append(want, i)
				}
			}
			if !ok || !slices.Equal(got, want) {
				t.Errorf("%v, %+v: %v, want %v", shape, q, got, want)
			}
		}
	}
}
