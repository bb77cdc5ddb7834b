package audit

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// epoch is a run of consecutive sequences. The log begins in epoch 1; each
// accepted rollback begins another one, above all sequences that the entries
// which were lost could have had. The tree goes on across epochs.
type epoch struct {
	number, first uint64
	size          int64 // of the tree before it
}

func epochKey(number uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/epoch/"), number)
}

var epochRange = store.Prefix([]byte("audit/epoch/"))

func (e epoch) encode() []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, e.first), uint64(e.size))
}

// epochRow is a row of an epoch: what anybody who writes to the database may say.
type epochRow struct {
	key []byte
	epoch
}

// epochRows returns the rows of epochs by their numbers; the first one has none.
// Of a row that is not one the epoch is zero.
func epochRows(r store.Reader) (rows []epochRow, err error) {
	err = r.Scan(epochRange, func(key, value []byte) bool {
		row := epochRow{key: bytes.Clone(key)}
		if len(key) == len(epochRange.From)+8 && len(value) == 16 {
			row.epoch = epoch{
				number: binary.BigEndian.Uint64(key[len(epochRange.From):]),
				first:  binary.BigEndian.Uint64(value),
				size:   int64(binary.BigEndian.Uint64(value[8:])),
			}
		}
		rows = append(rows, row)
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("reading the epochs of the log: %w", err)
	}
	return rows, nil
}

// follows reports whether an epoch may come after another one: that has an entry
// at least, and this one skips sequences but no indexes.
func (e epoch) follows(last epoch) bool {
	return e.number > last.number && e.size > last.size && e.first <= maxInteger &&
		e.first >= last.first && e.first-last.first >= uint64(e.size-last.size)
}

// indexOf returns the place of an entry in the tree, and false when no entry
// has the sequence. It does not know where the last epoch ends.
func indexOf(epochs []epoch, sequence uint64) (int64, bool) {
	for i := len(epochs) - 1; i >= 0; i-- {
		if e := epochs[i]; sequence >= e.first {
			index := e.size + int64(sequence-e.first)
			return index, i == len(epochs)-1 || index < epochs[i+1].size
		}
	}
	return 0, false
}

// sequenceAt returns the sequence of the entry at a place in the tree.
func sequenceAt(epochs []epoch, index int64) uint64 {
	for i := len(epochs) - 1; i > 0; i-- {
		if e := epochs[i]; index >= e.size {
			return e.first + uint64(index-e.size)
		}
	}
	return uint64(index) + 1
}

// RollbackError says that the database lacks entries which a checkpoint that is
// kept elsewhere knows.
type RollbackError struct {
	LostFrom uint64   // the first sequence that is lost; 0 when the database has other entries there
	LostTo   uint64   // the sequence of the checkpoint
	Hash     [32]byte // of the entry at LostTo
	Epoch    uint64   // of the checkpoint
	Place    string   // where the checkpoint is kept
}

func (e *RollbackError) Error() string {
	const remedy = "restore the newest copy of the database, or go on without them by latticekeep audit accept-rollback"
	if e.Place == memoryPlace {
		if e.LostFrom == 0 {
			return fmt.Sprintf("the audit log has other entries up to %d than those that this replica has seen in it, which are lost: "+remedy, e.LostTo)
		}
		return fmt.Sprintf("the database lacks entries %d to %d of the audit log, which this replica has seen in it: "+remedy, e.LostFrom, e.LostTo)
	}
	if e.LostFrom == 0 {
		return fmt.Sprintf("the audit log has other entries up to %d than those that the checkpoint kept in %s knows, which are lost: "+remedy, e.LostTo, e.Place)
	}
	return fmt.Sprintf("the database lacks entries %d to %d of the audit log, which the checkpoint kept in %s knows: "+remedy, e.LostFrom, e.LostTo, e.Place)
}

// haltReason is why the log takes no entries.
type haltReason struct{ reason error }

// Halt makes [Log.Ready], [Log.Append] and every commit fail with
// fault.Unavailable, until it is called with nil or, when the reason is a
// [RollbackError], until that is accepted.
func (d *Detector) Halt(reason error) {
	if reason == nil {
		d.halted.Store(nil)
		return
	}
	d.halted.Store(&haltReason{reason})
}

// HaltedBy returns why the log takes no entries, and nil when it does.
func (d *Detector) HaltedBy() error {
	if r := d.halted.Load(); r != nil {
		return r.reason
	}
	return nil
}

// checkNotHalted returns what a caller is told while the log takes no entries.
func (d *Detector) checkNotHalted() error {
	if reason := d.HaltedBy(); reason != nil {
		return fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), reason)
	}
	return nil
}

// Attributes of the entry of an accepted rollback.
const (
	attributeEpoch        = "epoch"         // that begins with it
	attributeLostFrom     = "lost_from"     // one above the entry before
	attributeLostTo       = "lost_to"       // one below it
	attributeAnchored     = "anchored"      // the sequence that the checkpoint kept elsewhere has
	attributeAnchoredHash = "anchored_hash" // of the entry there, lower-case hex
)

// Rollback is the beginning of a new epoch.
type Rollback struct {
	Epoch            uint64
	LostFrom, LostTo uint64 // the sequences that are skipped; LostTo is one less than LostFrom when there are none
	Receipt
}

