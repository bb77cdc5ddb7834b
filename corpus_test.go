package main_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestEveryFuzzTargetHasACorpus keeps the committed seeds, which a plain go test runs, from going missing or astray.
func TestEveryFuzzTargetHasACorpus(t *testing.T) {
	target := regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)
	var corpora, kept []string
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == ".git" || path == "bin"):
			return fs.SkipDir
		case entry.IsDir() && filepath.Base(filepath.Dir(path)) == "fuzz":
			kept = append(kept, path)
		case strings.HasSuffix(path, "_test.go"):
			source, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, m := range target.FindAllSubmatch(source, -1) {
				corpora = append(corpora, filepath.Join(filepath.Dir(path), "testdata", "fuzz", string(m[1])))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(corpora) == 0 {
		t.Fatal("no fuzz target found")
	}
	for _, corpus := range corpora {
		if seeds, err := os.ReadDir(corpus); err != nil || len(seeds) == 0 {
			t.Errorf("%s has %d seeds (%v)", corpus, len(seeds), err)
		}
	}
	for _, dir := range kept {
		if !slices.Contains(corpora, dir) {
			t.Errorf("%s belongs to no target", dir)
		}
	}
}
