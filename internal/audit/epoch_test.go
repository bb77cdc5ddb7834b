package audit

import (
	"testing"
)

func TestEpochsMapSequencesToTheTree(t *testing.T) {
	epochs := []Epoch{{1, 1, 0}, {2, 11, 5}, {4, 13, 7}, {5, 100, 9}}
	want := map[uint64]int64{1: 0, 5: 4, 11: 5, 12: 6, 13: 7, 14: 8, 100: 9, 107: 16}
	for sequence := range uint64(120) {
		index, ok := IndexOf(epochs, sequence)
		if at, known := want[sequence]; known && (!ok || index != at) {
			t.Errorf("indexOf(%d) = %d, %t", sequence, index, ok)
		}
		if (sequence == 0 || (sequence > 5 && sequence < 11) || (sequence > 14 && sequence < 100)) == ok {
			t.Errorf("indexOf(%d) = %d, %t", sequence, index, ok)
		}
		if ok && SequenceAt(epochs, index) != sequence {
			t.Errorf("sequenceAt(%d) = %d", index, SequenceAt(epochs, index))
		}
	}
}
