package transit

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Survey returns all of a tenant's keys, oldest first, without a principal and
// without an entry: for what the service itself says of them. Damaged rows are
// left out. Error: fault.Unavailable.
func (t *Transit) Survey(ctx context.Context, tenant authz.TenantID) ([]Key, error) {
	all, _, err := t.survey(ctx, tenant)
	return all, err
}

func (t *Transit) survey(ctx context.Context, tenant authz.TenantID) (all []Key, damaged int, err error) {
	err = t.store.View(ctx, func(rd store.Reader) error {
		all, damaged = nil, 0
		prefix := keysPrefix(tenant)
		return rd.Scan(store.Prefix(prefix), func(key, value []byte) bool {
			k, err := t.decode(tenant, string(key[len(prefix):]), value)
			if err != nil {
				damaged++
				return true
			}
			all = append(all, k.public())
			return true
		})
	})
	if err != nil {
		return nil, 0, fmt.Errorf("listing keys: %w", err)
	}
	slices.SortFunc(all, func(a, b Key) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return all, damaged, nil
}
