// Package overview answers what is wrong, what waits for somebody, and what happened, in one answer.
//
// # Model
//
// An [Overview] has parts. Each part is read by the service that has it, and only for a principal that may
// read it there: its scopes decide which parts there are, and its policies which credentials count. So an
// overview tells nobody more than the operations of these services do.
//
// # Invariants
//
//   - One entry records an overview before it is returned, and names its parts.
//   - The work is bounded, however much a tenant has, and each part takes a second at most.
//   - A part that cannot be read is named, and hides no other.
package overview

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/fair"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
)

// Spans.
const (
	Days       = 30 // the activity's
	UnreadDays = 90 // after which a credential that nobody has read counts
	SoonDays   = 7  // within which what expires counts

	day = 24 * time.Hour
)

// Services are the services whose parts an overview has. All are required.
type Services struct {
	Guard      *guard.Guard
	Vault      *vault.Vault
	Transit    *transit.Transit
	Identity   *identity.Service
	Reader     *reader.Reader
	Compliance *assessor.Service
	Diagnosis  func(context.Context, ...diagnosis.Part) diagnosis.Report
	Now        func() time.Time
}

// Service makes overviews. It is safe for concurrent use.
type Service struct {
	Services
	doctor    doctor
	gathering *fair.Semaphore[authz.TenantID] // one for each tenant, so that none keeps the evidence of all others waiting
}

// New returns a service.
func New(s Services) *Service {
	return &Service{s, doctor{look: func(ctx context.Context) diagnosis.Report { return s.Diagnosis(ctx, shownParts()...) }}, fair.NewSemaphore[authz.TenantID](0, 1)}
}

// Part is a part of an overview.
type Part string

// The parts that can be unavailable.
const (
	Account     Part = "account"
	Activity    Part = "activity"
	APIKeys     Part = "api_keys"
	Compliance  Part = "compliance"
	Credentials Part = "credentials"
	Keys        Part = "keys"
)

// Overview is what a principal is shown. Parts that it may not see are nil.
type Overview struct {
	Health      []Health
	HealthAt    time.Time // when that was looked at; zero: not known
	Todo        []Todo    // the most urgent first
	Setup       Setup
	Credentials *vault.Summary
	Days        []Day
	Whole       bool // the activity is complete
	Scores      []assessor.Standing
	Unavailable []Part // parts that cannot be read at the moment
	Causes      error  // why not, for the log of the process
}

// Day is what happened on a day.
type Day struct {
	reader.Day
	Denials *int // nil: not counted yet
}

// Todo is something that waits.
type Todo struct {
	Kind      Kind
	Count     int
	Framework string // only for ControlsFailing
}

// Kind is what a [Todo] is about.
type Kind string

// The kinds, the most urgent first.
const (
	CredentialsExpired  Kind = "credentials_expired"
	CredentialsExpiring Kind = "credentials_expiring"
	ReviewsWaiting      Kind = "reviews_waiting"
	APIKeysPending      Kind = "api_keys_pending"
	APIKeysExpiring     Kind = "api_keys_expiring"
	KeysOverdue         Kind = "keys_overdue"
	ControlsFailing     Kind = "controls_failing"
	EmailUnverified     Kind = "email_unverified"
)

var urgency = []Kind{CredentialsExpired, CredentialsExpiring, ReviewsWaiting, APIKeysPending, APIKeysExpiring, KeysOverdue, ControlsFailing, EmailUnverified}

// Setup is what a new tenant has done; nil is not known.
type Setup struct{ Credential, APIKey, Member, Email *bool }

// visit is an overview while it is made.
type visit struct {
	*Service
	p       authz.Principal
	o       Overview
	shown   []string
	damaged int
}

// Of returns the overview of p. Errors: fault.Unavailable when it cannot be recorded.
func (s *Service) Of(ctx context.Context, p authz.Principal) (Overview, error) {
	if err := s.Guard.Admit(ctx, p, authz.ReadOverview); err != nil {
		return Overview{}, err
	}
	v := &visit{Service: s, p: p}
	v.part(ctx, Account, authz.ReadAccount, v.account)
	v.part(ctx, Credentials, authz.ListCredentials, v.credentials)
	v.part(ctx, Keys, authz.ListKeys, v.keys)
	v.part(ctx, APIKeys, authz.ListAPIKeys, v.apiKeys)
	v.part(ctx, Activity, authz.ReadAudit, v.activity)
	v.evidence(ctx)
	if p.May(authz.ReadAudit) || p.May(authz.ReadScore) {
		r := s.doctor.latest(ctx)
		if v.o.Health = healthOf(r, s.Compliance.VerifiedTo()); r != nil {
			v.o.HealthAt = r.Time
		}
		v.shown = append(v.shown, "health")
	}
	slices.SortStableFunc(v.o.Todo, func(a, b Todo) int { return slices.Index(urgency, a.Kind) - slices.Index(urgency, b.Kind) })
	if err := s.Guard.Record(ctx, v.event()); err != nil {
		return Overview{}, err
	}
	return v.o, nil
}

