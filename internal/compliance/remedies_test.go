package compliance_test

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

// TestEachProbeHasARemedy makes each probe fail, and looks for what fixes it and for the section that
// says how. The page has no other sections of that kind.
func TestEachProbeHasARemedy(t *testing.T) {
	for i := range compliance.Probes {
		p := &compliance.Probes[i]
		fails := slices.IndexFunc(probeCases[p.Name], func(c probeCase) bool { return c.want == compliance.Fail })
		if fails < 0 {
			t.Errorf("%s: no case fails", p.Name)
			continue
		}
		s, e := pure(t)
		s.Began()
		probeCases[p.Name][fails].tell(s)
		r := p.Run(e)
		if r.Remedy == "" || r.Since == nil {
			t.Errorf("%s fails with remedy %q since %v", p.Name, r.Remedy, r.Since)
		}
		page, section, _ := strings.Cut(strings.TrimPrefix(r.Guide, "https://github.com/latticekeep/latticekeep/blob/main/"), "#")
		text, err := os.ReadFile("../../" + page)
		if err != nil || page == r.Guide {
			t.Fatalf("%s: the guide %q is not a page of the documentation", p.Name, r.Guide)
		}
		if !strings.Contains(string(text), "\n### `"+section+"`\n") {
			t.Errorf("%s: %s has no section %s", p.Name, page, section)
		}
		if n := strings.Count(string(text), "\n### "); n != len(compliance.Probes) {
			t.Errorf("%s has %d sections for %d probes", page, n, len(compliance.Probes))
		}
	}
}

// TestAFailureSaysSinceWhenAndWhat lets two credentials expire on different days, renews one, and
// renews the other.
func TestAFailureSaysSinceWhenAndWhat(t *testing.T) {
	s, e := pure(t)
	current := func() compliance.ProbeResult { return compliance.ProbeOf("credentials_current").Run(e) }
	s.Began().Sealed("a", 10).Sealed("b", 12).ReadLog()
	if r := current(); r.Result != compliance.Pass || r.Since != nil || r.Objects != nil || r.Remedy != "" {
		t.Fatalf("a probe that passes: %+v", r)
	}
	s.Days(11).ReadLog()
	first := s.Clock
	s.Days(1).After(time.Hour).ReadLog()
	s.Days(1).ReadLog()
	r := current()
	if !slices.Equal(r.Objects, []string{"a", "b"}) || r.Since.Sub(first).Abs() > time.Hour {
		t.Errorf("failing for %q since %v, want a and b since %v", r.Objects, r.Since, first)
	}
	s.Days(1).Renewed("a", 90)
	if r := current(); !slices.Equal(r.Objects, []string{"b"}) || r.Since.Sub(first).Abs() > time.Hour {
		t.Errorf("failing for %q since %v, want b since %v", r.Objects, r.Since, first)
	}
	s.Renewed("b", 1).Days(1).ReadLog()
	s.Days(2).ReadLog()
	if r := current(); !slices.Equal(r.Objects, []string{"b"}) || s.Clock.Sub(*r.Since) > 73*time.Hour {
		t.Errorf("failing again for %q since %v, want b since about %v", r.Objects, r.Since, s.Clock)
	}
}

// TestTheLeastObservedDoesNotLookBest compares a tenant without an assessment of the deployment
// with one that has it.
func TestTheLeastObservedDoesNotLookBest(t *testing.T) {
	s, e := pure(t)
	s.Began().Sealed("a", 30)
	a := catalogues(t)[compliance.SOC2].Assess(e)
	if !a.Provisional || a.Score == nil {
		t.Errorf("before the first assessment the score is %v, provisional %v", a.Score, a.Provisional)
	}
	s.Assessed()
	if a := catalogues(t)[compliance.SOC2].Assess(e); a.Provisional {
		t.Error("the score is provisional after an assessment")
	}
}

func TestEachProbeIsSomebodysJob(t *testing.T) {
	for name, want := range map[string]compliance.Responsible{
		"transport_encrypted": compliance.TheDeployment, "backup_recent": compliance.TheDeployment, "assessed_daily": compliance.TheDeployment,
		"credentials_current": compliance.TheTenant, "denials_reviewed": compliance.TheTenant, "departed_locked_out": compliance.TheDeployment,
	} {
		if got := compliance.ProbeOf(name).Responsible(); got != want {
			t.Errorf("%s is the job of the %s, want the %s", name, got, want)
		}
	}
}
