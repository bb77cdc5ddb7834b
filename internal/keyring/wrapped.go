package keyring

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
)

// wrappedKey is the wrapping key of a set as it is stored: of every set there is
// one row. A set that was moved has it under a key of its own,
//
//	key/<owner>/<version>/wrapping/<when it was moved: Unix microseconds, 16 hex digits>
//
// since what must be gone is deleted and not overwritten: only that is wiped.
type wrappedKey struct {
	owner   authz.TenantID
	version uint32
	movedAt int64 // Unix microseconds; 0 when it never was
	blob    []byte
}

func (w wrappedKey) row() []byte {
	row := keyRow(w.owner, w.version, wrapping)
	if w.movedAt == 0 {
		return row
	}
	return fmt.Appendf(row, "/%016x", w.movedAt)
}

// parseWrappedKey returns what a row of the keyring is, unless it is not that of
// a wrapping key. The blob shares the row's memory.
func parseWrappedKey(row, blob []byte) (w wrappedKey, ok bool) {
	parts := strings.Split(string(row), "/")
	if len(parts) != 4 && len(parts) != 5 || parts[3] != string(wrapping) {
		return w, false
	}
	version, err := strconv.ParseUint(parts[2], 16, 32)
	if err != nil {
		return w, false
	}
	w = wrappedKey{owner: authz.TenantID(parts[1]), version: uint32(version), blob: blob}
	if len(parts) == 5 {
		if w.movedAt, err = strconv.ParseInt(parts[4], 16, 64); err != nil {
			return w, false
		}
	}
	return w, bytes.Equal(w.row(), row)
}

// readWrappedKey returns the wrapping key of a set. Error: fault.Internal when it
// has none, or two.
func readWrappedKey(rd store.Reader, owner authz.TenantID, version uint32) (w wrappedKey, err error) {
	n, ok := 0, false
	err = rd.Scan(store.Prefix(keyRow(owner, version, wrapping)), func(row, blob []byte) bool {
		n++
		w, ok = parseWrappedKey(row, bytes.Clone(blob))
		return ok && n < 2
	})
	if err == nil && (n != 1 || !ok) {
		err = errDamaged
	}
	return w, err
}

// kmsKeyOf returns the id of the KMS key that a wrapping key is under, and ""
// when its stored form is none.
func (r *Ring) kmsKeyOf(w wrappedKey) string {
	if id, ok := kms.KeyOf(w.blob); ok {
		return id
	}
	if len(w.blob) > 0 && w.blob[0] == unnamedForm {
		return r.unnamed
	}
	return ""
}

// unnamedForm is the version byte of the stored form that names no KMS key: what
// a local key wrapped in the first releases.
const unnamedForm = 1

// configured returns the KMS key with that id, if the configuration names it.
func (r *Ring) configured(id string) KMS {
	if r.kms.ID() == id {
		return r.kms
	}
	for _, former := range r.config.Former {
		if former.ID() == id {
			return former
		}
	}
	return nil
}

// kmsOf returns the KMS key that is to open a wrapping key; what does not say, the
// current one refuses. Error: fault.Unavailable when the key is not configured, as
// on a replica whose configuration is behind.
func (r *Ring) kmsOf(w wrappedKey) (KMS, error) {
	id := r.kmsKeyOf(w)
	if id == "" {
		return r.kms, nil
	}
	if kms := r.configured(id); kms != nil {
		return kms, nil
	}
	return nil, unavailable("unwrapping keys", fmt.Errorf("they are under KMS key %s, which this server is not configured with (kms.url is %s): "+
		"name it in kms.url, or in kms.former to move away from it", id, r.kms.ID()))
}

// KMSKeyState says what a KMS key is for.
type KMSKeyState string

// The states: the current key wraps, former ones only open, and of an unknown one
// the configuration does not know.
const (
	KMSKeyCurrent KMSKeyState = "current"
	KMSKeyFormer  KMSKeyState = "former"
	KMSKeyUnknown KMSKeyState = "unknown"
)

// KMSKey is what is told of a KMS key.
type KMSKey struct {
	ID      string
	State   KMSKeyState
	Sets    int  // that are under it
	GivenUp bool // see [Ring.GiveUp]
}

// KMSKeys are those that sets are under and those that are configured, the current
// one first and then by state and id.
type KMSKeys struct {
	Keys      []KMSKey
	Remaining int // sets that [Ring.Rewrap] would move
	Damaged   int // sets of which it cannot be told what they are under
}

// KMSKeys counts the sets by the KMS key that they are under. Remaining are those
// that are under another key than the current one, or were moved before a time.
// Error: fault.Unavailable.
func (r *Ring) KMSKeys(ctx context.Context, before time.Time) (KMSKeys, error) {
	states := map[string]*KMSKey{r.kms.ID(): {ID: r.kms.ID(), State: KMSKeyCurrent}}
	for _, former := range r.config.Former {
		if id := former.ID(); states[id] == nil {
			states[id] = &KMSKey{ID: id, State: KMSKeyFormer}
		}
	}
	var keys KMSKeys
	err := r.eachWrappedKey(ctx, func(w wrappedKey) {
		id := r.kmsKeyOf(w)
		if id == "" {
			keys.Damaged++
			return
		}
		if states[id] == nil {
			states[id] = &KMSKey{ID: id, State: KMSKeyUnknown}
		}
		states[id].Sets++
		if r.moves(w, before) {
			keys.Remaining++
		}
	})
	if err != nil {
		return KMSKeys{}, err
	}
	err = r.store.View(ctx, func(rd store.Reader) error {
		for _, k := range states {
			b, err := rd.Get(givenUpRow(k.ID))
			if err != nil {
				return err
			}
			k.GivenUp = b != nil
		}
		return nil
	})
	if err != nil {
		return KMSKeys{}, fmt.Errorf("reading which KMS keys were given up: %w", err)
	}
	for _, k := range states {
		keys.Keys = append(keys.Keys, *k)
	}
	slices.SortFunc(keys.Keys, func(a, b KMSKey) int { // the states are in this order by name, too
		return strings.Compare(string(a.State)+a.ID, string(b.State)+b.ID)
	})
	return keys, nil
}

// moves reports whether [Ring.Rewrap] moves a wrapping key.
func (r *Ring) moves(w wrappedKey, before time.Time) bool {
	id := r.kmsKeyOf(w)
	return id != "" && (id != r.kms.ID() || !before.IsZero() && w.movedAt < before.UnixMicro())
}

var keyRows = store.Prefix([]byte("key/"))

// pageSize is the number of rows that one View reads, which lasts two seconds at
// most.
const pageSize = 4096

// eachWrappedKey visits the wrapping key of every set; what is not one yet, or no
// longer, is as of some time of the call. The blob is valid during the visit.
func (r *Ring) eachWrappedKey(ctx context.Context, visit func(wrappedKey)) error {
	rest := keyRows
	for more := true; more; {
		more = false
		var last []byte
		var page []wrappedKey // a View may run its closure again
		err := r.store.View(ctx, func(rd store.Reader) error {
			n := 0
			last, page, more = nil, page[:0], false
			return rd.Scan(rest, func(row, blob []byte) bool {
				if w, ok := parseWrappedKey(row, blob); ok {
					w.blob = bytes.Clone(blob)
					page = append(page, w)
				}
				n++
				if more = n == pageSize; more {
					last = append(bytes.Clone(row), 0)
				}
				return !more
			})
		})
		if err != nil {
			return fmt.Errorf("reading which KMS keys are in use: %w", err)
		}
		for _, w := range page {
			visit(w)
		}
		rest.From = last
	}
	return nil
}
