package compliance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// stateEvery is how old the state may be that a score on demand is judged by.
const stateEvery = day

// assessor acts for the deployment in a tenant's part of the log.
func assessor(tenant authz.TenantID) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.System, ID: "assessment"}
}

// current has the deployment's state in the tenant's part of the log as it is now:
// it is recorded when it changed, and when the entry is older than since. f is
// caught up, before and after.
func (s *Service) current(ctx context.Context, f *fold, since time.Time) error {
	state, err := s.state(ctx)
	if err != nil {
		return fault.Wrap(fault.Unavailable, "the deployment's state is not known at the moment: retry", err)
	}
	if s.verifier.Proof().Status == audit.ProofDisabled {
		state.VerifyEvery = 0 // whatever is configured
	}
	recorded := func() bool {
		last := f.evidence.State
		return last != nil && last.State.same(state) && !last.At.time().Before(since)
	}
	// Another replica may have recorded it since the fold was caught up. Does it say so,
	// and the log does not, then the log counts.
	for _, told := range []time.Time{since, endOfTime} {
		if recorded() {
			return nil
		}
		if err := s.recordState(ctx, f.tenant, state, told); err != nil && !errors.Is(err, errWritten) {
			return fmt.Errorf("recording the state: %w", err)
		}
		if err := s.catchUp(ctx, f, 0); err != nil {
			return err
		}
	}
	return nil
}

// endOfTime is after anything that was recorded.
var endOfTime = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)

// agenda remembers until when there is nothing to do for a tenant.
type agenda struct {
	mu   sync.Mutex
	next map[authz.TenantID]time.Time
	last authz.TenantID // that was looked at
}

// order returns the tenants from the one behind that which was looked at last: none
// keeps the others from their turn.
func (a *agenda) order(tenants []authz.TenantID) []authz.TenantID {
	a.mu.Lock()
	defer a.mu.Unlock()
	slices.Sort(tenants)
	from, found := slices.BinarySearch(tenants, a.last)
	if found {
		from++
	}
	return slices.Concat(tenants[from:], tenants[:from])
}

func (a *agenda) looked(at authz.TenantID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last = at
}

// due reports whether there may be something to do. Nothing waits for longer than
// a day: a time that is further off comes of a clock that was set back.
func (a *agenda) due(now time.Time, tenant authz.TenantID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	wait := a.next[tenant].Sub(now)
	return wait <= 0 || wait > day
}

func (a *agenda) postpone(tenant authz.TenantID, next time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.next == nil {
		a.next = make(map[authz.TenantID]time.Time)
	}
	a.next[tenant] = next
}

// settling is how long a tenant is left alone: the first entries of its part are
// its own.
const settling = day

// defaultAssessTime bounds a call of AssessAll: others do their work on the same
// ticks.
const defaultAssessTime = 20 * time.Second

