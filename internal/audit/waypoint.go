package audit

import (
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// dueCheckpoint is a checkpoint that the chain must match.
type dueCheckpoint struct {
	Checkpoint
	what string // name of the checkpoint in messages
}

// expect adds a verified checkpoint that the chain must match.
func (v *Verifier) expect(c Checkpoint, what string) {
	w := dueCheckpoint{c, what}
	i := 0
	for i < len(v.due) && v.due[i].Size <= c.Size {
		i++
	}
	v.due = append(v.due[:i:i], append([]dueCheckpoint{w}, v.due[i:]...)...)
}

// passDue compares the head with the checkpoints that are due at it.
func (v *Verifier) passDue() error {
	for len(v.due) > 0 && v.tree.size >= v.due[0].Size {
		w := v.due[0]
		v.due = v.due[1:]
		if !w.same(v.checkpoint()) {
			return w.forked()
		}
	}
	return nil
}

func (w dueCheckpoint) forked() *Broken {
	return &Broken{w.Sequence, "the log is not the one that " + w.what + " is of: it was rewritten at this entry or before"}
}

func (w dueCheckpoint) lostTo(from, accepted uint64) *Broken {
	return &Broken{from, fmt.Sprintf("%s is of epoch %d and knows entries up to %d: entries %d to %d are not in this log, they were lost by the rollback that entry %d accepted",
		w.what, w.Epoch, w.Sequence, from, w.Sequence, accepted)}
}

var (
	errSinceMalformed  = fault.New(fault.Invalid, "the older checkpoint is not a checkpoint of a latticekeep log: give the signed note as it was kept")
	errSinceUnverified = fault.New(fault.Invalid, "the older checkpoint is not signed with this log's key: it is of another log, or was altered")
	errSinceChain      = fault.New(fault.Invalid, "the older checkpoint is of another log")
	errSincePart       = fault.New(fault.Invalid, "a part of the log does not show what an older checkpoint knows: verify the whole log")
)

// beginSince parses the older checkpoint, verifies it with the log's key, and makes the chain match
// it.
func (v *Verifier) beginSince() error {
	if v.options.Since == nil {
		return nil
	}
	if !v.whole {
		return errSincePart
	}
	c, _, err := ParseKept(v.options.Since, v.public)
	switch {
	case errors.Is(err, ErrCheckpointMalformed):
		return errSinceMalformed
	case err != nil:
		return errSinceUnverified
	case c.ChainID != v.chainID:
		return errSinceChain
	}
	v.since = &c
	switch {
	case c.Size > v.tree.size:
		v.expect(c, "the older checkpoint")
	case c.Size == v.tree.size:
		v.due = append(v.due, dueCheckpoint{c, "the older checkpoint"})
		return v.passDue()
	case v.older == nil:
		return errSincePart
	default:
		return v.older(c)
	}
	return nil
}
