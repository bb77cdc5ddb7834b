package v2

import (
	"context"
	"sync"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// turns let one caller of a tenant at a time through. The next ones of it wait for
// that one, and those of other tenants do not. The zero value is ready for use.
type turns struct {
	mu     sync.Mutex
	queues map[authz.TenantID]*queue
}

// queue is a tenant's, for as long as somebody is in it.
type queue struct {
	turn chan struct{} // of capacity 1
	in   int           // who has the turn or waits for it
}

// take waits for the turn of a tenant, until done is called. Error:
// fault.Unavailable when ctx ends before.
func (t *turns) take(ctx context.Context, tenant authz.TenantID) (done func(), err error) {
	q := t.enter(tenant)
	select {
	case q.turn <- struct{}{}:
		return func() { <-q.turn; t.leave(tenant, q) }, nil
	case <-ctx.Done():
		t.leave(tenant, q)
		return nil, fault.Unavailable
	}
}

func (t *turns) enter(tenant authz.TenantID) *queue {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[tenant]
	if q == nil {
		q = &queue{turn: make(chan struct{}, 1)}
		if t.queues == nil {
			t.queues = make(map[authz.TenantID]*queue)
		}
		t.queues[tenant] = q
	}
	q.in++
	return q
}

func (t *turns) leave(tenant authz.TenantID, q *queue) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.in--; q.in == 0 {
		delete(t.queues, tenant)
	}
}
