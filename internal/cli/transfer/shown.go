package transfer

import (
	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/progress"
)

// shown is the progress of a command, once the command has started.
type shown struct {
	asked bool // although there is no terminal
	*progress.Progress
}

func (s *shown) register(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&s.asked, "progress", false, "show progress although standard error is no terminal")
}

func (s *shown) start(cmd *cobra.Command) { s.Progress = progress.New(cmd.ErrOrStderr(), s.asked) }
