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

// slots is the number of commits whose ids are kept: some ten seconds of the
// fastest that PostgreSQL commits, twice as long as a commit is looked for.
const slots = 16384

// locked is the base of a group's transaction, which holds the lock on the head.
type locked struct {
	s     *Store
	c     *conn
	fence int64 // fence of the previous commit
	pages []*ask
	hook  *wants // records what the hook reads, once it runs
}

// lock begins a transaction, takes the lock on the head, and reads what the group
// has asked for in rehearsals and the hook in earlier groups. What those ask for who
// have joined meanwhile is read then: a round trip more, and a commit less.
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
	asks = wanted.gets(&s.cache) // asks again only for what the cache had wrong
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

// trusting is after how many commits of this process, none of another between
// them, the cache is relied on: being wrong costs a round trip under the lock.
const trusting = 4

// members are those who want something of the group by now.
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

// join adds what other wants.
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

// has tells whether a page like p is among those wanted.
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

// gets returns an ask for each key that known does not have.
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

// habits is what the hook reads from one group to the next. A row that it has read
// in two of the last groups, 16 to 31 of them, is read for it with the lock. Most
// others it needs no more: they were the newest once.
type habits struct {
	usual       wants
	now, before map[string]int // in how many groups each key was read
	groups      int            // groups for which now holds
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

// commit makes the writes of t durable, or finds out that they are not; retry is
// that of attempt.
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
		return s.abandon(err), err // the server has refused a statement, and did not get to COMMIT
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
	return k != broken && k != full, err // it has not, and never will
}

// send writes everything and commits, in one round trip.
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

// confirmed tells whether the COMMIT that ended the steps was one without reserve.
// When a wait for standbys is cancelled the answer is the usual one, with a warning.
func (c *conn) confirmed(steps []step) error {
	if tag := steps[len(steps)-1].tag.String(); tag != "COMMIT" || c.warning != "" {
		return &failure{fmt.Errorf("PostgreSQL answered %q to COMMIT, with the warning %q", tag, c.warning), lost}
	}
	return nil
}

func slot(fence int64) []byte { return binary.BigEndian.AppendUint32(nil, uint32(fence%slots)) }

// settle finds out whether a commit whose answer is missing has persisted. It
// first takes the lock on the head, which the old transaction holds as long as it
// is not over: after that it cannot be committed any more. Its session held the
// lock before it was asked to commit.
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

// look says that a commit has persisted only after another one, of the same id
// again, has been confirmed: what that one waited for has both.
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

// committed accounts for a commit before anybody hears of it.
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

// evict is called with what a lock on the head failed with. When somebody holds it
// for too long, it ends sessions of this product whose transaction writes and has
// lasted longer than any does: those of a process that was stopped while the
// server was sending to it, which no limit of the server ends.
func (s *Store) evict(err error) {
	if pe := (*pgconn.PgError)(nil); errors.As(err, &pe) && pe.Code == "55P03" {
		s.evictOlder(commitWait + lockLimit)
	}
}

// evictOlder ends the sessions whose transaction has lasted for so long. One that
// waits for standbys is left: to end it would show what they do not have.
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
