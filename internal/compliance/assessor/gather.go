package assessor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
)

const (
	maxNewest        = 64      // tenants whose newest evidence is in memory
	maxOlder         = 8       // older heads whose evidence is in memory
	maxTenantOlder   = 2       // older heads of one tenant, so that it does not evict those of other tenants
	defaultSaveEvery = 8 << 10 // entries of a tenant between two saves of its evidence
	defaultMilestone = 1 << 16 // entries of a tenant between two milestones
	defaultNear      = 4 << 10 // entries that a caller who waits gathers; about a tenth of a second
)

// turn bounds how long the background holds the evidence of a tenant at once: callers get it in between.
const turn = 250 * time.Millisecond

var (
	errBusy = fault.New(fault.Unavailable, "the evidence is being gathered: retry")

	// errUnfinished means that the time was too short. The evidence gathered so far is kept.
	errUnfinished = errors.New("the evidence is not gathered up to the head yet")
)

// gathering is the evidence of a tenant up to a head, or on the way there. Only its holder uses it.
type gathering struct {
	tenant authz.TenantID
	head   uint64              // 0: the newest entry
	holder *semaphore.Weighted // weight 1

	evidence *compliance.Evidence // nil until it is loaded
	unproven bool                 // no verified signature covers the newest entry yet

	// These fields are used only for the newest head.
	stored     uint64            // tenant sequence of the stored evidence
	milestones map[uint64][]byte // packed milestones to be stored, by sequence
}

// reset drops the evidence.
func (g *gathering) reset() { g.evidence, g.milestones, g.unproven = nil, nil, false }

// addMilestone adds the evidence, as of its newest entry, to the milestones of the next save.
func (g *gathering) addMilestone(e *compliance.Evidence) error {
	packed, err := pack(e)
	if err != nil {
		return err
	}
	if g.milestones == nil {
		g.milestones = make(map[uint64][]byte)
	}
	g.milestones[e.Last.Sequence] = packed
	return nil
}

// cache keeps the most recently used gatherings. All of them follow from the log, so the cache may
// drop one at any time; its holder continues, and the next caller gathers again. The next call
// continues a gathering that has not reached its head, however little time each call has. Callers
// that ask for the same head at the same time do not gather it twice.
type cache struct {
	max, perTenant int

	mu  sync.Mutex
	all []*gathering // least recently used first
}

// find returns the index of a gathering, or -1. c.mu is held.
func (c *cache) find(tenant authz.TenantID, head uint64) int {
	return slices.IndexFunc(c.all, func(g *gathering) bool { return g.tenant == tenant && g.head == head })
}

// peek returns the gathering of the newest entries, which has no head, or nil. It does not count as a use.
func (c *cache) peek(tenant authz.TenantID) *gathering {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := c.find(tenant, 0); at >= 0 {
		return c.all[at]
	}
	return nil
}

func (c *cache) get(tenant authz.TenantID, head uint64) *gathering {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := c.find(tenant, head); at >= 0 {
		found := c.all[at]
		c.all = append(slices.Delete(c.all, at, at+1), found)
		return found
	}
	ofTenant := 0
	for _, g := range c.all {
		if g.tenant == tenant {
			ofTenant++
		}
	}
	switch {
	case ofTenant >= c.perTenant:
		oldest := slices.IndexFunc(c.all, func(g *gathering) bool { return g.tenant == tenant })
		c.all = slices.Delete(c.all, oldest, oldest+1)
	case len(c.all) >= c.max:
		c.all = slices.Delete(c.all, 0, 1)
	}
	added := &gathering{tenant: tenant, head: head, holder: semaphore.NewWeighted(1)}
	c.all = append(c.all, added)
	return added
}

// acquire returns a gathering for exclusive use until the first call of release. It returns
// fault.Unavailable when others hold the gathering for longer than ctx lasts.
func (c *cache) acquire(ctx context.Context, tenant authz.TenantID, head uint64) (g *gathering, release func(), err error) {
	g = c.get(tenant, head)
	release, err = g.hold(ctx)
	return g, release, err
}

