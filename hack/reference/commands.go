package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli"
)

const commandsHead = `One program has all commands. ` + "`--help`" + ` after any of them prints what stands here. Flags of a command such as
` + "`latticekeep audit`" + ` count for the commands below it, too. An error is one line on stderr that says what to do.

## Exit statuses

`

// commands describes every command with its usage, help, examples and flags.
func commands() (string, error) {
	var b strings.Builder
	b.WriteString(commandsHead)
	root := cli.Command()
	_, statuses, _ := strings.Cut(root.Long, "\n\n")
	paragraphs(&b, statuses)
	describe(&b, root)
	return strings.TrimRight(b.String(), "\n") + "\n", nil
}

// describe writes a command and its subcommands. The flags that a group passes to all its commands
// are listed with the group.
func describe(b *strings.Builder, cmd *cobra.Command) {
	if depth := strings.Count(cmd.CommandPath(), " "); depth > 0 {
		b.WriteString(strings.Repeat("#", min(depth, 3)+1) + " " + cmd.CommandPath() + "\n\n" + cmd.Short + ".\n\n")
		if cmd.Runnable() {
			b.WriteString("```text\n" + cmd.UseLine() + "\n```\n\n")
		}
		if cmd.Long != "" && cmd.Long != cmd.Short {
			paragraphs(b, cmd.Long)
		}
		if cmd.HasExample() {
			b.WriteString("```sh\n" + unindent(cmd.Example) + "\n```\n\n")
		}
		_ = cmd.Flags().MarkHidden("help") // every command has it, or there is nothing to hide
		if flags := strings.TrimRight(cmd.NonInheritedFlags().FlagUsagesWrapped(110), "\n"); flags != "" {
			b.WriteString("```text\n" + flags + "\n```\n\n")
		}
	}
	for _, child := range cmd.Commands() {
		if child.IsAvailableCommand() && child.Name() != "help" {
			describe(b, child)
		}
	}
}

// paragraphs writes help text as Markdown. Lists and tables, which are indented, stay as they are.
func paragraphs(b *strings.Builder, text string) {
	for part := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		if strings.HasPrefix(part, " ") || strings.Contains(part, "\n ") {
			part = "```text\n" + part + "\n```"
		} else {
			part = strings.ReplaceAll(part, "<", `\<`)
		}
		b.WriteString(part + "\n\n")
	}
}

func unindent(text string) string {
	lines := strings.Split(strings.Trim(text, "\n"), "\n")
	for i, l := range lines {
		lines[i] = strings.TrimPrefix(l, "  ")
	}
	return strings.Join(lines, "\n")
}
