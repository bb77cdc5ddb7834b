package transit

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

// VerifyKeys opens the seed of every version of every named key in s, and passes each fault to
// found. A row whose MAC is wrong is passed over. Nothing may write to the store meanwhile. Error:
// fault.Unavailable when the store or the KMS does not answer.
func VerifyKeys(ctx context.Context, s store.Store, keys *keyring.Ring, found func(audit.RowFault)) error {
	t := &Transit{store: s, keys: keys}
	report := func(key []byte, format string, args ...any) {
		found(audit.RowFault{Key: key, Reason: fmt.Sprintf(format, args...)})
	}
	var set *keySet // keys of the tenant that was seen last
	err := audit.ScanAll(ctx, s, store.Prefix([]byte("transit/key/")), func(key, value []byte) error {
		parts := strings.Split(string(key), "/")
		if len(parts) != 4 {
			report(key, "no named key has such a row")
			return nil
		}
		tenant, id := authz.TenantID(parts[2]), parts[3]
		k, err := t.decode(tenant, id, value)
		if err != nil {
			return nil
		}
		if set == nil || set.tenant != tenant {
			if set, err = t.current(ctx, tenant); keyring.Unreachable(err) {
				return err
			} else if err != nil {
				report(key, "the seeds of the named key cannot be opened: the tenant's keys are damaged")
				set = nil
				return nil
			}
		}
		for version := uint32(1); version <= min(k.Version, maxVersions); version++ {
			var seed *seedRow
			err := s.View(ctx, func(rd store.Reader) (err error) {
				seed, err = newestSeed(rd, tenant, id, version)
				return err
			})
			switch {
			case keyring.Unreachable(err):
				return err
			case err != nil || seed == nil:
				report(seedKey(tenant, id, version, set.Version), "the seed of version %d of named key %s is missing or has another key: nothing opens what it encrypted", version, id)
				continue
			}
			switch _, err := set.messageKey(ctx, id, seed); {
			case keyring.Unreachable(err):
				return err
			case err != nil:
				report(seedKey(tenant, id, version, seed.wrapping), "the seed of version %d of named key %s does not open: the row, or the tenant's keys, are damaged", version, id)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("opening named keys: %w", err)
	}
	var last *namedKey // the key that was seen last
	var exists bool
	err = audit.ScanAll(ctx, s, store.Prefix([]byte("transit/seed/")), func(key, _ []byte) error {
		parts := strings.Split(string(key), "/")
		if len(parts) != 6 {
			report(key, "no seed of a named key has such a row")
			return nil
		}
		tenant, id := authz.TenantID(parts[2]), parts[3]
		if last == nil || last.tenant != tenant || last.id != id {
			last = &namedKey{tenant: tenant, id: id}
			err := s.View(ctx, func(rd store.Reader) error {
				k, err := t.get(rd, tenant, id)
				if exists = k != nil || errors.Is(err, fault.Internal); k != nil {
					last = k
				} else if exists {
					last.Version, err = maxVersions, nil // the MAC of the key's row is wrong
				}
				return err
			})
			if err != nil {
				return err
			}
		}
		if version, err := strconv.ParseUint(parts[4], 16, 32); !exists || err != nil || version == 0 || version > uint64(last.Version) {
			report(key, "the row has a seed of a version that named key %q of tenant %q does not have", id, tenant)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading seeds: %w", err)
	}
	return nil
}
