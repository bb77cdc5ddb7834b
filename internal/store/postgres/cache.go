package postgres

import "sync"

// cache holds rows as they were after one commit, the newest that this process knows. When a
// transaction takes the lock on the head, the fence tells whether that commit is still the newest;
// if not, the cache is emptied. So a transaction that holds the lock finds here what it would read.
// Without the lock the rows may be old, which is good enough for rehearsals.
type cache struct {
	mu         sync.Mutex
	newest     commitName        // name of the newest known commit
	epoch      int               // changes when the cache is emptied
	turns      int               // changes when the older half is forgotten
	young, old map[string][]byte // a nil value means that the key is absent
	size       int               // size of young in bytes
}

// commitName distinguishes a commit from every other one, even in a copy of the database.
type commitName struct {
	fence int64
	id    string
}

// half is the size in bytes at which the young half becomes the old one.
const half = 16 << 20

func (c *cache) get(key []byte) (value []byte, ok bool) {
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

func (c *cache) set(key string, value []byte) {
	if c.young == nil || c.size > half {
		if c.young != nil {
			c.turns++
		}
		c.young, c.old, c.size = make(map[string][]byte), c.young, 0
	}
	c.young[key] = value
	c.size += len(key) + len(value) + 64
}

// put stores a value that a transaction holding the lock has read.
func (c *cache) put(key []byte, value []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(string(key), value)
}

// stamp is a moment in the life of a cache.
type stamp struct{ epoch, turns int }

func (c *cache) stamp() stamp {
	c.mu.Lock()
	defer c.mu.Unlock()
	return stamp{c.epoch, c.turns}
}

// add stores a value that was read without the lock after the stamp was taken. The value is as new
// as the commit that the cache knew then, or newer. If a commit of this process has changed it
// since, the cache has its key, or has forgotten the key, which changes the stamp. If a commit of
// another process has changed it, the fence will show that.
func (c *cache) add(at stamp, key, value []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at != (stamp{c.epoch, c.turns}) {
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

// at tells the cache which commit is the newest, while the lock is held. It reports whether the
// cache was valid; otherwise it empties the cache.
func (c *cache) at(newest commitName) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.newest == newest {
		return true
	}
	c.empty(newest)
	return false
}

// empty removes all values and sets the newest commit.
func (c *cache) empty(newest commitName) {
	c.newest, c.young, c.old, c.size = newest, nil, nil, 0
	c.epoch++
}

// doubt empties the cache, because the newest commit is unknown.
func (c *cache) doubt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.empty(commitName{})
}

// apply stores the writes of a commit of this process.
func (c *cache) apply(newest commitName, over map[string][]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.newest = newest
	for key, value := range over {
		c.set(key, value)
	}
}
