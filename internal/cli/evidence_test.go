package cli

import (
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/test/logtest"
	"github.com/latticekeep/latticekeep/test/machine"
)

// An archive that accepts connections but never answers delays nothing else.
func TestAnArchiveThatHangsStopsNothingElse(t *testing.T) {
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} {
		t.Setenv(name, "none")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := newSite(t, closed+"audit: {retention: {keep: 24h, archive: 's3://archive?region=us-east-1&use_path_style=true&endpoint="+
		url.QueryEscape("http://"+l.Addr().String())+"'}}\n")
	old := filepath.Join(s.path("data"), "reports", "reports/ten_a/soc2-1-0123456789ab.pdf")
	machine.WriteOldFile(t, old)
	_, stop := s.serve()
	patience := time.After(25 * time.Second) // a call to a bucket ends after thirty seconds
	for exists(old) {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-patience:
			t.Fatal("no maintenance beside a bucket that hangs: ", s.log.String())
		}
	}
	stop()
	if !strings.Contains(s.log.String(), "the archive of the audit log cannot be read") {
		t.Error(s.log.String())
	}
}

func TestAFolderThatIsMadeIsTold(t *testing.T) {
	s := newSite(t, "")
	machine.WriteFile(t, s.file, append([]byte(readText(t, s.file)), closed+"audit: {anchor: {bucket: 'file://"+s.path("anchors")+"'}}\n"...))
	const made = "created the folder of a bucket"
	for range 2 {
		_, stop := s.serve()
		stop()
		if n := strings.Count(s.log.String(), made); n != 1 || !strings.Contains(s.log.String(), "audit.anchor.bucket") {
			t.Errorf("told %d times: %s", n, s.log.String())
		}
	}
	if err := os.Rename(s.path("anchors"), s.path("elsewhere")); err != nil {
		t.Fatal(err)
	}
	_, stop := s.serve()
	stop()
	if n := strings.Count(s.log.String(), made); n != 2 {
		t.Errorf("a folder that went away was made, and told %d times", n-1)
	}
}

func TestAMalformedCatalogueStopsTheStartBeforeAnythingIsMade(t *testing.T) {
	s := newSite(t, "")
	catalogues := s.path("catalogues")
	if err := os.Mkdir(catalogues, 0o700); err != nil {
		t.Fatal(err)
	}
	machine.WriteFile(t, filepath.Join(catalogues, "soc2.yaml"), []byte("framework: soc2\nname: SOC 2\nwrong: key\n"))
	machine.WriteFile(t, s.file, append([]byte(readText(t, s.file)), closed+"compliance: {catalogues: "+catalogues+"}\n"...))
	_, err := run(t, "server", "--config", s.file)
	if err == nil || !strings.Contains(err.Error(), "compliance.catalogues: ") || !strings.Contains(err.Error(), "soc2.yaml:3") {
		t.Error(err)
	}
	for _, file := range []string{"data", "keys/kms.key", "system.key"} {
		if exists(s.path(file)) {
			t.Error(file, "was made")
		}
	}
}

func TestAnArchiveThatIsReadIsNotMade(t *testing.T) {
	l := logtest.New(t, writer.SignEntries)
	if err := l.Store.Close(); err != nil {
		t.Fatal(err)
	}
	typo := filepath.Join(t.TempDir(), "archvie")
	_, err := run(t, "audit", "verify", "--data-dir", l.Dir, "--archive", "file://"+typo)
	if err == nil || !strings.Contains(err.Error(), "--archive: ") || !strings.Contains(err.Error(), "does not exist") || exists(typo) {
		t.Errorf("%v, made %t", err, exists(typo))
	}
}
