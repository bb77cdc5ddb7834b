// Package cli provides the commands of the program. A command parses its flags and calls one
// function of another package. Groups of commands with their own terms and state are in the
// packages below this one.
package cli

import (
	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/cli/admin"
	"github.com/latticekeep/latticekeep/internal/cli/auditlog"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/cli/importer"
	"github.com/latticekeep/latticekeep/internal/cli/kmsplugin"
	"github.com/latticekeep/latticekeep/internal/cli/login"
	"github.com/latticekeep/latticekeep/internal/cli/pods"
	"github.com/latticekeep/latticekeep/internal/cli/score"
	"github.com/latticekeep/latticekeep/internal/cli/seal"
	"github.com/latticekeep/latticekeep/internal/cli/transfer"
	"github.com/latticekeep/latticekeep/internal/cli/transit"
	"github.com/latticekeep/latticekeep/internal/cli/vault"
	"github.com/latticekeep/latticekeep/internal/memory"
)

// Command returns the program's root command. It writes to the command's own streams, returns
// errors and never ends the process.
func Command() *cobra.Command {
	root := &cobra.Command{
		Use:           "latticekeep",
		Short:         "Quantum-safe credential vault for Kubernetes",
		Long:          "Latticekeep is a quantum-safe credential vault for Kubernetes.\n\n" + command.Statuses,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       buildinfo.Version(),

		PersistentPreRun: func(*cobra.Command, []string) { memory.Tune() },
	}
	root.CompletionOptions.DisableDefaultCmd = true // ours is below
	root.AddCommand(newServerCommand(), seal.NewSealCommand(), seal.NewResealCommand(), importer.NewCommand(seal.NewImportCommand()), seal.NewValidateCommand(), auditlog.NewCommand(),
		admin.NewSealingKeyCommand(), admin.NewKMSCommand(), admin.NewTenantCommand(), admin.NewAPIKeyCommand(), admin.NewUserCommand(), admin.NewAccessCommand(), admin.NewGroupCommand(), admin.NewSettingsCommand(), transfer.NewBackupCommand(), transfer.NewRestoreCommand(), transfer.NewMigrateCommand(), transfer.NewCompactCommand(), newVersionCommand())
	root.AddCommand(login.NewCommand(), login.NewLogoutCommand(), login.NewOpenCommand())
	root.AddCommand(vault.NewCommands()...)
	root.AddCommand(transit.NewCommands()...)
	root.AddCommand(newWebhookCommand(), newCRDCommand(), newUninstallCommand(), score.NewCommand(), auditlog.NewDoctorCommand(app.Diagnose), kmsplugin.NewCommand(), pods.NewProviderCommand(), pods.NewAgentCommand(), newCompletionCommand())
	command.Strict(root)
	completeFiles(root)
	return root
}

// ExitStatus returns the status with which the program ends after a command has returned err.
func ExitStatus(err error) int { return command.Status(err) }
