package v2

import (
	"cmp"
	"context"
	"io"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/server/gate"
)

// Backups configures what a backup contains and who may read it.
type Backups struct {
	Store  backup.Source                         // what is backed up
	Format func(context.Context) ([]byte, error) // row of the store's format, as backup.Header takes it
	// KMSKeys returns the key files for a backup, as backup.Write takes them. The caller wipes
	// them. A nil function means that there are none.
	KMSKeys    func(context.Context) ([][]byte, error)
	Recipients []backup.Recipient // allowed recipients; empty allows any
}

// backupAPI implements the endpoint that takes a backup.
type backupAPI struct {
	Backups
	audit     *writer.Log
	guard     *guard.Guard
	keys      *keyring.Ring
	program   string // program version, which the backup states
	now       func() time.Time
	backingUp sync.Mutex // held while a backup is taken
}

var errRecipient = fault.New(fault.Forbidden, "backups go to the recipients in the server's configuration (backup.recipients) only: name one of those")

var errBackingUp = fault.New(fault.Conflict, "another backup is being taken: wait until it is done")

// TakeBackup streams a copy of the store, encrypted to the recipient that the caller names. The
// backup and its recipient are recorded before the first byte is sent, whether or not the last one
// arrives.
//
// This process takes one backup at a time. Replicas do not wait for each other.
func (a *backupAPI) TakeBackup(c *gin.Context) {
	gate.Stream(c, "application/octet-stream", func(ctx context.Context, call *gate.Call) (func(context.Context, io.Writer) error, error) {
		var body api.BackupRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		to, err := backup.ParseRecipient(body.Recipient)
		if err != nil {
			return nil, err
		}
		if len(a.Recipients) > 0 && !slices.ContainsFunc(a.Recipients, func(r backup.Recipient) bool { return r.ID() == to.ID() }) {
			return nil, cmp.Or(a.guard.RecordAttempt(ctx, call.Principal(), authz.BackUp, audit.Denied, "recipient"), errRecipient)
		}
		if !a.backingUp.TryLock() {
			return nil, cmp.Or(a.guard.RecordAttempt(ctx, call.Principal(), authz.BackUp, audit.Failure, "in_progress"), errBackingUp)
		}
		var keys [][]byte
		if a.KMSKeys != nil {
			if keys, err = a.KMSKeys(ctx); err != nil {
				a.backingUp.Unlock()
				return nil, cmp.Or(a.guard.RecordAttempt(ctx, call.Principal(), authz.BackUp, audit.Failure, "no_kms_key"),
					fault.Wrap(fault.Unavailable, "the key file of the KMS, which belongs into the backup, cannot be read: see the server's log", err))
			}
		}
		raised, err := a.Format(ctx)
		if err != nil {
			a.backingUp.Unlock()
			return nil, err
		}
		err = a.guard.Record(ctx, audit.Event{
			Type: audit.BackupTaken, Outcome: audit.Success, Principal: call.Principal(), Resource: audit.Resource{Type: audit.BackupResource},
			Attributes: map[string]string{"recipient": to.ID(), "kms_key": strconv.FormatBool(len(keys) > 0 && len(keys[0]) > 0)},
		})
		if err != nil {
			a.backingUp.Unlock()
			return nil, err
		}
		h := backup.Header{Chain: a.audit.Fingerprint(), Identity: a.keys.Identity(), CreatedAt: a.now(), Program: a.program, Format: raised}
		return func(ctx context.Context, w io.Writer) error {
			defer a.backingUp.Unlock()
			defer func() {
				for _, key := range keys {
					clear(key)
				}
			}()
			return backup.Write(ctx, w, a.Store, h, keys, to, a.keys)
		}, nil
	})
}
