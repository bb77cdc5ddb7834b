package writer

import (
	"context"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/store"
)

const (
	AloneAfter  = aloneAfter
	FollowEvery = followEvery
	StepEntries = stepEntries
)

var (
	ErrOneByOne = errOneByOne
	ErrOutrun   = errOutrun
)

// AppendAcceptance adds the event, as one that accepts the loss if it is not nil.
func (l *Log) AppendAcceptance(tx store.Tx, e audit.Event, lost *audit.RollbackError) (*audit.Receipt, error) {
	if lost == nil {
		return l.append(tx, e, nil)
	}
	return l.append(tx, e, &acceptance{lost: *lost})
}

// Pending returns what [Log.Append] adds to a transaction.
func Pending(e audit.Event) any { return pending{Event: e, receipt: new(audit.Receipt)} }

func (l *Log) Proposed() audit.Head { return l.heads.proposed }

func (l *Log) SharedLately() bool { return l.heads.sharedLately.Load() }

func (l *Log) Seen() audit.Head { return *l.Detector.seen.Load() }

// ForgetLosses drops the losses that the process found by itself.
func (l *Log) ForgetLosses() { l.Detector.inDatabase.lost, l.Detector.inMemory.lost = nil, nil }

func TruncateTree(tx store.Tx, c audit.Checkpoint) error { return truncateTree(tx, c) }

func TruncateSummaries(tx store.Tx, to uint64) error { return truncateSummaries(tx, to) }

func (f *Follower) Step(ctx context.Context) (audit.Checkpoint, error) { return f.step(ctx) }

func (f *Follower) Begin(ctx context.Context) (step, error) { return f.begin(ctx) }

func (s *step) Read(ctx context.Context, db store.Store) error { return s.read(ctx, db) }

func (s *step) Checkpoint(ch *chain.Chain) (audit.Checkpoint, error) { return s.checkpoint(ch) }

func (s *step) Write(tx store.Tx, signed []byte) error { return s.write(tx, signed) }
