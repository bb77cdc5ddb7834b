package audit

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Epoch is a run of consecutive sequences. The log begins in epoch 1. Each accepted rollback begins
// another epoch, above all sequences that the lost entries could have had. The tree continues
// across epochs.
type Epoch struct {
	Number, First uint64
	Size          int64 // size of the tree before the epoch
}

// EpochKey returns the key of an epoch's row.
func EpochKey(number uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/epoch/"), number)
}

// EpochRange holds the rows of all epochs but the first, which has no row.
var EpochRange = store.Prefix([]byte("audit/epoch/"))

// Encode returns the row of the epoch: u64 First, u64 Size.
func (e Epoch) Encode() []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, e.First), uint64(e.Size))
}

// EpochRow is the unverified row of an epoch: anyone with write access to the database can change
// it.
type EpochRow struct {
	Key []byte
	Epoch
}

// ReadEpochRows returns the rows of epochs in the order of their numbers. Epoch 1 has no row. For a
// malformed row, the epoch is zero.
func ReadEpochRows(r store.Reader) (rows []EpochRow, err error) {
	err = r.Scan(EpochRange, func(key, value []byte) bool {
		row := EpochRow{Key: bytes.Clone(key)}
		if len(key) == len(EpochRange.From)+8 && len(value) == 16 {
			row.Epoch = Epoch{
				Number: binary.BigEndian.Uint64(key[len(EpochRange.From):]),
				First:  binary.BigEndian.Uint64(value),
				Size:   int64(binary.BigEndian.Uint64(value[8:])),
			}
		}
		rows = append(rows, row)
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("reading the epochs of the log: %w", err)
	}
	return rows, nil
}

// Follows reports whether an epoch may come after last: last has at least one entry, and e may skip
// sequences, but no indexes of the tree.
func (e Epoch) Follows(last Epoch) bool {
	return e.Number > last.Number && e.Size > last.Size && e.First <= MaxInteger &&
		e.First >= last.First && e.First-last.First >= uint64(e.Size-last.Size)
}

// IndexOf returns the index of an entry in the tree, and false if no entry has the sequence. It
// does not know where the last epoch ends.
func IndexOf(epochs []Epoch, sequence uint64) (int64, bool) {
	for i := len(epochs) - 1; i >= 0; i-- {
		if e := epochs[i]; sequence >= e.First {
			index := e.Size + int64(sequence-e.First)
			return index, i == len(epochs)-1 || index < epochs[i+1].Size
		}
	}
	return 0, false
}

// SequenceAt returns the sequence of the entry at an index of the tree.
func SequenceAt(epochs []Epoch, index int64) uint64 {
	for i := len(epochs) - 1; i > 0; i-- {
		if e := epochs[i]; index >= e.Size {
			return e.First + uint64(index-e.Size)
		}
	}
	return uint64(index) + 1
}

// EpochOf returns the epoch that contains a sequence.
func EpochOf(epochs []Epoch, sequence uint64) Epoch {
	of := epochs[0]
	for _, e := range epochs {
		if sequence >= e.First {
			of = e
		}
	}
	return of
}

// LossAfter returns the loss between the previous epoch and this one, without the checkpoint that
// revealed it.
func (e Epoch) LossAfter(previous Epoch) AcceptedLoss {
	return AcceptedLoss{previous: previous.Number, epoch: e.Number, from: previous.First + uint64(e.Size-previous.Size), to: e.First - 1}
}
