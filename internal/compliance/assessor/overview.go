package assessor

import (
	"context"
	"errors"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// Overview is what the evidence of a tenant says in a few numbers.
type Overview struct {
	Waiting compliance.Waiting // what the caller can acknowledge
	Denials []int              // denied attempts of each day that was asked for, the oldest first
	Scores  []Standing         // in the order of [compliance.Frameworks]
}

// Standing is the score of a framework.
type Standing struct {
	Framework   compliance.Framework
	Score       *float64 // nil: withheld
	Covered     float64  // percent
	Failing     int      // controls that fail and that the tenant can fix
	Provisional bool
}

// overviewPatience bounds the gathering for an overview. What is gathered is kept for the next one.
const overviewPatience = time.Second

// Overview returns what the newest evidence of p's tenant says, with the denials of the last days up to now.
// The caller has admitted p and records the read. It judges all frameworks by one gathering, and records no
// state. Error: fault.Unavailable, also while the evidence is not gathered up to the head.
func (s *Service) Overview(ctx context.Context, p authz.Principal, days int) (o Overview, err error) {
	ctx, cancel := context.WithTimeout(ctx, overviewPatience)
	defer cancel()
	if s.computing.Acquire(ctx, 1) != nil {
		return o, errBusy
	}
	defer s.computing.Release(1)
	all, err := s.overview(ctx, p, days, &o)
	if err != nil {
		return Overview{}, err
	}
	proof := compliance.Assessment{Head: all[0].Head} // all have the same head
	if err := s.prove(ctx, &proof); err != nil {
		return Overview{}, err
	}
	for _, a := range all {
		if proof.Reason != "" {
			a.Withhold(proof.Proof.Status, proof.Reason)
		}
		o.Scores = append(o.Scores, standing(a))
	}
	return o, nil
}

// overview judges all frameworks, and fills in what else the evidence says.
func (s *Service) overview(ctx context.Context, p authz.Principal, days int, o *Overview) (all []compliance.Assessment, err error) {
	g, release, err := s.evidence.acquire(ctx, p.Tenant)
	if err != nil {
		return nil, err
	}
	defer release()
	switch err := s.evidence.catchUpSoon(ctx, g); {
	case errors.Is(err, errUnfinished) || err == nil && g.evidence.Count == 0:
		return nil, errBusy
	case err != nil:
		return nil, fault.Wrap(fault.Unavailable, "the evidence cannot be gathered", err)
	}
	e := g.evidence
	o.Waiting, o.Denials = e.Waiting(e.Responsible(p.Kind, p.ID)), e.Denials(s.now(), days)
	for _, name := range compliance.Frameworks() {
		all = append(all, s.catalogues[name].Assess(e))
	}
	return all, nil
}

func standing(a compliance.Assessment) Standing {
	st := Standing{Framework: a.Framework, Score: a.Score, Covered: a.Coverage.Percent, Provisional: a.Provisional}
	for _, c := range a.Controls {
		for _, probe := range c.Probes {
			if c.Result == compliance.Fail && probe.Result == compliance.Fail && probe.Responsible == compliance.TheTenant {
				st.Failing++
				break
			}
		}
	}
	return st
}

// VerifiedTo returns the sequence up to which this process has verified the log, 0 for none of it.
func (s *Service) VerifiedTo() uint64 { return s.verifier.Proof().VerifiedTo }
