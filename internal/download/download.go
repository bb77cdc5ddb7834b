// Package download reads long answers of a server, and gives up on a server that stalls.
package download

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// stallTimeout is how long a server may send no byte.
const stallTimeout = 2 * time.Minute

var errStalled = errors.New("the server has sent nothing for two minutes: try again")

// download is the body of an answer.
type download struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	stall  *time.Timer
	body   io.ReadCloser
}

// Open returns the body that open returns. Reading fails when the server sends nothing for
// two minutes. Closing the body ends the context that open was given.
func Open(ctx context.Context, open func(context.Context) (io.ReadCloser, error)) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	stall := time.AfterFunc(stallTimeout, func() { cancel(errStalled) })
	body, err := open(ctx)
	if err != nil {
		stall.Stop()
		err = errors.Join(err, context.Cause(ctx))
		cancel(nil)
		return nil, err
	}
	return &download{ctx, cancel, stall, body}, nil
}

// Read implements io.Reader.
func (d *download) Read(b []byte) (int, error) {
	n, err := d.body.Read(b)
	if n > 0 {
		d.stall.Reset(stallTimeout)
	}
	if err != nil && err != io.EOF {
		err = errors.Join(fmt.Errorf("the server's answer was cut off; the server's log may say why: %w", err), context.Cause(d.ctx))
	}
	return n, err
}

// Close implements io.Closer.
func (d *download) Close() error {
	d.stall.Stop()
	d.cancel(nil)
	return d.body.Close()
}
