package cli

import (
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Every help is in this program's words, and commands on credentials have an example.
func TestNoHelpHasWordsOfTheLibrary(t *testing.T) {
	seen := 0
	library := regexp.MustCompile(`help for |version for |for more information|\[flags\]|\[command\]`)
	eachCommand(Command(), func(c *cobra.Command) {
		seen++
		help := mustRun(t, append(strings.Fields(strings.TrimPrefix(c.CommandPath(), "latticekeep")), "--help")...)
		if found := library.FindString(help); found != "" {
			t.Errorf("%s --help has %q", c.CommandPath(), found)
		}
		if !strings.Contains(help, "-h, --help") || !strings.Contains(help, "print this help") {
			t.Errorf("%s --help does not name itself:\n%s", c.CommandPath(), help)
		}
	})
	if seen < 40 {
		t.Errorf("only %d commands have a help", seen)
	}
	for _, name := range []string{"history", "rm", "ls", "mv", "reencrypt", "keep", "renew", "undo"} {
		if c, _, err := Command().Find([]string{name}); err != nil || c.Example == "" {
			t.Errorf("%s has no example (%v)", name, err)
		}
	}
	for _, args := range [][]string{{"import", "env"}, {"import", "json"}, {"import", "aws"}, {"import", "vault"}, {"completion"}, {"version"}} {
		c, _, err := Command().Find(args)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.SplitSeq(c.Long, "\n") {
			if len(line) > 88 {
				t.Errorf("%q: a line of the help has %d characters: %s", args, len(line), line)
			}
		}
	}
}
