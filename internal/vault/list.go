package vault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// List returns the credentials of p's tenant in the order of their ids, and the cursor of the next
// page, if any. It includes expired credentials and marks them. It leaves out those outside p's
// policies, and hides the credentials of objects in other namespaces from a ServiceAccount. With a
// limit or a filter, a page may hold fewer credentials than are left, or none, and still have a
// cursor. Damaged records are left out and counted in the entry. Errors: fault.Forbidden;
// fault.Invalid for an invalid filter and for the cursor of another list; fault.Unavailable.
func (v *Vault) List(ctx context.Context, p authz.Principal, q ListQuery) (list []Credential, next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListCredentials); err != nil {
		return nil, "", err
	}
	if err := q.Validate(); err != nil {
		return nil, "", err
	}
	cursors, after := listing.Cursors{Rows: v.records.Rows}, ""
	if q.Cursor != "" {
		var ok bool
		if after, ok = cursors.Decode(p.Tenant, q.Filter, q.Cursor); !ok {
			return nil, "", fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
		}
	}
	now := v.now()
	list = []Credential{}
	damaged := 0
	err = v.store.View(ctx, func(rd store.Reader) error {
		page := &page{owners: v.records.owners, rd: rd, p: p, now: now, budget: v.pageBudget, matches: q.Matcher(now)}
		err := page.read(q, after)
		list, damaged = append(list, page.list...), page.damaged
		if page.more {
			next = cursors.Encode(p.Tenant, q.Filter, page.last)
		}
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("listing credentials: %w", err)
	}
	if err := v.guard.Record(ctx, listEvent(p, len(list), damaged)); err != nil { // damage is no refusal here
		return nil, "", err
	}
	return list, next, nil
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

// page reads one page of the list.
type page struct {
	owners  ownerRows
	rd      store.Reader
	p       authz.Principal
	now     time.Time
	matches func(r *record.Record) bool

	budget  readBudget
	last    string // id of the credential read last
	list    []Credential
	damaged int
	more    bool // credentials follow after last
}

// read reads the credentials after an id, or from the first one if the id is empty.
func (f *page) read(q ListQuery, after string) error {
	rng := store.Prefix(record.TenantPrefix(f.p.Tenant))
	if after != "" {
		rng.From = store.Prefix(record.Prefix(f.p.Tenant, after)).To
	}
	prefix := len(record.TenantPrefix(f.p.Tenant))
	var bad error
	err := f.rd.Scan(rng, func(key, value []byte) bool {
		if record.IsOutside(f.p, authz.ListCredentials, key, value) {
			return true // no part of the budget, so where the page ends tells nothing of it
		}
		full := q.Limit > 0 && len(f.list) == q.Limit
		if f.more = full || q.bounded() && f.budget.spent() && f.last != ""; f.more {
			return false
		}
		f.budget.spend(value)
		if id, _, _ := strings.Cut(string(key[prefix:]), "/"); authz.ValidID(idPrefix, id) {
			f.last = id // set for a damaged record too
		}
		bad = f.add(key, value)
		return bad == nil
	})
	return errors.Join(err, bad)
}

// add appends a credential to the list if it matches and p may see it.
func (f *page) add(key, value []byte) error {
	r, err := record.ViewAt(key, value)
	if err != nil {
		f.damaged++ // one damaged record does not hide the others
		return nil
	}
	// A ServiceAccount must not learn, from where a page ends or how long it takes, whether a
	// credential that is hidden from it matches. So its filter runs only after the owner is read.
	if f.p.Kind != authz.ServiceAccount && !f.matches(r) {
		return nil
	}
	f.budget.records -= ownerCost
	by, err := f.owners.of(f.rd, f.p.Tenant, r.ID)
	if state.IsRefused(err) {
		f.damaged++
		return nil
	}
	if err != nil || by.hides(f.p) || !f.matches(r) {
		return err
	}
	f.list = append(f.list, credentialOf(r, f.now, by.owned))
	return nil
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
	if err := v.recordAccess(ctx, e); err != nil {
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
		list, err = v.records.history.List(rd, p.Tenant, id, l.record)
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
	if err := v.recordAccess(ctx, e); err != nil {
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
	c := counter{owners: v.records.owners, p: p, now: now, soon: now.Add(soon), types: make(map[string]int)}
	err := v.store.View(ctx, func(rd store.Reader) error { return c.count(rd, v.summaryBudget) })
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
	owners    ownerRows
	p         authz.Principal
	now, soon time.Time
	types     map[string]int
	damaged   int
}

func (c *counter) count(rd store.Reader, budget readBudget) error {
	c.Complete = true
	var bad error
	err := rd.Scan(store.Prefix(record.TenantPrefix(c.p.Tenant)), func(key, value []byte) bool {
		if record.IsOutside(c.p, authz.ListCredentials, key, value) {
			return true
		}
		if budget.spent() {
			c.Complete = false
			return false
		}
		budget.spend(value)
		r, err := record.ViewAt(key, value)
		if err != nil {
			c.damaged++
			return true
		}
		if c.p.Kind == authz.ServiceAccount { // only a ServiceAccount has hidden credentials
			budget.records -= ownerCost
			by, err := c.owners.of(rd, c.p.Tenant, r.ID)
			if state.IsRefused(err) {
				c.damaged++
				return true
			}
			if bad = err; err != nil || by.hides(c.p) {
				return err == nil
			}
		}
		c.add(r)
		return true
	})
	for i := range c.NextToExpire {
		by, err := c.owners.of(rd, c.p.Tenant, c.NextToExpire[i].ID)
		if state.IsRefused(err) {
			c.damaged++
			continue
		}
		bad = errors.Join(bad, err)
		c.NextToExpire[i].Owned = by.owned
	}
	return errors.Join(err, bad)
}

func (c *counter) add(r *record.Record) {
	c.Total++
	c.types[r.Type]++
	if !c.now.Before(r.ExpiresAt) {
		c.Expired++
		return
	}
	c.Active++
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

// NameOf returns the name of a credential of the tenant, expired or not, and "" if there is none with the
// id.
func NameOf(r store.Reader, tenant authz.TenantID, id string) (string, error) {
	if !authz.ValidID(idPrefix, id) {
		return "", nil
	}
	found, err := record.Find(r, tenant, id)
	if err != nil || found == nil {
		return "", err
	}
	return found.Name, nil
}
