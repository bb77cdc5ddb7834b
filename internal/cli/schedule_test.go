package cli

import (
	"bytes"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/test/s3test"
)

// A server with a bucket takes a backup at its first start, says so, and the file makes a server again.
func TestAServerTakesBackupsByItself(t *testing.T) {
	to := newRecipient(t)
	s := newSite(t, closed+"operations: {listen: \"127.0.0.1:0\"}\n")
	backups := s.path("backups")
	t.Setenv("LATTICEKEEP_BACKUP_BUCKET", "file://"+backups)
	t.Setenv("LATTICEKEEP_BACKUP_RECIPIENTS", to.text)
	ready, stop := s.serve()
	operations := regexp.MustCompile(`"operations":"([^"]+)"`).FindStringSubmatch(s.log.String())
	if operations == nil {
		t.Fatalf("the log does not say where the metrics are:\n%s", s.log.String())
	}
	metric := func(name string) string {
		status, text := s.ask(s.client(), http.MethodGet, operations[1]+"/metrics", "", "")
		if status != http.StatusOK {
			t.Fatalf("the metrics are %d %s", status, text)
		}
		_, value, _ := strings.Cut(text, "\n"+name+" ")
		value, _, _ = strings.Cut(value, "\n")
		return value
	}
	patience, tick := time.After(5*time.Minute), time.NewTicker(50*time.Millisecond)
	defer tick.Stop()
	for metric("latticekeep_backup_last_verified_timestamp_seconds") == "0" {
		select {
		case <-tick.C:
		case <-patience:
			t.Fatalf("no backup was verified:\n%s", s.log.String())
		}
	}
	if every := metric("latticekeep_backup_interval_seconds"); every != "86400" {
		t.Errorf("a backup is taken every %q seconds", every)
	}
	stop()
	files, err := filepath.Glob(filepath.Join(backups, "backup", "*", "*.backup"))
	if err != nil || len(files) != 1 {
		t.Fatalf("there are %q: %v", files, err)
	}
	if out, err := run(t, "backup", "verify", "--input", files[0], "--identity", ready.Identity, "--verify-with", to.file); err != nil || !strings.Contains(out, "the KMS key is in it") {
		t.Error(out, err)
	}
	if _, err := run(t, "restore", "--input", files[0], "--identity-file", to.file, "--data-dir", t.TempDir(), "--fingerprint", ready.Chain, "--identity", ready.Identity); err != nil {
		t.Error(err)
	}
}

func TestBackupsDoNotGoIntoTheFolderOfTheDatabase(t *testing.T) {
	s := newSite(t, closed)
	t.Setenv("LATTICEKEEP_BACKUP_BUCKET", "file://"+s.path("data/backups"))
	t.Setenv("LATTICEKEEP_BACKUP_RECIPIENTS", newRecipient(t).text)
	if _, err := run(t, "server", "--config", s.file); err == nil || !strings.Contains(err.Error(), "backup.bucket lies in dataDir") {
		t.Error(err)
	}
}

func TestABackupIsRestoredFromABucket(t *testing.T) {
	s3 := s3test.ForTest(t)
	bucket, err := s3.Bucket("backups")
	must(t, err)
	dir, to := small(t), newRecipient(t)
	whole, err := os.ReadFile(backupOf(t, dir, to))
	must(t, err)
	b, err := objects.Open(t.Context(), bucket, objects.SigningOptions{})
	must(t, err)
	const name = "backup/a/20261124-021700.backup"
	must(t, b.Put(t.Context(), name, whole))
	u, err := url.Parse(bucket)
	must(t, err)
	u.Path = "/" + name
	target := t.TempDir()
	if _, err := run(t, "restore", "--input", u.String(), "--identity-file", to.file, "--data-dir", target); err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(contentsOf(t, target), contentsOf(t, dir)) {
		t.Error("the rows differ")
	}
	u.Path = "/backup/none"
	if _, err := run(t, "restore", "--input", u.String(), "--identity-file", to.file, "--data-dir", t.TempDir()); err == nil || !strings.Contains(err.Error(), "does not exist") {
		t.Error("an object that is not there:", err)
	}
	must(t, b.Put(t.Context(), name, bytes.Clone(whole[:len(whole)-9])))
	u.Path = "/" + name
	nothing := t.TempDir()
	if _, err := run(t, "restore", "--input", u.String(), "--identity-file", to.file, "--data-dir", nothing); err == nil {
		t.Error("one that is cut off was restored")
	}
	nothingRestored(t, "it", nothing)
}
