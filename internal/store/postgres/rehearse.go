package postgres

import (
	"bytes"
	"context"
	"sync"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres/rowcache"
)

// Rehearsals
//
// While a group holds the lock on the head, all writers of all replicas wait, so the group should
// not ask the server for every Get. Each closure therefore runs once beforehand, in its caller's
// goroutine, over the current state of the cache and the server; its writes are dropped. Nothing
// depends on the result of that run. When the lock is taken, one read fetches what the rehearsals
// of the whole group asked for and the cache lacks.

// wants is the set of keys and pages that a closure, or the hook, has read.
type wants struct {
	keys  map[string]struct{}
	pages []*ask // pages of ranges
}

func (w *wants) key(key []byte) {
	if w.keys == nil {
		w.keys = make(map[string]struct{})
	}
	if _, known := w.keys[string(key)]; !known && len(w.keys) < mostKeys {
		w.keys[string(key)] = struct{}{}
	}
}

func (w *wants) page(rg store.Range, limit int) {
	if len(w.pages) >= mostPages {
		return
	}
	own := store.Range{From: clone(rg.From), Reverse: rg.Reverse}
	if rg.To != nil {
		own.To = clone(rg.To)
	}
	w.pages = append(w.pages, &ask{rg: own, limit: limit})
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
func (w *wants) gets(known *rowcache.Cache) []*ask {
	var asks []*ask
	for key := range w.keys {
		if known != nil {
			if _, ok := known.Get([]byte(key)); ok {
				continue
			}
		}
		asks = append(asks, &ask{key: []byte(key)})
	}
	return asks
}

// rehearsal is the base of a closure that is being rehearsed.
type rehearsal struct {
	loader *loader
	ctx    context.Context
	wants  wants
}

// rehearse returns what fn reads, or what it read before it failed.
func (l *loader) rehearse(ctx context.Context, fn func(store.Tx) error) *wants {
	r := &rehearsal{loader: l, ctx: ctx}
	t := &tx{base: r, over: make(map[string][]byte), check: func() error {
		if err := ctx.Err(); err != nil {
			return ended(err)
		}
		return nil
	}}
	func() {
		defer func() {
			t.check = over
			_ = recover() // the run that counts will panic again
		}()
		_ = fn(t)
	}()
	return &r.wants
}

// mostKeys and mostPages bound what is read for a closure in advance, because all of it must fit
// into memory. The closure reads the rest as it runs.
const mostKeys, mostPages = 1000, 16

func (r *rehearsal) get(key []byte) ([]byte, error) {
	r.wants.key(key)
	if value, ok := r.loader.cache.Get(key); ok {
		return value, nil
	}
	at := r.loader.cache.Stamp()
	a := newGet(key)
	if err := r.loader.do(r.ctx, a); err != nil {
		return nil, err
	}
	r.loader.cache.Add(at, key, a.value)
	return a.value, nil
}

func (r *rehearsal) page(rg store.Range, limit int) ([]row, error) {
	r.wants.page(rg, limit)
	a := newPage(rg, limit)
	if err := r.loader.do(r.ctx, a); err != nil {
		return nil, err // the loader may still be writing into a
	}
	return a.rows, nil
}

// loader reads for rehearsals. Asks that arrive while it reads travel together.
type loader struct {
	server *server
	pool   *pool
	cache  *rowcache.Cache

	mu   sync.Mutex
	asks []*ask
	busy bool
}

func (l *loader) do(ctx context.Context, a *ask) error {
	if l.server.down.Load() {
		return errRecovering
	}
	l.mu.Lock()
	l.asks = append(l.asks, a)
	if !l.busy {
		l.busy = true
		go l.run()
	}
	l.mu.Unlock()
	select {
	case <-a.done:
		return a.err
	case <-ctx.Done():
		return ended(ctx.Err())
	}
}

//nolint:contextcheck // a round is for all callers and outlasts each
func (l *loader) run() {
	for {
		gather(func() int {
			l.mu.Lock()
			defer l.mu.Unlock()
			return len(l.asks)
		})
		l.mu.Lock()
		asks := l.asks
		l.asks = nil
		l.busy = len(asks) > 0
		l.mu.Unlock()
		if len(asks) == 0 {
			return
		}
		err := l.read(asks)
		if err != nil {
			err = fault.Outage(fault.ReasonStore, errRecovering.Error(), err)
		}
		tell(asks, err)
	}
}

func (l *loader) read(asks []*ask) (err error) {
	ctx, cancel := context.WithTimeout(l.server.life, viewLimit)
	defer cancel()
	for try := range 2 {
		var c *conn
		if c, err = l.pool.get(ctx, try > 0); err != nil {
			return err
		}
		err = c.read(readWait, nil, asks)
		l.pool.put(c)
		if k, _ := kindOf(err); err == nil || k != lost || c.late {
			l.server.suspect(c, err)
			return err
		}
	}
	return err
}