// hold is acquire for a gathering that is known.
func (g *gathering) hold(ctx context.Context) (release func(), err error) {
	if g.holder.Acquire(ctx, 1) != nil {
		return nil, errBusy
	}
	return sync.OnceFunc(func() { g.holder.Release(1) }), nil
}

func (c *cache) forget(g *gathering) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = slices.DeleteFunc(c.all, func(o *gathering) bool { return o == g })
}

// gatherer folds the entries of tenants into evidence.
type gatherer struct {
	evidenceRows
	reader        *reader.Reader
	newest, older cache

	saveEvery, milestone, near uint64

	ahead sync.Map            // tenants whose evidence is gathered in the background: a channel that is closed at the end
	turns *semaphore.Weighted // weight 1: the background gathers for one tenant at a time
}

func newGatherer(rows evidenceRows, reader *reader.Reader) *gatherer {
	return &gatherer{
		evidenceRows: rows, reader: reader, saveEvery: defaultSaveEvery, milestone: defaultMilestone, near: defaultNear,
		turns:  semaphore.NewWeighted(1),
		newest: cache{max: maxNewest, perTenant: 1}, older: cache{max: maxOlder, perTenant: maxTenantOlder},
	}
}

// acquire returns the newest evidence of a tenant; see [cache.acquire].
func (s *gatherer) acquire(ctx context.Context, tenant authz.TenantID) (*gathering, func(), error) {
	return s.newest.acquire(ctx, tenant, 0)
}

// catchUp brings the newest evidence to the tenant's entry `to`, or to the last entry before it; 0
// means the newest. It first loads the stored evidence. Errors: errUnfinished, fault.Unavailable,
// and others when the tenant's part of the log does not verify.
func (s *gatherer) catchUp(ctx context.Context, g *gathering, to uint64) error {
	if err := s.loadInto(ctx, g); err != nil {
		return err
	}
	fresh := g.evidence.Count == 0
	if to != 0 && g.evidence.Last.Sequence >= to {
		if !g.unproven {
			return nil
		}
		to = 0 // later entries prove entry `to`
	}
	from := g.evidence.TenantSequence
	err := s.replay(ctx, g.tenant, g.evidence, to, g.addMilestone)
	switch {
	case resumable(err):
		g.unproven = g.unproven || g.evidence.TenantSequence > from
		return err
	case err != nil:
		reached := g.evidence.Last.Sequence
		g.reset()
		if fresh {
			return err
		}
		return s.startOver(ctx, g, to, reached, err)
	case g.unproven && g.evidence.TenantSequence == from:
		g.reset() // no later entry came that would prove it
		return errUnfinished
	}
	g.unproven = false
	if g.evidence.TenantSequence >= g.stored+s.saveEvery {
		if err := s.saveNewest(ctx, g); err != nil {
			s.logger.WarnContext(ctx, "storing a tenant's evidence failed; it is stored again later", "tenant", g.tenant, "error", err)
		}
	}
	return nil
}

// loadInto gives g the stored evidence, or empty evidence, unless it has some.
func (s *gatherer) loadInto(ctx context.Context, g *gathering) error {
	if g.evidence != nil {
		return nil
	}
	e, err := s.load(ctx, g.tenant)
	if err != nil {
		return err
	}
	if e == nil {
		e = compliance.NewEvidence()
	}
	g.evidence, g.stored = e, e.TenantSequence
	return nil
}

// catchUpSoon is catchUp to the newest entry for a caller who waits for the answer. If many entries
// are missing, the background gathers them, and the error is errUnfinished at once.
func (s *gatherer) catchUpSoon(ctx context.Context, g *gathering) error {
	if err := s.loadInto(ctx, g); err != nil {
		return err
	}
	newest, err := s.reader.NewestOf(ctx, g.tenant)
	if err != nil {
		return err
	}
	if newest > g.evidence.TenantSequence+s.near {
		s.gatherAhead(ctx, g.tenant)
		return errUnfinished
	}
	return s.catchUp(ctx, g, 0)
}

