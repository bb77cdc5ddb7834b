// Package receiver records in a deployment's log which entries the log of a node has: how many, and the
// hashes of the first and the last one. The entries themselves stay on the node.
//
// A row of each node says which entries are recorded, so what a node sends again is recorded once. The row
// decides nothing: when it is put back, entries are recorded again, and both records are in the
// deployment's log.
package receiver

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

const (
	// maxNodes bounds the nodes of a tenant, and maxLogs the logs of a node, of which the newest ones stay.
	maxNodes = 1000
	maxLogs  = 8
)

// Service records the logs of nodes. It is safe for concurrent use.
type Service struct {
	store store.Store
	guard *guard.Guard
	rows  mac.Rows
}

// New returns a service among the rows of a store.
func New(s store.Store, g *guard.Guard, rows mac.Rows) *Service { return &Service{s, g, rows} }

// Position is the newest entry of a log that is recorded. Its zero value is none.
type Position struct {
	Chain    string `json:"chain"`
	Sequence uint64 `json:"sequence"`
	Hash     string `json:"hash"`
}

// node is what the row of a node holds.
type node struct {
	// Logs has the newest log of the node last.
	Logs []Position `json:"logs"`
}

func prefix(p authz.Principal) []byte { return []byte("node-log/" + string(p.Tenant) + "/") }

// Attributes and reasons of entries. [audit.AttributeFrom], [audit.AttributeTo] and
// [audit.AttributeEntries] are of the node's log.
const (
	attributeLog          = "log_id"
	attributeFirstHash    = "first_hash"
	attributeLastHash     = "last_hash"
	attributeMissing      = "missing"       // how many entries before the first are not recorded; absent for none
	attributeEarlierLog   = "earlier_log"   // the log that this one takes the place of; absent for none
	attributeEarlierTo    = "earlier_to"    // the newest entry of that log that is recorded
	attributeRecorded     = "recorded"      // sequence of the newest entry that is recorded
	attributeRecordedHash = "recorded_hash" // its hash
	reasonForked          = "forked"
	reasonTooMany         = "too_many_nodes"
)

var (
	errForked = fault.New(fault.Conflict, "first or last is another entry than the one of that sequence that is recorded: the log of this node was changed after it was sent, so find out by whom")
	errNodes  = fault.New(fault.Conflict, fmt.Sprintf("the tenant has the logs of %d nodes, which is the limit", maxNodes))
)

// Receive records the entries from first to last of one log, which the node with that public key has
// signed, and returns which entry of the log is the newest one that is recorded then. What begins before that,
// with an entry that is recorded already, is not recorded: the caller sends what is after the position. Errors:
// fault.Forbidden; fault.Invalid; fault.Conflict for a log that is not the one that was recorded, and for too
// many nodes; fault.Unavailable.
func (s *Service) Receive(ctx context.Context, p authz.Principal, publicKey []byte, first, last *nodelog.Entry) (at Position, recorded bool, err error) {
	if err := s.guard.Authorize(ctx, p, authz.RecordNodeLog); err != nil {
		return at, false, err
	}
	if err := verify(publicKey, first, last); err != nil {
		return at, false, err
	}
	var refused error
	err = s.store.Update(ctx, func(tx store.Tx) (err error) {
		recorded, refused = false, nil
		at, recorded, refused, err = s.record(tx, p, first, last)
		return err
	})
	if err != nil {
		return Position{}, false, fmt.Errorf("recording the log of a node: %w", err)
	}
	return at, recorded, refused
}

