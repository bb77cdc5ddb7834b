package writer

import (
	"sync"
	"time"
)

// mostDenials is how many entries of what was denied or failed one principal gets in a minute while
// the disk is full. A caller beyond it is refused without an answer about what it asked for.
const mostDenials = 10

// denials counts the denials of each principal in one minute.
type denials struct {
	mu    sync.Mutex
	begun time.Time
	taken map[string]int
}

func (d *denials) take(principal string, now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if begun := now.Truncate(time.Minute); !begun.Equal(d.begun) {
		d.begun, d.taken = begun, make(map[string]int)
	}
	if d.taken[principal] == mostDenials {
		return false
	}
	d.taken[principal]++
	return true
}
