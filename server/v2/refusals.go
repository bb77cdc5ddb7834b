package v2

import (
	"sync"
	"time"
)

// refusals decides which requests of strangers are recorded: the first of each
// source in a minute, so that a stranger cannot fill the log, and not more than
// maxSources in all, so that many addresses cannot either. Every refusal is
// counted by the request metric.
type refusals struct {
	mu      sync.Mutex
	minute  time.Time
	sources map[string]bool // recorded in this minute
}

const maxSources = 256

// first reports whether the refusal is to be recorded.
func (r *refusals) first(source string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if minute := now.Truncate(time.Minute); !minute.Equal(r.minute) {
		r.minute, r.sources = minute, make(map[string]bool)
	}
	if r.sources[source] || len(r.sources) == maxSources {
		return false
	}
	r.sources[source] = true
	return true
}
