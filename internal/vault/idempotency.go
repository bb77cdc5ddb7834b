package vault

import (
	"context"
	"crypto/hmac"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A Seal with an idempotency key is remembered for a day in three rows: what
// credential the key made, what the request was, and when both are due to be
// forgotten. Neither key nor request can be read from them. What says anything
// of the values goes with the values.
const idempotencyTime = 24 * time.Hour

func idempotencyKey(tenant authz.TenantID, hash string) []byte {
	return []byte("idempotency/key/" + string(tenant) + "/" + hash)
}

var requestPrefix = []byte("idempotency/request/")

func requestKey(tenant authz.TenantID, id string) []byte {
	return []byte(string(requestPrefix) + string(tenant) + "/" + id)
}

var duePrefix = []byte("idempotency/due/")

func dueKey(expires time.Time, tenant authz.TenantID, hash string) []byte {
	b := binary.BigEndian.AppendUint64(append([]byte(nil), duePrefix...), uint64(expires.UnixMicro()))
	return append(b, string(tenant)+"/"+hash...)
}

// keyRow is under an idempotency key.
type keyRow struct {
	Credential string    `json:"credential"`
	ExpiresAt  time.Time `json:"expires_at"` // of the row
}

// requestRow is under the credential that the request made, as long as that
// has the values of the request.
type requestRow struct {
	Digest    []byte    `json:"digest"` // keyed
	Name      string    `json:"name"`
	Type      string    `json:"type"`
	SealedAt  time.Time `json:"sealed_at"`
	ExpiresAt time.Time `json:"expires_at"` // of the credential
}

// once is a request that is carried out once.
type once struct {
	hash   string // of the key
	digest []byte
}

// once returns nil for a request without a key.
func (v *Vault) once(tenant authz.TenantID, req SealRequest) *once {
	if req.IdempotencyKey == "" {
		return nil
	}
	values := encodeValues(req.Values)
	defer values.Zero()
	return &once{
		hash: hex.EncodeToString(v.keyedHash("latticekeep/idempotency-key/v1", []byte(tenant), []byte(req.IdempotencyKey))),
		digest: v.keyedHash("latticekeep/idempotent-request/v1",
			[]byte(tenant), []byte(req.Name), []byte(req.Type), frame.Uint64(uint64(req.ttlDays())), values),
	}
}

var (
	errOtherRequest = fault.New(fault.Invalid, "the Idempotency-Key was used with another request: use a new key for a new credential")
	errOverRequest  = fault.New(fault.Invalid, "the credential made with this Idempotency-Key was replaced or deleted since: use a new key")
)

// replay returns the first answer to a request, nil if there was none, after
// recording that it was given again.
func (v *Vault) replay(ctx context.Context, p authz.Principal, o *once) (*Credential, error) {
	if err := v.guard.Ready(ctx); err != nil {
		return nil, err
	}
	now := v.now()
	var made *keyRow
	var first *requestRow
	err := v.store.View(ctx, func(rd store.Reader) (err error) {
		if made, err = getRow[keyRow](v, rd, idempotencyKey(p.Tenant, o.hash)); err != nil || made == nil {
			return err
		}
		first, err = getRow[requestRow](v, rd, requestKey(p.Tenant, made.Credential))
		return err
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading what an idempotency key made: %w", err)
	case made == nil, !now.Before(made.ExpiresAt):
		return nil, nil
	case first == nil:
		return nil, errOverRequest
	case !hmac.Equal(first.Digest, o.digest):
		return nil, errOtherRequest
	}
	err = v.guard.Record(ctx, audit.Event{
		Type: audit.CredentialListed, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.CredentialResource, ID: made.Credential},
		Attributes: map[string]string{"replay": "true"},
	})
	if err != nil {
		return nil, err
	}
	return &Credential{
		ID: made.Credential, Name: first.Name, Type: first.Type, Version: 1,
		CreatedAt: first.SealedAt, SealedAt: first.SealedAt, ExpiresAt: first.ExpiresAt,
		Expired: !now.Before(first.ExpiresAt),
	}, nil
}

// remember joins the transaction that stores r. Error: fault.Conflict when
// another request with the key came first.
func (v *Vault) remember(tx store.Tx, o *once, r *record, now time.Time) error {
	if o == nil {
		return nil
	}
	key := idempotencyKey(r.tenant, o.hash)
	before, err := getRow[keyRow](v, tx, key)
	if err != nil {
		return err
	}
	if before != nil {
		if now.Before(before.ExpiresAt) {
			return errMoved
		}
		if err := v.forget(tx, r.tenant, o.hash, before); err != nil {
			return err
		}
	}
	expires := r.sealedAt.Add(idempotencyTime)
	return errors.Join(
		putRow(v, tx, key, keyRow{r.id, expires}),
		putRow(v, tx, requestKey(r.tenant, r.id), requestRow{o.digest, r.name, r.kind, r.sealedAt, r.expiresAt}),
		tx.Put(dueKey(expires, r.tenant, o.hash), nil),
	)
}

func (v *Vault) forget(tx store.Tx, tenant authz.TenantID, hash string, row *keyRow) error {
	return errors.Join(
		tx.Delete(requestKey(tenant, row.Credential)),
		tx.Delete(idempotencyKey(tenant, hash)),
		tx.Delete(dueKey(row.ExpiresAt, tenant, hash)),
	)
}

// sweepBatch bounds one transaction of [Vault.Sweep].
const sweepBatch = 256

// Sweep forgets the idempotency keys that are a day old, ends the former
// versions whose time is over, and returns how many of both there were. It is
// called every minute or so. Trouble with one does not keep it from the other.
func (v *Vault) Sweep(ctx context.Context) (int, error) {
	ended, err := v.endFormers(ctx)
	forgotten, err2 := v.forgetKeys(ctx)
	return ended + forgotten, errors.Join(err, err2)
}

func (v *Vault) forgetKeys(ctx context.Context) (n int, err error) {
	due := store.Range{From: duePrefix, To: dueKey(v.now().Add(time.Microsecond), "", "")}
	for {
		var keys [][]byte
		err := v.store.View(ctx, func(rd store.Reader) error {
			return rd.Scan(due, func(key, _ []byte) bool {
				keys = append(keys, append([]byte(nil), key...))
				return len(keys) < sweepBatch
			})
		})
		if err == nil && len(keys) > 0 {
			err = v.store.Update(ctx, func(tx store.Tx) error { return v.sweep(tx, keys) })
		}
		if err != nil {
			return n, fmt.Errorf("forgetting idempotency keys: %w", err)
		}
		if n += len(keys); len(keys) < sweepBatch {
			break
		}
	}
	if v.tidy.Load() {
		return n, nil
	}
	v.tidy.Store(true)
	if err := v.sweepRequests(ctx); err != nil {
		v.tidy.Store(false)
		return n, fmt.Errorf("forgetting requests: %w", err)
	}
	return n, nil
}

func (v *Vault) sweep(tx store.Tx, due [][]byte) error {
	for _, key := range due {
		if err := tx.Delete(key); err != nil {
			return err
		}
		tenant, hash, _ := strings.Cut(string(key[min(len(key), len(duePrefix)+8):]), "/")
		row, err := getRow[keyRow](v, tx, idempotencyKey(authz.TenantID(tenant), hash))
		switch {
		case errors.Is(err, fault.Internal): // it can be replayed no more
			v.tidy.Store(false) // nor tell of what request it was
			err = tx.Delete(idempotencyKey(authz.TenantID(tenant), hash))
		case err == nil && row == nil:
			v.tidy.Store(false)
		case err == nil && string(dueKey(row.ExpiresAt, authz.TenantID(tenant), hash)) == string(key):
			err = v.forget(tx, authz.TenantID(tenant), hash, row)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sweepRequests deletes the requests that are a day old by their own word, and
// those that say nothing. There are some only where an idempotency key was
// damaged or lost, so it goes through all of them once after the start, when a
// sweep before may have met one, and when a sweep met one since.
func (v *Vault) sweepRequests(ctx context.Context) error {
	rng, now := store.Prefix(requestPrefix), v.now()
	for {
		var keys [][]byte
		var next []byte
		err := v.store.View(ctx, func(rd store.Reader) error {
			rows := 0
			return rd.Scan(rng, func(key, stored []byte) bool {
				if rows == sweepBatch {
					next = append([]byte(nil), key...)
					return false
				}
				rows++
				row, err := decodeRow[requestRow](v, key, stored)
				if err != nil || !now.Before(row.SealedAt.Add(idempotencyTime)) {
					keys = append(keys, append([]byte(nil), key...))
				}
				return true
			})
		})
		if err == nil && len(keys) > 0 {
			err = v.store.Update(ctx, func(tx store.Tx) (err error) {
				for _, key := range keys { // never written twice
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

// getRow reads a JSON row under a MAC, nil when there is none.
func getRow[T any](v *Vault, rd store.Reader, key []byte) (*T, error) {
	stored, err := rd.Get(key)
	if err != nil || stored == nil {
		return nil, err
	}
	return decodeRow[T](v, key, stored)
}

func decodeRow[T any](v *Vault, key, stored []byte) (*T, error) {
	b, err := v.keys.OpenRow(key, stored)
	if err != nil {
		return nil, err
	}
	row := new(T)
	if err := json.Unmarshal(b, row); err != nil {
		return nil, errDamaged
	}
	return row, nil
}

func putRow[T any](v *Vault, tx store.Tx, key []byte, row T) error {
	b, err := json.Marshal(row)
	if err != nil {
		return err
	}
	return tx.Put(key, v.keys.SealRow(key, b))
}
