package assessor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// stateEvery bounds the age of the state that a score on demand uses.
const stateEvery = compliance.Day

// settling is the time before the first assessment of a tenant, so that the tenant's own entries
// come first in its part of the log.
const settling = compliance.Day

// defaultAssessTime bounds a call of AssessAll, because other work runs on the same ticks.
const defaultAssessTime = 20 * time.Second

// AssessAll records the state and the scores of the day for every tenant whose part of the log is
// at least a day old and lacks them, and keeps up with the entries of those whose evidence is in
// memory. It writes at most two entries per tenant. The process calls it each minute. A later call, which continues where this one ended, covers tenants for which the
// time was too short, whose chain is not verified yet, or whose evidence is in use. Errors:
// fault.Unavailable, or errors of single tenants, which do not stop the others.
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
			if err := s.keepUp(budget, tenant); err != nil {
				errs = append(errs, fmt.Errorf("gathering the evidence of tenant %s: %w", tenant, err))
			}
			continue
		}
		next, err := s.assess(budget, tenant, now)
		s.agenda.visited(tenant)
		switch {
		case ctx.Err() != nil:
			return errors.Join(append(errs, ctx.Err())...)
		case err == nil && !next.IsZero():
			s.agenda.postpone(tenant, next)
		case err == nil || errors.Is(err, errBusy) || budget.Err() != nil: // a later call does it
		default:
			errs = append(errs, fmt.Errorf("assessing tenant %s: %w", tenant, err))
			if fault.Of(err) == fault.Unavailable {
				return errors.Join(errs...) // the store is down for the next tenant too
			}
		}
		if budget.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

func (s *Service) keepUp(ctx context.Context, tenant authz.TenantID) error {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	return s.evidence.keepUp(ctx, tenant)
}

// assess records what is due for one tenant, and returns when something is due next. The zero time
// means that something is still due.
func (s *Service) assess(ctx context.Context, tenant authz.TenantID, now time.Time) (next time.Time, err error) {
	assessments, next, err := s.scores(ctx, tenant, now)
	if errors.Is(err, errUnfinished) {
		return time.Time{}, nil
	}
	if err != nil || len(assessments) == 0 {
		return next, err
	}
	proof := compliance.Assessment{Head: assessments[0].Head} // all have the same head
	proving, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	if err := s.prove(proving, &proof); err != nil {
		return time.Time{}, err
	}
	switch proof.Proof.Status {
	case compliance.Verified, compliance.Disabled:
	case compliance.Verifying:
		return time.Time{}, nil
	default:
		for i := range assessments {
			assessments[i].Withhold(proof.Proof.Status, proof.Reason)
		}
	}
	err = s.recordScores(ctx, tenant, assessments, next.Add(-compliance.Day))
	if err != nil && !errors.Is(err, errRecorded) {
		return time.Time{}, fmt.Errorf("recording scores: %w", err)
	}
	return next, nil
}

// scores records the state of the day and judges all frameworks, if the log lacks the scores of the
// day. It returns when they are due next. It reads from the log what was done, so a restart repeats
// nothing.
func (s *Service) scores(ctx context.Context, tenant authz.TenantID, now time.Time) (all []compliance.Assessment, next time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	g, release, err := s.evidence.acquire(ctx, tenant)
	if err != nil {
		return nil, time.Time{}, err
	}
	defer release()
	if err := s.evidence.catchUp(ctx, g, 0); err != nil {
		return nil, time.Time{}, err
	}
	if settled := g.evidence.First.Time().Add(settling); now.Before(settled) {
		return nil, settled, nil
	}
	today := now.UTC().Truncate(compliance.Day)
	next = today.Add(compliance.Day)
	if !g.evidence.Daily.Time().Before(today) {
		return nil, next, nil
	}
	if err := s.updateState(ctx, g, today); err != nil {
		if ctx.Err() != nil { // the store is not at fault
			err = errUnfinished
		}
		return nil, time.Time{}, err
	}
	for _, name := range compliance.Frameworks() {
		all = append(all, s.catalogues[name].Assess(g.evidence))
	}
	return all, next, nil
}

// updateState records the deployment's present state in the tenant's part of the log when the state
// has changed or its entry is older than since. g is caught up before and after.
func (s *Service) updateState(ctx context.Context, g *gathering, since time.Time) error {
	state, err := s.state(ctx)
	if err != nil {
		return fault.Wrap(fault.Unavailable, "the deployment's state is not known at the moment: retry", err)
	}
	if s.verifier.Proof().Status == verify.ProofDisabled {
		state.VerifyEvery = 0 // whatever the configuration says
	}
	recorded := func() bool {
		last := g.evidence.State
		return last != nil && last.State.Same(state) && !last.At.Time().Before(since)
	}
	// Another replica may have recorded the state after g was caught up. If the row says so and the
	// log does not, the log counts, and the second attempt ignores the row.
	for _, since := range []time.Time{since, endOfTime} {
		if recorded() {
			return nil
		}
		if err := s.recordState(ctx, g.tenant, state, since); err != nil && !errors.Is(err, errRecorded) {
			return fmt.Errorf("recording the state: %w", err)
		}
		if err := s.evidence.catchUp(ctx, g, 0); err != nil {
			return err
		}
	}
	return nil
}

