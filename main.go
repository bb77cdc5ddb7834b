// Latticekeep is a quantum-safe credential vault for Kubernetes: an operator
// and an HTTP service in one binary.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/latticekeep/latticekeep/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := cli.Command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "latticekeep:", err)
		os.Exit(cli.ExitStatus(err))
	}
}
