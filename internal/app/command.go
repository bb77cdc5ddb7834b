// Package app wires the parts together and is the only package that does. It
// holds the commands of the program; each parses its flags and calls one
// function.
package app

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// Command returns the program's root command. It writes to the command's own
// streams, returns its errors and never ends the process.
func Command() *cobra.Command {
	root := &cobra.Command{
		Use:           "latticekeep",
		Short:         "Quantum-safe credential vault for Kubernetes",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version(),
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(newServerCommand(), newSealCommand(), newResealCommand(), newImportCommand(), newValidateCommand(), newAuditCommand(),
		newSealingKeyCommand(), newKMSCommand(), newTenantCommand(), newAPIKeyCommand(), newUserCommand(), newBackupCommand(), newRestoreCommand(), newMigrateCommand(), newVersionCommand())
	root.AddCommand(newWebhookCommand(), newUninstallCommand(), newComplianceCommand())
	return root
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version of this program", Args: cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), version()) },
	}
}

// refuseEmpty fails when one of the flags was given without a value, as by an
// unset variable: a pin that pins nothing must not look like one.
func refuseEmpty(cmd *cobra.Command, flags ...string) error {
	for _, name := range flags {
		if f := cmd.Flags().Lookup(name); f.Changed && f.Value.String() == "" {
			return fmt.Errorf("--%s is empty: give it a value, or leave it out", name)
		}
	}
	return nil
}

// version returns the module's version, or the commit of a build from a
// checkout.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = s.Value
		}
	}
	if v == "" {
		return "unknown"
	}
	return v
}
