package compliance

import (
	"context"
	"runtime"
)

// places bound how many callers judge or render at the same time: some cores stay
// for all else. Nobody has one while a bucket is waited for.
type places chan struct{}

func newPlaces() places { return make(places, max(1, runtime.GOMAXPROCS(0)/2)) }

// take waits for a place, in turn. Error: fault.Unavailable.
func (p places) take(ctx context.Context) (leave func(), err error) {
	select {
	case p <- struct{}{}:
		return func() { <-p }, nil
	case <-ctx.Done():
		return nil, errBusy
	}
}
