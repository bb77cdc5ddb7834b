package app

import (
	"fmt"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain lets scripts run the program as the command latticekeep.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"latticekeep": func() {
		if err := Command().Execute(); err != nil {
			fmt.Fprintln(os.Stderr, "latticekeep:", err)
			os.Exit(1)
		}
	}})
}
