package cli

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// openAnyFormat opens a store without asking whether this program may.
func openAnyFormat(t *testing.T, at string) (s store.Database) {
	t.Helper()
	var err error
	if dir, ok := strings.CutPrefix(at, offline.BoltScheme); ok {
		s, err = bolt.Open(filepath.Join(dir, offline.DatabaseFile), bolt.Options{})
	} else {
		s, err = postgres.Open(t.Context(), at, postgres.Options{})
	}
	must(t, err)
	return s
}

func formatRow(reader, writer int) []byte {
	return fmt.Appendf(nil, `{"reader":%d,"writer":%d,"written_by":"v9.8.7"}`, reader, writer)
}

// putFormat writes the row of a newer release into a store.
func putFormat(t *testing.T, at string, reader, writer int) {
	t.Helper()
	s := openAnyFormat(t, at)
	must(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put(format.Row, formatRow(reader, writer)) }))
	must(t, s.Close())
}

const newerRelease = "install latticekeep v9.8.7 or a newer release"

// Every command that opens a store refuses one of a newer release. Commands that only read accept a
// store that they can read.
func TestAStoreOfANewerReleaseIsRefused(t *testing.T) {
	e, embedded := newEstate(t, "")
	to := newRecipient(t)
	moved, database := offline.BoltScheme+e.path("moved"), pgtest.Shared(t).URL()
	old := e.path("old.backup")
	mustRun(t, "backup", "--store", embedded, "--kms-key-file", e.keyFile(), "--recipient", to.text, "--output", old)
	mustRun(t, "migrate", "--from", embedded, "--to", database)
	mustRun(t, "restore", "--input", old, "--identity-file", to.file, "--store", moved)

	for kind, at := range map[string]string{"bolt": moved, "postgres": database} {
		t.Run(kind, func(t *testing.T) {
			e.t = t
			file := func(name string) string { return filepath.Join(t.TempDir(), name) }
			refused := func(args ...string) {
				t.Helper()
				if _, err := run(t, args...); err == nil || !strings.Contains(err.Error(), newerRelease) {
					t.Errorf("%s: %v", strings.Join(args[:2], " "), err)
				}
			}
			backUp := func(output string) []string {
				return []string{"backup", "--store", at, "--kms-key-file", e.keyFile(), "--recipient", to.text, "--output", output}
			}
			export := []string{"audit", "export", "--store", at, "--kms-key-file", e.keyFile(), "--output", file("log.jsonl")}

			putFormat(t, at, format.Reads, format.Writes+1)
			before := e.rowsOf(at)
			e.refused(at, newerRelease)
			refused("migrate", "--from", at, "--to", offline.BoltScheme+file("target"))
			refused("migrate", "--from", at, "--abandon")
			mustRun(t, "audit", "verify", "--store", at)
			mustRun(t, export...)
			raised := file("raised.backup")
			mustRun(t, append(backUp(raised), "--verify-with", to.file)...)
			in, err := backup.Open(strings.NewReader(readText(t, raised)), to.identities(t))
			must(t, err)
			if string(in.Header.Format) != string(formatRow(format.Reads, format.Writes+1)) {
				t.Errorf("the backup begins with the format %q", in.Header.Format)
			}
			target := offline.BoltScheme + file("restored")
			mustRun(t, "restore", "--input", raised, "--identity-file", to.file, "--store", target)
			if e.rowsOf(target)[string(format.Row)] != string(formatRow(format.Reads, format.Writes+1)) {
				t.Error("the row was not restored")
			}
			e.refused(target, newerRelease)

			putFormat(t, at, format.Reads+1, format.Writes+1)
			before[string(format.Row)] = string(formatRow(format.Reads+1, format.Writes+1))
			e.refused(at, newerRelease)
			refused("audit", "verify", "--store", at)
			refused("audit", "verify", "--store", at, "--from", "2")
			refused(export...)
			refused(backUp(file("refused.backup"))...)
			refused("migrate", "--from", at, "--to", offline.BoltScheme+file("target"))
			if after := e.rowsOf(at); fmt.Sprint(after) != fmt.Sprint(before) {
				t.Error("a refused command changed the store")
			}
			if dir, ok := strings.CutPrefix(at, offline.BoltScheme); ok {
				refused("audit", "verify", "--data-dir", dir)
				refused("audit", "fingerprint", "--data-dir", dir)
			}

			putFormat(t, at, format.Reads, format.Writes)
			_, end := e.serve(at)
			end()
		})
	}
}

