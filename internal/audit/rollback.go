package audit

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// compare holds the checkpoint that a place keeps, which verifies or is the zero
// one for none, against the database. It has the log refused when that does not
// go on from there, and reports whether the place knows of such a loss.
func (k *AnchorKeeper) compare(ctx context.Context, a *anchorState, theirs Checkpoint) (lost bool, err error) {
	err = k.log.rollbacks.decide(ctx, func(r store.Reader, s logState) (func(), error) {
		found, err := k.log.chain.lostOf(r, s, theirs)
		if err != nil {
			return nil, err
		}
		known := a.lostOf // it stays known, whatever lies in its place by then
		still, err := k.log.chain.lostOf(r, s, known)
		return func() {
			if still == nil && a.lost != nil && err == nil {
				a.lost = nil // it is there again, or was accepted
			}
			if found != nil && a.accepted != nil && found.LostTo == a.accepted.LostTo && found.Hash == a.accepted.Hash {
				found = nil
			}
			if found != nil && (a.lost == nil || found.LostTo > a.lost.LostTo) {
				a.note(found, s)
				a.lostOf = theirs
			}
		}, unlessDamage(err)
	})
	k.logLoss(ctx)
	if err != nil {
		return false, fmt.Errorf("comparing the anchor with the database: %w", err)
	}
	return k.knowsOfLoss(a), nil
}

// checkDatabase does for what the database itself and this process know what compare
// does for a place. There is nothing to write.
func (k *AnchorKeeper) checkDatabase(ctx context.Context) {
	if _, err := k.log.rollbacks.checkForRollback(ctx); err != nil {
		k.Logger.WarnContext(ctx, "the newest checkpoint of the audit log cannot be held against its entries", "err", err)
	}
	k.logLoss(ctx)
}

// knowsOfLoss reports whether a place knows of a loss.
func (k *AnchorKeeper) knowsOfLoss(a *anchorState) bool {
	k.log.rollbacks.mu.Lock()
	defer k.log.rollbacks.mu.Unlock()
	return a.lost != nil
}

// logLoss logs, once, that the log is refused.
func (k *AnchorKeeper) logLoss(ctx context.Context) {
	k.log.rollbacks.mu.Lock()
	lost := k.log.rollbacks.published
	said := lost == nil || lost == k.logged || k.log.rollbacks.HaltedBy() != error(lost)
	if !said {
		k.logged = lost
	}
	k.log.rollbacks.mu.Unlock()
	if !said {
		k.Logger.ErrorContext(ctx, "entries of the audit log are lost, and nothing is served until that is accepted", "err", lost,
			"lost_from", lost.LostFrom, "lost_to", lost.LostTo, "place", lost.Place)
	}
}

// lostOf returns what the database lacks of the log that a checkpoint, which
// verifies or is the zero one, is of: nil when the log goes on from there, or the
// loss was accepted. Error: fault.Unavailable; or fault.Internal when nothing but
// what is derived from the chain is damaged.
func (ch *Chain) lostOf(r store.Reader, s logState, c Checkpoint) (*RollbackError, error) {
	if c == (Checkpoint{}) || slices.ContainsFunc(s.losses, func(a acceptedLoss) bool { return a.covers(c) }) {
		return nil, nil
	}
	if c.Sequence > s.head.sequence && c.Epoch >= s.epoch().number {
		return &RollbackError{LostFrom: s.head.sequence + 1, LostTo: c.Sequence, Hash: c.Hash, Epoch: c.Epoch}, nil
	}
	same := c.Sequence <= s.head.sequence
	if same {
		var err error
		if same, err = ch.goesThrough(r, s.epochs, c); err != nil {
			return nil, err
		}
	}
	if same {
		return nil, nil
	}
	return &RollbackError{LostTo: c.Sequence, Hash: c.Hash, Epoch: c.Epoch}, nil
}

// acceptedLoss is what an accepted rollback says of the entries that it lost.
type acceptedLoss struct {
	former, epoch uint64 // that lost them, and that began then
	from, to      uint64 // sequences

	// The checkpoint that it was found by, which is of an entry in that range
	// unless the database had others there. Not known of an acceptance that is in
	// the archive.
	anchored uint64
	hash     string
}

func (a acceptedLoss) covers(c Checkpoint) bool {
	inRange := a.former <= c.Epoch && a.from <= c.Sequence && c.Sequence <= a.to
	named := a.anchored == c.Sequence && a.hash == hex.EncodeToString(c.Hash[:])
	// The database had other entries up to the one that was named: what an older
	// checkpoint knows of those that are lost was lost with them.
	older := a.anchored < a.from && c.Sequence < a.anchored
	return c.Epoch < a.epoch && (inRange || named || older)
}

