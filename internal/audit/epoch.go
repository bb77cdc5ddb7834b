package audit

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
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

func EpochKey(number uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/epoch/"), number)
}

var EpochRange = store.Prefix([]byte("audit/epoch/"))

func (e Epoch) Encode() []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, e.First), uint64(e.Size))
}

// epochRow is the unverified row of an epoch: anyone with write access to the database can change
// it.
type epochRow struct {
	Key []byte
	Epoch
}

// ReadEpochRows returns the rows of epochs in the order of their numbers. Epoch 1 has no row. For a
// malformed row, the epoch is zero.
func ReadEpochRows(r store.Reader) (rows []epochRow, err error) {
	err = r.Scan(EpochRange, func(key, value []byte) bool {
		row := epochRow{Key: bytes.Clone(key)}
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

// AcceptedLoss describes the entries that an accepted rollback lost.
type AcceptedLoss struct {
	previous, epoch uint64 // the epoch that lost them, and the epoch that began then
	from, to        uint64 // sequences

	// The checkpoint that revealed the loss. It covers an entry in the range above, unless the
	// database had other entries there. Both fields are zero if the acceptance is in the archive.
	Anchored uint64
	Hash     string
}

func (a AcceptedLoss) Covers(c Checkpoint) bool {
	inRange := a.previous <= c.Epoch && a.from <= c.Sequence && c.Sequence <= a.to
	named := a.Anchored == c.Sequence && a.Hash == hex.EncodeToString(c.Hash[:])
	// The database had other entries up to the named one. So the entries that an older checkpoint
	// covers in this stretch were lost with it.
	older := a.Anchored < a.from && c.Sequence < a.Anchored
	return c.Epoch < a.epoch && (inRange || named || older)
}

// IsOf reports whether an entry is the acceptance of this loss.
func (a AcceptedLoss) IsOf(e *Entry) bool {
	return e.Begins() && e.Number(AttributeEpoch) == a.epoch &&
		e.Number(AttributeLostFrom) == a.from && e.Number(AttributeLostTo) == a.to
}

// RollbackError reports that the database lacks entries that a checkpoint kept elsewhere covers.
type RollbackError struct {
	LostFrom uint64   // first lost sequence; 0 if the database has other entries there
	LostTo   uint64   // sequence of the checkpoint
	Hash     [32]byte // hash of the entry at LostTo
	Epoch    uint64   // epoch of the checkpoint
	Source   string   // where the checkpoint is kept
}

func (e *RollbackError) Error() string {
	const remedy = "restore the newest copy of the database, or go on without them by latticekeep audit accept-rollback"
	if e.Source == MemorySource {
		if e.LostFrom == 0 {
			return fmt.Sprintf("the audit log has other entries up to %d than those that this replica has seen in it, which are lost: "+remedy, e.LostTo)
		}
		return fmt.Sprintf("the database lacks entries %d to %d of the audit log, which this replica has seen in it: "+remedy, e.LostFrom, e.LostTo)
	}
	if e.LostFrom == 0 {
		return fmt.Sprintf("the audit log has other entries up to %d than those that the checkpoint kept in %s knows, which are lost: "+remedy, e.LostTo, e.Source)
	}
	return fmt.Sprintf("the database lacks entries %d to %d of the audit log, which the checkpoint kept in %s knows: "+remedy, e.LostFrom, e.LostTo, e.Source)
}

// MemorySource is the Place of a [RollbackError] when the process itself has seen the entries.
const MemorySource = "the memory of a replica"

// The newest checkpoint in the database is signed evidence, too: a log that does not continue from
// it has lost entries, whoever removed them. So this checkpoint is compared with the entries as if
// it were an anchor, and its loss is accepted like any other. Accepting the loss then takes
// everything derived back to the remaining entries.

// DatabaseSource is the Place of a [RollbackError] that the checkpoint in the database revealed.
const DatabaseSource = "the database"

// Rollback describes the beginning of a new epoch.
type Rollback struct {
	Epoch            uint64
	LostFrom, LostTo uint64 // skipped sequences; if there are none, LostTo is LostFrom-1
	Receipt
}
