package keyring

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/store"
)

// sealingRow is the stored key pair for values of SealedCredentials: the signed public document,
// and the private key under the deployment's wrapping key.
//
// The private key is bound to whether the key is retired, and the row starts with the keyring's
// MAC. So an attacker who can only write the store cannot retire or restore a key with a row of
// their own. They can put back an earlier row of ours, and with it the key's previous state. Only
// the audit log shows that, so package sealingkey asks the log. An early release wrote rows without
// a MAC; none of those is retired.
type sealingRow struct {
	Document        json.RawMessage `json:"document"`
	Suite           envelope.Suite  `json:"suite"`
	WrappingVersion uint32          `json:"wrapping_version"`
	PrivateKey      []byte          `json:"private_key"`
	RetiredAt       time.Time       `json:"retired_at,omitzero"`
}

var (
	currentSealingRow = []byte("sealing/current")
	sealingKeyPrefix  = []byte("sealing/key/")
)

func sealingKeyRow(id string) []byte { return append(slices.Clone(sealingKeyPrefix), id...) }

// context returns the context that the private key is bound to.
func (s sealingRow) context(id string) string {
	if s.RetiredAt.IsZero() {
		return "sealing/" + id
	}
	return "sealing/" + id + "/retired"
}

// ErrRetired is wrapped by the errors about a retired sealing key. Their kind is fault.NotFound, or
// fault.Internal if the key is the one to be published.
var ErrRetired = errors.New("the sealing key is retired")

var (
	errNoSealingKey = fault.New(fault.NotFound, "this deployment has no such sealing key; seal the values again with its current key (latticekeep seal)")
	errRetired      = fault.Wrap(fault.NotFound, "the sealing key is retired; seal the values again with the current key (latticekeep seal), "+
		"or restore it (latticekeep sealing-key restore) and move the manifest to the current key (latticekeep reseal)", ErrRetired)
	errCurrentRetired = fault.Wrap(fault.Internal, "the sealing key that the database says to publish is retired, which only somebody who writes to the database can have done: "+
		"make a new key (latticekeep sealing-key rotate), and run latticekeep doctor when the server can be stopped", ErrRetired)
	errSealingMoved = fault.New(fault.Conflict, "the sealing key changed meanwhile: retry")
	errCurrent      = fault.New(fault.Conflict, "the current sealing key is not retired: make a new one first (latticekeep sealing-key rotate)")
)

// NewSealingKey is a new sealing key that is not stored yet.
type NewSealingKey struct {
	ID      string
	keys    *sealingKeys
	row     []byte
	current []byte
}

// sealingKeys owns the rows of sealing keys.
type sealingKeys struct {
	store store.Store
	now   func() time.Time
	own   *deploymentKeys
	sets  *sets

	mu        sync.Mutex
	published *published
}

// NewSealingKey makes a key pair and its signed document. The deployment must be stored already,
// because its wrapping key seals the private key.
func (r *sealingKeys) NewSealingKey(ctx context.Context, suite envelope.Suite) (*NewSealingKey, error) {
	k, err := r.newSealingKey(ctx, suite)
	if err != nil {
		return nil, fmt.Errorf("making a sealing key: %w", err)
	}
	return k, nil
}

func (r *sealingKeys) newSealingKey(ctx context.Context, suite envelope.Suite) (*NewSealingKey, error) {
	wrapper, err := r.sets.Current(ctx, authz.SystemTenant)
	if err != nil {
		return nil, err
	}
	key, err := envelope.GenerateSealingKey(suite)
	if err != nil {
		return nil, err
	}
	private, err := key.Bytes()
	if err != nil {
		return nil, err
	}
	defer private.Zero()
	id := key.Public().ID()
	document, err := sealing.Sign(r.own.identity, key.Public(), r.now())
	if err != nil {
		return nil, err
	}
	row := sealingRow{Suite: suite, WrappingVersion: wrapper.Version}
	if row.Document, err = document.MarshalJSON(); err != nil {
		return nil, err
	}
	if row.PrivateKey, err = envelope.SealKey(wrapper.Wrapping, row.context(id), private); err != nil {
		return nil, err
	}
	stored, err := r.sealSealingRow(id, row)
	if err != nil {
		return nil, err
	}
	return &NewSealingKey{id, r, stored, r.own.SealRow(currentSealingRow, []byte(id))}, nil
}

