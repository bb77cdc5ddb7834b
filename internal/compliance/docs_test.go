package compliance_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

func TestDocumentationListsProbesAndAttributes(t *testing.T) {
	b, err := os.ReadFile("../../docs/compliance.md")
	check(t, err)
	doc := string(b)
	last := 0
	for i := range compliance.Probes {
		p := &compliance.Probes[i]
		at := strings.Index(doc, "| `"+p.Name+"` | "+p.Title)
		if at < last {
			t.Errorf("%s is not in the table, under its title and in its place", p.Name)
		}
		last = max(last, at)
		if _, of, _ := strings.Cut(doc, "### Who can make a probe pass"); !strings.Contains(of, "\n| `"+p.Name+"` | ") {
			t.Errorf("nothing says who can make %s pass", p.Name)
		}
	}
	state := compliance.State{LastBackup: time.Now(), SealingKeyCreated: time.Now()}.Attributes()
	for _, f := range compliance.Frameworks() {
		state[string(f)] = ""
	}
	for name := range state {
		if !strings.Contains(doc, "`"+name+"`") {
			t.Errorf("%s is not in docs/compliance.md", name)
		}
	}
}
