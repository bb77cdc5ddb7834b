package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
)

// GetBackup returns a backup while the server makes it, for as long as ctx
// allows. The caller reads it to its end and closes it. An end that came early
// shows only in the backup itself: see latticekeep restore.
func (v *V2) GetBackup(ctx context.Context) (io.ReadCloser, error) {
	return stream(v.api.GetBackup(with(ctx, manner{lasting: true})))
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
