package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/latticekeep/latticekeep/internal/cli"
)

// writeManPages writes a manual page for each command. Their date is SOURCE_DATE_EPOCH, or today.
func writeManPages(folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	root := cli.Command()
	root.DisableAutoGenTag = true
	root.InitDefaultHelpFlag()
	fence(root)
	return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "latticekeep", Manual: "Latticekeep"}, folder)
}

// fence has the lists and tables of all help texts stay as they are: manual pages are made from
// Markdown.
func fence(cmd *cobra.Command) {
	var b strings.Builder
	paragraphs(&b, cmd.Long)
	cmd.Long = strings.TrimSpace(b.String())
	for _, c := range cmd.Commands() {
		fence(c)
	}
}