// Put stores the key and publishes it. Earlier keys still open values.
func (k *NewSealingKey) Put(tx store.Tx) error {
	if err := tx.Put(sealingKeyRow(k.ID), k.row); err != nil {
		return err
	}
	return tx.Put(currentSealingRow, k.current)
}

// PutAfter is [NewSealingKey.Put] if previous is still the current key. Otherwise the error is
// fault.Conflict.
func (k *NewSealingKey) PutAfter(tx store.Tx, previous string) error {
	current, err := k.keys.currentSealingKey(tx)
	if err != nil {
		return err
	}
	if current != previous {
		return errSealingMoved
	}
	return k.Put(tx)
}

// currentSealingKey returns the id of the published key, and "" if there is none.
func (r *sealingKeys) currentSealingKey(rd store.Reader) (string, error) {
	b, err := rd.Get(currentSealingRow)
	if err == nil {
		b, err = r.own.OpenRow(currentSealingRow, b)
	}
	if err != nil {
		return "", fmt.Errorf("reading the current sealing key: %w", err)
	}
	return string(b), nil
}

// CurrentSealingKey returns the id of the sealing key that the store says to publish, even if that
// key is retired and cannot be published. It returns "" if there is none.
func (r *sealingKeys) CurrentSealingKey(ctx context.Context) (id string, err error) {
	err = r.store.View(ctx, func(rd store.Reader) (err error) {
		id, err = r.currentSealingKey(rd)
		return err
	})
	return id, err
}

// SealingDocument returns the signed public document of the current sealing key. Errors:
// fault.NotFound if there is none; fault.Internal if it is not ours; fault.Internal with
// [ErrRetired] if it is retired, because then nothing is published.
func (r *sealingKeys) SealingDocument(ctx context.Context) (sealing.Document, error) {
	var id string
	var row sealingRow
	err := r.store.View(ctx, func(rd store.Reader) (err error) {
		if id, err = r.currentSealingKey(rd); err != nil {
			return err
		}
		row, err = r.sealingRow(rd, id)
		return err
	})
	if err != nil {
		return sealing.Document{}, err
	}
	if !row.RetiredAt.IsZero() {
		return sealing.Document{}, errCurrentRetired
	}
	// Anyone may ask for the document, so its signature is not verified each time.
	r.mu.Lock()
	known := r.published
	r.mu.Unlock()
	if known != nil && known.id == id && bytes.Equal(known.encoded, row.Document) {
		return known.document, nil
	}
	document, err := r.document(id, row)
	if err != nil {
		return sealing.Document{}, err
	}
	r.mu.Lock()
	r.published = &published{id, row.Document, document}
	r.mu.Unlock()
	return document, nil
}

// document parses a stored document and checks that this deployment signed it, because an attacker
// who can write the store can replace it.
func (r *sealingKeys) document(id string, row sealingRow) (sealing.Document, error) {
	document, err := sealing.ParseDocument(row.Document)
	if err != nil {
		return sealing.Document{}, fault.Wrap(fault.Internal, fault.Message(errDamaged), err)
	}
	if document.Identity() != r.own.Identity().ID() || document.Key().ID() != id {
		return sealing.Document{}, errDamaged
	}
	return document, nil
}

// published is the last document that was verified.
type published struct {
	id       string
	encoded  []byte
	document sealing.Document
}

// SealingKey returns the private sealing key with that id, also of an earlier key. Errors:
// fault.NotFound for an unknown id and, with [ErrRetired], for a retired key; fault.Unavailable if
// the KMS does not answer.
func (r *sealingKeys) SealingKey(ctx context.Context, id string) (*envelope.SealingKey, error) {
	var row sealingRow
	err := r.store.View(ctx, func(rd store.Reader) (err error) {
		row, err = r.sealingRow(rd, id)
		return err
	})
	if err != nil {
		return nil, err
	}
	if !row.RetiredAt.IsZero() {
		return nil, errRetired
	}
	return r.privateSealingKey(ctx, id, row)
}

