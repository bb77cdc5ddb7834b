package keyring

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/store"
)

// sealingRow is a key pair for SealedCredential values as it is stored: the
// signed public document, and the private key under the deployment's wrapping
// key.
type sealingRow struct {
	Document        json.RawMessage `json:"document"`
	Suite           envelope.Suite  `json:"suite"`
	WrappingVersion uint32          `json:"wrapping_version"`
	PrivateKey      []byte          `json:"private_key"`
}

var currentSealingRow = []byte("sealing/current")

func sealingKeyRow(id string) []byte { return []byte("sealing/key/" + id) }

func sealingContext(id string) string { return "sealing/" + id }

// NewSealingKey is a freshly made sealing key that is not stored yet.
type NewSealingKey struct {
	ID      string
	row     []byte
	current []byte
}

// NewSealingKey makes a key pair and its signed document. The deployment must
// be stored already, since the private key goes under its wrapping key.
func (r *Ring) NewSealingKey(ctx context.Context, suite envelope.Suite) (*NewSealingKey, error) {
	wrapper, err := r.Current(ctx, authz.SystemTenant)
	if err != nil {
		return nil, fmt.Errorf("making a sealing key: %w", err)
	}
	key, err := envelope.GenerateSealingKey(suite)
	if err != nil {
		return nil, fmt.Errorf("making a sealing key: %w", err)
	}
	private, err := key.Bytes()
	if err != nil {
		return nil, fmt.Errorf("making a sealing key: %w", err)
	}
	defer private.Zero()
	id := key.Public().ID()
	blob, err := envelope.SealKey(wrapper.Wrapping, sealingContext(id), private)
	if err != nil {
		return nil, fmt.Errorf("making a sealing key: %w", err)
	}
	document, err := sealing.Sign(r.identity, key.Public(), r.config.Now())
	if err != nil {
		return nil, fmt.Errorf("making a sealing key: %w", err)
	}
	public, err := document.MarshalJSON()
	if err != nil {
		return nil, fmt.Errorf("making a sealing key: %w", err)
	}
	row, err := json.Marshal(sealingRow{public, suite, wrapper.Version, blob})
	if err != nil {
		return nil, fmt.Errorf("making a sealing key: %w", err)
	}
	return &NewSealingKey{id, row, r.SealRow(currentSealingRow, []byte(id))}, nil
}

// Put stores the key and makes it the one that is published. Earlier ones keep
// opening.
func (k *NewSealingKey) Put(tx store.Tx) error {
	if err := tx.Put(sealingKeyRow(k.ID), k.row); err != nil {
		return err
	}
	return tx.Put(currentSealingRow, k.current)
}

// SealingDocument returns the signed public document of the newest sealing
// key. Error: fault.NotFound while there is none.
func (r *Ring) SealingDocument(ctx context.Context) (sealing.Document, error) {
	var id string
	err := r.store.View(ctx, func(rd store.Reader) error {
		b, err := rd.Get(currentSealingRow)
		if err == nil {
			b, err = r.OpenRow(currentSealingRow, b)
		}
		id = string(b)
		return err
	})
	if err != nil {
		return sealing.Document{}, fmt.Errorf("reading the current sealing key: %w", err)
	}
	row, err := r.sealingRow(ctx, id)
	if err != nil {
		return sealing.Document{}, err
	}
	// Anyone may ask for the document, so its signature is not verified each time.
	r.mu.Lock()
	known := r.published
	r.mu.Unlock()
	if known != nil && known.id == id && bytes.Equal(known.encoded, row.Document) {
		return known.document, nil
	}
	document, err := sealing.ParseDocument(row.Document)
	if err != nil {
		return sealing.Document{}, fault.Wrap(fault.Internal, fault.Message(errDamaged), err)
	}
	// Whoever can write the store could have put a document of their own there.
	if document.Identity() != r.Identity().ID() || document.Key().ID() != id {
		return sealing.Document{}, errDamaged
	}
	r.mu.Lock()
	r.published = &published{id, row.Document, document}
	r.mu.Unlock()
	return document, nil
}

// published is the last document that was found to be ours.
type published struct {
	id       string
	encoded  []byte
	document sealing.Document
}

// SealingKey returns the private sealing key with that id, newest or not.
// Errors: fault.NotFound for an unknown id, fault.Unavailable when the KMS
// does not answer.
func (r *Ring) SealingKey(ctx context.Context, id string) (*envelope.SealingKey, error) {
	row, err := r.sealingRow(ctx, id)
	if err != nil {
		return nil, err
	}
	wrapper, err := r.Version(ctx, authz.SystemTenant, row.WrappingVersion)
	if err != nil {
		return nil, err
	}
	wrapper.mu.Lock()
	defer wrapper.mu.Unlock()
	if key, ok := wrapper.sealing[id]; ok {
		return key, nil
	}
	private, err := envelope.OpenKey(wrapper.Wrapping, sealingContext(id), row.PrivateKey)
	if err != nil {
		return nil, errDamaged
	}
	defer private.Zero()
	key, err := envelope.ParseSealingKey(row.Suite, private)
	if err != nil || key.Public().ID() != id {
		return nil, errDamaged
	}
	wrapper.sealing[id] = key
	return key, nil
}

func (r *Ring) sealingRow(ctx context.Context, id string) (row sealingRow, err error) {
	err = r.store.View(ctx, func(rd store.Reader) error {
		b, err := rd.Get(sealingKeyRow(id))
		if err != nil {
			return err
		}
		if b == nil {
			return fault.New(fault.NotFound, "this deployment has no sealing key with that id: seal the values again with its current key")
		}
		if err := json.Unmarshal(b, &row); err != nil {
			return errDamaged
		}
		return nil
	})
	return row, err
}
