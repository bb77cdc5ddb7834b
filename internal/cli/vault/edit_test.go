package vault

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// Where no file system is in memory, the text is in a folder for its user only. At the end zeros go over
// it, and it is gone.
func TestATextOnADiskIsOverwritten(t *testing.T) {
	parent := t.TempDir()
	t.Setenv("TMPDIR", parent)
	dir, err := privateFolder("darwin")
	if err != nil {
		t.Fatal(err)
	}
	if s, err := os.Stat(dir); err != nil || s.Mode() != fs.ModeDir|0o700 || filepath.Dir(dir) != parent {
		t.Errorf("%v, %v", s, err)
	}
	e := &editor{dir: dir, file: filepath.Join(dir, "values.yaml")}
	if err := e.write([]byte("user: hunter2\n")); err != nil {
		t.Fatal(err)
	}
	if s, err := os.Stat(e.file); err != nil || s.Mode() != 0o600 {
		t.Errorf("%v, %v", s, err)
	}
	other := filepath.Join(parent, "same")
	if err := os.Link(e.file, other); err != nil {
		t.Fatal(err)
	}
	e.close()
	if left, err := os.ReadFile(other); err != nil || !bytes.Equal(left, make([]byte, 14)) {
		t.Errorf("%q, %v", left, err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the folder is still there:", err)
	}
}
