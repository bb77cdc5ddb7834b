package vault

import "github.com/latticekeep/latticekeep/internal/vault/listing"

// Filter selects the credentials that match all of its fields.
type Filter = listing.Filter

// ListQuery selects a page of the list. The zero value selects the whole list.
type ListQuery struct {
	Filter
	Limit  int
	Cursor string // returned by the previous page, which had the same filter
}

// bounded reports whether a page may end before the list does.
func (q ListQuery) bounded() bool { return q.Limit > 0 || q.Filter != Filter{} }

// readBudget bounds the work of a read over many credentials, however many the tenant has and
// however few match. A record costs one unit, and a read of its owner ownerCost units. The bytes of
// the records, which the store must fetch, have their own bound.
type readBudget struct{ records, bytes int }

const ownerCost = 10

// pageBudget is enough for 100 credentials of any size without a filter.
func pageBudget() readBudget { return readBudget{2_500, 32 << 20} }

func summaryBudget() readBudget { return readBudget{20_000, 160 << 20} }

func (b *readBudget) spend(value []byte) { b.records, b.bytes = b.records-1, b.bytes-len(value) }

func (b *readBudget) spent() bool { return b.records <= 0 || b.bytes <= 0 }
