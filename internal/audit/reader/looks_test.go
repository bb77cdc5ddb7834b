package reader

import (
	"context"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// CountDays is Activity with a number of looks. It returns how many are left.
func (rd *Reader) CountDays(ctx context.Context, tenant authz.TenantID, now time.Time, days, looks int) (all []Day, whole bool, left int, err error) {
	err = rd.chain.Store.View(ctx, func(r store.Reader) error {
		c := dayCounter{r: r, tenant: string(tenant), looks: looks, kinds: make(map[uint32]audit.Category)}
		all, whole, err = c.count(rd.chain, now, days)
		left = c.looks
		return err
	})
	return all, whole, left, err
}

const ActivityLooks = activityLooks
