package state

import (
	"bytes"
	"hash/maphash"
	"sync/atomic"
)

// recent remembers the records of rows that were read lately, since three MACs cost more than the
// read itself. A row is found by its key and its whole value, so a changed one is never mistaken for
// it. Whether the record is the current one is asked of the table each time.
type recent struct {
	seed  maphash.Seed
	slots [recentRows]atomic.Pointer[recentRow]
}

// recentRows bounds the rows that are remembered, and recentSize their values in bytes. The rows
// that each request needs, those of its key, its tenant and their keys, are few and small.
const (
	recentRows = 4096
	recentSize = 1024
)

type recentRow struct {
	row
	hasher *hasher
	record record
}

func newRecent() *recent { return &recent{seed: maphash.MakeSeed()} }

// recordOf is [hasher.record] for a row that is likely to be read again.
func (c *recent) recordOf(h *hasher, r row) record {
	slot := &c.slots[maphash.Bytes(c.seed, r.key)%recentRows]
	if is := slot.Load(); is != nil && is.hasher == h && bytes.Equal(is.key, r.key) &&
		bytes.Equal(is.value, r.value) && (is.value == nil) == (r.value == nil) {
		return is.record
	}
	rec := h.record(r.family, r.key, r.value)
	if len(r.value) <= recentSize {
		r.key, r.value = bytes.Clone(r.key), bytes.Clone(r.value)
		slot.Store(&recentRow{r, h, rec})
	}
	return rec
}
