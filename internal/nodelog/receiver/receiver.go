// Package receiver records in a deployment's log what the log of a node holds: which entries, from which
// hash to which. The entries themselves stay on the node.
//
// A row of each log says up to which entry it is recorded, so what a node sends again is recorded once.
// The row decides nothing: when it is put back, entries are recorded again, and both records are in the
// deployment's log.
package receiver

import (
	"context"
	"fmt"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/nodelog"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
)

// Service records the logs of nodes. It is safe for concurrent use.
type Service struct {
	store store.Store
	guard *guard.Guard
	rows  mac.Rows
}

// New returns a service among the rows of a store.
func New(s store.Store, g *guard.Guard, rows mac.Rows) *Service { return &Service{s, g, rows} }

// Position is the newest entry of a log that is recorded. It is also what the row holds.
type Position struct {
	Sequence uint64 `json:"sequence"`
	Hash     string `json:"hash"`
}

func key(p authz.Principal, e *nodelog.Entry) []byte {
	return []byte("node-log/" + string(p.Tenant) + "/" + e.Node + "/" + e.Chain)
}

// Attributes and reasons of entries. [audit.AttributeFrom], [audit.AttributeTo] and
// [audit.AttributeEntries] are of the node's log.
const (
	attributeFirstHash = "first_hash"
	attributeLastHash  = "last_hash"
	attributeMissing   = "missing" // how many entries before the first are not recorded; absent for none
	reasonForked       = "forked"
)

var errForked = fault.New(fault.Conflict, "first or last is another entry than the one of that sequence that is recorded: the log of this node was changed after it was sent, so find out by whom")

// Receive records the entries from first to last of one log, which the node with that public key has
// signed, and returns up to where the log is recorded then. What begins before that, with an entry that is
// recorded already, is not recorded: the caller sends what is after the position. Errors: fault.Forbidden;
// fault.Invalid; fault.Conflict for a log that is not the one that was recorded; fault.Unavailable.
func (s *Service) Receive(ctx context.Context, p authz.Principal, publicKey []byte, first, last *nodelog.Entry) (at Position, recorded bool, err error) {
	if err := s.guard.Authorize(ctx, p, authz.RecordNodeLog); err != nil {
		return at, false, err
	}
	if err := verify(publicKey, first, last); err != nil {
		return at, false, fault.New(fault.Invalid, err.Error())
	}
	e := audit.Event{
		Type: audit.NodeLogRecorded, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.NodeLogResource, ID: first.Node},
	}
	forked := false
	err = s.store.Update(ctx, func(tx store.Tx) error {
		recorded, forked = false, false
		row, err := mac.Get[Position](s.rows, tx, key(p, first))
		if err != nil {
			return err
		}
		if row == nil {
			row = new(Position)
		}
		at = *row
		switch {
		case differs(first, at), differs(last, at), first.Sequence == at.Sequence+1 && at.Sequence > 0 && first.Previous != at.Hash:
			forked = true
			return nil
		case first.Sequence <= at.Sequence:
			return nil
		}
		e.Attributes = attributes(first, last, at)
		if _, err := s.guard.Append(tx, e); err != nil {
			return err
		}
		at, recorded = Position{last.Sequence, last.Hash()}, true
		return mac.Put(s.rows, tx, key(p, first), at)
	})
	switch {
	case err != nil:
		return Position{}, false, fmt.Errorf("recording the log of a node: %w", err)
	case forked:
		return Position{}, false, s.guard.Refuse(ctx, e, audit.Denied, reasonForked, errForked)
	}
	return at, recorded, nil
}

// verify checks that the node with that public key has signed both entries, and that they are of one log.
func verify(publicKey []byte, first, last *nodelog.Entry) error {
	node, err := dualsig.ParsePublicKey(publicKey)
	if err != nil {
		return fmt.Errorf("public_key: %w", err)
	}
	if err := first.Verify(node); err != nil {
		return fmt.Errorf("first: %w", err)
	}
	if err := last.Verify(node); err != nil {
		return fmt.Errorf("last: %w", err)
	}
	switch {
	case first.Chain != last.Chain:
		return fmt.Errorf("first and last are of two logs, %s and %s", first.Chain, last.Chain)
	case first.Sequence > last.Sequence, first.Sequence == last.Sequence && first.Hash() != last.Hash():
		return fmt.Errorf("last, entry %d, does not come after first, entry %d", last.Sequence, first.Sequence)
	}
	return nil
}

// differs reports whether e has the sequence of the recorded entry and another hash.
func differs(e *nodelog.Entry, at Position) bool {
	return e.Sequence == at.Sequence && e.Hash() != at.Hash
}

func attributes(first, last *nodelog.Entry, at Position) map[string]string {
	a := map[string]string{
		audit.AttributeChainID: first.Chain,
		audit.AttributeFrom:    strconv.FormatUint(first.Sequence, 10),
		audit.AttributeTo:      strconv.FormatUint(last.Sequence, 10),
		audit.AttributeEntries: strconv.FormatUint(last.Sequence-first.Sequence+1, 10),
		attributeFirstHash:     first.Hash(),
		attributeLastHash:      last.Hash(),
	}
	if missing := first.Sequence - at.Sequence - 1; missing > 0 {
		a[attributeMissing] = strconv.FormatUint(missing, 10)
	}
	return a
}
