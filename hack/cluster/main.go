// Command cluster is `make cluster`: it starts etcd, kube-apiserver and latticekeep with its
// operator. It takes a credential from a manifest to an unsealed value and a verified audit chain,
// prints each step and the commands to try next, and stays up until it is interrupted. However it
// ends, no process and no file of it remains.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: cluster PATH-OF-LATTICEKEEP (or: make cluster)")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := run(ctx, os.Args[1], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

// run returns nil after an interruption.
func run(ctx context.Context, binary string, out io.Writer) error {
	c, err := start(ctx, binary, out)
	if err == nil {
		err = c.prove(ctx)
	}
	if err == nil {
		c.explain()
		select {
		case <-ctx.Done():
		case <-c.server.Done():
			err = fmt.Errorf("latticekeep ended: %s", c.logTail())
		}
	}
	if ctx.Err() != nil {
		fmt.Fprintln(out, "\nstopping…")
		err = nil // an interruption is no error
	}
	return errors.Join(err, c.stop())
}
