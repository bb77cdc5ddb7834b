package objects_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
)

// A writer to the folder cannot make the service read, write or touch a file outside it, and cannot
// block a call.
func TestNothingLeadsOutOfTheFolder(t *testing.T) {
	ctx, dir, outside := t.Context(), t.TempDir(), t.TempDir()
	b := open(t, "file://"+dir, objects.SigningOptions{BaseURL: "https://a.example/d", Secret: make([]byte, 32)})
	secret := filepath.Join(outside, "secret")
	old := time.Now().Add(-time.Hour).Truncate(time.Second)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.WriteFile(secret, []byte("secret"), 0o600))
	must(os.Chtimes(secret, old, old))
	must(b.Put(ctx, "reports/real", []byte("real")))
	must(os.Symlink(secret, filepath.Join(dir, "reports", "link")))
	must(os.Symlink("real", filepath.Join(dir, "reports", "inside")))
	must(os.Symlink(filepath.Join(outside, "none"), filepath.Join(dir, "reports", "dangling")))
	must(syscall.Mkfifo(filepath.Join(dir, "reports", "pipe"), 0o600))
	must(os.Mkdir(filepath.Join(dir, "reports", "folder"), 0o700))
	must(os.Symlink(outside, filepath.Join(dir, "elsewhere")))
	must(os.Symlink("reports", filepath.Join(dir, "beside")))

	for _, name := range []string{"reports/link", "reports/inside", "reports/dangling", "reports/pipe", "reports/folder"} {
		if got, err := b.Get(ctx, name); fault.Of(err) != fault.NotFound {
			t.Errorf("%s: read %q, %v", name, got, err)
		}
		if there, err := b.Exists(ctx, name); there || err != nil {
			t.Errorf("%s: exists %v, %v", name, there, err)
		}
		_, err := b.SignedURL(ctx, name, time.Hour) // also touches objects
		must(err)
	}
	for _, name := range []string{"elsewhere/secret", "beside/real", "reports/link/a", "reports/real/a"} {
		if got, err := b.Get(ctx, name); fault.Of(err) != fault.Unavailable {
			t.Errorf("%s: read %q, %v", name, got, err)
		}
		if there, err := b.Exists(ctx, name); there || fault.Of(err) != fault.Unavailable {
			t.Errorf("%s: exists %v, %v", name, there, err)
		}
		if err := b.Put(ctx, name, []byte("x")); fault.Of(err) != fault.Unavailable {
			t.Errorf("%s: written: %v", name, err)
		}
		_, err := b.SignedURL(ctx, name, time.Hour)
		must(err)
	}
	// A write replaces the link and leaves its target alone.
	for _, name := range []string{"reports/link", "reports/dangling", "reports/pipe"} {
		must(b.Put(ctx, name, []byte("ours")))
		if got, err := b.Get(ctx, name); err != nil || string(got) != "ours" {
			t.Errorf("%s: read %q, %v", name, got, err)
		}
	}
	got, err := os.ReadFile(secret)
	info, err2 := os.Stat(secret)
	must(err)
	must(err2)
	if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 || string(got) != "secret" || !info.ModTime().Equal(old) {
		t.Errorf("outside there are %v, %q of %s: %v", entries, got, info.ModTime(), err)
	}
	// The folder itself may be a link, because the operator of the service has set it up.
	link := filepath.Join(outside, "link")
	must(os.Symlink(dir, link))
	linked := open(t, "file://"+link, objects.SigningOptions{})
	if got, err := linked.Get(ctx, "reports/real"); err != nil || !bytes.Equal(got, []byte("real")) {
		t.Errorf("through a link to the folder: %q, %v", got, err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := b.Get(ended, "reports/real"); fault.Of(err) != fault.Unavailable {
		t.Errorf("when the time is up: %v", err)
	}
}
