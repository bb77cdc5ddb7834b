package audit

import (
	"context"
	"fmt"
	"maps"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Kind is what entries are counted by.
type Kind struct {
	Type    EventType
	Outcome Outcome
}

// Progress returns the sequence of the newest entry, and how many entries of
// each kind this process has committed. It is the process's own view, for its
// metrics. Error: fault.Unavailable.
func (l *Log) Progress(ctx context.Context) (sequence uint64, written map[Kind]uint64, err error) {
	err = l.store.View(ctx, func(r store.Reader) error {
		b, err := r.Get(headKey)
		if err != nil {
			return err
		}
		head, err := decodeLink(b)
		sequence = head.sequence
		return err
	})
	if err != nil {
		return 0, nil, fmt.Errorf("reading the head of the chain: %w", err)
	}
	return sequence, l.written.at(sequence), nil // in this order: a tally is there before the commit that it speaks of
}

// tally counts entries. The hook proposes the counts before each commit; which of
// the two counts holds, the head that is stored says.
type tally struct{ latest atomic.Pointer[proposal] }

type proposal struct {
	before, after map[Kind]uint64 // are not changed any more
	sequence      uint64          // of the head once it is committed
}

// at returns the counts that belong to a stored head.
func (t *tally) at(sequence uint64) map[Kind]uint64 {
	switch p := t.latest.Load(); {
	case p == nil:
		return nil
	case sequence >= p.sequence:
		return p.after
	default:
		return p.before
	}
}

// propose counts the entries that follow a stored head; the last of them will
// have the sequence last.
func (t *tally) propose(head, last uint64, group []pending) {
	before := t.at(head)
	after := maps.Clone(before)
	if after == nil {
		after = make(map[Kind]uint64)
	}
	for _, p := range group {
		after[Kind{p.Type, p.Outcome}]++
	}
	t.latest.Store(&proposal{before, after, last})
}
