package listing

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/vault/lastread"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

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
	Unread                 *Unread      // nil: not asked for, or too many were read to tell
}

// Bounds of [Unread].
const (
	MaxUnread       = 5     // credentials that it has
	maxUnreadOwners = 1_000 // owners that are read for it
)

// Unread describes the active credentials that nobody has read for a time, but for those of objects, which
// the operator reads.
type Unread struct {
	Since    time.Time // they are older than that
	Count    int
	Complete bool         // false: there may be more
	Oldest   []Credential // those that were not read for the longest time, at most MaxUnread; they have LastRead
}

// Asked is what a summary says beyond its counts.
type Asked struct {
	Soon   time.Duration // what expires within it counts as expiring soon
	Unread time.Duration // what was not read for so long counts as unread; zero: not asked
}

// TypeCount is the number of credentials of a type.
type TypeCount struct {
	Type  string
	Count int
}

// Summarize counts what a source has, and separately what is asked. It reads as much as the budget allows.
// damaged is the number of records that are left out.
func Summarize(s Source, now time.Time, asked Asked, budget Budget) (sum Summary, damaged int, err error) {
	c := counter{now: now, soon: now.Add(asked.Soon), types: make(map[string]int)}
	if asked.Unread != 0 {
		c.since = now.Add(-asked.Unread)
		reads, whole, err := lastread.All(s.Reader, s.Principal.Tenant, budget.Records)
		if err != nil {
			return Summary{}, 0, err
		}
		if whole {
			c.reads = reads
		}
	}
	if err := c.count(s, budget); err != nil {
		return Summary{}, 0, err
	}
	return c.summary(), c.damaged, nil
}

// counter computes a summary.
type counter struct {
	Summary
	now, soon time.Time
	since     time.Time            // what was not read since then is unread
	reads     map[string]time.Time // when each credential was read last, by id; nil: not asked, or too many
	types     map[string]int
	unread    []Credential // also those of objects
	damaged   int
}

func (c *counter) count(s Source, budget Budget) error {
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
		if s.hides() {
			budget.Records -= OwnerCost
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
	return errors.Join(err, bad, c.countUnread(s))
}

// countUnread counts the credentials that nobody has read and no object owns.
func (c *counter) countUnread(s Source) error {
	if c.reads == nil {
		return nil
	}
	u := &Unread{Since: c.since, Complete: c.Complete && len(c.unread) <= maxUnreadOwners}
	slices.SortFunc(c.unread, func(a, b Credential) int {
		return cmp.Or(lastUse(a.LastRead, a.CreatedAt).Compare(lastUse(b.LastRead, b.CreatedAt)), cmp.Compare(a.ID, b.ID))
	})
	for _, one := range c.unread[:min(len(c.unread), maxUnreadOwners)] {
		by, err := s.Owner(one.ID)
		switch {
		case state.IsRefused(err):
			c.damaged++
		case err != nil:
			return err
		case !by.Owned:
			if u.Count++; u.Count <= MaxUnread {
				u.Oldest = append(u.Oldest, one)
			}
		}
	}
	c.Unread = u
	return nil
}

func (c *counter) add(r *record.Record) {
	c.Total++
	c.types[r.Type]++
	if !c.now.Before(r.Until()) {
		c.Expired++
		return
	}
	c.Active++
	if c.reads != nil && r.CreatedAt.Before(c.since) && c.reads[r.ID].Before(c.since) {
		one := CredentialOf(r, c.now, false)
		one.LastRead = c.reads[r.ID]
		c.unread = append(c.unread, one)
	}
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
	c.NextToExpire = slices.Insert(c.NextToExpire, at, CredentialOf(r, c.now, false))
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
