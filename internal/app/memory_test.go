package app

import (
	"os"
	"path/filepath"
	"testing"
)

func TestTheMemoryLimitIsThatOfTheControlGroup(t *testing.T) {
	for name, c := range map[string]struct {
		file, text string
		want       int64
	}{
		"version 2":           {"memory.max", "268435456\n", 256 << 20},
		"version 2, no limit": {"memory.max", "max\n", 0},
		"version 1":           {"memory/memory.limit_in_bytes", "268435456\n", 256 << 20},
		"version 1, no limit": {"memory/memory.limit_in_bytes", "9223372036854771712\n", 0},
		"neither":             {"other", "1\n", 0},
	} {
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Join(root, "memory"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, c.file), []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := memoryLimit(root); got != c.want {
			t.Errorf("%s: %d, not %d", name, got, c.want)
		}
	}
}
