// Package rowcache keeps rows of a shared database in memory, as they were after one commit.
package rowcache

import (
	"sync"

	"github.com/latticekeep/latticekeep/internal/memory"
)

// Cache holds rows as they were after one commit, the newest that this process knows. When a
// transaction takes the lock on the head, the fence tells whether that commit is still the newest;
// if not, the cache is emptied. So a transaction that holds the lock finds here what it would read.
// Without the lock the rows may be old, which is good enough for rehearsals.
type Cache struct {
	mu         sync.Mutex
	newest     Commit            // name of the newest known commit
	epoch      int               // changes when the cache is emptied
	turns      int               // changes when the older half is forgotten
	young, old map[string][]byte // a nil value means that the key is absent
	size       int               // size of young in bytes
}

// Commit is the name of a commit. It distinguishes the commit from every other one, even in a copy
// of the database.
type Commit struct {
	Fence int64
	ID    string
}

// half is the size in bytes at which the young half becomes the old one: both take an eighth of the
// memory limit at most.
var half = sync.OnceValue(func() int { return memory.Share(16, 1, 16<<20) })

// Get returns the value of a key. ok is false when the cache does not know it.
func (c *Cache) Get(key []byte) (value []byte, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if value, ok = c.young[string(key)]; ok {
		return value, true
	}
	if value, ok = c.old[string(key)]; ok {
		c.set(string(key), value)
	}
	return value, ok
}

func (c *Cache) set(key string, value []byte) {
	if c.young == nil || c.size > half() {
		if c.young != nil {
			c.turns++
		}
		c.young, c.old, c.size = make(map[string][]byte), c.young, 0
	}
	c.young[key] = value
	c.size += len(key) + len(value) + 64
}

// Put stores a value that a transaction holding the lock has read.
func (c *Cache) Put(key []byte, value []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(string(key), value)
}

// Stamp is a moment in the life of a cache.
type Stamp struct{ epoch, turns int }

// Stamp returns the present moment.
func (c *Cache) Stamp() Stamp {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Stamp{c.epoch, c.turns}
}

// Add stores a value that was read without the lock after the stamp was taken. The value is as new
// as the commit that the cache knew then, or newer. If a commit of this process has changed it
// since, the cache has its key, or has forgotten the key, which changes the stamp. If a commit of
// another process has changed it, the fence will show that.
func (c *Cache) Add(at Stamp, key, value []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at != (Stamp{c.epoch, c.turns}) {
		return
	}
	if _, ok := c.young[string(key)]; ok {
		return
	}
	if _, ok := c.old[string(key)]; ok {
		return
	}
	c.set(string(key), value)
}

// At tells the cache which commit is the newest, while the lock is held. It reports whether the
// cache was valid; otherwise it empties the cache.
func (c *Cache) At(newest Commit) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.newest == newest {
		return true
	}
	c.empty(newest)
	return false
}

// empty removes all values and sets the newest commit.
func (c *Cache) empty(newest Commit) {
	c.newest, c.young, c.old, c.size = newest, nil, nil, 0
	c.epoch++
}

// Doubt empties the cache, because the newest commit is unknown.
func (c *Cache) Doubt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.empty(Commit{})
}

// Apply stores the writes of a commit of this process.
func (c *Cache) Apply(newest Commit, over map[string][]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.newest = newest
	for key, value := range over {
		c.set(key, value)
	}
}