// epochs returns the epochs of the log, ascending, as far as they were accepted;
// the first one always was.
func (ch *Chain) epochs(r store.Reader) ([]epoch, error) {
	head, err := readHead(r)
	if err != nil {
		return nil, err
	}
	epochs, _, err := ch.accepted(r, head)
	return epochs, err
}

// accepted returns the epochs of the database, as far as the entries that begin
// them say so: they are signed. By a row alone whoever replaces the database by an
// older one could accept that himself, and whoever adds one have the entries behind
// it signed as another epoch's. So a row that no entry agrees with is none, and is
// no error: without the row of an epoch that there is, its entries do not fit.
func (ch *Chain) accepted(r store.Reader, head link) (epochs []epoch, losses []acceptedLoss, err error) {
	rows, err := epochRows(r)
	if err != nil {
		return nil, nil, err
	}
	epochs = []epoch{{number: 1, first: 1}}
	for _, row := range rows {
		former := epochs[len(epochs)-1]
		if !row.follows(former) || row.first > head.sequence {
			continue
		}
		loss := row.after(former)
		e, err := readEntry(r, row.first)
		switch {
		case errors.Is(err, errNoEntry):
			base, err := ch.baseIn(r)
			if err != nil && !damaged(err) {
				return nil, nil, err
			}
			if err != nil || base == nil || !slices.Contains(base.epochs, row.epoch) {
				continue // it is not in the archive either
			}
		case damaged(err):
			continue
		case err != nil:
			return nil, nil, err
		case !loss.isOf(e) || !e.verify(ch.key, nil):
			continue
		default:
			loss.anchored, loss.hash = e.number(attributeAnchored), e.Attributes[attributeAnchoredHash]
		}
		epochs, losses = append(epochs, row.epoch), append(losses, loss)
	}
	return epochs, losses, nil
}

// after returns the loss that an epoch began with, without what it was found by.
func (e epoch) after(former epoch) acceptedLoss {
	return acceptedLoss{former: former.number, epoch: e.number, from: former.first + uint64(e.size-former.size), to: e.first - 1}
}

// isOf reports whether an entry is the acceptance of the loss.
func (a acceptedLoss) isOf(e *Entry) bool {
	return e.begins() && e.number(attributeEpoch) == a.epoch &&
		e.number(attributeLostFrom) == a.from && e.number(attributeLostTo) == a.to
}

// begins reports whether the entry is one that begins an epoch.
func (e *Entry) begins() bool {
	return e.EventType == RollbackAccepted && e.Outcome == Success && e.TenantID == string(authz.SystemTenant)
}

// number returns an attribute that is one, and 0 for any other.
func (e *Entry) number(attribute string) uint64 {
	n, _ := strconv.ParseUint(e.Attributes[attribute], 10, 64) // no number of these is 0
	return n
}

// damaged reports whether an error says that what was read is not what was
// written.
func damaged(err error) bool { return err != nil && fault.Of(err) == fault.Internal }

// goesThrough reports whether the log has the entry of a checkpoint, which is not
// above its head, and the tree that it had then. An entry that cannot be read is
// another one: whoever forks a log may damage the one that shows it.
func (ch *Chain) goesThrough(r store.Reader, epochs []epoch, c Checkpoint) (bool, error) {
	index, ok := indexOf(epochs, c.Sequence)
	if !ok || index+1 != c.Size || epochOf(epochs, c.Sequence).number != c.Epoch {
		return false, nil
	}
	e, err := readEntry(r, c.Sequence)
	switch {
	case errors.Is(err, errNoEntry):
		// It is in the archive, and the tree knows of it.
		same, err := ch.treeHolds(r, index, c)
		if damaged(err) {
			return false, nil
		}
		return same, err
	case damaged(err):
		return false, nil
	case err != nil:
		return false, err
	case e.link().hash != c.Hash:
		return false, nil
	}
	if _, newest, err := ch.checkpointIn(r); err != nil || newest.Size < c.Size {
		return true, err // the tree is to follow
	}
	return ch.treeHolds(r, index, c)
}

// treeHolds reports whether the tree has the root and the last leaf that a
// checkpoint says. Error: errDamagedLog when it does not go that far.
func (ch *Chain) treeHolds(r store.Reader, index int64, c Checkpoint) (bool, error) {
	_, newest, err := ch.checkpointIn(r)
	if err != nil {
		return false, err
	}
	if newest.Size < c.Size {
		return false, errDamagedLog
	}
	t := treeView{r: r, newest: newest, hashes: tiles{r}.hashes(newest.Size, newest.Root)}
	root, err := t.rootAt(c.Size)
	if err != nil || root != c.Root {
		return false, err
	}
	leaf, err := t.hashes.ReadHashes([]int64{tlog.StoredHashIndex(0, index)})
	if err != nil {
		return false, treeError(err)
	}
	return leaf[0] == tlog.Hash(leafHash(c.Hash)), nil
}
