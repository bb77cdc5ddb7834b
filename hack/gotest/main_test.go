package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// sampleTest is in a module of its own. Its tests pass, fail or are skipped as told.
const sampleTest = `package sample

import "testing"

func TestPasses(t *testing.T) { t.Log("quiet") }
func TestSkipped(t *testing.T) { t.Skip("no such machine") }
func TestMain2(t *testing.T) { t.Run("inner", func(t *testing.T) { FAIL }) }
`

func TestSkippedTestsAreToldWithTheirReason(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: builds and runs tests of its own")
	}
	for name, c := range map[string]struct {
		inner       string
		status      int
		want, never []string
	}{
		"all pass": {inner: "", status: 0,
			want:  []string{"ok  \tsample", "skipped sample TestSkipped: sample_test.go:6: no such machine"},
			never: []string{"quiet", "TestPasses"}},
		"one fails": {inner: `t.Error("wrong sum")`, status: 1,
			want:  []string{"wrong sum", "--- FAIL: TestMain2/inner", "FAIL\tsample", "skipped sample TestSkipped"},
			never: []string{"quiet", "TestPasses"}},
		"dies": {inner: `go func() { panic("in the background") }(); select {}`, status: 1,
			want: []string{"panic: in the background", "goroutine ", "FAIL\tsample"}},
		"hangs": {inner: `select {}`, status: 1,
			want: []string{"panic: test timed out", "TestMain2/inner", "FAIL\tsample"}},
		"does not compile": {inner: "undefined()", status: 1,
			want: []string{"undefined: undefined", "[build failed]"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, content := range map[string]string{
				"go.mod":         "module sample\n\ngo 1.26\n",
				"sample_test.go": strings.Replace(sampleTest, "FAIL", c.inner, 1),
			} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			t.Chdir(dir)
			var out strings.Builder
			if got := run(t.Context(), []string{"-count=1", "-timeout=5s", "./..."}, &out, &out); got != c.status {
				t.Errorf("exit status %d, want %d", got, c.status)
			}
			missing := slices.DeleteFunc(slices.Clone(c.want), func(s string) bool { return strings.Contains(out.String(), s) })
			added := slices.DeleteFunc(slices.Clone(c.never), func(s string) bool { return !strings.Contains(out.String(), s) })
			if len(missing)+len(added) > 0 {
				t.Errorf("missing %q, unwanted %q in:\n%s", missing, added, out.String())
			}
		})
	}
}