// privateSealingKey opens the private key of a row. It caches only keys in use, by their
// ciphertext. Retiring a key changes its ciphertext.
func (r *sealingKeys) privateSealingKey(ctx context.Context, id string, row sealingRow) (*envelope.SealingKey, error) {
	wrapper, err := r.sets.Version(ctx, authz.SystemTenant, row.WrappingVersion)
	if err != nil {
		return nil, err
	}
	wrapper.mu.Lock()
	defer wrapper.mu.Unlock()
	kept := string(row.PrivateKey)
	if key, ok := wrapper.sealing[kept]; ok && row.RetiredAt.IsZero() && key.Public().ID() == id {
		return key, nil
	}
	private, err := envelope.OpenKey(wrapper.Wrapping, row.context(id), row.PrivateKey)
	if err != nil {
		return nil, errDamaged
	}
	defer private.Zero()
	key, err := envelope.ParseSealingKey(row.Suite, private)
	if err != nil || key.Public().ID() != id {
		return nil, errDamaged
	}
	if row.RetiredAt.IsZero() {
		wrapper.sealing[kept] = key
	}
	return key, nil
}

func (r *sealingKeys) sealSealingRow(id string, row sealingRow) ([]byte, error) {
	b, err := json.Marshal(row)
	if err != nil {
		return nil, fmt.Errorf("encoding a sealing key: %w", err)
	}
	return r.own.SealRow(sealingKeyRow(id), b), nil
}

func (r *sealingKeys) sealingRow(rd store.Reader, id string) (row sealingRow, err error) {
	b, err := rd.Get(sealingKeyRow(id))
	if err != nil {
		return sealingRow{}, fmt.Errorf("reading a sealing key: %w", err)
	}
	if b == nil {
		return sealingRow{}, errNoSealingKey
	}
	return r.decodeSealingRow(id, b)
}

func (r *sealingKeys) decodeSealingRow(id string, b []byte) (row sealingRow, err error) {
	content, err := r.own.OpenRow(sealingKeyRow(id), b)
	if err != nil || json.Unmarshal(content, &row) != nil {
		return sealingRow{}, errDamaged
	}
	return row, nil
}

// SealingKeyState says what a sealing key is for.
type SealingKeyState string

// The states: values are sealed for the current key, earlier keys only open, retired keys do not
// open.
const (
	SealingKeyCurrent SealingKeyState = "current"
	SealingKeyEarlier SealingKeyState = "earlier"
	SealingKeyRetired SealingKeyState = "retired"
)

// SealingKeyInfo is the public description of a sealing key.
type SealingKeyInfo struct {
	ID        string
	Suite     envelope.Suite
	State     SealingKeyState
	CreatedAt time.Time
	RetiredAt time.Time // zero unless retired
}

