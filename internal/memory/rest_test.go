package memory

import "testing"

// Memory is given back once work has ended, and not again before there was more work.
func TestMemoryIsGivenBackOnceWorkHasEnded(t *testing.T) {
	var r rest
	total := uint64(0)
	for i, look := range []struct {
		megabytes uint64
		due       bool
	}{
		{20, false}, // the start
		{2, false},  // nothing worth a collection yet
		{500, false},
		{500, false},
		{3, true},
		{3, false},
		{64, true},
		{65, false},
		{30, true},
		{15, false},
		{16, false},
		{1, true}, // 32 MB since the last time
		{0, false},
	} {
		total += look.megabytes << 20
		if due := r.isDue(total); due != look.due {
			t.Errorf("look %d: due is %v", i, due)
		}
	}
}

func TestAllocationsAreCounted(t *testing.T) {
	before := allocated()
	kept = make([]byte, 1<<20)
	if n := allocated() - before; n < 1<<20 {
		t.Errorf("%d bytes", n)
	}
}

var kept []byte // keeps an allocation from being optimised away
