package audit

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/store"
)

// epoch is a run of consecutive sequences. The log begins in epoch 1; each
// accepted rollback begins another one, above all sequences that the entries
// which were lost could have had. The tree goes on across epochs.
type epoch struct {
	number, first uint64
	size          int64 // of the tree before it
}

func epochKey(number uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/epoch/"), number)
}

var epochRange = store.Prefix([]byte("audit/epoch/"))

func (e epoch) encode() []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, e.first), uint64(e.size))
}

// epochRow is a row of an epoch: what anybody who writes to the database may say.
type epochRow struct {
	key []byte
	epoch
}

// epochRows returns the rows of epochs by their numbers; the first one has none.
// Of a row that is not one the epoch is zero.
func epochRows(r store.Reader) (rows []epochRow, err error) {
	err = r.Scan(epochRange, func(key, value []byte) bool {
		row := epochRow{key: bytes.Clone(key)}
		if len(key) == len(epochRange.From)+8 && len(value) == 16 {
			row.epoch = epoch{
				number: binary.BigEndian.Uint64(key[len(epochRange.From):]),
				first:  binary.BigEndian.Uint64(value),
				size:   int64(binary.BigEndian.Uint64(value[8:])),
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

// follows reports whether an epoch may come after another one: that has an entry
// at least, and this one skips sequences but no indexes.
func (e epoch) follows(last epoch) bool {
	return e.number > last.number && e.size > last.size && e.first <= maxInteger &&
		e.first >= last.first && e.first-last.first >= uint64(e.size-last.size)
}

// indexOf returns the place of an entry in the tree, and false when no entry
// has the sequence. It does not know where the last epoch ends.
func indexOf(epochs []epoch, sequence uint64) (int64, bool) {
	for i := len(epochs) - 1; i >= 0; i-- {
		if e := epochs[i]; sequence >= e.first {
			index := e.size + int64(sequence-e.first)
			return index, i == len(epochs)-1 || index < epochs[i+1].size
		}
	}
	return 0, false
}

// sequenceAt returns the sequence of the entry at a place in the tree.
func sequenceAt(epochs []epoch, index int64) uint64 {
	for i := len(epochs) - 1; i > 0; i-- {
		if e := epochs[i]; index >= e.size {
			return e.first + uint64(index-e.size)
		}
	}
	return uint64(index) + 1
}

// epochOf returns the epoch that a sequence is in.
func epochOf(epochs []epoch, sequence uint64) epoch {
	of := epochs[0]
	for _, e := range epochs {
		if sequence >= e.first {
			of = e
		}
	}
	return of
}

// after returns the loss that an epoch began with, without what it was found by.
func (e epoch) after(former epoch) acceptedLoss {
	return acceptedLoss{former: former.number, epoch: e.number, from: former.first + uint64(e.size-former.size), to: e.first - 1}
}

// acceptedLoss is what an accepted rollback says of the entries that it lost.
type acceptedLoss struct {
	former, epoch uint64 // that lost them, and that began then
	from, to      uint64 // sequences

	// The checkpoint that it was found by, which is of an entry in that range
	// unless the database had others there. Not known of an acceptance that is in
	// the archive.
	anchored uint64
	hash     string
}

func (a acceptedLoss) covers(c Checkpoint) bool {
	inRange := a.former <= c.Epoch && a.from <= c.Sequence && c.Sequence <= a.to
	named := a.anchored == c.Sequence && a.hash == hex.EncodeToString(c.Hash[:])
	// The database had other entries up to the one that was named: what an older
	// checkpoint knows of those that are lost was lost with them.
	older := a.anchored < a.from && c.Sequence < a.anchored
	return c.Epoch < a.epoch && (inRange || named || older)
}

// isOf reports whether an entry is the acceptance of the loss.
func (a acceptedLoss) isOf(e *Entry) bool {
	return e.begins() && e.number(attributeEpoch) == a.epoch &&
		e.number(attributeLostFrom) == a.from && e.number(attributeLostTo) == a.to
}

// RollbackError says that the database lacks entries which a checkpoint that is
// kept elsewhere knows.
type RollbackError struct {
	LostFrom uint64   // the first sequence that is lost; 0 when the database has other entries there
	LostTo   uint64   // the sequence of the checkpoint
	Hash     [32]byte // of the entry at LostTo
	Epoch    uint64   // of the checkpoint
	Place    string   // where the checkpoint is kept
}

func (e *RollbackError) Error() string {
	const remedy = "restore the newest copy of the database, or go on without them by latticekeep audit accept-rollback"
	if e.Place == memoryPlace {
		if e.LostFrom == 0 {
			return fmt.Sprintf("the audit log has other entries up to %d than those that this replica has seen in it, which are lost: "+remedy, e.LostTo)
		}
		return fmt.Sprintf("the database lacks entries %d to %d of the audit log, which this replica has seen in it: "+remedy, e.LostFrom, e.LostTo)
	}
	if e.LostFrom == 0 {
		return fmt.Sprintf("the audit log has other entries up to %d than those that the checkpoint kept in %s knows, which are lost: "+remedy, e.LostTo, e.Place)
	}
	return fmt.Sprintf("the database lacks entries %d to %d of the audit log, which the checkpoint kept in %s knows: "+remedy, e.LostFrom, e.LostTo, e.Place)
}

// memoryPlace is what a [RollbackError] calls what a process has seen itself.
const memoryPlace = "the memory of a replica"

// The newest checkpoint in the database is signed evidence, too: a log that does
// not go on from it has lost entries, whoever removed them. So it is held against
// the entries as if it were kept in a place of its own, and the loss is accepted
// as any other one. What is derived from the entries is then taken back to those
// that are left.

// databasePlace is what a [RollbackError] calls the database.
const databasePlace = "the database"

// Rollback is the beginning of a new epoch.
type Rollback struct {
	Epoch            uint64
	LostFrom, LostTo uint64 // the sequences that are skipped; LostTo is one less than LostFrom when there are none
	Receipt
}
