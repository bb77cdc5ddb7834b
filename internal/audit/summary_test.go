package audit

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestPlacesAreCutOnBothSides(t *testing.T) {
	for from := range blockSize {
		for _, to := range []int{0, 1, from - 1, from, from + 1, 63, 64, 127, 128, 254, 255} {
			if to < 0 || to >= blockSize {
				continue
			}
			at, n := allPlaces.from(from).to(to), 0
			for place, more := at.last(); more; place, more = at.last() {
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
	rows := block(rand.New(rand.NewPCG(3, 4)), 5, 7)
	whole := summaryOf(rows)
	for _, gone := range []int{0, 1, 100, 255} {
		left := slices.Clone(rows[gone:])
		if !summaryAgrees(whole, left) || !summaryAgrees(summaryOf(left), left) {
			t.Errorf("without %d rows it does not agree", gone)
		}
		left[len(left)-1].actor = "usr_other"
		if summaryAgrees(whole, left) {
			t.Errorf("without %d rows it agrees with another row", gone)
		}
	}
	for i := range whole {
		forged := slices.Clone(whole)
		forged[i]++
		if summaryAgrees(forged, rows) {
			t.Fatalf("byte %d can be changed", i)
		}
	}
	if summaryAgrees(whole[:len(whole)-1], rows) || summaryAgrees(nil, rows) || summaryAgrees([]byte{summaryVersion}, rows[1:]) {
		t.Error("one that was cut agrees")
	}
}

// The block has one row, so the summary has two keys, and each ends with the row's place, 255.
func TestASummaryHasItsGoldenForm(t *testing.T) {
	const want = "0121d87f4700ff4cd7d7e900ff"
	got := summaryOf([]indexRow{{eventType: CredentialSealed, actor: "usr_a"}})
	if hex.EncodeToString(got) != want {
		t.Errorf("%x, want %s", got, want)
	}
}

func FuzzSummary(f *testing.F) {
	f.Fuzz(func(t *testing.T, in []byte) {
		var out []byte
		rows := 0
		ok := eachKey(in, func(_ uint32, at placeSet) {
			for _, more := at.last(); more; _, more = at.last() {
				rows++
			}
		})
		places, readable := placesOf(in, []uint32{typeKey(CredentialSealed)})
		if ok && !readable && len(in) > 0 {
			t.Fatal("a whole summary cannot be searched")
		}
		if !ok {
			return
		}
		// Encoding again yields the same bytes, because there is one spelling.
		out = append(out, summaryVersion)
		eachKey(in, func(key uint32, at placeSet) {
			var of []byte
			if key == typeKey(CredentialSealed) && at != places {
				t.Fatal("the search found something else")
			}
			for place, more := at.last(); more; place, more = at.last() {
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