// AssessAll records the state and the scores of the day for every tenant whose
// part of the log is a day old and lacks them: two entries at most. It is called
// each minute; what there was no time for is done at a later call, which goes on
// where this one was, and so is a tenant whose chain is not verified yet or whose
// evidence is in use. Errors: fault.Unavailable, or of single tenants, which do
// not keep the others from it.
func (s *Service) AssessAll(ctx context.Context) error {
	now := s.now()
	tenants, err := s.reader.Tenants(ctx)
	if err != nil {
		return err
	}
	var errs []error
	budget, cancel := context.WithTimeout(ctx, s.assessTime)
	defer cancel()
	for _, tenant := range s.agenda.order(tenants) {
		if !s.agenda.due(now, tenant) {
			continue
		}
		next, err := s.assess(budget, tenant, now)
		s.agenda.looked(tenant)
		switch {
		case ctx.Err() != nil:
			return errors.Join(append(errs, ctx.Err())...)
		case err == nil && !next.IsZero():
			s.agenda.postpone(tenant, next)
		case err == nil || errors.Is(err, errBusy) || budget.Err() != nil: // it is done at a later call
		default:
			errs = append(errs, fmt.Errorf("assessing tenant %s: %w", tenant, err))
			if fault.Of(err) == fault.Unavailable {
				return errors.Join(errs...) // a store that is down is so for the next one too
			}
		}
		if budget.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// assess records what is due of one tenant, and returns when something is again:
// the zero time when not all of it could be done.
func (s *Service) assess(ctx context.Context, tenant authz.TenantID, now time.Time) (next time.Time, err error) {
	assessments, next, err := s.scores(ctx, tenant, now)
	if errors.Is(err, errUnfinished) {
		return time.Time{}, nil
	}
	if err != nil || len(assessments) == 0 {
		return next, err
	}
	proof := Assessment{Head: assessments[0].Head} // the same of all of them
	proving, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	if err := s.prove(proving, &proof); err != nil {
		return time.Time{}, err
	}
	switch proof.Proof.Status {
	case Verified, Disabled:
	case Verifying:
		return time.Time{}, nil
	default:
		for i := range assessments {
			assessments[i].withhold(proof.Proof.Status, proof.Reason)
		}
	}
	err = s.recordScores(ctx, tenant, assessments, next.Add(-day))
	if err != nil && !errors.Is(err, errWritten) {
		return time.Time{}, fmt.Errorf("recording scores: %w", err)
	}
	return next, nil
}

// scores judges all frameworks, once the state of the day is recorded, if the log
// does not have them of the day, and returns when it is due the next time. What
// was done is known by the log, so that a restart does nothing again.
func (s *Service) scores(ctx context.Context, tenant authz.TenantID, now time.Time) (all []Assessment, next time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	f, leave, err := s.enter(ctx, tenant)
	if err != nil {
		return nil, time.Time{}, err
	}
	defer leave()
	if err := s.catchUp(ctx, f, 0); err != nil {
		return nil, time.Time{}, err
	}
	if settled := f.evidence.First.time().Add(settling); now.Before(settled) {
		return nil, settled, nil
	}
	today := now.UTC().Truncate(day)
	next = today.Add(day)
	if !f.evidence.Daily.time().Before(today) {
		return nil, next, nil
	}
	if err := s.current(ctx, f, today); err != nil {
		if ctx.Err() != nil { // which says nothing of the store
			err = errUnfinished
		}
		return nil, time.Time{}, err
	}
	for _, name := range Frameworks() {
		all = append(all, s.catalogues[name].assess(f.evidence))
	}
	return all, next, nil
}

// scoredAll is the entry of the scores of a day, all of one head.
func scoredAll(tenant authz.TenantID, all []Assessment) audit.Event {
	e := audit.Event{
		Type: audit.ComplianceScored, Outcome: audit.Success, Principal: assessor(tenant),
		Resource: audit.Resource{Type: audit.ComplianceResource}, Attributes: map[string]string{attributeHead: decimalOf(all[0].Head.Sequence)},
	}
	for _, a := range all {
		e.Attributes[string(a.Framework)] = withheld
		if a.Score != nil {
			e.Attributes[string(a.Framework)] = scoreOf(*a.Score)
		}
	}
	return e
}

// LastOf returns when a tenant last had an entry of a type whose outcome was a
// success, also when it is archived by now; the zero time when it never had. It
// waits for nothing that gathers evidence. Errors: fault.Internal for a damaged
// log, fault.Unavailable.
func (s *Service) LastOf(ctx context.Context, tenant authz.TenantID, t audit.EventType) (time.Time, error) {
	entry, err := s.reader.Last(ctx, tenant, t)
	if err != nil {
		return time.Time{}, err
	}
	if entry != nil {
		return entry.Time(), nil
	}
	e, err := s.load(ctx, stateKey(tenant)) // stored before entries were cut
	if err != nil || e == nil {
		return time.Time{}, err
	}
	if m, ok := e.Succeeded[t]; ok {
		return m.time(), nil
	}
	return time.Time{}, nil
}

// Persist stores the evidence of each tenant that has entries up to `to` as of
// these, which all that come behind are judged from, so that it outlives them. It is called
// before entries are cut. Errors: fault.Unavailable, and that of a tenant whose
// part of the log does not hold: then nothing may be cut.
func (s *Service) Persist(ctx context.Context, to uint64) error {
	archived, err := s.reader.Archived(ctx)
	if err != nil {
		return err
	}
	tenants, err := s.reader.TenantsWithin(ctx, archived, to) // the others go on from where they are
	if err != nil {
		return err
	}
	for _, tenant := range tenants {
		if err := s.persist(ctx, tenant, archived, to); err != nil {
			return fmt.Errorf("keeping the evidence of tenant %s: %w", tenant, err)
		}
	}
	return nil
}

// persist stores a tenant's evidence, and forgets that of entries before those
// that are archived: nothing goes on from it any more.
func (s *Service) persist(ctx context.Context, tenant authz.TenantID, archived, to uint64) error {
	f, leave, err := s.enter(ctx, tenant)
	if err != nil {
		return err
	}
	defer leave()
	if err := s.catchUp(ctx, f, to); err != nil {
		return err
	}
	e, err := s.asOf(ctx, tenant, to)
	switch {
	case errors.Is(err, errNotNext) || fault.Of(err) == fault.Conflict && err != nil:
		// What it would be gathered from is archived and lost. The newest is there.
	case err != nil:
		return err
	case e.Last.Sequence > archived:
		if err := f.keep(e); err != nil {
			return err
		}
	}
	if err := s.save(ctx, f); err != nil {
		return err
	}
	return s.prune(ctx, tenant, archived)
}
