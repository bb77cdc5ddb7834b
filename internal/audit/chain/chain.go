// Package chain reads the log of a deployment from its store, and verifies what it reads with the
// log's key. It writes nothing.
package chain

import (
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Chain reads the log of one deployment from the store and verifies it with the log's key. It
// writes nothing. Its only state is a cache of the rows that it read last.
type Chain struct {
	Store   store.Store
	Key     *dualsig.PublicKey
	ChainID string

	bases      baseCache
	epochsRead atomic.Pointer[readEpochs] // nil before the second epoch
	Followed   atomic.Pointer[Followed]   // nil before this process has seen a checkpoint
}

// baseCache caches the base that was read last. Parsing takes seconds when a base has many
// credentials, so an unchanged row is not parsed again. The zero value is ready for use.
type baseCache struct {
	reading sync.Mutex // lets one caller parse a row while the others wait for the result
	last    atomic.Pointer[readRow]
}

// Followed is the newest checkpoint that this process has seen.
type Followed struct {
	Signed []byte
	audit.Checkpoint
}

// ErrNoCheckpoint is a [fault.Unavailable]: the log is younger than its first checkpoint.
var ErrNoCheckpoint = fault.New(fault.Unavailable, "the log has no checkpoint yet: ask again in a second")

// readEpochs caches the epoch rows that were read last and the newest epoch. An entry confirmed
// each of the rows.
type readEpochs struct {
	rows   []byte
	newest audit.Epoch
}
