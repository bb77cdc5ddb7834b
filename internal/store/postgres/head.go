package postgres

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/store/postgres/rowcache"
)

// slots is the number of commits whose ids are kept. At the highest commit rate of PostgreSQL that
// is about ten seconds, twice as long as a commit is looked up.
const slots = 16384

// pause is the time between two attempts to commit, or to find out whether a commit has persisted.
const pause = 50 * time.Millisecond

// head is the one row of latticekeep_head, with the fence. It owns the session of the writer. Only
// the writer goroutine uses it, except for hangs.
type head struct {
	server     *server
	cache      *rowcache.Cache
	now        func() time.Time
	commitWait time.Duration

	session *conn // nil until it is needed
	alone   int   // commits since the last one of another process
	habits  habits

	busySince atomic.Int64 // Unix nanoseconds since which the writer waits for the server; 0 when it does not
}

// lock begins a transaction, takes the lock on the head, and reads what the group's rehearsals and
// the hook in earlier groups asked for. Then it reads what the requests need that joined meanwhile.
// That costs one more round trip and saves a commit.
//
// A writer that waits for the lock has taken the snapshot from which it reads the version of the
// tables. So the lock alone would let each waiting writer of an older release commit once more
// after the version was raised. A group that raises it therefore first excludes all who have the
// lock or wait for it: it takes the table of the head, which they hold until their transactions
// end. PostgreSQL gives a statement its snapshot after the locks on its tables, so everyone who
// comes later reads the new version.
func (h *head) lock(q *queue, g *group) (*locked, error) {
	defer h.busy()()
	if h.session == nil {
		c, err := h.server.connect(h.server.life, writing)
		if err != nil {
			return nil, err
		}
		h.session = c
	}
	early := q.members(g)
	wanted := &wants{}
	wanted.join(&h.habits.usual)
	for r := range early {
		wanted.join(r.wants)
	}
	var asks []*ask
	if h.alone < trusting {
		asks = wanted.gets(nil)
	} else {
		asks = wanted.gets(h.cache)
	}
	l := &locked{head: h, c: h.session, pages: wanted.pages}
	var id string
	take := []step{{statement: begin}, {statement: lock, row: func(v [][]byte) (err error) {
		if l.fence, err = number(v[0]); err == nil {
			l.schema, err = number(v[1])
			id = string(v[2])
		}
		return err
	}}}
	if g.raises {
		take = slices.Insert(take, 1, step{statement: exclude})
	}
	if err := h.session.read(h.commitWait, take, append(asks, l.pages...)); err != nil {
		h.server.evict(err)
		return nil, err
	}
	switch {
	case !isKnown(l.schema):
		return nil, &failure{errSchema(l.schema), broken}
	case l.fence == 0:
		return nil, &failure{errors.New("latticekeep_head has no row"), broken}
	}
	if h.cache.At(rowcache.Commit{Fence: l.fence, ID: id}) {
		h.alone++
	} else {
		h.alone = 0
	}
	for _, a := range asks {
		h.cache.Put(a.key, a.value)
	}
	q.shut(g)
	for r := range q.members(g) {
		if _, ok := early[r]; !ok {
			wanted.join(r.wants)
		}
	}
	asks = wanted.gets(h.cache) // ask again only for keys that the cache lacks
	pages := wanted.pages[len(l.pages):]
	if len(asks)+len(pages) > 0 {
		if err := h.session.read(h.commitWait, nil, append(asks, pages...)); err != nil {
			return nil, err
		}
	}
	for _, a := range asks {
		h.cache.Put(a.key, a.value)
	}
	l.pages = wanted.pages
	return l, nil
}

// trusting is the number of consecutive commits of this process, with none of another in between,
// after which lock relies on the cache. A wrong guess costs a round trip under the lock.
const trusting = 4

// release ends a transaction that wrote nothing, and with it the lock. If that fails, what was read
// under the lock is still right.
func (h *head) release() {
	defer h.busy()()
	if err := h.session.run(h.commitWait, []step{{statement: rollback}}); err != nil {
		h.server.logger.Warn("releasing the head failed", "error", err)
		h.forget()
	}
}

// forget ends the session of the writer. Nothing of its last transaction was committed, or commit
// settles the outcome next.
func (h *head) forget() {
	if h.session != nil {
		h.session.kill()
		h.session = nil
	}
	h.cache.Doubt()
}

// settle finds out whether a commit without an answer has persisted. It first takes the lock on the
// head. The old transaction held that lock before its COMMIT was sent, and holds it until it has
// ended; so once settle has the lock, the old transaction can no longer commit.
func (h *head) settle(fence int64, id []byte, until time.Time) (persisted bool, err error) {
	for {
		persisted, err = h.look(fence, id)
		if k, ours := kindOf(err); err == nil || !ours || k == broken {
			return persisted, err
		}
		if time.Now().Add(pause).After(until) {
			return false, err
		}
		select {
		case <-time.After(pause):
		case <-h.server.life.Done():
		}
	}
}