// gatherAhead gathers the evidence of a tenant in the background, unless it does already. It ends at
// the newest entry, or with an error; the next caller begins it again.
func (s *gatherer) gatherAhead(ctx context.Context, tenant authz.TenantID) {
	done := make(chan struct{})
	if _, runs := s.ahead.LoadOrStore(tenant, done); runs {
		return
	}
	ctx = context.WithoutCancel(ctx)
	go func() {
		defer close(done)
		defer s.ahead.Delete(tenant)
		err := errUnfinished
		for errors.Is(err, errUnfinished) {
			err = s.takeTurn(ctx, tenant)
		}
		if err != nil {
			s.logger.WarnContext(ctx, "gathering a tenant's evidence failed; it goes on when somebody asks for it", "tenant", tenant, "error", err)
		}
	}()
}

func (s *gatherer) takeTurn(ctx context.Context, tenant authz.TenantID) error {
	if err := s.turns.Acquire(ctx, 1); err != nil {
		return err
	}
	defer s.turns.Release(1)
	g, release, err := s.acquire(ctx, tenant)
	if err != nil {
		return err
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, turn)
	defer cancel()
	return s.catchUp(ctx, g, 0)
}

// keepUp gathers what is new of a tenant whose evidence is in memory, so that callers need not. It
// returns nil when there was too little time.
func (s *gatherer) keepUp(ctx context.Context, tenant authz.TenantID) error {
	g := s.newest.peek(tenant)
	if g == nil {
		return nil
	}
	release, err := g.hold(ctx)
	if err == nil {
		defer release()
		err = s.catchUp(ctx, g, 0)
	}
	if resumable(err) {
		return nil
	}
	return err
}

// startOver gathers again when the log does not continue from `reached`. Either another replica has
// archived the following entries and stored their evidence, or the log is a different one, and the
// evidence starts with its first entry.
func (s *gatherer) startOver(ctx context.Context, g *gathering, to, reached uint64, why error) error {
	stored, err := s.load(ctx, g.tenant)
	if err != nil {
		return err
	}
	if stored != nil && stored.Last.Sequence > reached {
		if g.evidence, g.stored = stored, stored.TenantSequence; to != 0 && stored.Last.Sequence >= to {
			return nil
		}
		err := s.replay(ctx, g.tenant, g.evidence, to, g.addMilestone)
		if err == nil || resumable(err) {
			g.unproven = err != nil && g.evidence.TenantSequence > g.stored
			return err
		}
		g.evidence, g.milestones = nil, nil
	}
	e := compliance.NewEvidence()
	if err := s.replay(ctx, g.tenant, e, to, nil); err != nil {
		if errors.Is(err, errUnfinished) {
			return err
		}
		return why
	}
	s.logger.WarnContext(ctx, "gathered a tenant's evidence anew: the log did not continue from the stored evidence", "tenant", g.tenant, "error", why)
	g.evidence, g.stored = e, 0
	return nil
}

