package seal

import (
	"fmt"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// TestMain lets scripts run the commands of this package as the program latticekeep.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"latticekeep": func() {
		root := &cobra.Command{Use: "latticekeep", SilenceUsage: true, SilenceErrors: true}
		imports := &cobra.Command{Use: "import"}
		imports.AddCommand(NewImportCommand())
		root.AddCommand(NewSealCommand(), NewResealCommand(), imports, NewValidateCommand())
		command.Strict(root)
		if err := root.Execute(); err != nil {
			fmt.Fprintln(os.Stderr, "latticekeep:", err)
			os.Exit(1)
		}
	}})
}
