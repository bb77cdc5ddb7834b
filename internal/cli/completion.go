package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/latticekeep/latticekeep/internal/cli/command"
)

var shells = []string{"bash", "zsh", "fish", "powershell"}

func newCompletionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "Print a script with which a shell completes commands and flags",
		Long: `Print a script for bash, zsh, fish or powershell. With it the Tab key completes
commands, flags, files, and the values of flags that take one of a few. It completes
from the program itself, so it needs no update later.

For one session of bash:

  source <(latticekeep completion bash)

For all sessions, write the script once to where the shell looks for it, and start a new
shell. Bash needs the package bash-completion, and zsh "autoload -U compinit; compinit"
in ~/.zshrc.`,
		Example: `  latticekeep completion bash > ~/.local/share/bash-completion/completions/latticekeep
  latticekeep completion zsh > "${fpath[1]}/_latticekeep"
  latticekeep completion fish > ~/.config/fish/completions/latticekeep.fish`,
		ValidArgs: shells,
		Args:      cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			root, out := cmd.Root(), cmd.OutOrStdout()
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(out, true)
			case "zsh":
				return root.GenZshCompletion(out)
			case "fish":
				return root.GenFishCompletion(out, true)
			case "powershell":
				return root.GenPowerShellCompletionWithDesc(out)
			}
			return command.UsageError(fmt.Sprintf("there is no script for the shell %q: it is one of %s", args[0], strings.Join(shells, ", ")))
		},
	}
}

// completeFiles has a shell complete the names of files only where a command takes one: for arguments
// called FILE, and for flags in [files] and [folders].
func completeFiles(cmd *cobra.Command) {
	if cmd.ValidArgsFunction == nil && len(cmd.ValidArgs) == 0 && !strings.Contains(cmd.Use, " FILE") {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		_, chosen := cmd.GetFlagCompletionFunc(f.Name)
		switch {
		case chosen || f.Value.Type() == "bool" || takesFile(f.Name):
		case folders[f.Name]:
			_ = cmd.MarkFlagDirname(f.Name) // cannot fail: the flag exists
		default:
			_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.NoFileCompletions) // cannot fail: the flag exists
		}
	})
	for _, c := range cmd.Commands() {
		completeFiles(c)
	}
}

func takesFile(flag string) bool { return strings.HasSuffix(flag, "-file") || files[flag] }

// Flags that take a file or a folder. So does every flag whose name ends with -file.
var (
	files = map[string]bool{
		"config": true, "etcd-ca": true, "etcd-cert": true, "etcd-key": true, "file": true, "filename": true, "files": true,
		"from-file": true, "input": true, "key": true, "key-set": true, "keys": true, "kms-key-out": true, "kubeconfig": true,
		"merge-into": true, "output": true, "public-key": true, "public-key-out": true, "signatures": true, "since": true, "socket": true, "verify-with": true,
	}
	folders = map[string]bool{"catalogues": true, "data-dir": true, "dir": true, "into": true}
)
