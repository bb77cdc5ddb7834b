package reader

import (
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/store"
)

const (
	EntriesAtOnce = entriesAtOnce
	EntryLooks    = entryLooks
	MaxLooks      = maxLooks
	ReasonNoEntry = reasonNoEntry
	TailPage      = tailPage
)

func Cursor(tenantSequence uint64) string { return cursor(tenantSequence) }

func (q Query) Before() (uint64, error) { return q.before() }

func (q Query) Bounds(ch *chain.Chain, r store.Reader, tenant string, before uint64) (low, high uint64, err error) {
	return q.bounds(ch, r, tenant, before)
}

func (q Query) Run(ch *chain.Chain, r store.Reader, tenant string, before uint64) ([]audit.Entry, string, error) {
	return q.run(ch, r, tenant, before)
}

func (q Query) Page(ch *chain.Chain, r store.Reader, tenant string, before uint64, late func() bool) ([]audit.Entry, string, error) {
	return q.page(ch, r, tenant, before, late)
}

func (q Query) Keys() []uint32 { return q.keys() }

func (q Query) Matches(row audit.IndexRow) bool { return q.matches(row) }

// SweepOnce runs one step of a visit, and returns the entries that it finds.
func SweepOnce(ch *chain.Chain, r store.Reader, tenant string, eventType audit.EventType) (found []*audit.Entry, more bool, err error) {
	s := typeSweep{chain: ch, tenant: tenant, types: []audit.EventType{eventType}, keys: []uint32{audit.TypeKey(eventType)}, next: 1}
	more, err = s.step(r)
	return s.found, more, err
}
