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
// metrics: with several that write one log, their counts add up. Error:
// fault.Unavailable.
func (l *Log) Progress(ctx context.Context) (sequence uint64, written map[Kind]uint64, err error) {
	err = l.chain.store.View(ctx, func(r store.Reader) error {
		head, err := readHead(r)
		if err != nil {
			return err
		}
		sequence = head.sequence
		p := l.heads.written.latest.Load() // a tally is there before the commit that it speaks of
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

// tally counts entries. The hook proposes the counts before each commit, and settles
// at the next one, when the store shows it, which of the two hold.
type tally struct{ latest atomic.Pointer[proposal] }

type proposal struct {
	before, after map[Kind]uint64 // are not changed any more
	head          link            // once it is committed
}

// settle says whether what was proposed last was committed.
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

// propose counts the entries of a commit, the last of which is the head after it.
func (t *tally) propose(head link, group []pending) {
	var before map[Kind]uint64
	if p := t.latest.Load(); p != nil {
		before = p.before // and after: it is settled
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
