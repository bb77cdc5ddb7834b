package transit

import (
	"context"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/keyring"
)

// keySet is a tenant's keys as one operation uses them: the newest, and the
// earlier versions that something names. Each version is asked for once, also
// when the ring caches nothing and a batch names it a hundred times. It belongs
// to its operation, and is not safe for concurrent use.
type keySet struct {
	*keyring.Keys // the newest

	ring    *keyring.Ring
	tenant  authz.TenantID
	earlier map[uint32]keysOrError
}

type keysOrError struct {
	keys *keyring.Keys
	err  error
}

// current returns the tenant's newest keys.
func (t *Transit) current(ctx context.Context, tenant authz.TenantID) (*keySet, error) {
	keys, err := t.keys.Current(ctx, tenant)
	if err != nil {
		return nil, fmt.Errorf("unwrapping the tenant's keys: %w", err)
	}
	return &keySet{keys, t.keys, tenant, make(map[uint32]keysOrError)}, nil
}

// at returns one version of the tenant's keys. What was refused once is refused
// for the rest of the operation.
func (s *keySet) at(ctx context.Context, version uint32) (*keyring.Keys, error) {
	if version == s.Version {
		return s.Keys, nil
	}
	known, ok := s.earlier[version]
	if !ok {
		known.keys, known.err = s.ring.Version(ctx, s.tenant, version)
		s.earlier[version] = known
	}
	if known.err != nil {
		return nil, fmt.Errorf("unwrapping earlier keys: %w", known.err)
	}
	return known.keys, nil
}

// messageKey opens a seed with the wrapping key that it names.
func (s *keySet) messageKey(ctx context.Context, id string, seed *seedRow) (*envelope.KEMKey, error) {
	wrapper, err := s.at(ctx, seed.wrapping)
	if err != nil {
		return nil, err
	}
	return wrapper.MessageKey(seedContext(s.tenant, id, seed.version), seed.blob)
}
