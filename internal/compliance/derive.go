package compliance

import (
	"encoding/json"
	"fmt"
	"iter"
	"math"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
)

var ErrNoHead = fault.New(fault.NotFound, "the tenant has no such entry in the log, or it is archived: choose one of its later entries as head")

// Derive judges a framework by one tenant's entries as of the entry head; 0 means the last one. The
// entries start with the tenant's first one and are in order. Derive verifies nothing, so pass
// verified entries only. Proof says only that they reach the head. Errors: fault.Invalid for other
// entries, fault.NotFound for a head that is not among them, and the errors of the sequence.
func Derive(c *Catalogue, entries iter.Seq2[*audit.Entry, error], head uint64) (Assessment, error) {
	e := NewEvidence()
	for entry, err := range entries {
		if err != nil {
			return Assessment{}, err
		}
		if head != 0 && entry.Sequence > head {
			break
		}
		if err := e.Add(entry); err != nil {
			return Assessment{}, err
		}
	}
	if e.Count == 0 || head != 0 && e.Last.Sequence != head {
		return Assessment{}, ErrNoHead
	}
	a := c.Assess(e)
	a.Proof = Proof{Status: Verified, VerifiedTo: e.Last.Sequence, Hash: e.Last.Hash}
	return a, nil
}

// Assess judges as of the newest entry of the evidence. It leaves Proof unset.
func (c *Catalogue) Assess(e *Evidence) Assessment {
	a := Assessment{Framework: c.Framework, Version: c.Version, Coverage: c.Coverage(), Head: e.Head(), Provisional: e.State == nil, Controls: []ControlResult{}}
	asked := make(map[string]ProbeResult)
	passed, scored := 0.0, 0.0
	for _, control := range c.Controls {
		r := ControlResult{
			ID: control.ID, Title: control.Title, Profile: control.Profile, Related: control.Related, Weight: control.Weight,
			Result: Manual, Probes: []ProbeResult{},
		}
		for _, name := range control.Probes {
			result, ok := asked[name]
			if !ok {
				result = ProbeOf(name).Run(e)
				asked[name] = result
			}
			r.Probes = append(r.Probes, result)
		}
		if len(r.Probes) > 0 {
			r.Result = combine(r.Probes)
		}
		switch r.Result {
		case Pass:
			passed += r.Weight
			scored += r.Weight
		case Fail:
			scored += r.Weight
		}
		a.Controls = append(a.Controls, r)
	}
	if scored == 0 {
		a.Reason = "there is no data to judge by yet"
		return a
	}
	score := decimal(100 * passed / scored)
	a.Score = &score
	return a
}

func (c *Catalogue) Coverage() Coverage {
	all := Coverage{Controls: len(c.Controls)}
	for _, control := range c.Controls {
		if len(control.Probes) > 0 {
			all.Evidenced++
		}
	}
	all.Percent = decimal(100 * float64(all.Evidenced) / float64(all.Controls))
	return all
}

// decimal rounds to one decimal.
func decimal(x float64) float64 { return math.Round(x*10) / 10 }

// combine returns the result of a control: the first of Fail, Pass and NoData that one of its
// probes has, and otherwise NotApplicable.
func combine(probes []ProbeResult) Result {
	has := make(map[Result]bool)
	for _, p := range probes {
		has[p.Result] = true
	}
	for _, r := range []Result{Fail, Pass, NoData} {
		if has[r] {
			return r
		}
	}
	return NotApplicable
}

// evidenceVersion is the version of the stored form. Evidence of another version is gathered again.
const evidenceVersion = 4

func (e *Evidence) Encode() ([]byte, error) {
	b, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encoding evidence: %w", err)
	}
	return append([]byte{evidenceVersion}, b...), nil
}

var ErrForeignEvidence = fault.New(fault.Internal, "the stored evidence is damaged, or another version's")

func DecodeEvidence(b []byte) (*Evidence, error) {
	if len(b) < 1 || b[0] != evidenceVersion {
		return nil, ErrForeignEvidence
	}
	e := NewEvidence()
	if err := json.Unmarshal(b[1:], e); err != nil || e.Count == 0 || !e.whole() {
		return nil, ErrForeignEvidence
	}
	return e, nil
}

// whole reports whether the evidence has all parts that the fold creates.
func (e *Evidence) whole() bool {
	if e.Types == nil || e.Succeeded == nil || e.Days == nil || e.Credentials == nil || e.Keys == nil || e.APIKeys == nil || e.Users == nil ||
		e.Invitations == nil || e.Departed == nil || e.Makers == nil || e.Scores == nil || e.Failing == nil || e.Days[dayOf(e.Last.Micros)] == nil {
		return false
	}
	for _, aspects := range e.Days {
		if aspects == nil || !noneNil(aspects) {
			return false
		}
	}
	return noneNil(e.Types) && noneNil(e.Credentials) && noneNil(e.Keys) && noneNil(e.APIKeys) && noneNil(e.Users)
}

// noneNil reports whether none of the values is nil.
func noneNil[K comparable, V any](m map[K]*V) bool {
	for _, v := range m {
		if v == nil {
			return false
		}
	}
	return true
}
