package identity

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

// records reads and writes the rows of the deployment's identities, each with the keyring's MAC,
// and commits a change together with its entry.
type records struct {
	store store.Store
	guard *audit.Guard
	keys  *keyring.Ring
	now   func() time.Time
}

// encode returns a row with a MAC that only this deployment can make, since a row decides whose
// secrets a caller may see.
func (s *records) encode(key []byte, row any) ([]byte, error) {
	b, err := json.Marshal(row)
	if err != nil {
		return nil, err
	}
	return s.keys.SealRow(key, b), nil
}

func (s *records) decode(key, stored []byte, row any) error {
	b, err := s.keys.OpenRow(key, stored)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, row)
}

// keyedHash returns a MAC of b as lower-case hex, so rows can be searched for b without revealing b
// to a reader of the database. Each label serves one kind of b.
func (s *records) keyedHash(label string, b []byte) string {
	h := hmac.New(sha512.New, s.keys.APIKeyHash())
	h.Write(frame.Join(label, b))
	return hex.EncodeToString(h.Sum(nil)[:sha512.Size256])
}

// maxCached bounds the rows of one kind in a cache.
const maxCached = 4096

// rowCache holds rows of one kind as they were last decoded. Every request still reads the row. The
// cache only saves verifying and decoding the same bytes under the same key again. Rows are shared,
// so nobody may change what they hold. The zero value is ready.
type rowCache[T any] struct {
	mu   sync.RWMutex
	rows map[string]decoded[T]
}

type decoded[T any] struct {
	stored []byte
	row    T
}

// get reads the row of a key and reports whether it exists.
func (k *rowCache[T]) get(s *records, r store.Reader, key []byte) (row T, found bool, err error) {
	stored, err := r.Get(key)
	if err != nil || stored == nil {
		return row, false, err
	}
	k.mu.RLock()
	last, ok := k.rows[string(key)]
	k.mu.RUnlock()
	if ok && bytes.Equal(last.stored, stored) {
		return last.row, true, nil
	}
	if err := s.decode(key, stored, &row); err != nil {
		return row, true, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.rows == nil || len(k.rows) >= maxCached {
		k.rows = make(map[string]decoded[T])
	}
	k.rows[string(key)] = decoded[T]{bytes.Clone(stored), row}
	return row, true, nil
}

// readTimeout bounds a read, so a read that cannot be recorded is refused within a second even when
// the store hangs.
const readTimeout = 900 * time.Millisecond

// get reads a row into v and reports whether it exists.
func (s *records) get(r store.Reader, key []byte, v any) (bool, error) {
	b, err := r.Get(key)
	if err != nil || b == nil {
		return false, err
	}
	return true, s.decode(key, b, v)
}

func (s *records) put(tx store.Tx, key []byte, v any) error {
	b, err := s.encode(key, v)
	if err != nil {
		return err
	}
	return tx.Put(key, b)
}

type sealedRow struct{ key, value []byte }

// getOr is get, but decodes the row other if there is none, so both cases do the same work.
func (s *records) getOr(r store.Reader, key []byte, other sealedRow, v any) (bool, error) {
	b, err := r.Get(key)
	if err != nil {
		return false, err
	}
	if b == nil {
		return false, s.decode(other.key, other.value, v)
	}
	return true, s.decode(key, b, v)
}

// refusal is an error that is recorded. The change is not made, its entry says denied and why, and
// the caller gets the error.
type refusal struct {
	reason string
	error
}

func (r *refusal) Unwrap() error { return r.error }

func refuse(reason string, err error) error { return &refusal{reason, err} }

// commit makes a change together with its one entry. A change that returns a refusal must have
// written nothing.
func (s *records) commit(ctx context.Context, e audit.Event, change func(tx store.Tx, e *audit.Event) error) error {
	var refused *refusal
	err := s.store.Update(ctx, func(tx store.Tx) error {
		refused = nil
		e := e
		if err := change(tx, &e); errors.As(err, &refused) {
			e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: refused.reason}
		} else if err != nil {
			return err
		}
		_, err := s.guard.Append(tx, e)
		return err
	})
	if err != nil {
		return err
	}
	if refused != nil {
		return refused
	}
	return nil
}

// deny records that p may not do a, and returns err.
func (s *records) deny(ctx context.Context, p authz.Principal, a authz.Action, reason string, err error) error {
	if failed := s.guard.RecordAttempt(ctx, p, a, audit.Denied, reason); failed != nil {
		return failed
	}
	return err
}

// refuseStranger records that an unknown caller was refused, once per source and minute, and
// returns err. The entry belongs to the system's tenant unless from names another.
func (s *records) refuseStranger(ctx context.Context, from authz.Principal, t audit.EventType, resource, reason string, err error) error {
	return s.refuseAbout(ctx, "", from, t, resource, reason, err)
}

// refuseAbout is refuseStranger, but records once per source, minute and about, which identifies
// what was asked for.
func (s *records) refuseAbout(ctx context.Context, about string, from authz.Principal, t audit.EventType, resource, reason string, err error) error {
	failed := s.guard.RecordRefusal(ctx, audit.Source(from.SourceIP)+" "+about, audit.Event{
		Type: t, Outcome: audit.Denied, Principal: from, Resource: audit.Resource{Type: resource},
		Attributes: map[string]string{audit.AttributeReason: reason},
	})
	if failed != nil {
		return failed
	}
	return err
}
