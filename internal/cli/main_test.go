package cli

import (
	"fmt"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain lets scripts run the program as the command latticekeep. Neither
// that nor a test is the operator of the cluster that it may run in.
func TestMain(m *testing.M) {
	if err := os.Unsetenv(serviceHost); err != nil {
		panic(err)
	}
	testscript.Main(m, map[string]func(){"latticekeep": func() {
		if err := Command().Execute(); err != nil {
			fmt.Fprintln(os.Stderr, "latticekeep:", err)
			os.Exit(1)
		}
	}})
}
