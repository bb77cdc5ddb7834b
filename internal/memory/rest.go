package memory

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// After work the heap stays as large as the next collection needs it, up to five times of what is in use
// (see gcPercent), and a process that has little to do hardly comes to the next collection.
const (
	restEvery = 10 * time.Second
	restBelow = 64 << 20 // bytes that a process with little to do allocates in that time at most
	restAfter = 32 << 20 // bytes allocated since memory was last given back for which a collection is worth its while
)

// KeepResting gives memory that is not used back to the operating system whenever the process has little to
// do, until ctx ends.
func KeepResting(ctx context.Context) {
	tick := time.NewTicker(restEvery)
	defer tick.Stop()
	var r rest
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if r.isDue(allocated()) {
				debug.FreeOSMemory()
			}
		}
	}
}

// rest decides when memory is given back.
type rest struct {
	last, given uint64 // bytes allocated since the start, as of the last look and when memory was last given back
}

// isDue reports whether to give memory back now that so many bytes have been allocated since the start.
func (r *rest) isDue(allocated uint64) bool {
	idle, worth := allocated-r.last <= restBelow, allocated-r.given >= restAfter
	r.last = allocated
	if idle && worth {
		r.given = allocated
	}
	return idle && worth
}

// allocated returns the bytes that were allocated in the heap since the start.
func allocated() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
