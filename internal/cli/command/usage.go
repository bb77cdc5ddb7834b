package command

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Strict makes cmd and the commands below it refuse what does not belong on a command line. A group
// of commands refuses a command that it does not have, and prints its help without one.
func Strict(cmd *cobra.Command) {
	args := cmd.Args
	if !cmd.Runnable() {
		cmd.DisableFlagsInUseLine = true
		cmd.Use += " COMMAND"
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		args = known
	}
	cmd.Args = func(cmd *cobra.Command, given []string) error {
		err := args(cmd, given)
		if err == nil {
			err = checkNotEmpty(cmd)
		}
		if err != nil {
			return &StatusError{Status: StatusUsage, Err: err}
		}
		return nil
	}
	for _, c := range cmd.Commands() {
		Strict(c)
	}
}

// known fails if a group of commands was given a command that it does not have.
func known(cmd *cobra.Command, given []string) error {
	if len(given) == 0 {
		return nil
	}
	alike := ""
	cmd.SuggestionsMinimumDistance = 2 // cobra sets it only for a root command that is not runnable
	if names := cmd.SuggestionsFor(given[0]); len(names) > 0 {
		alike = "; did you mean " + strings.Join(names, " or ") + "?"
	}
	return fmt.Errorf("%s has no command %q%s", cmd.CommandPath(), given[0], alike)
}

// checkNotEmpty fails if a flag was given without a value, for example from an unset variable. What
// it would select, restrict or pin must not be left out silently.
func checkNotEmpty(cmd *cobra.Command) (err error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		empty := f.Value.String() == ""
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values := list.GetSlice()
			empty = len(values) == 0 || slices.Contains(values, "")
		}
		if empty && err == nil {
			err = fmt.Errorf("--%s is empty: give it a value, or leave it out", f.Name)
		}
	})
	return err
}
