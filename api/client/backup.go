package client

import (
	"context"
	"io"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// TakeBackup returns a backup while the server makes it, encrypted, for as long as
// ctx allows. The caller reads it to its end and closes it. An end that came early
// shows only in the backup itself: see latticekeep backup and restore.
// ErrInvalid: the recipient is not a post-quantum one of age.
func (v *V2) TakeBackup(ctx context.Context, r v2.BackupRequest) (io.ReadCloser, error) {
	return v.transport.stream(ctx, post("/api/v2/system/backup", r).lasting())
}