// A server that a newer one overtakes commits nothing more, says why, and stops being ready.
func TestAServerNoticesANewerRelease(t *testing.T) {
	e, embedded := newEstate(t, "")
	database := pgtest.Shared(t).URL()
	mustRun(t, "migrate", "--from", embedded, "--to", database)
	url, end := e.serve(database)
	e.seal(url, 1)
	ready := func() int {
		t.Helper()
		answer, err := http.Get(url + "/readyz")
		must(t, err)
		must(t, answer.Body.Close())
		return answer.StatusCode
	}
	if got := ready(); got != http.StatusOK {
		t.Errorf("before: %d", got)
	}
	putFormat(t, database, format.Reads, format.Writes+1)
	_, err := e.connect(url, e.tenant).SealCredential(t.Context(), v2.SealRequest{Name: "db", CredentialType: "t", Values: map[string]string{"v": "w"}}, nil)
	if !errors.Is(err, client.ErrUnavailable) {
		t.Errorf("a change was answered %v", err)
	}
	if got := ready(); got != http.StatusServiceUnavailable {
		t.Errorf("after: %d", got)
	}
	end()
}

// rowsOf is rows for a store of any format.
func (e *estate) rowsOf(at string) map[string]string {
	e.t.Helper()
	all := map[string]string{}
	s := openAnyFormat(e.t, at)
	must(e.t, s.View(e.t.Context(), func(r store.Reader) error {
		return r.Scan(store.Range{}, func(key, value []byte) bool { all[string(key)] = string(value); return true })
	}))
	must(e.t, s.Close())
	return all
}

// A backup that only a newer release reads is refused before any of its rows is written, and also
// when the store was raised while the backup was taken.
func TestABackupOfANewerReleaseIsRefused(t *testing.T) {
	e, embedded := newEstate(t, "")
	to := newRecipient(t)
	old := e.path("old.backup")
	mustRun(t, "backup", "--store", embedded, "--kms-key-file", e.keyFile(), "--recipient", to.text, "--output", old)
	content, err := os.ReadFile(old)
	must(t, err)
	newer := formatRow(format.Reads+1, format.Writes+1)
	for name, made := range map[string][]byte{
		"begun": rewritten(t, e, content, to, func(h *backup.Header, all rows) rows {
			h.Format = newer
			return all
		}),
		"raised": withRow(t, e, content, to, format.Row, newer),
	} {
		file := filepath.Join(t.TempDir(), name)
		machine.WriteFile(t, file, made)
		database := pgtest.Shared(t).URL()
		for _, at := range []string{offline.BoltScheme + e.path(name), database} {
			if _, err := run(t, "restore", "--input", file, "--identity-file", to.file, "--store", at); err == nil || !strings.Contains(err.Error(), newerRelease) {
				t.Errorf("%s into %s: %v", name, at, err)
			}
		}
		if exists(filepath.Join(e.path(name), offline.DatabaseFile)) {
			t.Errorf("%s: a database was made", name)
		}
		if got := len(e.rowsOf(database)); name == "begun" && got != 0 {
			t.Errorf("%s: %d rows were written", name, got)
		}
		if name == "raised" {
			e.refused(database, "is unfinished")
		}
	}
}

func TestTheVersionNamesTheFormats(t *testing.T) {
	if out := mustRun(t, "version"); strings.Count(out, "\n") != 1 {
		t.Errorf("version: %s", out)
	}
	want := fmt.Sprintf("\nreads store formats: 1 to %d\nwrites store formats: 1 to %d\n", format.Reads, format.Writes)
	if out := mustRun(t, "version", "--formats"); !strings.HasSuffix(out, want) {
		t.Errorf("version --formats: %s", out)
	}
}