// endOfTime is later than any entry.
var endOfTime = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)

// scoresEvent returns the audit event for the scores of all frameworks, which have the same head.
func scoresEvent(p authz.Principal, all []compliance.Assessment) audit.Event {
	e := audit.Event{
		Type: audit.ComplianceScored, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.ComplianceResource}, Attributes: map[string]string{compliance.AttributeHead: formatUint(all[0].Head.Sequence)},
	}
	for _, a := range all {
		e.Attributes[string(a.Framework)] = compliance.Withheld
		if a.Score != nil {
			e.Attributes[string(a.Framework)] = formatScore(*a.Score)
		}
	}
	return e
}

// LastOf returns the time of a tenant's last successful entry of a type, archived ones included. It
// returns the zero time when there is none. It does not wait for a gathering. Errors:
// fault.Internal for a damaged log, fault.Unavailable.
func (s *Service) LastOf(ctx context.Context, tenant authz.TenantID, t audit.EventType) (time.Time, error) {
	entry, err := s.reader.Last(ctx, tenant, t)
	if err != nil {
		return time.Time{}, err
	}
	if entry != nil {
		return entry.Time(), nil
	}
	e, err := s.evidence.load(ctx, tenant) // evidence is stored before its entries are archived
	if err != nil || e == nil {
		return time.Time{}, err
	}
	if m, ok := e.Succeeded[t]; ok {
		return m.Time(), nil
	}
	return time.Time{}, nil
}

// Persist stores the evidence of each tenant that has entries up to `to`, so that the evidence
// outlives the entries and later ones can be judged with it. The archiver calls Persist before it
// removes entries. Errors: fault.Unavailable, and the error of a tenant whose part of the log does
// not verify; then nothing may be removed.
func (s *Service) Persist(ctx context.Context, to uint64) error {
	archived, err := s.reader.Archived(ctx)
	if err != nil {
		return err
	}
	tenants, err := s.reader.TenantsWithin(ctx, archived, to) // the other tenants have evidence up to here
	if err != nil {
		return err
	}
	for _, tenant := range tenants {
		if err := s.evidence.persist(ctx, tenant, archived, to); err != nil {
			return fmt.Errorf("keeping the evidence of tenant %s: %w", tenant, err)
		}
	}
	return nil
}

// Replicas that assess a tenant at the same time find the same entry missing. Only one of them
// writes it, together with a row under the keyring's MAC that records this. One row is for the last
// recorded state, and one for the last day with recorded scores.
func statedKey(tenant authz.TenantID) []byte { return []byte("compliance/stated/" + string(tenant)) }

func dailyKey(tenant authz.TenantID) []byte { return []byte("compliance/daily/" + string(tenant)) }

// statedRow describes the last recorded state.
type statedRow struct {
	At     time.Time `json:"at"`
	Digest []byte    `json:"digest"` // digest of the attributes
}

// errRecorded means that another replica has recorded the entry.
var errRecorded = errors.New("another replica has recorded the entry")

// recordOnce records an event and a row about it, unless recorded accepts the present row, which
// another replica wrote.
func (s *Service) recordOnce(ctx context.Context, e audit.Event, key, content []byte, recorded func(content []byte) bool) error {
	row := s.evidence.seal(key, content)
	return s.evidence.store.Update(ctx, func(tx store.Tx) error {
		before, err := tx.Get(key)
		if err != nil {
			return err
		}
		if before != nil {
			// A row without a valid MAC does not count.
			if content, err := s.evidence.unseal(key, before); err == nil && recorded(content) {
				return errRecorded
			}
		}
		if err := tx.Put(key, row); err != nil {
			return err
		}
		_, err = s.guard.Append(tx, e)
		return err
	})
}

// recordState records the state of the deployment in the tenant's part of the log, unless another
// replica has recorded the same state after since. Error: errRecorded.
func (s *Service) recordState(ctx context.Context, tenant authz.TenantID, state compliance.State, since time.Time) error {
	own := statedRow{s.now().UTC(), state.Digest()}
	content, err := json.Marshal(own)
	if err != nil {
		return fault.Wrap(fault.Internal, fault.Internal.Error(), err)
	}
	e := audit.Event{
		Type: audit.ComplianceAssessed, Outcome: audit.Success, Principal: compliance.Assessor(tenant),
		Resource: audit.Resource{Type: audit.ComplianceResource}, Attributes: state.Attributes(),
	}
	return s.recordOnce(ctx, e, statedKey(tenant), content, func(content []byte) bool {
		var last statedRow
		return json.Unmarshal(content, &last) == nil && bytes.Equal(last.Digest, own.Digest) && !last.At.Before(since)
	})
}

// recordScores records the scores of a day, unless another replica has. Error: errRecorded.
func (s *Service) recordScores(ctx context.Context, tenant authz.TenantID, all []compliance.Assessment, today time.Time) error {
	content := []byte(today.Format(time.DateOnly))
	return s.recordOnce(ctx, scoresEvent(compliance.Assessor(tenant), all), dailyKey(tenant), content, func(last []byte) bool { return bytes.Equal(last, content) })
}
