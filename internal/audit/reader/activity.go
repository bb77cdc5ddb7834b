package reader

import (
	"cmp"
	"encoding/binary"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Day counts a tenant's entries of a day in UTC, those of attempts included.
type Day struct {
	Start            time.Time
	Secrets, Changes int // entries of these categories
}

// activityLooks bounds the summaries and rows that a count reads: about a million entries.
const activityLooks = 4096

// dayCounter counts entries by day and category.
type dayCounter struct {
	r      store.Reader
	tenant string
	looks  int // remaining number of looks
	days   []Day
	starts []uint64 // first tenant sequence of each day, and of the day after the last
	kinds  map[uint32]audit.Category
}

func (c *dayCounter) count(ch *chain.Chain, now time.Time, days int) ([]Day, bool, error) {
	for _, of := range []audit.Category{audit.Secrets, audit.Changes} {
		for _, t := range of.Types() {
			c.kinds[audit.TypeKey(t)] = of
		}
	}
	low, high, err := ch.Extent(c.r, c.tenant)
	if err != nil {
		return nil, false, err
	}
	start := now.UTC().Truncate(24*time.Hour).AddDate(0, 0, 1-days)
	for range days {
		low, err = chain.FirstRow(c.r, c.tenant, low, high, func(row audit.IndexRow) bool { return !time.UnixMicro(row.Micros).Before(start) })
		if err != nil {
			return nil, false, err
		}
		c.days, c.starts = append(c.days, Day{Start: start}), append(c.starts, low)
		start = start.AddDate(0, 0, 1)
	}
	c.starts = append(c.starts, high+1)
	counted, err := c.down(high)
	if err != nil {
		return nil, false, err
	}
	first := 0
	for first < days-1 && c.starts[first] < counted { // the newest day stays, as far as it was counted
		first++
	}
	return c.days[first:], c.starts[0] >= counted, nil
}

// down counts from a tenant sequence down to the first of the days, and returns the one that it has come to.
func (c *dayCounter) down(n uint64) (counted uint64, err error) {
	for n >= c.starts[0] && c.looks > 0 {
		below, err := c.bySummaries(n)
		if err == nil && below == n { // the block of n has none
			below, err = c.byRows(max(c.starts[0], audit.EndOf(audit.BlockOf(n))+1-audit.BlockSize), n)
		}
		if err != nil {
			return 0, err
		}
		n = below
	}
	return n + 1, nil
}

// bySummaries counts from n down until it meets a block without a summary. It returns the next sequence to
// count.
func (c *dayCounter) bySummaries(n uint64) (uint64, error) {
	bad := false
	rng := store.Range{From: audit.SummaryKey(c.tenant, audit.BlockOf(c.starts[0])), To: audit.SummaryKey(c.tenant, audit.BlockOf(n)+1), Reverse: true}
	err := c.r.Scan(rng, func(key, value []byte) bool {
		block := audit.BlockOf(n)
		if binary.BigEndian.Uint64(key[len(key)-8:]) != block {
			return false
		}
		c.looks--
		start := audit.EndOf(block) + 1 - audit.BlockSize
		bad = !audit.VisitPlaces(value, func(key uint32, at audit.PlaceSet) {
			if of, ok := c.kinds[key]; ok {
				c.add(of, start, n, at)
			}
		})
		n = max(start, c.starts[0]) - 1
		return !bad && n >= c.starts[0] && c.looks > 0
	})
	if bad {
		err = cmp.Or(err, error(audit.ErrDamagedLog))
	}
	return n, err
}

// add counts the places of a block up to a tenant sequence, in the days that they are of.
func (c *dayCounter) add(of audit.Category, start, to uint64, at audit.PlaceSet) {
	for i := range c.days {
		from, last := max(c.starts[i], start), min(c.starts[i+1]-1, to, start+audit.BlockSize-1)
		if from <= last {
			c.days[i].add(of, at.From(int(from-start)).To(int(last-start)).Len())
		}
	}
}

func (d *Day) add(of audit.Category, n int) {
	if of == audit.Secrets {
		d.Secrets += n
	} else {
		d.Changes += n
	}
}

// byRows counts the rows from one tenant sequence to another, and returns the next one to count.
func (c *dayCounter) byRows(from, to uint64) (uint64, error) {
	n, damaged := to, error(nil)
	rng := store.Range{From: audit.TenantKey(c.tenant, from), To: audit.TenantKey(c.tenant, to+1), Reverse: true}
	err := c.r.Scan(rng, func(key, value []byte) bool {
		row, bad := audit.DecodeIndexRow(value)
		if bad == nil && binary.BigEndian.Uint64(key[len(key)-8:]) != n {
			bad = audit.ErrDamagedLog // a row is missing
		}
		if damaged = bad; bad != nil {
			return false
		}
		day, exact := slices.BinarySearch(c.starts, n)
		if !exact {
			day--
		}
		for day+1 < len(c.days) && c.starts[day+1] == n { // days without an entry begin there, too
			day++
		}
		if of, ok := c.kinds[audit.TypeKey(row.EventType)]; ok {
			c.days[day].add(of, 1)
		}
		c.looks--
		n--
		return c.looks > 0
	})
	if err == nil && damaged == nil && n >= from && c.looks > 0 {
		damaged = audit.ErrDamagedLog
	}
	return n, cmp.Or(err, damaged)
}
