package keyring

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Bounds of one [Ring.Rewrap]. Callers repeat it until nothing remains.
const (
	rewrapTime     = 400 * time.Millisecond // time in which moves begin; each call of a KMS has loadTimeout
	rewrapWorkers  = 8
	rewrapFailures = 16 // after these, Rewrap stops: the KMS is probably down or throttling
)

// Rewrap holds sets that are wrapped by the current KMS key and not stored yet.
type Rewrap struct {
	To  string // id of the current key
	Err error  // why some set was not moved; nil: no move failed

	moves []move
}

type move struct {
	from, to wrappedKey
	fromKey  string // id of the KMS key of from
}

var (
	errNotKept  = errors.New("the KMS does not open what it wrapped just now, so nothing was replaced by it")
	errUnmarked = errors.New("the KMS does not say in what it wraps that it did")
)

// Rewrap puts sets that are under another KMS key under the current one. If before is not zero, it
// also moves sets that were last moved before that time or never: after a rotation at the provider,
// the KMS then wraps them with its newest version. One call moves as many sets as fit into part of
// a second, in no order, and at least one if there is any. It leaves a set that it cannot move
// unchanged. It stores nothing; [Rewrap.Put] does.
//
// The wrapping keys themselves stay the same. Before a wrapping key is wrapped, it must open the
// keys of its set. Afterwards, the new ciphertext must open to the same key. So a stored row is
// replaced only by one that opens as well. Error: fault.Unavailable if the store does not answer.
func (r *Ring) Rewrap(ctx context.Context, before time.Time) (*Rewrap, error) {
	var due []cacheKey
	err := r.eachWrappedKey(ctx, func(w wrappedKey) {
		if r.moves(w, before) {
			due = append(due, cacheKey{w.owner, w.version})
		}
	})
	if err != nil {
		return nil, err
	}
	// With a random order, sets that cannot be moved do not always come first, and two callers
	// seldom work on the same sets.
	rand.Shuffle(len(due), func(i, j int) { due[i], due[j] = due[j], due[i] }) //nolint:gosec // an order is no secret

	result := &Rewrap{To: r.kms.ID()}
	began, failures := time.Now(), 0
	var mu sync.Mutex
	next := func() (set cacheKey, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		if len(due) == 0 || failures >= rewrapFailures || time.Since(began) >= rewrapTime || ctx.Err() != nil {
			return cacheKey{}, false
		}
		set, due = due[0], due[1:]
		return set, true
	}
	var workers sync.WaitGroup
	for range rewrapWorkers {
		workers.Go(func() {
			for set, ok := next(); ok; set, ok = next() {
				m, err := r.rewrap(ctx, set, before)
				mu.Lock()
				switch {
				case err != nil:
					failures++
					result.Err = fmt.Errorf("moving version %d of the keys of %s: %w", set.version, set.owner, err)
				case m != nil:
					result.moves = append(result.moves, *m)
				}
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	return result, nil
}

// rewrap prepares the move of one set. It returns nil if the set was moved meanwhile.
func (r *Ring) rewrap(ctx context.Context, set cacheKey, before time.Time) (*move, error) {
	stored, err := r.readSet(ctx, set.owner, set.version)
	if err != nil {
		return nil, err
	}
	from := stored.wrappedKey
	if !r.moves(from, before) {
		return nil, nil
	}
	opening, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	plain, err := r.openSet(opening, stored)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, key := range plain {
			key.Zero()
		}
	}()
	wrapping, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	to := from
	if to.blob, err = r.wrapAgain(wrapping, from, plain); err != nil {
		return nil, err
	}
	// movedAt must be later than the previous move, so the row gets a new key in the store, and not
	// earlier than before, so a run ends, whatever this machine's clock says.
	to.movedAt = max(r.config.Now().UnixMicro(), from.movedAt+1)
	if !before.IsZero() {
		to.movedAt = max(to.movedAt, before.UnixMicro())
	}
	return &move{from, to, r.kmsKeyOf(from)}, nil
}

// wrapAgain wraps the wrapping key of a set with the current KMS key and checks that it opens
// again.
func (r *Ring) wrapAgain(ctx context.Context, w wrappedKey, plain map[purpose]secret.Bytes) ([]byte, error) {
	name := keyContext(w.owner, w.version, wrapping)
	wrapped, err := r.kms.Wrap(ctx, name, plain[wrapping])
	if err != nil {
		return nil, unavailable("wrapping a key", err)
	}
	again, err := r.kms.Unwrap(ctx, name, wrapped)
	defer clear(again)
	switch {
	case err != nil:
		return nil, unavailable("opening what was wrapped", err)
	case !bytes.Equal(again, plain[wrapping]):
		return nil, unavailable("opening what was wrapped", errNotKept)
	case r.kmsKeyOf(wrappedKey{blob: wrapped}) != r.kms.ID():
		return nil, errUnmarked
	}
	return wrapped, nil
}

// Put stores the sets under their new key and deletes their previous rows. It returns how many sets
// it moved, by the id of their previous KMS key. It skips sets that another caller moved meanwhile.
// Error: fault.Unavailable if the new key was given up meanwhile.
func (w *Rewrap) Put(tx store.Tx) (moved map[string]int, err error) {
	moved = make(map[string]int)
	if err := checkInUse(tx, w.To); err != nil {
		return nil, err
	}
	for _, m := range w.moves {
		b, err := tx.Get(m.from.row())
		if err != nil {
			return nil, err
		}
		if !bytes.Equal(b, m.from.blob) {
			continue
		}
		if err := errors.Join(tx.Delete(m.from.row()), tx.Put(m.to.row(), m.to.blob), w.nameInDeployment(tx, m)); err != nil {
			return nil, err
		}
		moved[m.fromKey]++
	}
	for id := range moved {
		b, err := tx.Get(movedFromRow(id))
		if err == nil && b == nil {
			err = tx.Put(movedFromRow(id), nil)
		}
		if err != nil {
			return nil, err
		}
	}
	return moved, nil
}

// nameInDeployment updates the first row of the store, which names the KMS key of the deployment's
// own set.
func (w *Rewrap) nameInDeployment(tx store.Tx, m move) error {
	if m.to.owner != authz.SystemTenant {
		return nil
	}
	if current, err := currentVersion(tx, m.to.owner); err != nil || current != m.to.version {
		return err
	}
	b, err := tx.Get(deploymentRow)
	if err != nil {
		return err
	}
	var d deployment
	if json.Unmarshal(b, &d) != nil {
		return errDamaged
	}
	if d.KMSKey == w.To {
		return nil
	}
	d.KMSKey = w.To
	if b, err = json.Marshal(d); err != nil {
		return err
	}
	return tx.Put(deploymentRow, b)
}
