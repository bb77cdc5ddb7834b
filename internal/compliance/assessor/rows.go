package assessor

import (
	"bytes"
	"compress/flate"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/store"
)

// evidenceRows stores evidence. All rows are under the keyring's MAC. One row per tenant holds the
// newest evidence; further rows hold the milestones, which are kept for good under their sequence.
// Each of these rows holds the sequence and the packed evidence, which may be megabytes. One more
// row holds only the sequence of the newest evidence, so that a comparison need not read the
// evidence.
type evidenceRows struct {
	store  store.Store
	seal   func(key, content []byte) []byte
	unseal func(key, row []byte) ([]byte, error)
	logger *slog.Logger
}

func stateKey(tenant authz.TenantID) []byte { return []byte("compliance/state/" + string(tenant)) }

func headKey(tenant authz.TenantID) []byte { return []byte("compliance/head/" + string(tenant)) }

func milestonePrefix(tenant authz.TenantID) []byte { return append(stateKey(tenant), '/') }

func milestoneKey(tenant authz.TenantID, sequence uint64) []byte {
	return binary.BigEndian.AppendUint64(milestonePrefix(tenant), sequence)
}

// maxEncoded bounds unpacked evidence, in bytes.
const maxEncoded = 1 << 30

// pack compresses encoded evidence, which is mostly names of members and hexadecimal.
func pack(e *compliance.Evidence) ([]byte, error) {
	encoded, err := e.Encode()
	if err != nil {
		return nil, err
	}
	var packed bytes.Buffer
	w, err := flate.NewWriter(&packed, flate.BestSpeed)
	if err == nil {
		_, err = w.Write(encoded)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, fmt.Errorf("compressing evidence: %w", err)
	}
	return packed.Bytes(), nil
}

func unpack(packed []byte) (*compliance.Evidence, error) {
	encoded, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(packed)), maxEncoded))
	if err != nil {
		return nil, errors.Join(compliance.ErrForeignEvidence, err)
	}
	return compliance.DecodeEvidence(encoded)
}

func (r *evidenceRows) encode(key []byte, sequence uint64, packed []byte) []byte {
	content := binary.BigEndian.AppendUint64(make([]byte, 0, 8+len(packed)), sequence)
	return r.seal(key, append(content, packed...))
}

// open returns the sequence and the packed evidence of a row.
func (r *evidenceRows) open(key, row []byte) (sequence uint64, packed []byte, err error) {
	content, err := r.unseal(key, row)
	if err != nil || len(content) < 8 {
		return 0, nil, errors.Join(compliance.ErrForeignEvidence, err)
	}
	return binary.BigEndian.Uint64(content), content[8:], nil
}

// decode returns the evidence of a row, or nil for an unusable row, whose evidence is then gathered
// again.
func (r *evidenceRows) decode(ctx context.Context, key, row []byte) *compliance.Evidence {
	sequence, packed, err := r.open(key, row)
	if err == nil {
		var e *compliance.Evidence
		if e, err = unpack(packed); err == nil && e.Last.Sequence == sequence {
			return e
		}
	}
	r.logger.WarnContext(ctx, "ignoring stored evidence that is damaged; gathering it anew", "error", err)
	return nil
}

// load returns the newest evidence of a tenant, or nil when there is no usable one.
func (r *evidenceRows) load(ctx context.Context, tenant authz.TenantID) (e *compliance.Evidence, err error) {
	key := stateKey(tenant)
	var row []byte
	err = r.store.View(ctx, func(rd store.Reader) error { // a view has two seconds; decoding may take longer
		row, err = rd.Get(key)
		row = bytes.Clone(row)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading stored evidence: %w", err)
	}
	if row == nil {
		return nil, nil
	}
	return r.decode(ctx, key, row), nil
}

// loadBefore returns the newest milestone at or before the sequence, or empty evidence when there
// is none.
func (r *evidenceRows) loadBefore(ctx context.Context, tenant authz.TenantID, sequence uint64) (*compliance.Evidence, error) {
	rng := store.Prefix(milestonePrefix(tenant))
	rng.To, rng.Reverse = milestoneKey(tenant, sequence+1), true
	for {
		var key, row []byte
		err := r.store.View(ctx, func(rd store.Reader) error {
			return rd.Scan(rng, func(k, v []byte) bool {
				key, row = bytes.Clone(k), bytes.Clone(v)
				return false
			})
		})
		if err != nil {
			return nil, fmt.Errorf("reading stored evidence: %w", err)
		}
		if key == nil {
			return compliance.NewEvidence(), nil
		}
		if e := r.decode(ctx, key, row); e != nil {
			return e, nil
		}
		rng.To = key
	}
}

// save stores the newest evidence of a tenant and its packed milestones, which are keyed by
// sequence. It keeps stored evidence that is newer, because the entries after older evidence may
// have been archived.
func (r *evidenceRows) save(ctx context.Context, tenant authz.TenantID, e *compliance.Evidence, milestones map[uint64][]byte) error {
	packed, err := pack(e)
	if err != nil {
		return err
	}
	// All rows are made before the closure, because other writers wait for it.
	key, head := stateKey(tenant), headKey(tenant)
	row, position := r.encode(key, e.Last.Sequence, packed), r.encode(head, e.Last.Sequence, nil)
	rows := make(map[string][]byte, len(milestones))
	for sequence, packed := range milestones {
		at := milestoneKey(tenant, sequence)
		rows[string(at)] = r.encode(at, sequence, packed)
	}
	err = r.store.Update(ctx, func(tx store.Tx) error {
		for at, row := range rows {
			if err := tx.Put([]byte(at), row); err != nil {
				return err
			}
		}
		before, err := tx.Get(head)
		if err != nil {
			return err
		}
		if before != nil {
			// Evidence with the same sequence is stored again, because the stored row may be
			// damaged.
			if sequence, _, err := r.open(head, before); err == nil && sequence > e.Last.Sequence {
				return nil
			}
		}
		return errors.Join(tx.Put(key, row), tx.Put(head, position))
	})
	if err != nil {
		return fmt.Errorf("storing evidence: %w", err)
	}
	return nil
}

// prune removes the milestones of a tenant before the last one at `archived` or earlier, because
// nothing continues from them any more.
func (r *evidenceRows) prune(ctx context.Context, tenant authz.TenantID, archived uint64) error {
	var old [][]byte
	err := r.store.View(ctx, func(rd store.Reader) error {
		rng := store.Prefix(milestonePrefix(tenant))
		rng.To, rng.Reverse = milestoneKey(tenant, archived+1), true
		return rd.Scan(rng, func(key, _ []byte) bool {
			old = append(old, bytes.Clone(key))
			return true
		})
	})
	if err == nil && len(old) > 1 {
		err = r.store.Update(ctx, func(tx store.Tx) error {
			for _, key := range old[1:] {
				if err := tx.Delete(key); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("removing old evidence: %w", err)
	}
	return nil
}
