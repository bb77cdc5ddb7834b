// Package download reads long responses of a server, and gives up when the server stalls.
package download

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// stallTimeout is the longest time without a byte from the server.
const stallTimeout = 2 * time.Minute

var errStalled = errors.New("the server has sent nothing for two minutes: try again")

// download is a response body with a stall timeout.
type download struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	stall  *time.Timer
	body   io.ReadCloser
}

// Open calls open and returns its body. Reading fails when the server sends nothing for two
// minutes. Closing the body cancels the context that open received.
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
	if err != nil && !errors.Is(err, io.EOF) {
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
