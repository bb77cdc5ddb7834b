package keyring

import (
	"bytes"
	"context"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// PublicKey is the public half of one version of a tenant's signing keys, as it
// is published: its encoding and the id of that, and nothing parsed.
type PublicKey struct {
	Version uint32
	ID      string
	Bytes   []byte // 1952
}

// publicRow holds a public signing key under the row MAC, so that publishing all
// of them unwraps none.
func publicRow(owner authz.TenantID, version uint32) []byte { return keyRow(owner, version, "public") }

// PublicKeys returns the public keys of every version of a tenant's signing
// keys, newest first. Errors as for [Ring.Current], and fault.Internal for a row
// that is not ours.
func (r *Ring) PublicKeys(ctx context.Context, owner authz.TenantID) ([]PublicKey, error) {
	var rows [][]byte // newest first; nil where a release before these rows made the set
	err := r.store.View(ctx, func(rd store.Reader) error {
		current, err := currentVersion(rd, owner)
		if err != nil {
			return err
		}
		for version := current; version > 0; version-- {
			key := publicRow(owner, version)
			b, err := rd.Get(key)
			if err == nil {
				b, err = r.OpenRow(key, b)
			}
			if err != nil {
				return err
			}
			rows = append(rows, bytes.Clone(b))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading public keys: %w", err)
	}
	if len(rows) == 0 {
		return nil, fault.New(fault.NotFound, "the tenant has no keys")
	}
	keys := make([]PublicKey, len(rows))
	for i, row := range rows {
		if keys[i], err = r.publicKey(ctx, owner, uint32(len(rows)-i), row); err != nil {
			return nil, err
		}
	}
	return keys, nil
}

func (r *Ring) publicKey(ctx context.Context, owner authz.TenantID, version uint32, row []byte) (PublicKey, error) {
	if row == nil {
		keys, err := r.Version(ctx, owner, version)
		if err != nil {
			return PublicKey{}, err
		}
		row = keys.Signing.Public().Bytes()
	}
	id, err := dualsig.PublicKeyID(row)
	if err != nil {
		return PublicKey{}, errDamaged
	}
	return PublicKey{version, id, row}, nil
}
