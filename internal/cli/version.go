package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

func newVersionCommand() *cobra.Command {
	var formats, asJSON bool
	cmd := &cobra.Command{
		Use: "version", Short: "Print the version of this program", Args: cobra.NoArgs,
		Long: `Print the version, and with --json the commit, its time, whether the checkout was
modified, the version of Go, the platform, and the newest format of a store that this
program reads and writes. A program that was not built from a checkout has no commit.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			build := buildinfo.Read()
			if asJSON {
				return command.PrintJSON(cmd.OutOrStdout(), struct {
					buildinfo.Info
					StoreFormats storeFormats `json:"store_formats"`
				}{build, storeFormats{format.Reads, format.Writes}})
			}
			text := build.Version + "\n"
			if formats {
				text += fmt.Sprintf("reads store formats: 1 to %d\nwrites store formats: 1 to %d\n", format.Reads, format.Writes)
			}
			_, err := fmt.Fprint(cmd.OutOrStdout(), text)
			return err
		},
	}
	cmd.Flags().BoolVar(&formats, "formats", false, "also print which formats of a store this program reads and writes")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the commit and all else that is known of the build, as JSON")
	return cmd
}

// storeFormats are the newest formats; a program reads and writes all older ones too.
type storeFormats struct {
	Reads  int `json:"reads"`
	Writes int `json:"writes"`
}
