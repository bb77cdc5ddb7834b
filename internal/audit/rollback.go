package audit

import (
	"encoding/hex"
	"fmt"
)

// AcceptedLoss describes the entries that an accepted rollback lost.
type AcceptedLoss struct {
	previous, epoch uint64 // the epoch that lost them, and the epoch that began then
	from, to        uint64 // sequences

	// The checkpoint that revealed the loss. It covers an entry in the range above, unless the
	// database had other entries there. Both fields are zero if the acceptance is in the archive.
	Anchored uint64
	Hash     string
}

// Covers reports whether the acceptance of this loss explains that the log lacks a checkpoint.
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

// RollbackError reports that the database lacks entries that a checkpoint or this process knows.
type RollbackError struct {
	LostFrom uint64   // first lost sequence; 0 if the database has other entries there
	LostTo   uint64   // last lost sequence that is known
	Hash     [32]byte // hash of the entry at LostTo
	Epoch    uint64   // epoch of that entry
	Source   string   // what knows the entries: an anchor, DatabaseSource or MemorySource
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

// MemorySource is the Source of a [RollbackError] when the process itself has seen the entries.
const MemorySource = "the memory of a replica"

// DatabaseSource is the Source of a [RollbackError] that the newest checkpoint in the database
// revealed. That checkpoint is signed evidence, too: a log that does not continue from it has lost
// entries, whoever removed them. So it is compared with the entries as if it were in an anchor, and
// its loss is accepted like any other. Accepting the loss then takes everything derived back to the
// remaining entries.
const DatabaseSource = "the database"

// Rollback describes the beginning of a new epoch.
type Rollback struct {
	Epoch            uint64
	LostFrom, LostTo uint64 // skipped sequences; if there are none, LostTo is LostFrom-1
	Receipt
}
