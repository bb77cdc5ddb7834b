package command

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

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

// Confirm has somebody type one of words before something that cannot be undone. When standard input is no
// terminal, the error says to give --yes.
func Confirm(cmd *cobra.Command, question string, words ...string) error {
	in, ok := terminal(cmd.InOrStdin())
	if !ok {
		return UsageError("nobody is there to confirm it: give --yes")
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s: ", question)
	answer, err := bufio.NewReader(in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("reading the answer: %w", err)
	}
	if !slices.Contains(words, strings.TrimRight(answer, "\r\n")) {
		return UsageError("not confirmed: nothing was done")
	}
	return nil
}

// IsTerminal reports whether a stream is a terminal.
func IsTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
