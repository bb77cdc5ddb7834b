package buildinfo_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/buildinfo"
)

// The flags with which the image and `make build` compile the program leave its commit in it. The
// program here is this package and nothing else.
func TestTheFlagsOfEveryBuildLeaveTheCommitInTheProgram(t *testing.T) {
	for file, pattern := range map[string]string{
		"../../Dockerfile": `go build (.*) -o `,
		"../../Makefile":   `\nBUILD := go build (.*)\n`,
	} {
		text, err := os.ReadFile(file)
		must(t, err)
		flags := regexp.MustCompile(pattern).FindSubmatch(text)
		if flags == nil {
			t.Fatalf("%s has no line that builds the program", file)
		}
		t.Run(filepath.Base(file), func(t *testing.T) {
			c := newCheckout(t)
			build := func() (i buildinfo.Info) {
				t.Helper()
				c.run("go build " + string(flags[1]) + " -o program .")
				must(t, json.Unmarshal([]byte(c.run("./program")), &i))
				return i
			}

			clean := build()
			if commit := strings.TrimSpace(c.run("git rev-parse HEAD")); clean.Commit != commit || clean.Modified {
				t.Errorf("built from a clean checkout of %s: %+v", commit, clean)
			}
			if clean.CommitTime == nil || !clean.CommitTime.Equal(time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)) {
				t.Errorf("the time of the commit is %v", clean.CommitTime)
			}
			if clean.Go != runtime.Version() || clean.Platform != runtime.GOOS+"/"+runtime.GOARCH || clean.Version == "" || clean.Version == "unknown" {
				t.Errorf("%+v", clean)
			}
			must(t, os.WriteFile(filepath.Join(c.dir, "go.mod"), []byte(module+"// changed\n"), 0o600))
			if !build().Modified {
				t.Error("a program from a changed checkout does not say that it is modified")
			}
		})
	}
}

const module = "module example.org/program\n\ngo 1.26\n"

type checkout struct {
	*testing.T
	dir string
}

func newCheckout(t *testing.T) *checkout {
	t.Helper()
	c := &checkout{t, t.TempDir()}
	own, err := os.ReadFile("buildinfo.go")
	must(t, err)
	must(t, os.Mkdir(filepath.Join(c.dir, "buildinfo"), 0o700))
	for name, text := range map[string]string{
		"go.mod":                 module,
		".gitignore":             "/program\n",
		"buildinfo/buildinfo.go": string(own),
		"main.go": `package main

import (
	"encoding/json"
	"os"

	"example.org/program/buildinfo"
)

func main() { _ = json.NewEncoder(os.Stdout).Encode(buildinfo.Read()) }
`} {
		must(t, os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600))
	}
	c.run("git init -q && git add . && git -c user.name=x -c user.email=x@example.org commit -q -m first")
	return c
}

// run runs commands in the checkout, with the flags of this repository's builds and no
// configuration of git.
func (c *checkout) run(script string) string {
	c.Helper()
	cmd := exec.CommandContext(c.Context(), "sh", "-ec", script)
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath", "GOWORK=off", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_DATE=2026-02-03T04:05:06Z", "GIT_COMMITTER_DATE=2026-02-03T04:05:06Z")
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
