package command

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/latticekeep/latticekeep/internal/secret"
)

// Prompt asks for a secret in the terminal, which does not show what is typed. ok is false when
// standard input is no terminal, so that nobody is there to be asked.
func Prompt(cmd *cobra.Command, question string) (answer secret.Bytes, ok bool, err error) {
	in, ok := terminal(cmd.InOrStdin())
	if !ok {
		return nil, false, nil
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s: ", question)
	answer, err = term.ReadPassword(int(in.Fd()))
	fmt.Fprintln(cmd.ErrOrStderr())
	return answer, true, err
}

func terminal(r io.Reader) (*os.File, bool) {
	f, ok := r.(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}
