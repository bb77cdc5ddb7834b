package vault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/pathindex"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Filter selects the credentials that match all of its fields.
type Filter = listing.Filter

// ListQuery selects a page of the list. The zero value selects the whole list.
type ListQuery = listing.Query

// List returns the credentials of p's tenant in the order of their ids, or of their names when the
// query has a prefix, or as it asks, and what is left of the list. It includes expired
// credentials and marks them. It leaves out those outside p's policies, without a look at them, and is
// in the order of names rather than ids then; and it hides the credentials of objects in other namespaces
// from a ServiceAccount. With a limit or a filter, a page may hold fewer credentials than are left, or none,
// and still have a cursor, except in an order of times. Damaged records are left out and counted in the
// entry. Errors: fault.Forbidden; fault.Invalid for an invalid filter, for the cursor of another list and for
// too many credentials in an order of times; fault.Unavailable, also for the order of names of a store of an
// earlier release until its names are indexed.
func (v *Vault) List(ctx context.Context, p authz.Principal, q ListQuery) (list []Credential, rest listing.Rest, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListCredentials); err != nil {
		return nil, rest, err
	}
	if err := q.Validate(); err != nil {
		return nil, rest, err
	}
	pages, now := listing.Pages{Cursors: listing.Cursors{Rows: v.records.Rows}, One: v.pageBudget, All: v.summaryBudget}, v.now()
	damaged := 0
	err = v.store.View(ctx, func(rd store.Reader) error {
		list = []Credential{}
		s, err := v.records.owners.source(rd, p, q.UsesPaths(p))
		if err != nil {
			return err
		}
		if q.Order == listing.ByName && !s.ByName {
			return errNotIndexed
		}
		rest, damaged, err = pages.Read(s, q, now, func(c listing.Found) { list = append(list, credentialOf(c.Record, now, c.Owned)) })
		return err
	})
	if errors.Is(err, fault.Invalid) {
		return nil, listing.Rest{}, err
	}
	if err != nil {
		return nil, listing.Rest{}, fmt.Errorf("listing credentials: %w", err)
	}
	if err := v.guard.Record(ctx, listEvent(p, len(list), damaged)); err != nil { // damage is no refusal here
		return nil, listing.Rest{}, err
	}
	return list, rest, nil
}

var errNotIndexed = fault.New(fault.Unavailable, "the names of an earlier release are still being indexed: try again in a minute, or list without sort")

// source returns what p may see of its tenant's credentials.
func (o ownerRows) source(rd store.Reader, p authz.Principal, byName bool) (s listing.Source, err error) {
	if byName {
		byName, err = pathindex.IsComplete(rd)
	}
	owner := func(id string) (listing.Owner, error) {
		by, err := o.of(rd, p.Tenant, id)
		return listing.Owner{Owned: by.owned, Hidden: by.hides(p)}, err
	}
	return listing.Source{Reader: rd, Principal: p, Owner: owner, ByName: byName}, err
}

// listEvent returns the entry of a read of many credentials.
func listEvent(p authz.Principal, count, damaged int) audit.Event {
	e := audit.Event{
		Type: audit.CredentialListed, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.CredentialResource},
		Attributes: map[string]string{"count": strconv.Itoa(count)},
	}
	if damaged > 0 {
		e.Outcome = audit.Failure
		e.Attributes[audit.AttributeReason], e.Attributes["damaged"] = reasonIntegrity, strconv.Itoa(damaged)
	}
	return e
}

// Metadata returns the metadata of one credential, expired or not, as [Vault.List] does. It records
// the read before it returns, and opens nothing. Errors: fault.Forbidden for a credential that does
// not exist for p, fault.Unavailable.
func (v *Vault) Metadata(ctx context.Context, p authz.Principal, id string) (Credential, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListCredentials); err != nil {
		return Credential{}, err
	}
	l, err := v.look(ctx, p, authz.ListCredentials, id, nil)
	if err != nil {
		return Credential{}, err
	}
	e := l.event(audit.CredentialListed, p, time.Time{}) // at the zero time nothing has expired
	if err := recordAccess(ctx, v.guard, e); err != nil {
		return Credential{}, err
	}
	return credentialOf(l.record, v.now(), l.owned), nil
}