// record is Receive in a transaction.
func (s *Service) record(tx store.Tx, p authz.Principal, first, last *nodelog.Entry) (at Position, recorded bool, refused, err error) {
	key := append(prefix(p), first.Node...)
	row, err := mac.Get[node](s.rows, tx, key)
	if err != nil {
		return at, false, nil, err
	}
	e := audit.Event{
		Type: audit.NodeLogRecorded, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.NodeLogResource, ID: first.Node}, Attributes: attributes(first, last),
	}
	refuse := func(reason string, why error) (Position, bool, error, error) {
		e.Outcome, e.Attributes[audit.AttributeReason] = audit.Denied, reason
		_, err := s.guard.Append(tx, e)
		return Position{}, false, why, err
	}
	if row == nil {
		row = new(node)
		if n, err := count(tx, prefix(p)); err != nil {
			return at, false, nil, err
		} else if n >= maxNodes {
			return refuse(reasonTooMany, errNodes)
		}
	}
	i := slices.IndexFunc(row.Logs, func(l Position) bool { return l.Chain == first.Chain })
	if i >= 0 {
		at = row.Logs[i]
	}
	switch {
	case at.contradicts(first), at.contradicts(last):
		e.Attributes[attributeRecorded], e.Attributes[attributeRecordedHash] = decimal(at.Sequence), at.Hash
		return refuse(reasonForked, errForked)
	case first.Sequence <= at.Sequence:
		return at, false, nil, nil
	}
	if missing := first.Sequence - at.Sequence - 1; missing > 0 {
		e.Attributes[attributeMissing] = decimal(missing)
	}
	if n := len(row.Logs); i < 0 && n > 0 {
		e.Attributes[attributeEarlierLog], e.Attributes[attributeEarlierTo] = row.Logs[n-1].Chain, decimal(row.Logs[n-1].Sequence)
	}
	if _, err := s.guard.Append(tx, e); err != nil {
		return at, false, nil, err
	}
	at = Position{last.Chain, last.Sequence, last.Hash()}
	if i >= 0 {
		row.Logs[i] = at
	} else {
		row.Logs = append(row.Logs, at)
	}
	row.Logs = row.Logs[max(0, len(row.Logs)-maxLogs):]
	return at, true, nil, mac.Put(s.rows, tx, key, *row)
}

// count returns the number of rows under a prefix, at most maxNodes.
func count(r store.Reader, prefix []byte) (n int, err error) {
	err = r.Scan(store.Prefix(prefix), func(_, _ []byte) bool {
		n++
		return n < maxNodes
	})
	return n, err
}

var errNotOfOneLog = errors.New("first and last are not of one log, in this order")

// verify checks that the node with that public key has signed both entries, and that they are of one log.
// Error: fault.Invalid.
func verify(publicKey []byte, first, last *nodelog.Entry) error {
	node, err := dualsig.ParsePublicKey(publicKey)
	if err != nil {
		err = errors.New("public_key is no ML-DSA-65 public key")
	}
	if err == nil {
		if err = first.Verify(node); err != nil {
			err = fmt.Errorf("first: %w", err)
		}
	}
	if err == nil {
		if err = last.Verify(node); err != nil {
			err = fmt.Errorf("last: %w", err)
		}
	}
	if err == nil && (first.Chain != last.Chain || first.Sequence > last.Sequence || first.Sequence == last.Sequence && first.Hash() != last.Hash()) {
		err = errNotOfOneLog
	}
	if err != nil {
		return fault.New(fault.Invalid, err.Error())
	}
	return nil
}

// contradicts reports whether e cannot be of the log that has the entry of the position.
func (p Position) contradicts(e *nodelog.Entry) bool {
	return p.Sequence > 0 && (e.Sequence == p.Sequence && e.Hash() != p.Hash || e.Sequence == p.Sequence+1 && e.Previous != p.Hash)
}

func attributes(first, last *nodelog.Entry) map[string]string {
	return map[string]string{
		attributeLog:           first.Chain,
		audit.AttributeFrom:    decimal(first.Sequence),
		audit.AttributeTo:      decimal(last.Sequence),
		audit.AttributeEntries: decimal(last.Sequence - first.Sequence + 1),
		attributeFirstHash:     first.Hash(),
		attributeLastHash:      last.Hash(),
	}
}

func decimal(n uint64) string { return strconv.FormatUint(n, 10) }
