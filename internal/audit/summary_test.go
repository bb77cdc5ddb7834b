package audit_test

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/test/audittest"
)

func TestPlacesAreCutOnBothSides(t *testing.T) {
	for from := range audit.BlockSize {
		for _, to := range []int{0, 1, from - 1, from, from + 1, 63, 64, 127, 128, 254, 255} {
			if to < 0 || to >= audit.BlockSize {
				continue
			}
			at, n := audit.AllPlaces.From(from).To(to), 0
			for place, more := at.Last(); more; place, more = at.Last() {
				if n++; place < from || place > to {
					t.Fatalf("%d is not from %d to %d", place, from, to)
				}
			}
			if n != max(0, to-from+1) {
				t.Fatalf("%d places from %d to %d", n, from, to)
			}
		}
	}
}

// If the first rows of a block were cut, its summary still agrees with the remaining rows.
func TestASummaryIsHeldAgainstTheRowsThatAreLeft(t *testing.T) {
	rows := audittest.Block(rand.New(rand.NewPCG(3, 4)), 5, 7)
	whole := audit.SummaryOf(rows)
	for _, gone := range []int{0, 1, 100, 255} {
		left := slices.Clone(rows[gone:])
		if !audit.SummaryAgrees(whole, left) || !audit.SummaryAgrees(audit.SummaryOf(left), left) {
			t.Errorf("without %d rows it does not agree", gone)
		}
		left[len(left)-1].Actor = "usr_other"
		if audit.SummaryAgrees(whole, left) {
			t.Errorf("without %d rows it agrees with another row", gone)
		}
	}
	for i := range whole {
		forged := slices.Clone(whole)
		forged[i]++
		if audit.SummaryAgrees(forged, rows) {
			t.Fatalf("byte %d can be changed", i)
		}
	}
	if audit.SummaryAgrees(whole[:len(whole)-1], rows) || audit.SummaryAgrees(nil, rows) || audit.SummaryAgrees([]byte{audit.SummaryVersion}, rows[1:]) {
		t.Error("one that was cut agrees")
	}
}

// The block has one row, so the summary has two keys, and each ends with the row's place, 255.
func TestASummaryHasItsGoldenForm(t *testing.T) {
	const want = "0121d87f4700ff4cd7d7e900ff"
	got := audit.SummaryOf([]audit.IndexRow{{EventType: audit.CredentialSealed, Actor: "usr_a"}})
	if hex.EncodeToString(got) != want {
		t.Errorf("%x, want %s", got, want)
	}
}

func FuzzSummary(f *testing.F) {
	f.Fuzz(func(t *testing.T, in []byte) {
		var out []byte
		rows := 0
		ok := audit.EachKey(in, func(_ uint32, at audit.PlaceSet) {
			for _, more := at.Last(); more; _, more = at.Last() {
				rows++
			}
		})
		places, readable := audit.PlacesOf(in, []uint32{audit.TypeKey(audit.CredentialSealed)}, nil)
		if ok && !readable && len(in) > 0 {
			t.Fatal("a whole summary cannot be searched")
		}
		if !ok {
			return
		}
		// Encoding again yields the same bytes, because there is one spelling.
		out = append(out, audit.SummaryVersion)
		audit.EachKey(in, func(key uint32, at audit.PlaceSet) {
			var of []byte
			if key == audit.TypeKey(audit.CredentialSealed) && at != places {
				t.Fatal("the search found something else")
			}
			for place, more := at.Last(); more; place, more = at.Last() {
				of = append(of, byte(place))
			}
			slices.Reverse(of)
			out = append(out, byte(key>>24), byte(key>>16), byte(key>>8), byte(key), byte(len(of)-1))
			out = append(out, of...)
		})
		if !bytes.Equal(in, out) {
			t.Fatal("a summary has another spelling")
		}
	})
}
