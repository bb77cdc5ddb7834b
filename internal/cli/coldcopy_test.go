package cli

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A cold copy follows a server, survives being killed, is served by nobody, and takes over when it is
// promoted.
func TestACopyFollowsAndIsPromoted(t *testing.T) {
	s := newShippingSite(t)
	url, end := s.serveBackedUp(1)
	copied, metrics := s.path("copy"), s.path("follow.prom")
	program := filepath.Join(t.TempDir(), "latticekeep") // under this name the test binary is the program
	self, err := os.Executable()
	must(t, err)
	must(t, os.Symlink(self, program))
	args := []string{"restore", "--follow", "--bucket", s.bucketURL, "--identity-file", s.to.file, "--data-dir", copied, "--metrics-file", metrics}
	follow := func() (*exec.Cmd, *said) {
		t.Helper()
		cmd := exec.Command(program, args...)
		out := make(said, 100)
		cmd.Stdout, cmd.Stderr = out, out
		must(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		return cmd, &out
	}

	first, out := follow()
	out.await(t, "copied backup/")
	must(t, first.Process.Kill())
	_ = first.Wait()
	s.refused(offline.BoltScheme+copied, "a cold copy of a deployment that is served elsewhere")

	c := s.connect(url, s.tenant)
	_, err = c.ReplaceCredential(t.Context(), s.ids[0], v2.ReplaceRequest{Values: map[string]string{"v": "shipped"}})
	must(t, err)
	must(t, c.DeleteCredential(t.Context(), s.ids[1]))
	end() // what was not shipped yet is shipped now

	second, out := follow()
	line := out.await(t, "followed up to entry ")
	must(t, second.Process.Kill())
	_ = second.Wait()
	if text := readText(t, metrics); !regexp.MustCompile(`(?m)^latticekeep_follow_success_timestamp_seconds \d{10}$`).MatchString(text) {
		t.Errorf("metrics:\n%s", text)
	}
	head := regexp.MustCompile(`entry (\d+ [0-9a-f]{64})`).FindStringSubmatch(line)
	if source := mustRun(t, "audit", "verify", "--store", s.at); head == nil || !strings.Contains(source, strings.Fields(head[1])[1]) {
		t.Errorf("the copy is at %v, the server was at\n%s", head, source)
	}

	promote := []string{"restore", "--promote", "--data-dir", copied}
	if _, err := run(t, promote...); err == nil || !strings.Contains(err.Error(), "--kms-key-file") {
		t.Error("without a KMS key: ", err)
	}
	tampered := s.path("tampered")
	must(t, os.CopyFS(tampered, os.DirFS(copied)))
	s.with(offline.BoltScheme+tampered, func(db store.Database) {
		must(t, db.Update(t.Context(), func(tx store.Tx) error {
			row, err := tx.Get(audit.EntryKey(2))
			if err != nil {
				return err
			}
			row = bytes.Clone(row)
			row[len(row)-1] ^= 1
			return tx.Put(audit.EntryKey(2), row)
		}))
	})
	if _, err := run(t, "restore", "--promote", "--data-dir", tampered, "--kms-key-file", s.keyFile()); err == nil || !strings.Contains(err.Error(), "the copy is not served") {
		t.Error("a copy with a changed entry: ", err)
	}
	s.refused(offline.BoltScheme+tampered, "a cold copy of a deployment that is served elsewhere")
	promoted := mustRun(t, append(promote, "--kms-key-file", s.keyFile())...)
	if !strings.Contains(promoted, "head: "+head[1]) || !strings.Contains(promoted, "epoch: 2") {
		t.Error(promoted)
	}
	if _, err := run(t, append(promote, "--kms-key-file", s.keyFile())...); err == nil || !strings.Contains(err.Error(), "nothing to promote") {
		t.Error("promoted twice: ", err)
	}
	if _, err := run(t, args...); err == nil || !strings.Contains(err.Error(), "follows no other") {
		t.Error("a promoted database follows again: ", err)
	}
	mustRun(t, "audit", "verify", "--store", offline.BoltScheme+copied)
	url, end = s.serve(offline.BoltScheme + copied)
	got, err := s.connect(url, s.tenant).UnsealCredential(t.Context(), s.ids[0])
	must(t, err)
	if got.Values["v"] != "shipped" {
		t.Errorf("the value is %q", got.Values["v"])
	}
	if _, err := s.connect(url, s.tenant).UnsealCredential(t.Context(), s.ids[1]); err == nil {
		t.Error("a deleted credential is there")
	}
	end()
}
