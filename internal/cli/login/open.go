package login

import (
	"fmt"
	"os/exec"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// NewOpenCommand returns the command that shows where the dashboard is.
func NewOpenCommand() *cobra.Command {
	var r command.Server
	cmd := &cobra.Command{
		Use:   "open",
		Short: "Print the address of the dashboard, and open it in a browser",
		Long: `Print the address of the dashboard. In a terminal it is also opened in a browser;
nobody is signed in by that.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := r.Locate(); err != nil {
				return err
			}
			if r.URL == "" {
				return command.UsageError("no server: set --url or " + command.URLVariable + ", or run latticekeep login")
			}
			// A browser opens other things, too, so only what the client would call goes to it.
			if _, err := client.New(r.URL); err != nil {
				return &command.StatusError{Status: command.StatusUsage, Err: err}
			}
			if _, err := fmt.Fprintln(cmd.OutOrStdout(), command.Printable(r.URL)); err != nil || !command.IsTerminal(cmd.OutOrStdout()) {
				return err
			}
			browser := "xdg-open"
			if runtime.GOOS == "darwin" {
				browser = "open"
			}
			if err := exec.CommandContext(cmd.Context(), browser, r.URL).Run(); err != nil {
				_, err = fmt.Fprintln(cmd.ErrOrStderr(), "no browser could be opened: open the address yourself")
				return err
			}
			return nil
		},
	}
	r.RegisterAddress(cmd, cmd.Flags(), "base URL of the server")
	return cmd
}
