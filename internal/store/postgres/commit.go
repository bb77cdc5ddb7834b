package postgres

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// slots is the number of commits whose ids are kept. At the highest commit rate of PostgreSQL that
// is about ten seconds, twice as long as a commit is looked up.
const slots = 16384

// locked is the base of a group's transaction, which holds the lock on the head.
type locked struct {
	s     *Store
	c     *conn
	fence int64 // fence of the previous commit
	pages []*ask
	hook  *wants // records what the hook reads; set while it runs
}

// lock begins a transaction, takes the lock on the head, and reads what the group's rehearsals and
// the hook in earlier groups asked for. Then it reads what the requests need that joined meanwhile.
// That costs one more round trip and saves a commit.
func (s *Store) lock(g *group) (*locked, error) {
	defer s.busy()()
	if s.session == nil {
		c, err := s.connect(s.life, writing)
		if err != nil {
			return nil, err
		}
		s.session = c
	}
	early := s.members(g)
	wanted := &wants{}
	wanted.join(&s.habits.usual)
	for r := range early {
		wanted.join(r.wants)
	}
	var asks []*ask
	if s.alone < trusting {
		asks = wanted.gets(nil)
	} else {
		asks = wanted.gets(&s.cache)
	}
	l := &locked{s: s, c: s.session, pages: wanted.pages}
	var version int64
	var id string
	take := []step{{statement: begin}, {statement: lock, row: func(v [][]byte) (err error) {
		if l.fence, err = number(v[0]); err == nil {
			version, err = number(v[1])
			id = string(v[2])
		}
		return err
	}}}
	if err := s.session.read(s.opts.commitWait, take, append(asks, l.pages...)); err != nil {
		s.evict(err)
		return nil, err
	}
	switch {
	case version != schemaVersion:
		return nil, &failure{errSchema(version), broken}
	case l.fence == 0:
		return nil, &failure{errors.New("latticekeep_head has no row"), broken}
	}
	if s.cache.at(commitName{l.fence, id}) {
		s.alone++
	} else {
		s.alone = 0
	}
	for _, a := range asks {
		s.cache.put(a.key, a.value)
	}
	s.shut(g)
	for r := range s.members(g) {
		if _, ok := early[r]; !ok {
			wanted.join(r.wants)
		}
	}
	asks = wanted.gets(&s.cache) // ask again only for keys that the cache lacks
	pages := wanted.pages[len(l.pages):]
	if len(asks)+len(pages) > 0 {
		if err := s.session.read(s.opts.commitWait, nil, append(asks, pages...)); err != nil {
			return nil, err
		}
	}
	for _, a := range asks {
		s.cache.put(a.key, a.value)
	}
	l.pages = wanted.pages
	return l, nil
}

// trusting is the number of consecutive commits of this process, with none of another in between,
// after which lock relies on the cache. A wrong guess costs a round trip under the lock.
const trusting = 4

// members returns the requests of the group that are not gone.
func (s *Store) members(g *group) map[*request]struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[*request]struct{}, len(g.requests))
	for _, r := range g.requests {
		if r.wants != nil && r.state.Load() != gone {
			all[r] = struct{}{}
		}
	}
	return all
}

// join adds the keys and pages of other.
func (w *wants) join(other *wants) {
	for key := range other.keys {
		w.key([]byte(key))
	}
	for _, p := range other.pages {
		if !w.has(p) {
			w.pages = append(w.pages, p)
		}
	}
}

// has reports whether a page like p is among the wanted ones.
func (w *wants) has(p *ask) bool {
	for _, q := range w.pages {
		if p.limit == q.limit && same(p.rg, q.rg) {
			return true
		}
	}
	return false
}

func same(a, b store.Range) bool {
	return a.Reverse == b.Reverse && (a.To == nil) == (b.To == nil) && bytes.Equal(a.From, b.From) && bytes.Equal(a.To, b.To)
}

// gets returns an ask for each key that known lacks.
func (w *wants) gets(known *cache) []*ask {
	var asks []*ask
	for key := range w.keys {
		if known != nil {
			if _, ok := known.get([]byte(key)); ok {
				continue
			}
		}
		asks = append(asks, &ask{key: []byte(key)})
	}
	return asks
}

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

func (l *locked) get(key []byte) ([]byte, error) {
	if l.hook != nil {
		l.hook.key(key)
	}
	if value, ok := l.s.cache.get(key); ok {
		return value, nil
	}
	defer l.s.busy()()
	a := &ask{key: key}
	if err := l.c.read(l.s.opts.commitWait, nil, []*ask{a}); err != nil {
		return nil, err
	}
	l.s.cache.put(key, a.value)
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
	defer l.s.busy()()
	a := &ask{rg: rg, limit: limit}
	err := l.c.read(l.s.opts.commitWait, nil, []*ask{a})
	return a.rows, err
}

