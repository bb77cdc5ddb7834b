package vault

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/details"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/lastread"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/pathindex"
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
	q.Tag = authz.NormalizeName(q.Tag)
	pages, now := listing.Pages{Cursors: listing.Cursors{Rows: v.records.Rows}, One: v.pageBudget, All: v.summaryBudget}, v.now()
	damaged := 0
	err = v.store.View(ctx, func(rd store.Reader) error {
		list = []Credential{}
		s, err := v.records.source(rd, p, q.UsesPaths(p))
		if err != nil {
			return err
		}
		if (q.Order == listing.ByName || q.Folders) && !s.ByName {
			return errNotIndexed
		}
		rest, damaged, err = pages.Read(s, q, now, func(found listing.Found) {
			c := listing.CredentialOf(found.Record, now, found.Owned)
			c.Details, c.LastRead = found.Details, found.LastRead
			list = append(list, c)
		})
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
func (s recordStore) source(rd store.Reader, p authz.Principal, byName bool) (from listing.Source, err error) {
	if byName {
		byName, err = pathindex.IsComplete(rd)
	}
	owner := func(id string) (listing.Owner, error) {
		if !listing.Hides(p) { // The time that this takes has nothing hidden to tell p.
			if owner, err := rd.Get(ownerKey(p.Tenant, id)); owner == nil {
				return listing.Owner{}, err
			}
		}
		by, err := s.owners.of(rd, p.Tenant, id)
		return listing.Owner{Owned: by.owned, Hidden: by.hides(p)}, err
	}
	read := func(id string) (time.Time, error) { return lastread.At(rd, p.Tenant, id) }
	return listing.Source{Reader: rd, Principal: p, Owner: owner, Details: s.details.OfAll(rd, p.Tenant), LastRead: read, ByName: byName}, err
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
	var said *details.Details
	var read time.Time
	l, err := v.look(ctx, p, byID(authz.ListCredentials, id), func(rd store.Reader, l *lookup, id string) (err error) {
		var err2 error
		read, err2 = lastread.At(rd, p.Tenant, id)
		if said, err = v.records.details.Of(rd, p.Tenant, id); isDamaged(err) {
			l.failed, err = true, nil
		}
		return errors.Join(err, err2)
	})
	if err != nil {
		return Credential{}, err
	}
	e := l.event(audit.CredentialListed, p, time.Time{}) // at the zero time nothing has expired
	if err := recordAccess(ctx, v.guard, e); err != nil {
		return Credential{}, err
	}
	c := listing.CredentialOf(l.record, v.now(), l.owned)
	c.Details, c.LastRead = said, read
	return c, nil
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
	l, err := v.look(ctx, p, byID(authz.ListVersions, id), func(rd store.Reader, l *lookup, id string) (err error) {
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

// Summary describes a tenant's credentials in a few numbers.
type Summary = listing.Summary

// Summary counts the credentials that [Vault.List] would return, and separately those that expire
// within soon. It reads a bounded number of credentials. Damaged records are left out and counted
// in the entry. Errors: fault.Forbidden, fault.Unavailable.
func (v *Vault) Summary(ctx context.Context, p authz.Principal, soon time.Duration) (Summary, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	sum, damaged, err := Summarize(ctx, v, p, listing.Asked{Soon: soon})
	if err != nil {
		return Summary{}, err
	}
	e := listEvent(p, sum.Total, damaged)
	e.Attributes["summary"] = "true"
	if err := v.guard.Record(ctx, e); err != nil {
		return Summary{}, err
	}
	return sum, nil
}

// Summarize is [Vault.Summary] for a caller that records the read itself. It also says what else is asked.
func Summarize(ctx context.Context, v *Vault, p authz.Principal, asked listing.Asked) (sum Summary, damaged int, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListCredentials); err != nil {
		return Summary{}, 0, err
	}
	err = v.store.View(ctx, func(rd store.Reader) error {
		s, err := v.records.source(rd, p, p.Access.IsLimited())
		if err == nil {
			sum, damaged, err = listing.Summarize(s, v.now(), asked, v.summaryBudget)
		}
		return err
	})
	if err != nil {
		return Summary{}, 0, fmt.Errorf("counting credentials: %w", err)
	}
	return sum, damaged, nil
}
