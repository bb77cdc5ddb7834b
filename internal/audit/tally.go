package audit

import (
	"context"
	"fmt"
	"maps"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Kind is the event type and outcome by which entries are counted.
type Kind struct {
	Type    EventType
	Outcome Outcome
}

// Progress returns the sequence of the newest entry, and the number of entries of each kind that
// this process has committed. The counts are per process, for its metrics; the counts of several
// processes add up. Error: fault.Unavailable.
func (l *Log) Progress(ctx context.Context) (sequence uint64, written map[Kind]uint64, err error) {
	err = l.chain.store.View(ctx, func(r store.Reader) error {
		head, err := readHead(r)
		if err != nil {
			return err
		}
		sequence = head.sequence
		p := l.heads.written.latest.Load() // the hook stores the tally before its commit succeeds
		if p == nil {
			return nil
		}
		committed := p.head == head
		if !committed && p.head.sequence < head.sequence { // another process has written since, or in its place
			committed, err = l.chain.has(r, p.head)
		}
		if written = p.before; committed {
			written = p.after
		}
		return unlessDamaged(err)
	})
	if err != nil {
		return 0, nil, fmt.Errorf("reading the head of the chain: %w", err)
	}
	return sequence, written, nil
}

// tally counts entries. The hook proposes counts before each commit. At the next commit, when the
// store shows the result, it settles which of the two counts is right.
type tally struct{ latest atomic.Pointer[proposal] }

type proposal struct {
	before, after map[Kind]uint64 // immutable
	head          link            // head after the commit
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
func (t *tally) propose(head link, group []pending) {
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
