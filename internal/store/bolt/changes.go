package bolt

import (
	"maps"
	"slices"
	"sync"
)

// The list of changed keys is bounded, and a copy that falls too far behind fails: the writer never
// waits for it.
const (
	noteBytes = 16 << 20 // bound for the noted keys, each counted as its length plus noteSize
	noteSize  = 64
)

// changedKeys is the list of keys that commits have changed since a copy began or last took the
// list.
type changedKeys struct {
	mu   sync.Mutex
	keys map[string]struct{}
	size int
	lost bool // the keys exceeded noteBytes and were dropped
}

func newChangedKeys() *changedKeys { return &changedKeys{keys: make(map[string]struct{})} }

// note adds the keys of log; the writer calls it before a commit.
func (c *changedKeys) note(log []change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lost {
		return
	}
	for _, change := range log {
		if _, known := c.keys[string(change.key)]; !known {
			c.keys[string(change.key)] = struct{}{}
			c.size += len(change.key) + noteSize
		}
	}
	if c.size > noteBytes {
		c.keys, c.size, c.lost = nil, 0, true
	}
}

// bytes returns the size of the list.
func (c *changedKeys) bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.size
}

// list returns the keys in order. lost reports that there are others, which were dropped.
func (c *changedKeys) list() (keys []string, lost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.keys)), c.lost
}

// take returns the list and empties it.
func (c *changedKeys) take() (keys []string, lost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	keys, lost = slices.Sorted(maps.Keys(c.keys)), c.lost
	c.keys, c.size = make(map[string]struct{}), 0
	return keys, lost
}
