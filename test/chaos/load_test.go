package chaos

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// clients use the credentials of a few names until they are stopped. A name that was used often
// enough is replaced, because a longer history takes longer to check.
type clients struct {
	history *history
	asks    []func(call) answer // one for each client, possibly for different replicas

	mu    sync.Mutex
	names []string
	used  map[string]int      // calls by name; calls without an outcome count more
	known map[string][]string // ids by name, newest last; some are removed
	again int                 // counter for values, which are never used twice
	stop  atomic.Bool
	done  sync.WaitGroup

	acknowledged atomic.Int64   // calls with an outcome
	each         []atomic.Int64 // the same for each client
}

// start starts the clients. No client makes more than most calls.
func (c *clients) start(most int) {
	c.known, c.used, c.each = make(map[string][]string), make(map[string]int), make([]atomic.Int64, len(c.asks))
	for range 4 {
		c.names = append(c.names, newName())
	}
	for i, ask := range c.asks {
		c.done.Go(func() {
			for n := 0; n < most && !c.stop.Load(); n++ {
				c.one(i, ask)
			}
		})
	}
}

var names atomic.Int64

// newName returns a name that nobody has used.
func newName() string { return fmt.Sprintf("name-%d", names.Add(1)) }

// openWeight is the weight of a call without an outcome. A name with the weight enough is replaced.
const openWeight, enough = 8, 80

// end stops the clients and reads everything once more. That settles the result of unanswered
// calls.
func (c *clients) end(ask func(call) answer) {
	c.stop.Store(true)
	c.done.Wait()
	reader := len(c.asks)
	everything := call{action: list}
	var called, returned int64
	settled := func(asked call) (a answer) {
		for tries := 0; tries == 0 || a.unknown && tries < 20; tries++ {
			if tries > 0 {
				time.Sleep(50 * time.Millisecond)
			}
			called, a, returned = c.history.now(), ask(asked), c.history.now()
		}
		return a
	}
	a := settled(everything)
	listed, until := called, returned
	for name := range c.used {
		everything.name = name
		seen := answer{unknown: a.unknown, seen: ofName(name, a.all)}
		c.history.add(reader, everything, seen, listed, until)
		for _, s := range seen.seen {
			one := call{action: unseal, name: name, id: s.id}
			read := settled(one)
			c.history.add(reader, one, read, called, returned)
		}
	}
}

func (c *clients) one(client int, ask func(call) answer) {
	next := c.next()
	a := c.history.record(client, next, ask)
	c.count(next, a)
	if a.unknown || a.unasked {
		time.Sleep(50 * time.Millisecond) // real clients wait too, and each open outcome makes the check longer
		return
	}
	c.acknowledged.Add(1)
	c.each[client].Add(1)
	if next.action == seal {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.known[next.name] = append(c.known[next.name], a.seen[0].id)
	}
}

// count records the use of a name, and replaces the name when it was used enough.
func (c *clients) count(made call, a answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.used[made.name]++; a.unknown && made.writes() {
		c.used[made.name] += openWeight - 1
	}
	if i := slices.Index(c.names, made.name); i >= 0 && c.used[made.name] > enough {
		c.names[i] = newName()
	}
}

// next chooses a call. Each name has about two credentials at a time, which several clients share.
func (c *clients) next() call {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.again++
	name := c.names[rand.IntN(len(c.names))]
	known := c.known[name]
	if len(known) < 2 || rand.IntN(12) == 0 {
		return call{action: seal, name: name, value: fmt.Sprintf("%s-%d", name, c.again)}
	}
	known = known[max(0, len(known)-3):]
	id := known[rand.IntN(len(known))]
	switch n := rand.IntN(16); {
	case n < 4:
		return call{action: replace, name: name, id: id, value: fmt.Sprintf("%s-%d", name, c.again)}
	case n < 6:
		return call{action: rotate, name: name, id: id}
	case n < 7:
		return call{action: remove, name: name, id: known[0]}
	case n < 12:
		return call{action: unseal, name: name, id: id}
	case n < 14:
		return call{action: unsealNewest, name: name}
	default:
		return call{action: list, name: name}
	}
}

// ofName returns the credentials of one name from a list.
func ofName(name string, all []named) (seen []sight) {
	for _, s := range all {
		if s.name == name {
			seen = append(seen, s.sight)
		}
	}
	slices.SortFunc(seen, func(x, y sight) int { return cmp.Compare(x.id, y.id) })
	return seen
}

type named struct {
	name string
	sight
}
