// Package idempotency remembers for a day which credential a seal request with an idempotency key
// made, so that the same request makes no second one.
package idempotency

import (
	"bytes"
	"context"
	"crypto/hmac"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Keys remembers a request with an idempotency key in three rows: the credential that was made with
// the key, the request, and when both expire. Neither the key nor the request can be read from the
// rows. The row of the request depends on the values and is deleted together with them.
type Keys struct {
	mac.Rows
	store store.Store
	now   func() time.Time
	tidy  atomic.Bool // no row of a request outlives its key's row
}

// New returns the keys in a store.
func New(rows mac.Rows, s store.Store, now func() time.Time) *Keys {
	return &Keys{Rows: rows, store: s, now: now}
}

// Request is what a request with an idempotency key asks for.
type Request struct {
	Key     string // empty for a request without one
	Name    string
	Type    string
	TTLDays int
	Values  map[string]secret.Bytes
}

// Answer is what was answered to a request.
type Answer struct {
	ID, Name, Type      string
	SealedAt, ExpiresAt time.Time
}

const lifetime = 24 * time.Hour

func idempotencyKey(tenant authz.TenantID, hash string) []byte {
	return []byte("idempotency/key/" + string(tenant) + "/" + hash)
}

var requestPrefix = []byte("idempotency/request/")

// RequestKey returns the key of the row that depends on the values of a credential.
func RequestKey(tenant authz.TenantID, id string) []byte {
	return []byte(string(requestPrefix) + string(tenant) + "/" + id)
}

var duePrefix = []byte("idempotency/due/")

func dueKey(expires time.Time, tenant authz.TenantID, hash string) []byte {
	b := binary.BigEndian.AppendUint64(bytes.Clone(duePrefix), uint64(expires.UnixMicro()))
	return append(b, string(tenant)+"/"+hash...)
}

// keyRow is the row of an idempotency key.
type keyRow struct {
	Credential string    `json:"credential"`
	ExpiresAt  time.Time `json:"expires_at"` // when the key is forgotten
}

// requestRow is the row of the credential that the request made. It exists as long as the
// credential has the values of the request.
type requestRow struct {
	Digest    []byte    `json:"digest"` // keyed hash
	Name      string    `json:"name"`
	Type      string    `json:"type"`
	SealedAt  time.Time `json:"sealed_at"`
	ExpiresAt time.Time `json:"expires_at"` // when the credential expires
}

// Fingerprint identifies a request with an idempotency key.
type Fingerprint struct {
	hash   string // keyed hash of the key
	digest []byte // keyed hash of the request
}

// Fingerprint returns the Fingerprint of a request of p, or nil for one without an idempotency key. A
// principal with a policy has keys of its own: the answer to a key that somebody else has used would
// tell that they did.
func (i *Keys) Fingerprint(p authz.Principal, req Request) *Fingerprint {
	if req.Key == "" {
		return nil
	}
	tenant := p.Tenant
	if p.Access.IsLimited() {
		req.Key = p.ID + " " + req.Key // no key has a space
	}
	values := record.EncodeValues(req.Values)
	defer values.Zero()
	return &Fingerprint{
		hash: i.KeyedHex("latticekeep/idempotency-key/v1", []byte(tenant), []byte(req.Key)),
		digest: i.KeyedHash("latticekeep/idempotent-request/v1",
			[]byte(tenant), []byte(req.Name), []byte(req.Type), frame.Uint64(uint64(req.TTLDays)), values),
	}
}

var (
	errTaken        = fault.New(fault.Conflict, "another request with this Idempotency-Key came first: retry")
	errOtherRequest = fault.New(fault.Invalid, "the Idempotency-Key was used with another request: use a new key for a new credential")
	errOverRequest  = fault.New(fault.Invalid, "the credential made with this Idempotency-Key was replaced or deleted since, so the request was carried out: use a new key only for another credential")
)

// FirstAnswer returns the answer to the first request with the Fingerprint, or nil if there was
// none.
func (i *Keys) FirstAnswer(ctx context.Context, tenant authz.TenantID, f *Fingerprint) (*Answer, error) {
	now := i.now()
	var key *keyRow
	var first *requestRow
	err := i.store.View(ctx, func(rd store.Reader) (err error) {
		if key, err = mac.Get[keyRow](i.Rows, rd, idempotencyKey(tenant, f.hash)); err != nil || key == nil {
			return err
		}
		first, err = mac.Get[requestRow](i.Rows, rd, RequestKey(tenant, key.Credential))
		return err
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading what an idempotency key made: %w", err)
	case key == nil, !now.Before(key.ExpiresAt):
		return nil, nil
	case first == nil:
		return nil, errOverRequest
	case !hmac.Equal(first.Digest, f.digest):
		return nil, errOtherRequest
	}
	return &Answer{key.Credential, first.Name, first.Type, first.SealedAt, first.ExpiresAt}, nil
}

// Remember stores the Fingerprint in the transaction that stores r. It ignores a nil Fingerprint.
// The error is fault.Conflict when another request with the key came first.
func (i *Keys) Remember(tx store.Tx, f *Fingerprint, r *record.Record, now time.Time) error {
	if f == nil {
		return nil
	}
	key := idempotencyKey(r.Tenant, f.hash)
	before, err := mac.Get[keyRow](i.Rows, tx, key)
	if err != nil {
		return err
	}
	if before != nil {
		if now.Before(before.ExpiresAt) {
			return errTaken
		}
		if err := i.forget(tx, r.Tenant, f.hash, before); err != nil {
			return err
		}
	}
	expires := r.SealedAt.Add(lifetime)
	return errors.Join(
		mac.Put(i.Rows, tx, key, keyRow{r.ID, expires}),
		mac.Put(i.Rows, tx, RequestKey(r.Tenant, r.ID), requestRow{f.digest, r.Name, r.Type, r.SealedAt, r.ExpiresAt}),
		tx.Put(dueKey(expires, r.Tenant, f.hash), nil),
	)
}

func (i *Keys) forget(tx store.Tx, tenant authz.TenantID, hash string, row *keyRow) error {
	return errors.Join(
		tx.Delete(RequestKey(tenant, row.Credential)),
		tx.Delete(idempotencyKey(tenant, hash)),
		tx.Delete(dueKey(row.ExpiresAt, tenant, hash)),
	)
}

// sweepBatch bounds one transaction of a sweep.
const sweepBatch = 256

// ForgetDue deletes the keys that have expired and returns their number.
func (i *Keys) ForgetDue(ctx context.Context) (int, error) {
	due := store.Range{From: duePrefix, To: dueKey(i.now().Add(time.Microsecond), "", "")}
	n, err := store.Sweep(ctx, i.store, due, sweepBatch, i.forgetKey)
	if err != nil {
		return n, fmt.Errorf("forgetting idempotency keys: %w", err)
	}
	if i.tidy.Load() {
		return n, nil
	}
	i.tidy.Store(true)
	if err := i.forgetOrphans(ctx); err != nil {
		i.tidy.Store(false)
		return n, fmt.Errorf("forgetting requests: %w", err)
	}
	return n, nil
}

// forgetKey deletes a row of the index of what is due, with the key that it names.
func (i *Keys) forgetKey(tx store.Tx, due []byte) (gone bool, err error) {
	if err := tx.Delete(due); err != nil {
		return false, err
	}
	name, hash, _ := strings.Cut(string(due[min(len(due), len(duePrefix)+8):]), "/")
	tenant := authz.TenantID(name)
	row, err := mac.Get[keyRow](i.Rows, tx, idempotencyKey(tenant, hash))
	switch {
	case errors.Is(err, fault.Internal): // a damaged row neither replays nor names its request
		i.tidy.Store(false)
		err = tx.Delete(idempotencyKey(tenant, hash))
	case err == nil && row == nil:
		i.tidy.Store(false)
	case err == nil && string(dueKey(row.ExpiresAt, tenant, hash)) == string(due):
		err = i.forget(tx, tenant, hash, row)
	}
	return err == nil, err
}

// forgetOrphans deletes the rows of requests that are older than a day or damaged. Such rows exist
// only where the row of a key was damaged or lost. forgetOrphans reads all request rows, so it runs
// only once after the start, because an earlier process may have met such a key, and again after a
// sweep meets one.
func (i *Keys) forgetOrphans(ctx context.Context) error {
	rng, now := store.Prefix(requestPrefix), i.now()
	for {
		var keys [][]byte
		var next []byte
		err := i.store.View(ctx, func(rd store.Reader) error {
			rows := 0
			return rd.Scan(rng, func(key, stored []byte) bool {
				if rows == sweepBatch {
					next = bytes.Clone(key)
					return false
				}
				rows++
				row, err := mac.Decode[requestRow](i.Rows, key, stored)
				if err != nil || !now.Before(row.SealedAt.Add(lifetime)) {
					keys = append(keys, bytes.Clone(key))
				}
				return true
			})
		})
		if err == nil && len(keys) > 0 {
			err = i.store.Update(ctx, func(tx store.Tx) (err error) {
				for _, key := range keys { // safe: a row of a request is never written twice
					err = errors.Join(err, tx.Delete(key))
				}
				return err
			})
		}
		if err != nil || next == nil {
			return err
		}
		rng.From = next
	}
}