// look reports a commit as persisted only after it has confirmed another commit with the same id.
// The standbys that acknowledge the second commit have both.
func (h *head) look(fence int64, id []byte) (persisted bool, err error) {
	c, err := h.server.connect(h.server.life, writing)
	if err != nil {
		return false, err
	}
	defer c.kill()
	var current, signed int64
	var found []byte
	steps := []step{
		{statement: begin},
		{statement: lock, row: func(v [][]byte) (err error) { current, err = number(v[0]); return err }},
		{statement: lookup, params: [][]byte{slot(fence)}, row: func(v [][]byte) (err error) {
			found = clone(v[1])
			signed, err = number(v[0])
			return err
		}},
	}
	if err := c.run(h.commitWait, steps); err != nil {
		h.server.evict(err)
		return false, err
	}
	switch {
	case current < fence:
		return false, nil
	case signed != fence:
		return false, &failure{errors.New("too many commits since, to find out"), broken}
	case !bytes.Equal(found, id):
		return false, nil
	}
	again := []step{{statement: sign, params: [][]byte{slot(fence), binary.BigEndian.AppendUint64(nil, uint64(fence)), id}}, {statement: commit}}
	if err := c.run(h.commitWait, again); err != nil {
		return false, err
	}
	if err := c.confirmed(again); err != nil {
		return false, err
	}
	return true, nil
}

// hangs reports whether the writer has waited for the database longer than limit.
func (h *head) hangs(limit time.Duration) bool {
	since := h.busySince.Load()
	return since != 0 && h.now().Sub(time.Unix(0, since)) > limit
}

// busy marks the time during which the writer waits for the database.
func (h *head) busy() (end func()) {
	h.busySince.Store(h.now().UnixNano())
	return func() { h.busySince.Store(0) }
}

// locked is the base of a group's transaction, which holds the lock on the head.
type locked struct {
	head   *head
	c      *conn
	fence  int64 // fence of the previous commit
	schema int64 // version of the tables
	pages  []*ask
	hook   *wants // records what the hook reads; set while it runs
}

func (l *locked) get(key []byte) ([]byte, error) {
	if l.hook != nil {
		l.hook.key(key)
	}
	if value, ok := l.head.cache.Get(key); ok {
		return value, nil
	}
	defer l.head.busy()()
	a := &ask{key: key}
	if err := l.c.read(l.head.commitWait, nil, []*ask{a}); err != nil {
		return nil, err
	}
	l.head.cache.Put(key, a.value)
	return a.value, nil
}

func (l *locked) page(rg store.Range, limit int) ([]row, error) {
	if l.hook != nil {
		l.hook.page(rg, limit)
	}
	for _, p := range l.pages {
		if p.limit == limit && same(p.rg, rg) {
			return p.rows, nil
		}
	}
	defer l.head.busy()()
	a := &ask{rg: rg, limit: limit}
	err := l.c.read(l.head.commitWait, nil, []*ask{a})
	return a.rows, err
}

// send sends all writes and COMMIT in one round trip.
func (l *locked) send(t *tx, fence int64, id []byte) error {
	keys, values, removed := t.writes()
	var steps []step
	if len(removed) > 0 {
		steps = append(steps, step{statement: remove, params: [][]byte{byteaArray(removed)}})
	}
	if len(keys) > 0 {
		steps = append(steps, step{statement: upsert, params: [][]byte{byteaArray(keys), byteaArray(values)}})
	}
	if l.schema < raisedVersion && raises(t) {
		steps = append(steps, step{statement: raise, params: [][]byte{binary.BigEndian.AppendUint64(nil, raisedVersion)}})
	}
	number := binary.BigEndian.AppendUint64(nil, uint64(fence))
	steps = append(steps,
		step{statement: advance, params: [][]byte{number, id}},
		step{statement: sign, params: [][]byte{slot(fence), number, id}},
		step{statement: commit})
	if err := l.c.run(l.head.commitWait, steps); err != nil {
		return err
	}
	return l.c.confirmed(steps)
}

// raises reports whether a transaction writes a row that keeps some release away. Then the version
// of the tables must say so too.
func raises(t *tx) bool {
	row := t.over[string(format.Row)]
	return row != nil && format.Raised(row)
}

// confirmed returns nil if the steps ended with a COMMIT without a warning. When a wait for
// standbys is cancelled, the server answers COMMIT as usual but adds a warning.
func (c *conn) confirmed(steps []step) error {
	if tag := steps[len(steps)-1].tag.String(); tag != "COMMIT" || c.warning != "" {
		return &failure{fmt.Errorf("PostgreSQL answered %q to COMMIT, with the warning %q", tag, c.warning), lost}
	}
	return nil
}

func slot(fence int64) []byte { return binary.BigEndian.AppendUint32(nil, uint32(fence%slots)) }

// habits remembers what the hook reads from one group to the next. lock reads a row for the hook in
// advance when the hook has read it in at least two of the last 16 to 31 groups. The hook does not
// need most other rows again: they were only once the newest.
type habits struct {
	usual       wants
	now, before map[string]int // number of groups in which each key was read
	groups      int            // number of groups counted in now
}

func (h *habits) note(w *wants) {
	if h.groups++; h.groups > 16 || h.now == nil {
		h.before, h.now, h.groups = h.now, make(map[string]int), 1
		h.usual.keys = nil
		for key, n := range h.before {
			if n > 1 {
				h.usual.key([]byte(key))
			}
		}
	}
	for key := range w.keys {
		if h.now[key]++; h.now[key]+h.before[key] > 1 {
			h.usual.key([]byte(key))
		}
	}
	h.usual.pages = w.pages
}
