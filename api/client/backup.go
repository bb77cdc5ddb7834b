package client

import (
	"context"
	"fmt"
	"io"
	"net/http"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// TakeBackup returns a backup while the server makes it, encrypted, for as long as
// ctx allows. The caller reads it to its end and closes it. An end that came early
// shows only in the backup itself: see latticekeep backup and restore.
// ErrInvalid: the recipient is not a post-quantum one of age.
func (v *V2) TakeBackup(ctx context.Context, r v2.BackupRequest) (io.ReadCloser, error) {
	return stream(v.api.TakeBackup(with(ctx, manner{lasting: true}), r))
}

// stream is answer for the operations whose answer is read while it comes.
func stream(r *http.Response, err error) (io.ReadCloser, error) {
	if err != nil {
		return nil, err
	}
	if r.StatusCode == http.StatusOK {
		return r.Body, nil
	}
	_, err = read(r, nil)
	if err == nil {
		err = fmt.Errorf("reading the answer: unexpected status %d", r.StatusCode)
	}
	return nil, err
}
