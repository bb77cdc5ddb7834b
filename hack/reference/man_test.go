package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli"
)

// Each command has a manual page, and no table in it has become a paragraph.
func TestEveryCommandHasAManualPage(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "man")
	if err := writeManPages(folder); err != nil {
		t.Fatal(err)
	}
	pages := 0
	var look func(*cobra.Command)
	look = func(c *cobra.Command) {
		if c.IsAvailableCommand() || !c.HasParent() {
			pages++
			name := strings.ReplaceAll(c.CommandPath(), " ", "-") + ".1"
			text, err := os.ReadFile(filepath.Join(folder, name))
			if err != nil {
				t.Error(err)
			}
			for line := range strings.Lines(c.Long) {
				if strings.HasPrefix(line, "  ") && !strings.Contains(line, "-") && !strings.Contains(string(text), line) {
					t.Errorf("%s has no line %q", name, line)
				}
			}
		}
		for _, child := range c.Commands() {
			if child.Name() != "help" {
				look(child)
			}
		}
	}
	look(cli.Command())
	if pages < 40 {
		t.Errorf("only %d pages", pages)
	}
}
