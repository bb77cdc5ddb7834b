package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// foreign are parts of the sentences of the libraries that read the command line. They name no
// remedy, and call things by other names than this program's help.
var foreign = []string{
	"accepts ", "arg(s)", "at least one of the flags", "if any flags in the group", "required flag", "unknown command", "unknown flag",
	"unknown shorthand", "flag needs an argument", "bad flag syntax", "invalid argument", "strconv", "for usage", "unknown help topic",
	"requires at least", "for \"latticekeep",
}

// Every mistake that a command line can have, on every command, is answered in this program's words,
// with the help of the very command, and with the status of a usage error.
func TestEveryMistakeOnEveryCommandLineHasAnAnswerOfOurs(t *testing.T) {
	kinds := make(map[string]int)
	try := func(kind string, c *cobra.Command, says string, args ...string) {
		t.Helper()
		kinds[kind]++
		args = append(strings.Fields(strings.TrimPrefix(c.CommandPath(), "latticekeep")), args...)
		out, err := run(t, args...)
		text := strings.ToLower(fmt.Sprint(err))
		if ExitStatus(err) != 2 || !strings.Contains(text, strings.ToLower(says)) || !strings.HasSuffix(text, fmt.Sprintf(`; run "%s --help"`, c.CommandPath())) || out != "" {
			t.Errorf("%s: %q: status %d, %v; want %q, and how to get help; it printed %q", kind, args, ExitStatus(err), err, says, out)
		}
		for _, f := range foreign {
			if strings.Contains(text, strings.ToLower(f)) {
				t.Errorf("%s: %q: %v has %q", kind, args, err, f)
			}
		}
	}
	eachCommand(Command(), func(c *cobra.Command) {
		try("unknown flag", c, "there is no flag --no-such", "--no-such")
		try("unknown letter", c, "there is no flag -Q", "-Q")
		try("syntax", c, "---x is no flag", "---x")
		if c.HasSubCommands() && c.Name() != "backup" {
			try("unknown command", c, `has no command "no-such"`, "no-such")
			return
		}

		args, variadic := arguments(c)
		switch {
		case len(args) > 0 && !strings.HasPrefix(args[0], "["):
			try("missing argument", c, "needs "+args[0])
			if !variadic {
				try("too many arguments", c, "was given 9 arguments", strings.Fields(strings.Repeat("x ", 9))...)
			}
		case len(args) == 0:
			try("an argument", c, "unexpected argument", "x")
		}
		flags := make(map[string]*pflag.Flag)
		c.InheritedFlags() // brings those of the groups into Flags
		c.Flags().VisitAll(func(f *pflag.Flag) { flags[f.Name] = f })
		given := func(names ...string) (all []string) {
			for _, name := range names {
				all = append(all, "--"+name+"="+valueOf(flags[name]))
			}
			return slices.Concat(all, args)
		}
		var required []string
		groups := map[string]map[string]bool{oneRequired: {}, exclusive: {}}
		for _, name := range slices.Sorted(maps.Keys(flags)) {
			f := flags[name]
			if f.NoOptDefVal == "" {
				try("no value", c, "--"+name+" needs a value", "--"+name)
				if f.Value.Type() != "string" && f.Value.Type() != "stringArray" && f.Value.Type() != "stringSlice" {
					try("no such value", c, "--"+name+` cannot be "x"`, "--"+name+"=x")
				}
			} else {
				try("neither true nor false", c, "--"+name+` cannot be "x"`, "--"+name+"=x")
			}
			if slices.Equal(f.Annotations[cobra.BashCompOneRequiredFlag], []string{"true"}) {
				required = append(required, name)
			}
			for kind := range groups {
				for _, group := range f.Annotations[kind] {
					groups[kind][group] = true
				}
			}
		}
		for _, name := range required {
			try("required flag", c, "--"+name, args...)
		}
		if len(required) > 0 {
			return // reported before groups, which the tests of such commands try
		}
		if len(groups[oneRequired]) > 0 {
			try("one of several", c, "one of --", args...)
		}
		for group := range groups[exclusive] {
			names := strings.Fields(group)
			if slices.ContainsFunc(names, func(n string) bool { return flags[n] == nil }) || len(groups[oneRequired]) > 0 {
				continue
			}
			try("exclusive flags", c, "exclude each other", given(names...)...)
		}
	})
	for _, kind := range []string{"unknown flag", "unknown letter", "syntax", "unknown command", "missing argument", "too many arguments", "an argument", "no value",
		"no such value", "neither true nor false", "required flag", "one of several", "exclusive flags"} {
		if kinds[kind] == 0 {
			t.Errorf("nothing was tried of the kind: %s", kind)
		}
	}

	for _, args := range [][]string{{"help", "no-such"}, {"help", "audit", "no-such"}, {"no-such"}} {
		if _, err := run(t, args...); ExitStatus(err) != 2 || !strings.Contains(fmt.Sprint(err), `has no command "no-such"`) {
			t.Errorf("%q: %v", args, err)
		}
	}
	if out := mustRun(t, "help", "audit", "verify"); out != mustRun(t, "audit", "verify", "--help") {
		t.Errorf("help of a command is not what its --help prints:\n%s", out)
	}
}

// Annotations with which cobra marks groups of flags.
const (
	oneRequired = "cobra_annotation_one_required"
	exclusive   = "cobra_annotation_mutually_exclusive"
)

// arguments returns the arguments that a command's line names before its flags, and whether it takes
// any number of them.
func arguments(c *cobra.Command) (args []string, variadic bool) {
	words := strings.Fields(c.Use)[1:]
	if i := slices.Index(words, "--"); i >= 0 { // a program and its arguments
		words = words[i+1:]
	}
	for _, word := range words {
		if strings.HasPrefix(word, "-") || strings.HasPrefix(word, "(") || strings.HasPrefix(word, "[-") {
			break
		}
		args = append(args, word)
		variadic = variadic || strings.Contains(word, "...")
	}
	return args, variadic
}

// valueOf returns a value that a flag takes.
func valueOf(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "bool":
		return "true"
	case "int":
		if f.Name == "length" {
			return "16" // at least
		}
		return "1"
	case "duration":
		return "1h"
	}
	return "x"
}

// eachCommand calls use with every command.
func eachCommand(cmd *cobra.Command, use func(*cobra.Command)) {
	use(cmd)
	for _, c := range cmd.Commands() {
		eachCommand(c, use)
	}
}
