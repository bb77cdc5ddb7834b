package client

import (
	"context"
	"io"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// TakeBackup returns an encrypted backup while the server makes it, for as long as ctx allows. The
// caller must read it to the end and close it. Only the backup itself shows that it was cut short:
// see latticekeep backup and restore. ErrInvalid: the recipient is not a post-quantum one of age.
func (v *V2) TakeBackup(ctx context.Context, r v2.BackupRequest) (io.ReadCloser, error) {
	return v.transport.stream(ctx, post("/api/v2/system/backup", r).lasting())
}
