package writer

import (
	"maps"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/audit"
)

// Kind is the event type and outcome by which entries are counted.
type Kind struct {
	Type    audit.EventType
	Outcome audit.Outcome
}

// tally counts entries. The hook proposes counts before each commit. At the next commit, when the
// store shows the result, it settles which of the two counts is right.
type tally struct{ latest atomic.Pointer[proposal] }

type proposal struct {
	before, after map[Kind]uint64 // immutable
	head          audit.Position  // head after the commit
}

// settle records whether the last proposal was committed.
func (t *tally) settle(committed bool) {
	p := t.latest.Load()
	if p == nil {
		return
	}
	counts := p.before
	if committed {
		counts = p.after
	}
	t.latest.Store(&proposal{counts, counts, p.head})
}

// propose counts the entries of a commit. The given head is the head after the commit.
func (t *tally) propose(head audit.Position, group []pending) {
	var before map[Kind]uint64
	if p := t.latest.Load(); p != nil {
		before = p.before // the same as after, because the proposal is settled
	}
	after := maps.Clone(before)
	if after == nil {
		after = make(map[Kind]uint64)
	}
	for _, p := range group {
		after[Kind{p.Type, p.Outcome}]++
	}
	t.latest.Store(&proposal{before, after, head})
}
