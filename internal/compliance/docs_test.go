package compliance

import (
	"os"
	"strings"
	"testing"
	"time"
)

func TestDocumentationListsProbesAndAttributes(t *testing.T) {
	b, err := os.ReadFile("../../docs/compliance.md")
	check(t, err)
	doc := string(b)
	last := 0
	for i := range probes {
		p := &probes[i]
		at := strings.Index(doc, "| `"+p.name+"` | "+p.title)
		if at < last {
			t.Errorf("%s is not in the table, under its title and in its place", p.name)
		}
		last = max(last, at)
	}
	state := State{LastBackup: time.Now(), SealingKeyCreated: time.Now()}.attributes()
	for _, f := range Frameworks() {
		state[string(f)] = ""
	}
	for name := range state {
		if !strings.Contains(doc, "`"+name+"`") {
			t.Errorf("%s is not in docs/compliance.md", name)
		}
	}
}
