// Package dryrun says who would lose what by a change of access: by what they did in the last 30 days,
// as the log has it. Nothing is changed. The change is made over a snapshot, by the code that makes it, and
// each use in the log is judged before and after it.
package dryrun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/access"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/overlay"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Span is how far back a dry run looks.
const Span = 30 * 24 * time.Hour

// maxEntries bounds the entries of a page. Its work is bounded by that of a query of the log, too.
const maxEntries = 1000

// DryRun tries changes of access. It is safe for concurrent use.
type DryRun struct {
	store  store.Store
	guard  *guard.Guard
	log    *reader.Reader
	access *access.Service
	past   past.Names // says which ServiceAccount a UID is of
	now    func() time.Time
}

// New returns the dry runs of the changes that a makes.
func New(s store.Store, g *guard.Guard, log *reader.Reader, a *access.Service, p past.Names, now func() time.Time) *DryRun {
	return &DryRun{s, g, log, a, p, now}
}

// Loss is what somebody did with a credential and could do no longer.
type Loss struct {
	Actor      audit.Actor
	Credential string // id
	Name       string // its present name; empty for those who may not know it
	Verb       authz.Verb
	Uses       int
	LastUse    time.Time
}

// Page is what a part of the log says, newest first.
type Page struct {
	Losses   []Loss // sorted by actor, credential and verb
	From     time.Time
	Unjudged int    // uses by ServiceAccounts of which only the UID is known
	Cursor   string // the rest begins there; empty: that is all
}

// use is what the entries of a page have in common that are judged together.
type use struct {
	actor      audit.Actor
	credential string
	action     authz.Action
}

// actions has the action that a successful event stands for.
var actions = map[audit.EventType]authz.Action{
	audit.CredentialListed:      authz.ListCredentials,
	audit.CredentialUnsealed:    authz.UnsealCredential,
	audit.CredentialSealed:      authz.SealCredential,
	audit.CredentialRotated:     authz.ReplaceCredential,
	audit.CredentialReencrypted: authz.RotateCredential,
	audit.CredentialDescribed:   authz.DescribeCredential,
}

// verbs has the verb that policies have for an action.
var verbs = map[authz.Action]authz.Verb{
	authz.ListCredentials: authz.ListPath, authz.UnsealCredential: authz.ReadPath, authz.SealCredential: authz.WritePath,
	authz.TrashCredential: authz.DeletePath,
}

// useOf returns the use that an entry is of, and false for an entry about no credential and for one of
// somebody whom no policy limits.
func useOf(e *audit.Entry) (use, bool) {
	action, ok := actions[e.EventType]
	switch {
	case e.Attributes[audit.AttributeTrashed] != "":
		action = authz.TrashCredential
	case action != authz.ListCredentials && action != authz.UnsealCredential:
		action = authz.SealCredential // all of them take the same scope and verb
	}
	limited := slices.Contains([]string{string(authz.User), string(authz.APIKey), string(authz.ServiceAccount)}, e.Actor.Type)
	return use{e.Actor, e.Resource.ID, action}, ok && limited && e.Resource.ID != ""
}

// Of returns who would lose what by a change, from one page of the log. What the change would be refused
// for, it is refused for here. Of credentials outside the policies of p it tells only with audit:read, and
// never their names, and of the others the names only with audit:names. Uses of deleted credentials, and of keys and users that
// are gone, are no losses. Errors: those of the change; fault.Forbidden; fault.Invalid for a cursor of
// another list; fault.Unavailable.
func (d *DryRun) Of(ctx context.Context, p authz.Principal, c access.Change, cursor string) (Page, error) {
	if err := d.guard.Admit(ctx, p, authz.TryAccess); err != nil {
		return Page{}, err
	}
	page := Page{From: d.now().Add(-Span)}
	entries, next, err := d.log.Unrecorded(ctx, p.Tenant, reader.Query{Outcome: audit.Success, From: page.From, Limit: maxEntries, Cursor: cursor})
	if err != nil {
		return Page{}, err
	}
	page.Cursor = next
	uses := make(map[use]*Loss)
	for _, e := range entries {
		u, ok := useOf(&e)
		if !ok {
			continue
		}
		if uses[u] == nil { // the newest comes first
			uses[u] = &Loss{Actor: u.actor, Credential: u.credential, Verb: verbs[u.action], LastUse: e.Time()}
		}
		uses[u].Uses++
	}
	e := audit.Event{Type: audit.AccessChecked, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.PolicyResource}}
	err = d.store.View(ctx, func(r store.Reader) (err error) {
		tried := overlay.New(r)
		if e.Resource, err = d.access.Try(tried, p, c); err == nil {
			page.Losses, page.Unjudged, err = d.judge(r, tried, p, uses)
		}
		return err
	})
	if reason, refused := records.ReasonOf(err); refused {
		return Page{}, d.guard.Refuse(ctx, e, audit.Denied, reason, err)
	}
	if err != nil {
		return Page{}, fmt.Errorf("trying a change of access: %w", err)
	}
	e.Attributes = map[string]string{audit.AttributeTried: string(c.Kind), "losses": strconv.Itoa(len(page.Losses))}
	if err := d.guard.Record(ctx, e); err != nil {
		return Page{}, err
	}
	return page, nil
}

