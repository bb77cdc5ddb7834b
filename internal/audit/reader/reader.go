// Package reader answers questions about the log: queries, tails, proofs, evidence and exports.
package reader

import (
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
)

// Reader answers questions about the log. It records the reads of tenants, but not those of the
// service itself. It has no state.
type Reader struct {
	log      *writer.Log
	chain    *chain.Chain
	Follower *writer.Follower
	guard    *guard.Guard
}

// New returns the reader of a log that is bound to its store.
func New(l *writer.Log, g *guard.Guard) *Reader {
	return &Reader{l, l.Chain, writer.NewFollower(l), g}
}
