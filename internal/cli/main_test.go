package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain lets scripts run the program as the command latticekeep. Neither the program nor a test
// becomes the operator of the cluster in which the tests may run, or reads a profile of their user.
func TestMain(m *testing.M) {
	if err := os.Unsetenv(serviceHost); err != nil {
		panic(err)
	}
	if filepath.Base(os.Args[0]) != "latticekeep" {
		if err := os.Setenv("XDG_CONFIG_HOME", "/nonexistent"); err != nil {
			panic(err)
		}
	}
	testscript.Main(m, map[string]func(){"latticekeep": func() {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM) // as main does
		defer stop()
		if err := Command().ExecuteContext(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "latticekeep:", err)
			os.Exit(ExitStatus(err))
		}
	}})
}