// replay adds the tenant's entries after the newest one of e, up to `to`. If keep is not nil,
// replay passes the evidence at each milestone to it.
func (s *gatherer) replay(ctx context.Context, tenant authz.TenantID, e *compliance.Evidence, to uint64, keep func(*compliance.Evidence) error) error {
	after := reader.ReplayPoint{TenantSequence: e.TenantSequence, Sequence: e.Last.Sequence, Hash: e.Last.Hash}
	_, err := s.reader.Replay(ctx, tenant, after, to, func(entry *audit.Entry) error {
		if err := e.Add(entry); err != nil {
			return err
		}
		if keep != nil && e.TenantSequence%s.milestone == 0 {
			return keep(e)
		}
		return nil
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return errUnfinished
	case err != nil:
		return fmt.Errorf("reading the tenant's entries: %w", err)
	}
	return nil
}

// resumable reports whether the evidence gathered before err is still usable.
func resumable(err error) bool {
	return err != nil && (errors.Is(err, errUnfinished) || fault.Of(err) == fault.Unavailable)
}

// saveNewest stores the newest evidence and its milestones.
func (s *gatherer) saveNewest(ctx context.Context, g *gathering) error {
	if g.evidence == nil || g.evidence.Count == 0 {
		return nil
	}
	if err := s.save(ctx, g.tenant, g.evidence, g.milestones); err != nil {
		return err
	}
	g.stored, g.milestones = g.evidence.TenantSequence, nil
	return nil
}

// asOf returns the evidence as of an older entry, for exclusive use until the caller calls release.
// It returns the errors of catchUp, and fault.NotFound when the tenant has no such entry.
func (s *gatherer) asOf(ctx context.Context, tenant authz.TenantID, head uint64) (e *compliance.Evidence, release func(), err error) {
	g, release, err := s.older.acquire(ctx, tenant, head)
	if err != nil {
		return nil, nil, err
	}
	err = s.reach(ctx, g)
	if err == nil && g.evidence.Last.Sequence != head {
		err = compliance.ErrNoHead
	}
	if err == nil {
		return g.evidence, release, nil
	}
	if !resumable(err) {
		g.reset()
		s.older.forget(g)
	}
	release()
	return nil, nil, err
}

// reach gathers up to the head of an older gathering. It returns the errors of asOf, but does not
// detect a head that is not an entry of the tenant.
func (s *gatherer) reach(ctx context.Context, g *gathering) error {
	resumed := g.evidence != nil
	err := s.resume(ctx, g)
	if resumed && err != nil && !resumable(err) { // later entries may have been archived meanwhile
		g.evidence = nil
		err = s.resume(ctx, g)
	}
	if errors.Is(err, compliance.ErrNotNext) || err != nil && fault.Of(err) == fault.Conflict {
		return compliance.ErrNoHead // the earlier entries are archived
	}
	return err
}

func (s *gatherer) resume(ctx context.Context, g *gathering) error {
	if g.evidence == nil || g.unproven && g.evidence.Last.Sequence >= g.head { // no later entry would prove it
		e, err := s.loadBefore(ctx, g.tenant, g.head)
		if err != nil {
			return err
		}
		g.evidence, g.unproven = e, false
	}
	if g.evidence.Last.Sequence >= g.head {
		return nil
	}
	from := g.evidence.TenantSequence
	err := s.replay(ctx, g.tenant, g.evidence, g.head, nil)
	// Without an entry that would prove the rest, the gathering does not reach the head either.
	g.unproven = err != nil && (g.unproven || g.evidence.TenantSequence > from)
	return err
}

// persist stores a tenant's evidence up to `to` before its entries are archived, and removes the
// milestones that are no longer needed to continue.
func (s *gatherer) persist(ctx context.Context, tenant authz.TenantID, archived, to uint64) error {
	g, release, err := s.acquire(ctx, tenant)
	if err != nil {
		return err
	}
	defer release()
	if err := s.catchUp(ctx, g, to); err != nil {
		return err
	}
	e, err := s.loadBefore(ctx, tenant, to)
	if err == nil && e.Last.Sequence != to {
		err = s.replay(ctx, tenant, e, to, nil)
	}
	switch {
	case errors.Is(err, compliance.ErrNotNext) || fault.Of(err) == fault.Conflict && err != nil:
		// The entries needed for this evidence are archived and lost. The newest evidence stays.
	case err != nil:
		return err
	case e.Last.Sequence > archived:
		if err := g.addMilestone(e); err != nil {
			return err
		}
	}
	if err := s.saveNewest(ctx, g); err != nil {
		return err
	}
	return s.prune(ctx, tenant, archived)
}
