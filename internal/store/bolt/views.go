package bolt

import (
	"sync"
	"sync/atomic"
	"time"
)

// views holds the file in use and counts the Views that read it. It counts separately those that
// began before the last commit and so may read pages that this commit freed. A View is counted
// before its snapshot is taken, so it counts as older than a commit that it just sees. This error
// is on the safe side.
type views struct {
	mu      sync.Mutex
	file    *file // for Views and groups; nil until it has been reopened
	closed  bool
	epoch   uint64 // changes with each commit
	current int    // Views that began in this epoch
	older   int    // Views that began earlier
	awaited bool   // the writer wants a poke when a View ends

	failed atomic.Bool   // no commit has succeeded since one failed or the file went out of use
	left   chan struct{} // wakes the writer: an awaited View has ended
	wake   chan struct{} // wakes the writer: the file went out of use
}

func (v *views) any() bool   { return v.current+v.older > 0 }
func (v *views) stale() bool { return v.older > 0 }

func (v *views) enter() (*file, uint64, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return nil, 0, errClosed()
	}
	if v.file == nil {
		return nil, 0, errRecovering
	}
	v.current++
	v.file.readers.Add(1)
	return v.file, v.epoch, nil
}

func (v *views) leave(f *file, epoch uint64) {
	defer f.readers.Done()
	v.mu.Lock()
	defer v.mu.Unlock()
	if epoch == v.epoch {
		v.current--
	} else {
		v.older--
	}
	if v.awaited {
		poke(v.left)
	}
}

// await waits until some returns false or giveUp fires, and reports whether some returned false.
// Only the writer waits, so one channel is enough.
func (v *views) await(some func() bool, giveUp <-chan time.Time) bool {
	for {
		v.mu.Lock()
		v.awaited = some()
		wait := v.awaited
		v.mu.Unlock()
		if !wait {
			return true
		}
		select {
		case <-v.left:
		case <-giveUp:
			return false
		}
	}
}

// usable reports whether the file is open and not under suspicion.
func (v *views) usable() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.file != nil
}

// drop takes f out of use and makes the writer reopen the file.
func (v *views) drop(f *file) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.file == f {
		v.file = nil
		v.failed.Store(true)
		poke(v.wake)
	}
}

// use takes a reopened or compacted file into use.
func (v *views) use(f *file) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.file = f
}

// age counts all open Views as older, after a commit.
func (v *views) age() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.epoch++
	v.older += v.current
	v.current = 0
}

// close refuses further Views. It reports whether this call was the first.
func (v *views) close() (first bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	first = !v.closed
	v.closed = true
	return first
}

// state reports whether the store is closed, and whether the file is in use and takes commits.
func (v *views) state() (closed, healthy bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.closed, v.file != nil && !v.failed.Load()
}