// judge returns the uses that are allowed before a change and not after it, and how many are not judged.
func (d *DryRun) judge(before, after store.Reader, p authz.Principal, uses map[use]*Loss) (losses []Loss, unjudged int, err error) {
	names := make(map[string]string)
	losses = []Loss{}
	now, then := d.judgeIn(before, p.Tenant), d.judgeIn(after, p.Tenant)
	for u, loss := range uses {
		name, known := names[u.credential]
		if !known {
			var err error
			name, err = record.NameOf(before, p.Tenant, u.credential)
			if err != nil && !state.IsRefused(err) && !errors.Is(err, fault.Internal) { // nobody reaches a damaged one
				return nil, 0, err
			}
			names[u.credential] = name
		}
		if name == "" {
			continue
		}
		subject, err := d.subjectOf(before, p.Tenant, u.actor)
		if err != nil {
			return nil, 0, err
		}
		if subject == "" {
			unjudged += loss.Uses
			continue
		}
		could, err := now.allows(subject, u.action, name)
		if err != nil {
			return nil, 0, err
		}
		can, err := then.allows(subject, u.action, name)
		if err != nil {
			return nil, 0, err
		}
		mayList := p.Reaches(authz.ListCredentials, name)
		if !could || can || !mayList && !p.May(authz.ReadAudit) { // the log tells of what is outside the caller's policies, too
			continue
		}
		if mayList && p.May(authz.ReadNames) {
			loss.Name = name
		}
		losses = append(losses, *loss)
	}
	slices.SortFunc(losses, func(a, b Loss) int {
		return cmp.Or(cmp.Compare(a.Actor.ID, b.Actor.ID), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Credential, b.Credential), cmp.Compare(a.Verb, b.Verb))
	})
	return losses, unjudged, nil
}

// subjectOf returns the actor of entries as a subject of policies, "" for a ServiceAccount that has not been
// seen since its name is noted.
func (d *DryRun) subjectOf(r store.Reader, tenant authz.TenantID, a audit.Actor) (string, error) {
	if a.Type != string(authz.ServiceAccount) {
		return a.ID, nil
	}
	noted, err := d.past.Of(r, tenant, a.ID)
	if err != nil || len(noted) == 0 || noted[0].Type != audit.ServiceAccountResource {
		return "", err
	}
	return noted[0].Name, nil
}

// judge says what subjects may do in one state of the store.
type judge struct {
	access *access.Service
	in     store.Reader
	tenant authz.TenantID
	known  map[string]authz.Principal
}

func (d *DryRun) judgeIn(r store.Reader, tenant authz.TenantID) *judge {
	return &judge{d.access, r, tenant, make(map[string]authz.Principal)}
}

// allows reports whether a subject may do something with a credential of that name. Who is gone may do nothing.
func (j *judge) allows(subject string, a authz.Action, name string) (bool, error) {
	p, known := j.known[subject]
	if !known {
		var err error
		if p, err = j.access.Principal(j.in, j.tenant, subject); err != nil {
			return false, err
		}
		j.known[subject] = p
	}
	return p.May(a) && p.Reaches(a, name), nil
}