// SealingKeys returns all sealing keys: the current one first, then the others from newest to
// oldest. Error: fault.Internal if one of them is not ours.
func (r *sealingKeys) SealingKeys(ctx context.Context) ([]SealingKeyInfo, error) {
	var current string
	rows := make(map[string]sealingRow)
	err := r.store.View(ctx, func(rd store.Reader) (err error) {
		if current, err = r.currentSealingKey(rd); err != nil {
			return err
		}
		var bad error
		err = rd.Scan(store.Prefix(sealingKeyPrefix), func(key, value []byte) bool {
			id := string(key[len(sealingKeyPrefix):])
			rows[id], bad = r.decodeSealingRow(id, value)
			return bad == nil
		})
		return errors.Join(err, bad)
	})
	if err != nil {
		return nil, fmt.Errorf("reading the sealing keys: %w", err)
	}
	keys := make([]SealingKeyInfo, 0, len(rows))
	for id, row := range rows {
		info, err := r.sealingKeyInfo(id, row, current)
		if err != nil {
			return nil, err
		}
		keys = append(keys, info)
	}
	slices.SortFunc(keys, func(a, b SealingKeyInfo) int {
		if a.State == SealingKeyCurrent || b.State == SealingKeyCurrent {
			return cmp.Compare(rank(a.State), rank(b.State))
		}
		return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return keys, nil
}

func rank(s SealingKeyState) int {
	if s == SealingKeyCurrent {
		return 0
	}
	return 1
}

func (r *sealingKeys) sealingKeyInfo(id string, row sealingRow, current string) (SealingKeyInfo, error) {
	document, err := r.document(id, row)
	if err != nil {
		return SealingKeyInfo{}, err
	}
	info := SealingKeyInfo{ID: id, Suite: row.Suite, State: SealingKeyEarlier, CreatedAt: document.CreatedAt(), RetiredAt: row.RetiredAt}
	switch {
	case !row.RetiredAt.IsZero():
		info.State = SealingKeyRetired
	case id == current:
		info.State = SealingKeyCurrent
	}
	return info, nil
}

// SealingKeyChange retires or restores a sealing key. It is not stored yet.
type SealingKeyChange struct {
	Key SealingKeyInfo // state after the change

	keys     *sealingKeys
	from, to []byte // rows; equal if the key is in the wanted state already
}

// RetireSealingKey prepares to retire a key. The private key stays stored, but opens nothing.
// Errors: fault.NotFound, fault.Conflict for the current key, fault.Unavailable.
func (r *sealingKeys) RetireSealingKey(ctx context.Context, id string) (*SealingKeyChange, error) {
	return r.changeSealingKey(ctx, id, r.now().UTC().Truncate(time.Second))
}

// RestoreSealingKey prepares to take a retired key back into use, as an earlier one. Errors:
// fault.NotFound, fault.Unavailable.
func (r *sealingKeys) RestoreSealingKey(ctx context.Context, id string) (*SealingKeyChange, error) {
	return r.changeSealingKey(ctx, id, time.Time{})
}

// changeSealingKey prepares a key's row with another time of retirement. A zero time means not
// retired. A key that is retired already keeps its time.
func (r *sealingKeys) changeSealingKey(ctx context.Context, id string, retiredAt time.Time) (*SealingKeyChange, error) {
	var current string
	c := &SealingKeyChange{keys: r}
	err := r.store.View(ctx, func(rd store.Reader) (err error) {
		if current, err = r.currentSealingKey(rd); err != nil {
			return err
		}
		b, err := rd.Get(sealingKeyRow(id))
		c.from = bytes.Clone(b)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading a sealing key: %w", err)
	}
	if c.from == nil {
		return nil, errNoSuchKey
	}
	row, err := r.decodeSealingRow(id, c.from)
	if err != nil {
		return nil, err
	}
	if id == current && !retiredAt.IsZero() {
		return nil, errCurrent
	}
	if c.to = c.from; row.RetiredAt.IsZero() != retiredAt.IsZero() {
		if row, err = r.rebindSealingKey(ctx, id, row, retiredAt); err != nil {
			return nil, err
		}
		if c.to, err = r.sealSealingRow(id, row); err != nil {
			return nil, err
		}
	}
	c.Key, err = r.sealingKeyInfo(id, row, current)
	return c, err
}

// errNoSuchKey is for a caller who names a key. errNoSealingKey is for a caller who presents sealed
// values.
var errNoSuchKey = fault.New(fault.NotFound, "there is no sealing key with that id: list the keys to see which there are")

// rebindSealingKey seals the private key of a row again, bound to the state after the change.
func (r *sealingKeys) rebindSealingKey(ctx context.Context, id string, row sealingRow, retiredAt time.Time) (sealingRow, error) {
	key, err := r.privateSealingKey(ctx, id, row)
	if err != nil {
		return sealingRow{}, err
	}
	private, err := key.Bytes()
	if err != nil {
		return sealingRow{}, fmt.Errorf("changing a sealing key: %w", err)
	}
	defer private.Zero()
	wrapper, err := r.sets.Current(ctx, authz.SystemTenant)
	if err != nil {
		return sealingRow{}, err
	}
	row.RetiredAt, row.WrappingVersion = retiredAt, wrapper.Version
	if row.PrivateKey, err = envelope.SealKey(wrapper.Wrapping, row.context(id), private); err != nil {
		return sealingRow{}, fmt.Errorf("changing a sealing key: %w", err)
	}
	return row, nil
}

// Changes reports whether the key is in another state before the change.
func (c *SealingKeyChange) Changes() bool { return !bytes.Equal(c.from, c.to) }

// Put stores the change. Error: fault.Conflict if the key changed meanwhile, or if a key to be
// retired became the current one.
func (c *SealingKeyChange) Put(tx store.Tx) error {
	key := sealingKeyRow(c.Key.ID)
	b, err := tx.Get(key)
	if err != nil {
		return err
	}
	current, err := c.keys.currentSealingKey(tx)
	if err != nil {
		return err
	}
	if !bytes.Equal(b, c.from) || c.Key.State == SealingKeyRetired && c.Key.ID == current {
		return errSealingMoved
	}
	if !c.Changes() {
		return nil
	}
	return tx.Put(key, c.to)
}