// Versions returns the history of a credential, newest version first and at most [history.MaxVersions]. It
// records the read before it returns, and opens nothing. Errors: fault.Forbidden for a credential
// that does not exist for p, fault.Unavailable.
func (v *Vault) Versions(ctx context.Context, p authz.Principal, id string) ([]history.Version, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListVersions); err != nil {
		return nil, err
	}
	var list []history.Version
	l, err := v.look(ctx, p, authz.ListVersions, id, func(rd store.Reader, l *lookup, id string) (err error) {
		list, err = v.records.versions(rd, p.Tenant, id, l.record, v.now())
		if isDamaged(err) {
			l.failed, err = true, nil
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	e := l.event(audit.CredentialListed, p, v.now())
	if e.Outcome == audit.Success {
		e.Attributes["count"] = strconv.Itoa(len(list))
	}
	if err := recordAccess(ctx, v.guard, e); err != nil {
		return nil, err
	}
	return list, nil
}

// Bounds of a [Summary].
const (
	MaxNextToExpire = 10
	MaxSummaryTypes = 20
)

// Summary describes a tenant's credentials in a few numbers.
type Summary struct {
	Total, Active, Expired int
	NeverExpire            int          // number of active ones that never expire
	ExpiringSoon           int          // number of active ones that expire soon
	Types                  []TypeCount  // most frequent first, at most MaxSummaryTypes
	OtherTypes             int          // credentials of all other types
	NextToExpire           []Credential // active ones, soonest first, at most MaxNextToExpire
	Complete               bool         // false when only a random part was counted
}

// TypeCount is the number of credentials of a type.
type TypeCount struct {
	Type  string
	Count int
}

// Summary counts the credentials that [Vault.List] would return, and separately those that expire
// within soon. It reads a bounded number of credentials. Damaged records are left out and counted
// in the entry. Errors: fault.Forbidden, fault.Unavailable.
func (v *Vault) Summary(ctx context.Context, p authz.Principal, soon time.Duration) (Summary, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListCredentials); err != nil {
		return Summary{}, err
	}
	now := v.now()
	var c counter
	err := v.store.View(ctx, func(rd store.Reader) error {
		c = counter{p: p, now: now, soon: now.Add(soon), types: make(map[string]int)}
		s, err := v.records.owners.source(rd, p, p.Access.IsLimited())
		if err != nil {
			return err
		}
		return c.count(s, v.summaryBudget)
	})
	if err != nil {
		return Summary{}, fmt.Errorf("counting credentials: %w", err)
	}
	e := listEvent(p, c.Total, c.damaged)
	e.Attributes["summary"] = "true"
	if err := v.guard.Record(ctx, e); err != nil {
		return Summary{}, err
	}
	return c.summary(), nil
}

// counter computes a summary.
type counter struct {
	Summary
	p         authz.Principal
	now, soon time.Time
	types     map[string]int
	damaged   int
}

func (c *counter) count(s listing.Source, budget listing.Budget) error {
	c.Complete = true
	var bad error
	err := s.Visit("", "", func(_ string, key, value []byte) bool {
		if key == nil || budget.Spent() {
			c.Complete = false
			return false
		}
		budget.Spend(value)
		r, err := record.ViewAt(key, value)
		if err != nil {
			c.damaged++
			return true
		}
		if c.p.Kind == authz.ServiceAccount { // only a ServiceAccount has hidden credentials
			budget.Records -= listing.OwnerCost
			by, err := s.Owner(r.ID)
			if state.IsRefused(err) {
				c.damaged++
				return true
			}
			if bad = err; err != nil || by.Hidden {
				return err == nil
			}
		}
		c.add(r)
		return true
	})
	for i := range c.NextToExpire {
		by, err := s.Owner(c.NextToExpire[i].ID)
		if state.IsRefused(err) {
			c.damaged++
			continue
		}
		bad = errors.Join(bad, err)
		c.NextToExpire[i].Owned = by.Owned
	}
	return errors.Join(err, bad)
}

func (c *counter) add(r *record.Record) {
	c.Total++
	c.types[r.Type]++
	if !c.now.Before(r.Until()) {
		c.Expired++
		return
	}
	c.Active++
	if r.NeverExpires() {
		c.NeverExpire++
		return
	}
	if r.ExpiresAt.Before(c.soon) {
		c.ExpiringSoon++
	}
	n := len(c.NextToExpire)
	if n == MaxNextToExpire {
		if !r.ExpiresAt.Before(c.NextToExpire[n-1].ExpiresAt) {
			return
		}
		c.NextToExpire = c.NextToExpire[:n-1]
	}
	at, _ := slices.BinarySearchFunc(c.NextToExpire, r, func(listed Credential, r *record.Record) int {
		return cmp.Or(listed.ExpiresAt.Compare(r.ExpiresAt), -1) // after those that expire at the same time
	})
	c.NextToExpire = slices.Insert(c.NextToExpire, at, credentialOf(r, c.now, false))
}

func (c *counter) summary() Summary {
	for kind, n := range c.types {
		c.Types = append(c.Types, TypeCount{kind, n})
	}
	slices.SortFunc(c.Types, func(a, b TypeCount) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Type, b.Type))
	})
	if len(c.Types) > MaxSummaryTypes {
		for _, t := range c.Types[MaxSummaryTypes:] {
			c.OtherTypes += t.Count
		}
		c.Types = c.Types[:MaxSummaryTypes]
	}
	return c.Summary
}
