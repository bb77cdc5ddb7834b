package objects_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/test/s3test"
)

// age sets the modification time of a file into the past.
func age(t *testing.T, path string, by time.Duration) {
	t.Helper()
	at := time.Now().Add(-by)
	if err := os.Chtimes(path, at, at); err != nil {
		t.Fatal(err)
	}
}

func TestOpenSaysThatItMadeAFolder(t *testing.T) {
	address := "file://" + filepath.Join(t.TempDir(), "a", "b")
	for i, want := range []bool{true, false} {
		if b := open(t, address, objects.SigningOptions{}); b.Made() != want {
			t.Errorf("opened %d times before: made is %t", i, b.Made())
		}
	}
	if open(t, bucketOf(t, s3test.ForTest(t), "reports"), objects.SigningOptions{}).Made() {
		t.Error("a cloud's bucket was made")
	}
}

func TestAReaderMakesNothing(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{"none", "none/below"} {
		b, err := objects.OpenExisting(t.Context(), "file://"+filepath.Join(dir, path))
		if b != nil || fault.Of(err) != fault.NotFound || !strings.Contains(fault.Message(err), "mounted") {
			t.Errorf("%s: %v", path, err)
		}
	}
	left := filepath.Join(dir, "left.1.tmp")
	for _, path := range []string{left, filepath.Join(dir, "object")} {
		if err := os.WriteFile(path, []byte("o"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	age(t, left, 48*time.Hour)
	if _, err := objects.OpenExisting(t.Context(), "file://"+left); fault.Of(err) != fault.Unavailable {
		t.Error("a file for a folder:", err)
	}
	if _, err := objects.OpenExisting(t.Context(), "file://"+dir+"?a=b"); fault.Of(err) != fault.Invalid {
		t.Error(err)
	}
	b, err := objects.OpenExisting(t.Context(), "file://"+dir)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if o, err := b.Get(t.Context(), "object"); err != nil || string(o) != "o" {
		t.Errorf("%q %v", o, err)
	}
	if got := strings.Join(filesOf(t, dir), " "); got != "left.1.tmp object" {
		t.Errorf("there are %s", got)
	}
	c, err := objects.OpenExisting(t.Context(), bucketOf(t, s3test.ForTest(t), "archive"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if there, err := c.Exists(t.Context(), "object"); there || err != nil {
		t.Error(there, err)
	}
}

// A folder that disappears while in use, as a volume can, is not created again.
func TestAFolderThatWentAwayIsNotMadeAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "anchors")
	b := open(t, "file://"+dir, signing)
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := b.Put(t.Context(), "a/b", []byte("b")); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
	if _, err := b.SignedURL(t.Context(), "a/b", time.Hour); err != nil {
		t.Error(err)
	}
	if _, err := b.Expire(t.Context(), "a", time.Now(), 0); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("the folder was made again")
	}
}

func TestObjectsExpireUnlessTheyAreGivenOut(t *testing.T) {
	dir := t.TempDir()
	b := open(t, "file://"+dir, signing)
	if n, err := b.Expire(t.Context(), "reports", time.Now(), 0); n != 0 || err != nil {
		t.Error("of nothing:", n, err)
	}
	for _, name := range []string{"reports/a/old", "reports/a/given", "reports/a/new", "reports/b/old", "other/old", "reportsx"} {
		if err := b.Put(t.Context(), name, []byte(name)); err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(name, "new") {
			age(t, filepath.Join(dir, name), 25*time.Hour)
		}
	}
	if _, err := b.SignedURL(t.Context(), "reports/a/given", time.Hour); err != nil {
		t.Fatal(err)
	}
	n, err := b.Expire(t.Context(), "reports", time.Now().Add(-24*time.Hour), 1<<20)
	if got := strings.Join(filesOf(t, dir), " "); n != 2 || err != nil || got != "old given new reportsx" {
		t.Errorf("%d expired: %v; there are %s", n, err, got)
	}
	for _, prefix := range []string{"", "..", "reports/", "/"} {
		if _, err := b.Expire(t.Context(), prefix, time.Now(), 0); fault.Of(err) != fault.Invalid {
			t.Errorf("%q: %v", prefix, err)
		}
	}
	cloud := open(t, bucketOf(t, s3test.ForTest(t), "reports"), objects.SigningOptions{})
	if err := cloud.Put(t.Context(), "reports/a", []byte("a")); err != nil {
		t.Fatal(err)
	}
	if _, err := cloud.Expire(t.Context(), "reports", time.Now().Add(time.Hour), 0); fault.Of(err) != fault.Invalid {
		t.Error(err)
	}
	if there, err := cloud.Exists(t.Context(), "reports/a"); !there || err != nil {
		t.Error("a cloud's object is gone:", err)
	}
}

// Each folder has its own limit: filling one removes nothing from another.
func TestTheOldestObjectsMakeRoom(t *testing.T) {
	dir := t.TempDir()
	b := open(t, "file://"+dir, objects.SigningOptions{})
	for i := range 5 {
		name := fmt.Sprintf("reports/a/%d", i)
		if err := b.Put(t.Context(), name, make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		age(t, filepath.Join(dir, name), time.Duration(i)*time.Hour)
	}
	if err := b.Put(t.Context(), "reports/b/0", make([]byte, 300)); err != nil {
		t.Fatal(err)
	}
	writing := filepath.Join(dir, "reports/a/9.1.tmp")
	if err := os.WriteFile(writing, make([]byte, 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	n, err := b.Expire(t.Context(), "reports", time.Now().Add(-24*time.Hour), 300)
	if got := filesOf(t, dir); n != 2 || err != nil || !slices.Equal(got, []string{"0", "1", "2", "9.1.tmp", "0"}) {
		t.Errorf("%d expired: %v; there are %v", n, err, got)
	}
}
