package compliance

import (
	"context"
	"errors"
	"slices"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// How much evidence as of older entries is in memory.
const (
	maxPasts       = 8
	maxTenantPasts = 2 // so that no tenant has the others begin anew again and again
)

// pasts are evidence of tenants as of older entries. One that is not gathered up
// to its entry yet is gone on with, however little time each call has; and who
// asks for the same one at the same time does not gather it twice.
type pasts struct {
	mu  sync.Mutex
	all []*past // those that were used last at the end
}

// past is evidence up to a head, or on the way there. Whoever has its turn may use it.
type past struct {
	tenant authz.TenantID
	head   uint64
	turn   *semaphore.Weighted // weight 1

	evidence *evidence // nil until it was loaded
	unproven bool      // no signature behind its newest entry was verified yet
}

// of returns the one for a head. Who has the turn of one that is forgotten for it
// may go on: the next one gathers anew.
func (p *pasts) of(tenant authz.TenantID, head uint64) *past {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := slices.IndexFunc(p.all, func(o *past) bool { return o.tenant == tenant && o.head == head })
	if at >= 0 {
		found := p.all[at]
		p.all = append(slices.Delete(p.all, at, at+1), found)
		return found
	}
	theirs := 0
	for _, o := range p.all {
		if o.tenant == tenant {
			theirs++
		}
	}
	switch {
	case theirs >= maxTenantPasts:
		oldest := slices.IndexFunc(p.all, func(o *past) bool { return o.tenant == tenant })
		p.all = slices.Delete(p.all, oldest, oldest+1)
	case len(p.all) >= maxPasts:
		p.all = slices.Delete(p.all, 0, 1)
	}
	made := &past{tenant: tenant, head: head, turn: semaphore.NewWeighted(1)}
	p.all = append(p.all, made)
	return made
}

func (p *pasts) forget(o *past) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = slices.DeleteFunc(p.all, func(q *past) bool { return q == o })
}

// past returns the evidence as of an entry that the fold is beyond, for the caller
// alone until it leaves. Errors: as catchUp, and fault.NotFound when the tenant has
// no such entry.
func (s *Service) past(ctx context.Context, tenant authz.TenantID, head uint64) (e *evidence, leave func(), err error) {
	p := s.pasts.of(tenant, head)
	if p.turn.Acquire(ctx, 1) != nil {
		return nil, nil, errBusy
	}
	leave = sync.OnceFunc(func() { p.turn.Release(1) })
	err = s.reach(ctx, p)
	if err == nil && p.evidence.Last.Sequence != head {
		err = errNoHead
	}
	if err == nil {
		return p.evidence, leave, nil
	}
	if !interrupted(err) {
		p.evidence, p.unproven = nil, false
		s.pasts.forget(p)
	}
	leave()
	return nil, nil, err
}

// interrupted reports whether what was gathered up to an error is as good as
// before.
func interrupted(err error) bool {
	return err != nil && (errors.Is(err, errUnfinished) || fault.Of(err) == fault.Unavailable)
}

// reach gathers up to the head. Errors: as past, but for a head that is no entry
// of the tenant.
func (s *Service) reach(ctx context.Context, p *past) error {
	began := p.evidence != nil
	err := s.goOn(ctx, p)
	if began && err != nil && !interrupted(err) { // behind its newest entry some may be archived by now
		p.evidence = nil
		err = s.goOn(ctx, p)
	}
	if errors.Is(err, errNotNext) || err != nil && fault.Of(err) == fault.Conflict {
		return errNoHead // the entries before it are archived
	}
	return err
}

func (s *Service) goOn(ctx context.Context, p *past) error {
	if p.evidence == nil || p.unproven && p.evidence.Last.Sequence >= p.head { // nothing comes that would prove it
		e, err := s.before(ctx, p.tenant, p.head)
		if err != nil {
			return err
		}
		p.evidence, p.unproven = e, false
	}
	if p.evidence.Last.Sequence >= p.head {
		return nil
	}
	from := p.evidence.TenantSequence
	err := s.replay(ctx, p.tenant, p.evidence, p.head, nil)
	// Without an entry that would prove the rest it does not come to the head either.
	p.unproven = err != nil && (p.unproven || p.evidence.TenantSequence > from)
	return err
}
