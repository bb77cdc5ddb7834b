package identity

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Guessing the password of one account is made slow, wherever the guesses come
// from and whichever replica they reach: failures are counted in the store. There
// are a fixed number of slots for them, to which a keyed hash assigns accounts,
// so that addresses that nobody has fill up nothing; and what is done for those is
// what is done for all others. A success writes nothing of its own, and neither
// does what is tried while an account waits.
const (
	freeFailures = 5
	firstWait    = time.Second
	longestWait  = 15 * time.Minute
	forgetAfter  = time.Hour // after the end of the last wait
	slots        = 1 << 12
	slotSize     = 16 // accounts
)

// failures are those of one account: by keyed hash of the canonical address; by
// user for changes of the password.
type failures struct {
	Of    string    `json:"of"` // keyed hash
	Count int       `json:"count"`
	Until time.Time `json:"until"` // before this nothing succeeds
}

// waits reports whether nothing succeeds now. No wait is longer than the longest: a
// time that is further off was written by a clock that was ahead.
func (f failures) waits(now time.Time) bool {
	left := f.Until.Sub(now)
	return left > 0 && left <= longestWait
}

func (f failures) over(now time.Time) bool {
	return now.After(f.Until.Add(forgetAfter)) || f.Until.Sub(now) > longestWait
}

var slotsPrefix = []byte("slowdown/")

// throttle owns the counts of failed guesses.
type throttle struct{ *records }

// slot returns where failures of who are kept, and as whose.
func (s *throttle) slot(who string) (key []byte, of string) {
	hash := s.keyedHash("latticekeep/slowdown/v1", []byte(who))
	b, _ := hex.DecodeString(hash) // the hash is hexadecimal
	key = binary.BigEndian.AppendUint16(bytes.Clone(slotsPrefix), binary.BigEndian.Uint16(b)%slots)
	return key, hash[len(hash)/2:]
}

// readSlot reads the failures in a slot. A damaged one holds none: nobody is kept
// out for it.
func (s *throttle) readSlot(r store.Reader, key []byte) (all []failures, err error) {
	b, err := r.Get(key)
	if err != nil || b == nil {
		return nil, err
	}
	if bad := s.decode(key, b, &all); bad != nil {
		return nil, nil
	}
	return all, nil
}

func (s *throttle) putSlot(tx store.Tx, key []byte, all []failures) error {
	if len(all) == 0 {
		return tx.Delete(key)
	}
	return s.put(tx, key, all)
}

func indexOf(all []failures, of string) int {
	return slices.IndexFunc(all, func(f failures) bool { return f.Of == of })
}

// waits reports whether an account waits.
func (s *throttle) waits(r store.Reader, who string, now time.Time) (bool, error) {
	key, of := s.slot(who)
	all, err := s.readSlot(r, key)
	at := indexOf(all, of)
	return at >= 0 && all[at].waits(now), err
}

// forget lets an account start afresh, whose owner was proven.
func (s *throttle) forget(tx store.Tx, who string) error {
	key, of := s.slot(who)
	all, err := s.readSlot(tx, key)
	at := indexOf(all, of)
	if err != nil || at < 0 {
		return err
	}
	return s.putSlot(tx, key, slices.Delete(all, at, at+1))
}

// fail counts a failure, and says whether the account waits, maybe from this one
// on. It decides and counts in one step, so that guesses made in parallel gain
// nothing: while an account waits, nothing counts.
func (s *throttle) fail(ctx context.Context, who string, now time.Time) (waits bool, err error) {
	err = s.store.Update(ctx, func(tx store.Tx) (err error) {
		waits, err = s.countFailure(tx, who, now)
		return err
	})
	return waits, err
}

func (s *throttle) countFailure(tx store.Tx, who string, now time.Time) (waits bool, err error) {
	key, of := s.slot(who)
	all, err := s.readSlot(tx, key)
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
	return f.Until.After(now), errors.Join(s.putSlot(tx, key, all), s.tidySlot(tx, key, now))
}

// evicted makes room: the account with the fewest failures goes. Made-up addresses,
// with which someone tries to push out the account that he guesses at, so push out
// each other.
func evicted(all []failures) []failures {
	victim := slices.MinFunc(all, func(a, b failures) int {
		return cmp.Or(cmp.Compare(a.Count, b.Count), a.Until.Compare(b.Until))
	})
	return slices.DeleteFunc(all, func(f failures) bool { return f.Of == victim.Of })
}

// tidySlot removes the slot behind one that was written if all in it are over, so
// that what is kept of failures goes as new ones come.
func (s *throttle) tidySlot(tx store.Tx, written []byte, now time.Time) error {
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
	all, err := s.readSlot(tx, next)
	if err != nil || slices.ContainsFunc(all, func(f failures) bool { return !f.over(now) }) {
		return err
	}
	return tx.Delete(next)
}