// acceptance belongs to the event that begins an epoch. What it comes to is
// decided in the hook, which knows the head.
type acceptance struct {
	lost  RollbackError
	epoch epoch
	made  Rollback
}

// maxReason bounds the reason of an accepted rollback, which is printable ASCII.
const maxReason = 200

var (
	errReason = fault.New(fault.Invalid, "the reason has 1 to 200 printable ASCII characters: say why the entries were lost")

	// errOneByOne is told to whoever accepts what someone else is accepting, or
	// while the last entries before the refusal are still being committed.
	errOneByOne = fault.New(fault.Unavailable, fault.Unavailable.Error())

	errNothingLost = fault.New(fault.Conflict, "no rollback is to be accepted: the log is not behind a checkpoint that is kept elsewhere")
)

func validReason(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return len(s) >= 1 && len(s) <= maxReason
}

// AcceptRollback goes on without the entries that a [RollbackError] names, in a
// new epoch above them, and lifts the refusal. It asks nobody whether p may: that is
// for [Guard.AcceptRollback]. Errors: fault.Invalid for the reason, fault.Conflict
// when nothing was lost, fault.Unavailable.
func (l *Log) AcceptRollback(ctx context.Context, p authz.Principal, reason string) (Rollback, error) {
	if err := l.chain.store.Ready(ctx); err != nil {
		return Rollback{}, err
	}
	if !validReason(reason) {
		return Rollback{}, errReason
	}
	// Another replica may have found out what this one did not look for yet, and what
	// anybody knows is accepted at once.
	l.rollbacks.mu.Lock()
	look := l.rollbacks.askPlaces
	l.rollbacks.mu.Unlock()
	if look != nil {
		look(ctx)
	}
	if _, err := l.rollbacks.checkForRollback(ctx); err != nil {
		return Rollback{}, err
	}
	was := l.rollbacks.halted.Load()
	var lost *RollbackError
	if was == nil || !errors.As(was.reason, &lost) {
		return Rollback{}, errNothingLost
	}
	a := &acceptance{lost: *lost}
	p.Tenant = authz.SystemTenant // a verification takes it from no other
	var receipt *Receipt
	var done bool
	err := l.chain.store.Update(ctx, func(tx store.Tx) error {
		receipt, done = nil, false
		epochs, err := l.chain.epochs(tx)
		if err != nil {
			return err
		}
		if newest := epochs[len(epochs)-1]; newest.number > lost.Epoch && newest.first > lost.LostTo {
			done = true // and its answer did not arrive
			return nil
		}
		receipt, err = l.append(tx, Event{
			Type: RollbackAccepted, Outcome: Success, Principal: p,
			Resource:   Resource{Type: ChainResource, ID: l.chain.chainID},
			Attributes: map[string]string{AttributeReason: reason},
		}, a)
		return err
	})
	if err != nil {
		return Rollback{}, fmt.Errorf("accepting a rollback: %w", err)
	}
	l.rollbacks.halted.CompareAndSwap(was, nil)
	_, _ = l.rollbacks.checkForRollback(ctx) // the former checkpoint is taken back; else the next look of the follower says so
	l.noteAcceptance(ctx)
	if done {
		return Rollback{}, errNothingLost
	}
	a.made.Receipt = *receipt
	return a.made, nil
}

// noteAcceptance tells the verification of the running log that entries were accepted to be lost.
func (l *Log) noteAcceptance(ctx context.Context) {
	if l.onAcceptance != nil {
		l.onAcceptance(ctx)
	}
}

// beginEpoch decides on the epoch that follows the head, and returns the sequence of
// its first entry. Rows of epochs that no entry accepts are removed, and what is
// derived from entries that are lost.
func (a *acceptance) beginEpoch(l *Log, tx store.Tx, head link) (first uint64, err error) {
	epochs, _, err := l.chain.accepted(tx, head)
	if err != nil {
		return 0, err
	}
	index, ok := indexOf(epochs, head.sequence)
	first = max(a.lost.LostTo, head.sequence) + 1
	if !ok || first > maxInteger {
		return 0, errDamagedLog
	}
	rows, err := epochRows(tx)
	if err != nil {
		return 0, err
	}
	for _, row := range rows {
		if slices.Contains(epochs[1:], row.epoch) {
			continue
		}
		if err := tx.Delete(row.key); err != nil {
			return 0, err
		}
	}
	if err := l.takeBack(tx, epochs, head); err != nil {
		return 0, err
	}
	number := max(a.lost.Epoch, epochs[len(epochs)-1].number) + 1
	a.epoch = epoch{number, first, index + 1}
	a.made = Rollback{Epoch: number, LostFrom: head.sequence + 1, LostTo: first - 1}
	return first, tx.Put(epochKey(number), a.epoch.encode())
}

// describe says in the first entry of the epoch what it follows.
func (a *acceptance) describe(e *Entry) {
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	e.add(attributeEpoch, number(a.made.Epoch))
	e.add(attributeLostFrom, number(a.made.LostFrom))
	e.add(attributeLostTo, number(a.made.LostTo))
	e.add(attributeAnchored, number(a.lost.LostTo))
	e.add(attributeAnchoredHash, hex.EncodeToString(a.lost.Hash[:]))
}