// event returns the entry of the visit.
func (v *visit) event() audit.Event {
	slices.Sort(v.shown)
	e := audit.Event{
		Type: audit.AccountRead, Outcome: audit.Success, Principal: v.p, Resource: audit.Resource{Type: audit.UserResource},
		Attributes: map[string]string{audit.AttributeOverview: strings.Join(v.shown, " ")},
	}
	if v.p.Kind == authz.User {
		e.Resource.ID = v.p.ID
	}
	if c := v.o.Credentials; c != nil {
		e.Attributes["count"] = strconv.Itoa(c.Total)
	}
	if v.damaged > 0 {
		e.Outcome = audit.Failure
		e.Attributes[audit.AttributeReason], e.Attributes["damaged"] = "integrity", strconv.Itoa(v.damaged)
	}
	return e
}

// part reads a part, if the principal may do what it takes.
func (v *visit) part(ctx context.Context, part Part, takes authz.Action, read func(context.Context) error) {
	if !v.p.May(takes) {
		return
	}
	if err := read(ctx); err != nil {
		v.lacks(part, err)
		return
	}
	v.shown = append(v.shown, string(part))
}

func (v *visit) lacks(part Part, err error) {
	v.o.Unavailable = append(v.o.Unavailable, part)
	v.o.Causes = errors.Join(v.o.Causes, fmt.Errorf("reading %s for an overview: %w", part, err))
}

func (v *visit) todo(kind Kind, n int, framework string) {
	if n > 0 {
		v.o.Todo = append(v.o.Todo, Todo{kind, n, framework})
	}
}

func (v *visit) account(ctx context.Context) error {
	_, user, err := v.Identity.AccountUnrecorded(ctx, v.p)
	if err != nil || user == nil {
		return err
	}
	v.o.Setup.Email = &user.EmailVerified
	if !user.EmailVerified {
		v.todo(EmailUnverified, 1, "")
	}
	return nil
}

func (v *visit) credentials(ctx context.Context) error {
	sum, damaged, err := vault.Summarize(ctx, v.Vault, v.p, listing.Asked{Soon: SoonDays * day, Unread: UnreadDays * day})
	if err != nil {
		return err
	}
	v.damaged += damaged
	v.o.Credentials, v.o.Setup.Credential = &sum, new(sum.Total > 0)
	v.todo(CredentialsExpired, sum.Expired, "")
	v.todo(CredentialsExpiring, sum.ExpiringSoon, "")
	return nil
}

func (v *visit) keys(ctx context.Context) error {
	n, damaged, err := v.Transit.Overdue(ctx, v.p)
	v.damaged += damaged
	v.todo(KeysOverdue, n, "")
	return err
}

// apiKeys reads the API keys and, with the same scope, the members.
func (v *visit) apiKeys(ctx context.Context) error {
	keys, err := v.Identity.APIKeysUnrecorded(ctx, v.p)
	if err != nil {
		return err
	}
	now, pending, expiring := v.Now(), 0, 0
	for _, k := range keys {
		switch {
		case k.Expired(now):
		case k.Pending:
			pending++
		case k.Expired(now.Add(SoonDays * day)):
			expiring++
		}
	}
	v.todo(APIKeysPending, pending, "")
	v.todo(APIKeysExpiring, expiring, "")
	v.o.Setup.APIKey = new(len(keys) > 0)
	if v.p.Tenant == authz.SystemTenant { // it has no members
		return nil
	}
	members, open, err := v.Identity.MembersUnrecorded(ctx, v.p)
	if err == nil {
		v.o.Setup.Member = new(len(members)+len(open) > 1)
	}
	return err
}

func (v *visit) activity(ctx context.Context) error {
	days, whole, err := v.Reader.Activity(ctx, v.p.Tenant, v.Now(), Days)
	v.o.Whole = whole
	for _, d := range days {
		v.o.Days = append(v.o.Days, Day{Day: d})
	}
	return err
}

// longestTurn bounds the wait for another overview of the same tenant.
const longestTurn = time.Second

func (v *visit) gather(ctx context.Context) (found assessor.Overview, err error) {
	waiting, cancel := context.WithTimeout(ctx, longestTurn)
	defer cancel()
	if err := v.gathering.Acquire(waiting, v.p.Tenant); err != nil {
		return found, err
	}
	defer v.gathering.Release(v.p.Tenant)
	return v.Compliance.Overview(ctx, v.p, Days)
}

// evidence reads what the evidence of the tenant says: of the log with audit:read, and the scores with
// compliance:read.
func (v *visit) evidence(ctx context.Context) {
	log, scores := v.p.May(authz.ReadAudit), v.p.May(authz.ReadScore)
	if !log && !scores {
		return
	}
	found, err := v.gather(ctx)
	if err != nil {
		v.o.Whole = false
		v.lacks(Compliance, err)
		return
	}
	if log {
		v.todo(ReviewsWaiting, found.Waiting.Denials+found.Waiting.Failures, "")
		for i := range v.o.Days {
			v.o.Days[i].Denials = &found.Denials[Days-len(v.o.Days)+i]
		}
	}
	if scores {
		v.shown = append(v.shown, "scores")
		v.o.Scores = found.Scores
		for _, s := range found.Scores {
			v.todo(ControlsFailing, s.Failing, string(s.Framework))
		}
	}
}
