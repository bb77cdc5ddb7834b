package v2

import (
	"cmp"
	"context"
	"io"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/server/gate"
)

var errBackingUp = fault.New(fault.Conflict, "another backup is being taken: wait until it is done")

// GetBackup answers a copy of the store while it is being made. That it was
// taken is recorded before the first byte leaves, whether or not the last one
// arrives.
func (a *API) GetBackup(c *gin.Context) {
	gate.Stream(c, "application/octet-stream", func(ctx context.Context, call *gate.Call) (func(context.Context, io.Writer) error, error) {
		if !a.backingUp.TryLock() {
			return nil, cmp.Or(a.Audit.Attempt(ctx, call.Principal(), authz.BackUp, audit.Failure, "in_progress"), errBackingUp)
		}
		err := a.Audit.Record(ctx, audit.Event{
			Type: audit.BackupTaken, Outcome: audit.Success, Principal: call.Principal(), Resource: audit.Resource{Type: audit.BackupResource},
		})
		if err != nil {
			a.backingUp.Unlock()
			return nil, err
		}
		h := backup.Header{Chain: a.Audit.Fingerprint(), Identity: a.Keys.Identity(), CreatedAt: a.Now(), Program: a.Program}
		return func(ctx context.Context, w io.Writer) error {
			defer a.backingUp.Unlock()
			return backup.Write(ctx, w, a.Store, h, a.Keys.SignBackup)
		}, nil
	})
}
