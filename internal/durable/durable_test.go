package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
)

func TestANewFileIsWholeAndReplacesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := WriteNew(path, []byte("first")); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	if err := WriteNew(path, []byte("second")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("writing over a file: %v, want fs.ErrExist", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "first" {
		t.Errorf("the file holds %q, %v; want the first content", b, err)
	}
	if names, err := os.ReadDir(filepath.Dir(path)); err != nil || len(names) != 1 {
		t.Errorf("the folder holds %v, %v; want the file alone", names, err)
	}
}

func TestWithoutLinksOneOfManyWritersGetsTheName(t *testing.T) {
	t.Cleanup(func() { link = os.Link })
	for range 50 {
		path := filepath.Join(t.TempDir(), "file")
		errs := make([]error, 8)
		var wg, looked sync.WaitGroup
		looked.Add(len(errs))
		link = func(from, to string) error {
			looked.Done()
			looked.Wait() // until all have seen that there is no file
			return &os.LinkError{Op: "link", Old: from, New: to, Err: syscall.EPERM}
		}
		for i := range errs {
			wg.Go(func() { errs[i] = WriteNew(path, []byte{byte(i)}) })
		}
		wg.Wait()
		b, err := os.ReadFile(path)
		if err != nil || len(b) != 1 || errs[b[0]] != nil {
			t.Fatalf("the file holds %v, %v; the writers got %v", b, err, errs)
		}
		for i, err := range errs {
			if i != int(b[0]) && !errors.Is(err, fs.ErrExist) {
				t.Fatalf("writer %d, whose content is not in the file, got %v", i, err)
			}
		}
		if names, err := os.ReadDir(filepath.Dir(path)); err != nil || len(names) != 1 {
			t.Fatalf("the folder holds %v, %v; want the file alone", names, err)
		}
	}
}

func TestAWrittenFileReplacesAnother(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, content := range []string{"first", "second"} {
		if err := Write(path, []byte(content)); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != content {
			t.Errorf("the file holds %q, %v; want %q", b, err, content)
		}
	}
	if names, err := os.ReadDir(filepath.Dir(path)); err != nil || len(names) != 1 {
		t.Errorf("the folder holds %v, %v; want the file alone", names, err)
	}
}

func TestAReplacedFileKeepsItsModeAndItsLink(t *testing.T) {
	dir := t.TempDir()
	path, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(path, []byte("first"), 0o640), os.Symlink(path, link)); err != nil {
		t.Fatal(err)
	}
	if err := Replace(link, []byte("second")); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil || string(b) != "second" {
		t.Errorf("the file holds %q, %v; want the second content", b, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o640 {
		t.Errorf("mode %v, %v; want 0640", info.Mode(), err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link became %v, %v", info.Mode(), err)
	}
	if err := Replace(filepath.Join(dir, "none"), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("replacing nothing: %v, want fs.ErrNotExist", err)
	}
}
