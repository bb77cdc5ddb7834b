package cli

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/machine"
)

// followed says how a test follows each page: it runs the commands in their order, while that is so
// which the page is about.
var followed = map[string]func(*documented){
	"docs/guides/agent.md":          followAgent,
	"docs/guides/anchors.md":        followAnchors,
	"docs/guides/backup.md":         followBackup,
	"docs/guides/csi.md":            followCSI,
	"docs/guides/kms.md":            followKMS,
	"docs/guides/kms-plugin.md":     followKMSPlugin,
	"docs/guides/postgresql.md":     followPostgres,
	"docs/guides/upgrade.md":        followUpgrade,
	"docs/guides/verify-the-log.md": followVerification,

	"docs/guides/external-secrets.md": followExternalSecrets,

	"docs/runbooks/README.md":       followRunbooks,
	"docs/runbooks/certificates.md": followCertificates,
	"docs/runbooks/database.md":     followDatabase,
	"docs/runbooks/objects.md":      followObjects,
	"docs/runbooks/server.md":       followServer,
}

// Every command of these guides and of all runbooks is one that somebody can type, and does what the
// page says. A command that nothing can follow here is passed over with the reason.
func TestTheDocumentationIsFollowed(t *testing.T) {
	runbooks, err := filepath.Glob("../../docs/runbooks/*.md")
	must(t, err)
	pages := make(map[string]bool)
	for _, path := range runbooks {
		pages["docs/runbooks/"+filepath.Base(path)] = true
	}
	for page := range followed {
		pages[page] = true
	}
	var shared *cluster
	for _, page := range slices.Sorted(maps.Keys(pages)) {
		f := &documented{page: page, left: commandsOf(readText(t, "../../"+page)), shared: &shared, parent: t}
		follow, there := followed[page]
		switch {
		case !there && len(f.left) > 0:
			t.Errorf("nothing follows %s, which has the command %s", page, f.left[0])
		case there && len(f.left) == 0:
			t.Errorf("%s has no commands to follow", page)
		case there:
			t.Run(page, func(t *testing.T) {
				f.T, f.dir = t, t.TempDir()
				f.set("HOME", f.dir)
				follow(f)
				for _, command := range f.left {
					t.Errorf("nothing follows the command %s", command)
				}
			})
		}
	}
}

// documented follows the commands of a page of the documentation, as somebody does who reads it.
type documented struct {
	*testing.T
	page  string
	left  []string // commands that were not followed yet
	dir   string   // where they run
	env   []string
	bound []string // what the page writes, and what it stands for here

	shared **cluster // of all pages, once one needs it
	parent *testing.T
}

// programs is what begins a command in the text of a page.
const programs = `(?:latticekeep|kubectl|helm|curl|age|age-keygen|gcloud|\(umask)`

// inText finds commands in the text of a page: those that have at least one option. The others only
// name a command.
var inText = regexp.MustCompile("`(" + programs + "\\b[^`]* -[^`]*)`")

// commandsOf returns the commands of a page in their order: the lines of its blocks of sh, and what
// its text has between backticks.
func commandsOf(text string) (all []string) {
	for i, part := range strings.Split("\n"+text, "```") {
		if i%2 == 0 {
			for _, m := range inText.FindAllStringSubmatch(part, -1) {
				all = append(all, strings.Join(strings.Fields(m[1]), " "))
			}
			continue
		}
		block, isShell := strings.CutPrefix(part, "sh\n")
		if !isShell {
			continue
		}
		for line := range strings.Lines(strings.ReplaceAll(block, "\\\n", "")) {
			if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
				all = append(all, line)
			}
		}
	}
	return all
}

// bind says what something stands for that the page writes.
func (f *documented) bind(written, here string) { f.bound = append(f.bound, written, here) }

// set sets a variable that the page uses, or that its reader has set.
func (f *documented) set(name, value string) { f.env = append(f.env, name+"="+value) }

func (f *documented) path(name string) string { return filepath.Join(f.dir, name) }

// next returns the next command, which begins so.
func (f *documented) next(begin string) string {
	f.Helper()
	if len(f.left) == 0 || !strings.HasPrefix(f.left[0], begin) {
		f.Fatalf("%s goes on with %q, and this test with %q", f.page, append(f.left, "nothing")[0], begin)
	}
	next := f.left[0]
	f.left = f.left[1:]
	return next
}

// try runs the next command. more are further bindings.
func (f *documented) try(begin string, more ...string) (string, error) {
	f.Helper()
	script := strings.NewReplacer(append(more, f.bound...)...).Replace(f.next(begin))
	cmd := exec.CommandContext(f.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir, cmd.Env = f.dir, append(os.Environ(), f.env...)
	said, err := cmd.CombinedOutput()
	return string(said), err
}

// run runs the next command, which must succeed, and whose output must have these parts.
func (f *documented) run(begin string, parts ...string) string {
	f.Helper()
	return f.runAs(begin, nil, parts...)
}

// runAs is run with further bindings.
func (f *documented) runAs(begin string, more []string, parts ...string) string {
	f.Helper()
	said, err := f.try(begin, more...)
	if err != nil {
		f.Fatalf("%s: %v\n%s", begin, err, said)
	}
	for _, part := range parts {
		if !strings.Contains(said, part) {
			f.Errorf("%s does not say %q:\n%s", begin, part, said)
		}
	}
	return said
}

// fails runs the next command, which must find something wrong and say it.
func (f *documented) fails(begin string, parts ...string) {
	f.Helper()
	said, err := f.try(begin)
	if err == nil {
		f.Errorf("%s finds nothing wrong:\n%s", begin, said)
	}
	for _, part := range parts {
		if !strings.Contains(said, part) {
			f.Errorf("%s does not say %q:\n%s", begin, part, said)
		}
	}
}

// pass passes over the next command, for a reason.
func (f *documented) pass(begin, reason string) {
	f.Helper()
	f.Logf("not followed: %s: %s", f.next(begin), reason)
}

// onNode passes over the next command, since it needs a kubelet. The run on a real node follows it in
// the given form, which is in its transcript.
func (f *documented) onNode(begin, form string) {
	f.Helper()
	command := f.next(begin)
	if !strings.Contains(readText(f.T, "../../docs/e2e.md"), "\n$ "+form) {
		f.Errorf("docs/e2e.md does not show that %s was run as %s", command, form)
	}
}

// cluster returns a cluster whose commands need no configuration.
func (f *documented) cluster() *cluster {
	f.Helper()
	if *f.shared == nil {
		c := &cluster{t: f.parent, plane: kubetest.ForTest(f.parent)}
		c.kubectl("", "create", "namespace", namespace)
		*f.shared = c
	}
	c := *f.shared
	f.set("KUBECONFIG", c.plane.Kubeconfig)
	return &cluster{t: f.T, plane: c.plane}
}

// namespace is where the chart is.
const namespace = "latticekeep-system"

// at says where the server of an estate is, with its fingerprints and its system key in a file.
func (f *documented) at(url string, e *estate) {
	f.Helper()
	f.set("BASE", url)
	f.set("LATTICEKEEP_URL", url)
	f.set("LATTICEKEEP_API_KEY", e.systemKey())
	machine.WriteFile(f.T, f.path("system.key"), []byte(e.systemKey()))
}
