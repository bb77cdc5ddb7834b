package vault

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func newRunCommand() *cobra.Command {
	var r command.Server
	var names []string
	cmd := &cobra.Command{
		Use:   "run [--env-from NAME]... -- COMMAND [ARGUMENT]...",
		Short: "Run a program with the values of credentials in its environment",
		Long: `Run a program whose environment has the values of credentials, under their keys, and
what this process has in its own, but for LATTICEKEEP_API_KEY. Of the same key in
several the last one counts. Nothing is written to disk.

Whoever may write the credential chooses variables of the program, and some of those run
code of theirs. The best known are refused: PATH, HOME, EDITOR, LD_PRELOAD, NODE_OPTIONS,
PYTHONPATH and their like. That list is not complete, since each program has variables of
its own: give run only credentials whose writers you trust.

The program takes the place of this process: it gets all signals, and its exit status
is what the shell sees. The API key needs the scope vault:read.`,
		Example: `  latticekeep run --env-from shop/db --env-from shop/mail -- ./server --listen :8080`,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := exec.LookPath(args[0])
			if err != nil {
				return command.UsageError("there is no program " + command.Printable(args[0]) + " that can be run")
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			added := make(map[string]string)
			for _, name := range names {
				o, err := open(cmd.Context(), c, name)
				if err != nil {
					return err
				}
				defer o.values.zero()
				for key, value := range o.values {
					if steers.MatchString(key) {
						return fmt.Errorf("%s in %s would change which code the program runs: give the value another key", key, command.Printable(name))
					}
					if bytes.IndexByte(value, 0) >= 0 {
						return fmt.Errorf("the value of %s in %s has a zero byte, which no environment can hold", key, command.Printable(name))
					}
					added[key] = string(value)
				}
			}
			err = syscall.Exec(path, args, command.Environment(added)) // returns only if it fails
			if errors.Is(err, syscall.E2BIG) {
				return errors.New("the values are too large for an environment: have the program read them with latticekeep get")
			}
			return fmt.Errorf("running %s: %w", command.Printable(args[0]), err)
		},
	}
	r.RegisterConnection(cmd)
	cmd.Flags().StringArrayVar(&names, "env-from", nil, "credential whose values are in the environment; may be repeated")
	_ = cmd.RegisterFlagCompletionFunc("env-from", func(cmd *cobra.Command, _ []string, begin string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return namesLike(cmd, &r, begin), cobra.ShellCompDirectiveNoFileComp
	}) // cannot fail: the flag exists
	_ = cmd.MarkFlagRequired("env-from") // cannot fail: the flag exists
	cmd.Flags().SetInterspersed(false)   // what follows the program is the program's
	return cmd
}

// steers matches variables by which loaders, shells, interpreters and common programs find code to run,
// and those of this program. It cannot be complete. Common settings that run nothing, such as NODE_ENV,
// JAVA_HOME and HTTPS_PROXY, are for credentials to have.
var steers = regexp.MustCompile(`^(LD_.*|DYLD_.*|GLIBC_TUNABLES|GCONV_PATH|LATTICEKEEP_.*|PATH|HOME|SHELL|IFS|ENV|CDPATH|BASH_ENV|BASH_FUNC_.*|SHELLOPTS|BASHOPTS|PS4|PROMPT_COMMAND|ZDOTDIR|` +
	`PAGER|[A-Z]+_PAGER|LESSOPEN|LESSCLOSE|EDITOR|[A-Z_]*_EDITOR|VISUAL|BROWSER|` +
	`GIT_(SSH.*|EXEC_PATH|CONFIG.*|ASKPASS|EXTERNAL_DIFF|PROXY_COMMAND|TEMPLATE_DIR|DIR|WORK_TREE)|SSH_ASKPASS|SUDO_ASKPASS|` +
	`NODE_(OPTIONS|PATH|REPL_EXTERNAL_MODULE)|(?i:npm_config_.*)|PYTHON(PATH|HOME|STARTUP|USERBASE|EXECUTABLE|BREAKPOINT|WARNINGS|PLATLIBDIR|PYCACHEPREFIX)|` +
	`PERL(LIB|5.*)|RUBY(LIB|OPT|PATH)|GEM_(HOME|PATH)|BUNDLE_(GEMFILE|PATH|BIN_PATH)|LUA_(PATH|CPATH|INIT).*|PHPRC|PHP_INI_SCAN_DIR|` +
	`JAVA_TOOL_OPTIONS|_JAVA_OPTIONS|JDK_JAVA_OPTIONS|MAVEN_OPTS|PSQLRC|SSLKEYLOGFILE|CLASSPATH|DOTNET_(STARTUP_HOOKS|ADDITIONAL_DEPS|SHARED_STORE)|CORECLR_.*|OPENSSL_(CONF|MODULES|ENGINES))$`)

func newEnvCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "env", Short: "Read and write .env files"}
	cmd.AddCommand(newPullCommand(), newPushCommand())
	return cmd
}

func newPullCommand() *cobra.Command {
	var r command.Server
	cmd := &cobra.Command{
		Use:   "pull NAME",
		Short: "Print a credential as a .env file",
		Long: `Print the values of a credential as lines of KEY=VALUE, in quotes where a shell or
the usual libraries need them: latticekeep get NAME -o env. Without a file there is
nothing to lose: latticekeep run needs none. The API key needs the scope vault:read.`,
		Example: `  (umask 077 && latticekeep env pull shop/db >.env)`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			o, err := open(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			defer o.values.zero()
			return o.printEnv(cmd.OutOrStdout(), args[0])
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	return cmd
}

func newPushCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var t target
	cmd := &cobra.Command{
		Use:   "push NAME",
		Short: "Store a .env file from standard input as a credential",
		Long: `Store the KEY=VALUE lines of standard input as a credential, in place of ALL values
that it had; --keep keeps those of other keys. Comments, an "export" and quotes are
understood, and nothing is expanded: $NAME is text. A line that cannot be read is
named by its number, and nothing is stored. It is latticekeep put NAME
--from-env-file -. The API key needs the scopes vault:read and vault:write.`,
		Example: `  latticekeep env push shop/db <.env`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if command.IsTerminal(cmd.InOrStdin()) {
				return command.UsageError("standard input is a terminal: give it the file, as in latticekeep env push NAME <.env")
			}
			s := sources{envFiles: []string{"-"}}
			return put(cmd, &r, &f, &t, &s, args)
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	t.register(cmd)
	t.registerKeep(cmd)
	return cmd
}
