package audit

import (
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Chain reads the log of one deployment where it lies in the store, and verifies with the key of the log what
// it goes by. It writes nothing. The only state that it has are the rows that it read last.
type Chain struct {
	store   store.Store
	key     *dualsig.PublicKey
	chainID string

	bases      baseCache
	epochsRead atomic.Pointer[readEpochs] // nil before the second epoch
	followed   atomic.Pointer[followed]   // nil before the first checkpoint was seen
}
