package compliance_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/test/story"
)

// programs are the callers who are no person at work: an API key, a pod, a poller of the log, and
// the dashboard, which reads in the name of the user who has it open.
var programs = map[string]func(*story.Story){
	"an API key":       func(s *story.Story) { everything(s, story.Client) },
	"a ServiceAccount": func(s *story.Story) { everything(s, story.As(authz.ServiceAccount, "sa")) },
	"a poller":         func(s *story.Story) { s.Used(audit.AuditRead, story.Client).Used(audit.AuditRead, story.Client) },
	"the dashboard": func(s *story.Story) {
		for _, t := range []audit.EventType{
			audit.UserSignedIn, audit.AccountRead, audit.AuditRead, audit.ProofRead, audit.APIKeyListed, audit.MemberListed, audit.SessionListed,
			audit.InventoryRead, audit.ComplianceHistoryRead, audit.ComplianceReported, audit.UserSignedOut, audit.SessionEnded,
		} {
			s.Used(t, story.Reviewer)
		}
	},
}

// everything writes each kind of entry that could count as a review or a reaction, even those that
// the service refuses to programs.
func everything(s *story.Story, p authz.Principal) {
	for _, t := range []audit.EventType{
		audit.AuditRead, audit.APIKeyListed, audit.MemberListed, audit.InventoryRead, audit.PasswordChanged, audit.PasswordReset,
		audit.SessionEnded, audit.MemberChanged, audit.MemberRemoved, audit.APIKeyRevoked, audit.AccessReviewed, audit.InventoryReviewed,
	} {
		s.Used(t, p)
	}
	s.AcknowledgedBy(p, 1, s.Told())
}

// earned are the probes that only the act of a member may turn green.
var earned = []string{"log_reviewed", "access_reviewed", "denials_reviewed", "failures_reviewed", "inventory_reviewed", "sign_in_failures_handled"}

func TestNoProgramReviews(t *testing.T) {
	for i := range compliance.Probes {
		if name := compliance.Probes[i].Name; strings.HasSuffix(name, "_reviewed") && !slices.Contains(earned, name) {
			t.Errorf("%s is not tried", name)
		}
	}
	for who, act := range programs {
		s, e := pure(t)
		s.Began().Registered().Issued(story.Client.ID, 0, story.Owner.ID, authz.AuditRead)
		s.Denied().Credential(audit.CredentialUnsealed, audit.Failure, "a").FailedSignIns(6)
		act(s)
		s.Days(2)
		act(s)
		for _, name := range earned {
			if got := compliance.ProbeOf(name).Run(e); got.Result == compliance.Pass {
				t.Errorf("%s turns %s green: %s", who, name, got.Detail)
			}
		}
	}
	// A member does, so the cases above fail for the right reason.
	s, e := pure(t)
	s.Began().Registered().Denied().Credential(audit.CredentialUnsealed, audit.Failure, "a").FailedSignIns(6).Acknowledged()
	s.Reviewed(audit.AccessReviewed, story.Reviewer).Reviewed(audit.InventoryReviewed, story.Reviewer)
	for _, name := range earned {
		if got := compliance.ProbeOf(name).Run(e); got.Result != compliance.Pass {
			t.Errorf("%s after a member's review: %s, %s", name, got.Result, got.Detail)
		}
	}
}

// The numbers in an entry are for readers: what it covers follows from the entries before it.
func TestAnAcknowledgementCoversWhatItsRangeCovers(t *testing.T) {
	s, e := pure(t)
	s.Began().Registered().Issued(story.Client.ID, 0, story.Owner.ID, authz.VaultRead).Denied().Denied()
	s.Credential(audit.CredentialUnsealed, audit.Failure, "a").FailedSignIns(1)
	if w := e.Waiting(story.Owner.ID); w.Own != (compliance.Tally{Denials: 2, Failures: 1}) || w.Tally != (compliance.Tally{Denials: 1}) {
		t.Errorf("for the owner of the API key: %+v", w)
	}
	w := e.Waiting(story.Reviewer.ID)
	if w.Tally != (compliance.Tally{Denials: 3, Failures: 1}) || w.From != 1 || w.To != uint64(s.Told()) || w.Own != (compliance.Tally{}) {
		t.Errorf("for another member: %+v", w)
	}
	if a := e.Acknowledge(story.Owner.ID, w.From, w.To); a.Denials != 1 || a.Own.Denials != 2 || a.Own.Failures != 1 || len(a.Digest) != 64 {
		t.Errorf("%+v", a)
	}
	s.AcknowledgedBy(story.Owner, 1, s.Told())
	if w := e.Waiting(story.Reviewer.ID); w.Tally != (compliance.Tally{Denials: 2, Failures: 1}) || w.From != 4 {
		t.Errorf("after the owner's acknowledgement: %+v", w)
	}
	s.AcknowledgedBy(story.Reviewer, 5, s.Told())
	if w := e.Waiting(story.Reviewer.ID); w.Tally != (compliance.Tally{Denials: 1}) {
		t.Errorf("after a range without the first: %+v", w)
	}
}

// Very many denials stay few groups, and a merged one is acknowledged only as a whole.
func TestManyDenialsAreKeptInFewGroups(t *testing.T) {
	s, e := pure(t)
	s.Began()
	for range 10_000 {
		s.Denied()
	}
	if b, err := e.Encode(); err != nil || len(b) > 1<<20 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if n := e.Waiting(story.Reviewer.ID).Denials; n != 10_000 {
		t.Errorf("%d wait", n)
	}
	s.AcknowledgedBy(story.Reviewer, 3, s.Told())
	if n := e.Waiting(story.Reviewer.ID).Denials; n < 1000 || n >= 10_000 {
		t.Errorf("%d wait after a range without the first", n)
	}
	s.AcknowledgedBy(story.Reviewer, 2, s.Told())
	if n := e.Waiting(story.Reviewer.ID).Denials; n != 0 {
		t.Errorf("%d wait after a range with all", n)
	}
}