// commit makes the writes of t durable, or finds out that they are not. retry has the meaning that
// it has for attempt.
func (s *Store) commit(l *locked, t *tx, until time.Time) (retry bool, err error) {
	defer s.busy()()
	id := make([]byte, 16)
	rand.Read(id) // never fails
	fence := l.fence + 1
	err = s.opts.durably("commit", func() error { return l.send(t, fence, id) })
	if err == nil {
		s.cache.apply(commitName{fence, string(id)}, t.over)
		s.committed(t)
		return false, nil
	}
	s.opts.Logger.Warn("committing failed", "error", err)
	s.failed.Store(true)
	k, ours := kindOf(err)
	if ours && k != lost && l.c.pg.TxStatus() == 'E' {
		return s.abandon(err), err // the server refused a statement and did not reach COMMIT
	}
	s.forget()
	if until.IsZero() {
		until = time.Now().Add(s.opts.patience)
	}
	persisted, serr := s.settle(fence, id, until)
	switch {
	case serr != nil:
		return false, fault.Wrap(fault.Unavailable, errUnconfirmed, errors.Join(err, serr))
	case persisted:
		s.opts.Logger.Info("the commit that failed has persisted")
		s.committed(t)
		return false, nil
	}
	if !ours {
		return false, answer(err)
	}
	return k != broken && k != full, err // the commit has not persisted and never will
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
	number := binary.BigEndian.AppendUint64(nil, uint64(fence))
	steps = append(steps,
		step{statement: advance, params: [][]byte{number, id}},
		step{statement: sign, params: [][]byte{slot(fence), number, id}},
		step{statement: commit})
	if err := l.c.run(l.s.opts.commitWait, steps); err != nil {
		return err
	}
	return l.c.confirmed(steps)
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

// settle finds out whether a commit without an answer has persisted. It first takes the lock on the
// head. The old transaction held that lock before its COMMIT was sent, and holds it until it has
// ended; so once settle has the lock, the old transaction can no longer commit.
func (s *Store) settle(fence int64, id []byte, until time.Time) (persisted bool, err error) {
	for {
		persisted, err = s.look(fence, id)
		if k, ours := kindOf(err); err == nil || !ours || k == broken {
			return persisted, err
		}
		if time.Now().Add(pause).After(until) {
			return false, err
		}
		select {
		case <-time.After(pause):
		case <-s.life.Done():
		}
	}
}

// look reports a commit as persisted only after it has confirmed another commit with the same id.
// The standbys that acknowledge the second commit have both.
func (s *Store) look(fence int64, id []byte) (persisted bool, err error) {
	c, err := s.connect(s.life, writing)
	if err != nil {
		return false, err
	}
	defer c.kill()
	var head, signed int64
	var found []byte
	steps := []step{
		{statement: begin},
		{statement: lock, row: func(v [][]byte) (err error) { head, err = number(v[0]); return err }},
		{statement: lookup, params: [][]byte{slot(fence)}, row: func(v [][]byte) (err error) {
			found = clone(v[1])
			signed, err = number(v[0])
			return err
		}},
	}
	if err := c.run(s.opts.commitWait, steps); err != nil {
		s.evict(err)
		return false, err
	}
	switch {
	case head < fence:
		return false, nil
	case signed != fence:
		return false, &failure{errors.New("too many commits since, to find out"), broken}
	case !bytes.Equal(found, id):
		return false, nil
	}
	again := []step{{statement: sign, params: [][]byte{slot(fence), binary.BigEndian.AppendUint64(nil, uint64(fence)), id}}, {statement: commit}}
	if err := c.run(s.opts.commitWait, again); err != nil {
		return false, err
	}
	if err := c.confirmed(again); err != nil {
		return false, err
	}
	return true, nil
}

// committed updates the counters after a commit, before any caller gets its answer.
func (s *Store) committed(t *tx) {
	s.commits.Add(1)
	s.failed.Store(false)
	s.down.Store(false)
	for _, do := range t.after {
		do()
	}
	for _, value := range t.over {
		if value == nil {
			poke(s.deleted)
			return
		}
	}
}

// evict gets the error of a failed attempt to take the lock on the head. If another session has
// held the lock for too long, evict ends sessions of this product whose writing transaction has
// lasted longer than any normal one. Such a session belongs to a process that was stopped while the
// server was sending to it; no limit of the server ends it.
func (s *Store) evict(err error) {
	if pe := (*pgconn.PgError)(nil); errors.As(err, &pe) && pe.Code == "55P03" {
		s.evictOlder(commitWait + lockLimit)
	}
}

// evictOlder ends sessions whose writing transaction is older than age. It spares a session that
// waits for standbys: ending it would make a commit visible that they do not have.
func (s *Store) evictOlder(age time.Duration) {
	c, err := s.connect(s.life, tending)
	if err != nil {
		return
	}
	defer c.kill()
	_ = c.exec(commitWait, fmt.Sprintf(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND usename = current_user AND application_name = '%s' AND pid <> pg_backend_pid()
		AND wait_event IS DISTINCT FROM 'SyncRep' AND backend_xid IS NOT NULL AND xact_start < now() - interval '%d milliseconds'`,
		application, age.Milliseconds()))
}
