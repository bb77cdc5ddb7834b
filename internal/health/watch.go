package health

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Outcome says how the latest calls of a part ended.
type Outcome struct {
	Succeeded time.Time // end of the last call that succeeded; zero: none
	Failed    time.Time // end of the last call that failed; zero: none
	Err       error     // error of the call that ended last; nil when it succeeded
}

// probeInterval is the shortest time between two calls that a [Watch] makes.
const probeInterval = 10 * time.Second

// probeTimeout bounds such a call.
const probeTimeout = 2 * time.Second

// ErrUnasked is the error of a [Watch]'s Try that learned nothing about its part.
var ErrUnasked = errors.New("another part failed first")

// Watch judges a part by how its calls end.
type Watch struct {
	Last func() Outcome              // outcome of the requests' own calls
	Try  func(context.Context) error // makes a call, within a second; ErrUnasked: nothing was learned
	// Bridges is how long requests go on without the part, because they keep what it gave. The part
	// fails once its calls have not succeeded for longer.
	Bridges time.Duration
	Now     func() time.Time

	mu   sync.Mutex
	own  Outcome // outcome of Try
	next time.Time
}

// Ask returns why the part fails, or nil. It waits at most for one call.
func (w *Watch) Ask(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	last, now := later(w.Last(), w.own), w.Now()
	quiet := probeInterval
	if last.Err == nil {
		quiet = max(quiet, w.Bridges) // until then an outage would stop nothing
	}
	if now.Sub(last.ended()) >= quiet && !now.Before(w.next) {
		w.next = now.Add(probeInterval)
		w.probe(ctx)
		last, now = later(w.Last(), w.own), w.Now()
	}
	if last.Err != nil && now.Sub(last.Succeeded) >= w.Bridges {
		return last.Err
	}
	return nil
}

// probe makes a call that goes on when whoever asked hangs up: that would say nothing about the part.
func (w *Watch) probe(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTimeout)
	defer cancel()
	switch err := w.Try(ctx); {
	case errors.Is(err, ErrUnasked):
	case err == nil:
		w.own.Succeeded, w.own.Err = w.Now(), nil
	default:
		w.own.Failed, w.own.Err = w.Now(), err
	}
}

func (o Outcome) ended() time.Time {
	if o.Failed.After(o.Succeeded) {
		return o.Failed
	}
	return o.Succeeded
}

// later combines two outcomes.
func later(a, b Outcome) Outcome {
	if a.ended().After(b.ended()) {
		a, b = b, a
	}
	if a.Succeeded.After(b.Succeeded) {
		b.Succeeded = a.Succeeded
	}
	return b
}
