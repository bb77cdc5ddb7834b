package command

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Strict makes cmd and the commands below it refuse a wrong command line, in this program's words and
// with [StatusUsage]. A group of commands refuses a command that it does not
// have, and prints its help without one.
func Strict(cmd *cobra.Command) {
	if !cmd.HasParent() {
		strictHelp(cmd)
		ownFlag(cmd, "version", "v", "print the version of this program")
		// A group's own line says COMMAND already.
		cmd.SetUsageTemplate(strings.NewReplacer("{{if .HasAvailableSubCommands}}\n  {{.CommandPath}} [command]{{end}}", "",
			`Use "{{.CommandPath}} [command] --help" for more information about a command.`, `"{{.CommandPath}} COMMAND --help" prints the help of one of these.`,
		).Replace(cmd.UsageTemplate()))
	}
	ownFlag(cmd, "help", "h", "print this help")
	cmd.DisableFlagsInUseLine = true // they are listed below it
	args, run := checkArguments(cmd.Args), cmd.RunE
	if !cmd.Runnable() {
		cmd.Use += " COMMAND"
		args, run = checkCommand, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return withHelp(cmd, flagError(err)) })
	cmd.Args = func(cmd *cobra.Command, given []string) error {
		err := args(cmd, given)
		if err == nil {
			err = checkFlags(cmd)
		}
		return withHelp(cmd, err)
	}
	cmd.RunE = func(cmd *cobra.Command, given []string) error { return withHelp(cmd, run(cmd, given)) }
	for _, c := range cmd.Commands() {
		Strict(c)
	}
}

// ownFlag defines a flag that cobra would define in its own words.
func ownFlag(cmd *cobra.Command, name, letter, usage string) {
	if name == "version" && cmd.Version == "" {
		return
	}
	cmd.Flags().BoolP(name, letter, false, usage)
	_ = cmd.Flags().SetAnnotation(name, cobra.FlagSetByCobraAnnotation, []string{"true"}) // cannot fail: the flag exists
}

// strictHelp has root's command help refuse a command that does not exist. Cobra's own prints the usage
// of the program, and succeeds.
func strictHelp(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() != "help" {
			continue
		}
		cmd.Use, cmd.Short = "help [COMMAND...]", "Print the help of a command"
		cmd.Long = "Print what --help after the command prints."
		cmd.Args, cmd.Run = cobra.ArbitraryArgs, nil
		cmd.RunE = func(_ *cobra.Command, given []string) error {
			found, rest, err := root.Find(given)
			if err == nil {
				err = checkCommand(found, rest)
			}
			if err != nil {
				return err
			}
			found.InitDefaultHelpFlag() // so that the help names the flag
			return found.Help()
		}
	}
}

// withHelp adds to a usage error how to get help.
func withHelp(cmd *cobra.Command, err error) error {
	if err == nil || Status(err) != StatusUsage {
		return err
	}
	return fmt.Errorf("%w; run \"%s --help\"", err, cmd.CommandPath())
}

// checkCommand fails if a group of commands was given a command that it does not have.
func checkCommand(cmd *cobra.Command, given []string) error {
	if len(given) == 0 {
		return nil
	}
	alike := ""
	cmd.SuggestionsMinimumDistance = 2 // cobra sets it only for a root command that is not runnable
	if names := cmd.SuggestionsFor(given[0]); len(names) > 0 {
		alike = "; did you mean " + strings.Join(names, " or ") + "?"
	}
	return UsageError(fmt.Sprintf("%s has no command %q%s", cmd.CommandPath(), given[0], alike))
}

// checkArguments says in our words what args says in cobra's.
func checkArguments(args cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, given []string) error {
		_, names, _ := strings.Cut(cmd.Use, " ")
		if _, program, ok := strings.Cut(names, " -- "); ok {
			names = program
		}
		var own *StatusError
		err := args(cmd, given)
		switch {
		case err == nil, errors.As(err, &own):
			return err
		case args(cmd, nil) == nil:
			return UsageError(fmt.Sprintf("unexpected argument %q: %s takes flags only", given[0], cmd.CommandPath()))
		}
		return UsageError(fmt.Sprintf("%s needs %s, and was given %d arguments", cmd.CommandPath(), names, len(given)))
	}
}

// checkFlags fails if a flag is empty or missing, or if two exclude each other.
func checkFlags(cmd *cobra.Command) error {
	err := checkNotEmpty(cmd)
	if err == nil {
		err = cmd.ValidateRequiredFlags()
	}
	if err == nil {
		err = cmd.ValidateFlagGroups()
	}
	if err == nil {
		return nil
	}
	text := err.Error()
	switch listed := flagLists.FindAllStringSubmatch(text, -1); {
	case strings.HasPrefix(text, "required flag"):
		names := requiredFlags.FindAllStringSubmatch(text, -1)
		if text = flagNames(names) + " is needed"; len(names) > 1 {
			text = flagNames(names) + " are needed"
		}
	case strings.HasPrefix(text, "at least one"):
		text = "one of " + flagNames(flagWords.FindAllStringSubmatch(listed[0][1], -1)) + " is needed"
	case len(listed) == 2:
		text = flagNames(flagWords.FindAllStringSubmatch(listed[1][1], -1)) + " exclude each other: give one of them"
	}
	return UsageError(text)
}

// Parts of cobra's messages about flags.
var (
	requiredFlags = regexp.MustCompile(`"([^"]+)"`)
	flagLists     = regexp.MustCompile(`\[([^]]*)\]`)
	flagWords     = regexp.MustCompile(`(\S+)`)
)

func flagNames(found [][]string) string {
	var names []string
	for _, f := range found {
		names = append(names, "--"+f[1])
	}
	if n := len(names) - 1; n > 0 {
		return strings.Join(names[:n], ", ") + " and " + names[n]
	}
	return strings.Join(names, "")
}

// checkNotEmpty fails if a flag was given without a value, for example from an unset variable. A flag
// that selects, restricts or pins something must not be ignored silently.
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

// flagError says in our words what pflag says about a flag.
func flagError(err error) error {
	var syntax *pflag.InvalidSyntaxError
	var unknown *pflag.NotExistError
	var missing *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	var parsed *strconv.NumError
	text := err.Error()
	switch {
	case errors.As(err, &syntax):
		text = fmt.Sprintf("%s is no flag: write it as --name or --name=value", syntax.GetSpecifiedFlag())
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		text = fmt.Sprintf("there is no flag --%s", unknown.GetSpecifiedName())
	case errors.As(err, &unknown):
		text = fmt.Sprintf("there is no flag -%s", unknown.GetSpecifiedName())
	case errors.As(err, &missing):
		text = fmt.Sprintf("--%s needs a value", missing.GetFlag().Name)
	case errors.As(err, &invalid):
		text = fmt.Sprintf("--%s cannot be %q: %v", invalid.GetFlag().Name, invalid.GetValue(), invalid.Unwrap())
		if errors.As(err, &parsed) {
			text = fmt.Sprintf("--%s cannot be %q: it takes true or false", invalid.GetFlag().Name, invalid.GetValue())
		}
	}
	return UsageError(text)
}
