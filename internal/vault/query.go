package vault

import "github.com/latticekeep/latticekeep/internal/vault/listing"

// Filter selects the credentials that match all of its fields.
type Filter = listing.Filter

// ListQuery selects a page of the list. The zero value selects the whole list.
type ListQuery = listing.Query

// pageBudget is enough for 100 credentials of any size without a filter.
func pageBudget() listing.Budget { return listing.Budget{Records: 2_500, Bytes: 32 << 20} }

func summaryBudget() listing.Budget { return listing.Budget{Records: 20_000, Bytes: 160 << 20} }
