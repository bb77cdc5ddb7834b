// Package throttle slows down guesses at the password of one account, whatever their source and
// whichever replica they reach, because the store counts the failures. A keyed hash assigns
// accounts to a fixed number of slots, so made-up addresses cannot fill the store. The same work is
// done for them as for real ones. A success writes nothing extra, and neither does an attempt while
// an account waits.
package throttle

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/store"
)

const (
	freeFailures = 5
	firstWait    = time.Second
	longestWait  = 15 * time.Minute
	forgetAfter  = time.Hour // after the end of the last wait
	slots        = 1 << 12
	slotSize     = 16 // accounts per slot
)

// failures counts the wrong passwords for one account. Sign-ins are counted by the keyed hash of
// the canonical address, changes of the password by user.
type failures struct {
	Of    string    `json:"of"` // keyed hash
	Count int       `json:"count"`
	Until time.Time `json:"until"` // no attempt succeeds before this
}

// waits reports whether no attempt succeeds now. A wait beyond longestWait was written by a clock
// that was ahead and does not count.
func (f failures) waits(now time.Time) bool {
	left := f.Until.Sub(now)
	return left > 0 && left <= longestWait
}

func (f failures) over(now time.Time) bool {
	return now.After(f.Until.Add(forgetAfter)) || f.Until.Sub(now) > longestWait
}

var slotsPrefix = []byte("slowdown/")

// Throttle owns the rows that count wrong passwords.
type Throttle struct {
	store store.Store
	rows  *records.Store
}

// New returns the throttle whose rows are in s.
func New(s store.Store, rows *records.Store) *Throttle { return &Throttle{s, rows} }

// slot returns the key of the row that holds the failures of who, and the name of who in that row.
func (t *Throttle) slot(who string) (key []byte, of string) {
	hash := t.rows.Hash("latticekeep/slowdown/v1", []byte(who))
	b, _ := hex.DecodeString(hash) // the hash is hexadecimal
	key = binary.BigEndian.AppendUint16(bytes.Clone(slotsPrefix), binary.BigEndian.Uint16(b)%slots)
	return key, hash[len(hash)/2:]
}

// readSlot reads the failures in a slot. A damaged slot counts as empty, so it blocks nobody.
func (t *Throttle) readSlot(r store.Reader, key []byte) (all []failures, err error) {
	b, err := r.Get(key)
	if err != nil || b == nil {
		return nil, err
	}
	if bad := t.rows.Decode(key, b, &all); bad != nil {
		return nil, nil
	}
	return all, nil
}

func (t *Throttle) putSlot(tx store.Tx, key []byte, all []failures) error {
	if len(all) == 0 {
		return tx.Delete(key)
	}
	return t.rows.Put(tx, key, all)
}

func indexOf(all []failures, of string) int {
	return slices.IndexFunc(all, func(f failures) bool { return f.Of == of })
}

// Waits reports whether an account must wait.
func (t *Throttle) Waits(r store.Reader, who string, now time.Time) (bool, error) {
	key, of := t.slot(who)
	all, err := t.readSlot(r, key)
	at := indexOf(all, of)
	return at >= 0 && all[at].waits(now), err
}

// Forget removes the failures of an account whose owner has given the right password or a token.
func (t *Throttle) Forget(tx store.Tx, who string) error {
	key, of := t.slot(who)
	all, err := t.readSlot(tx, key)
	at := indexOf(all, of)
	if err != nil || at < 0 {
		return err
	}
	return t.putSlot(tx, key, slices.Delete(all, at, at+1))
}

// Fail counts a failure and reports whether the account must wait, also if this failure begins the
// wait. It decides and counts in one transaction, so guesses made in parallel gain nothing. While
// an account waits, no failure counts.
func (t *Throttle) Fail(ctx context.Context, who string, now time.Time) (waits bool, err error) {
	err = t.store.Update(ctx, func(tx store.Tx) (err error) {
		waits, err = t.countFailure(tx, who, now)
		return err
	})
	return waits, err
}

func (t *Throttle) countFailure(tx store.Tx, who string, now time.Time) (waits bool, err error) {
	key, of := t.slot(who)
	all, err := t.readSlot(tx, key)
	if err != nil {
		return false, err
	}
	if at := indexOf(all, of); at >= 0 && all[at].waits(now) {
		return true, nil
	}
	all = slices.DeleteFunc(all, func(f failures) bool { return f.over(now) })
	at := indexOf(all, of)
	if at < 0 {
		if len(all) >= slotSize {
			all = evicted(all)
		}
		at, all = len(all), append(all, failures{Of: of})
	}
	f := &all[at]
	f.Count++
	f.Until = now.UTC()
	if f.Count >= freeFailures {
		f.Until = f.Until.Add(min(firstWait<<min(f.Count-freeFailures, 20), longestWait))
	}
	return f.Until.After(now), errors.Join(t.putSlot(tx, key, all), t.tidySlot(tx, key, now))
}

// evicted makes room by removing the account with the fewest failures. So made-up addresses push
// out each other, and not the account that somebody guesses at.
func evicted(all []failures) []failures {
	victim := slices.MinFunc(all, func(a, b failures) int {
		return cmp.Or(cmp.Compare(a.Count, b.Count), a.Until.Compare(b.Until))
	})
	return slices.DeleteFunc(all, func(f failures) bool { return f.Of == victim.Of })
}

// tidySlot removes the slot after the written one if all failures in it are over. In this way new
// failures clean up old ones.
func (t *Throttle) tidySlot(tx store.Tx, written []byte, now time.Time) error {
	rng := store.Prefix(slotsPrefix)
	rng.From = append(bytes.Clone(written), 0)
	var next []byte
	err := tx.Scan(rng, func(key, _ []byte) bool {
		next = bytes.Clone(key)
		return false
	})
	if err != nil || next == nil {
		return err
	}
	all, err := t.readSlot(tx, next)
	if err != nil || slices.ContainsFunc(all, func(f failures) bool { return !f.over(now) }) {
		return err
	}
	return tx.Delete(next)
}
