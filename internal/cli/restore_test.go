package cli

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/logtest"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// backUp takes a backup of a running server and returns its file.
func (e *estate) backUp(url string, to recipient) string {
	e.t.Helper()
	file := filepath.Join(e.t.TempDir(), "all.backup")
	mustRun(e.t, "backup", "--url", url, "--api-key", e.systemKey(), "--recipient", to.text, "--verify-with", to.file, "--output", file)
	return file
}

// A deployment can be backed up from any store and restored into any other with only the identity.
func TestABackupIsRestoredIntoAnotherKindOfStore(t *testing.T) {
	to := newRecipient(t)
	e, embedded := newEstate(t, fmt.Sprintf("backup: {recipients: [%s]}\n", to.text))
	server := pgtest.Shared(t)
	url, end := e.serve(embedded)
	file := e.backUp(url, to)
	end()

	database := server.URL()
	password := filepath.Join(t.TempDir(), "password")
	plain := withoutPassword(t, database, password)
	must(t, os.Remove(e.keyFile())) // everything is lost except the backup and the identity
	out := mustRun(t, "restore", "--input", file, "--identity-file", to.file, "--store", plain, "--password-file", password, "--kms-key-out", e.keyFile())
	if !strings.Contains(out, "restored: ") || !strings.Contains(out, "put it where the server's kms.url says") {
		t.Error(out)
	}
	e.whole(database)
	if _, err := run(t, "restore", "--input", file, "--identity-file", to.file, "--store", database); err == nil ||
		!regexp.MustCompile(`a deployment already, of the chain \w{64}`).MatchString(err.Error()) {
		t.Error("a deployment was restored over another: ", err)
	}
	e.whole(database)

	// The way back works from the running server and from the stopped one.
	url, end = e.serve(database)
	running := e.backUp(url, to)
	end()
	stopped := filepath.Join(t.TempDir(), "stopped.backup")
	if _, err := run(t, "backup", "--store", database, "--recipient", to.text, "--output", stopped); err == nil || !strings.Contains(err.Error(), "--kms-key-file") {
		t.Error("without its keys: ", err)
	}
	mustRun(t, "backup", "--store", database, "--kms-key-file", e.keyFile(), "--recipient", to.text, "--output", stopped)
	for name, from := range map[string]string{"running": running, "stopped": stopped} {
		target := offline.BoltScheme + e.path(name)
		mustRun(t, "restore", "--input", from, "--identity-file", to.file, "--store", target)
		if name == "stopped" && !maps.Equal(e.rows(target), e.rows(database)) {
			t.Error("the rows differ")
		}
	}
	export := filepath.Join(t.TempDir(), "log.jsonl")
	mustRun(t, "audit", "export", "--store", database, "--kms-key-file", e.keyFile(), "--output", export)
	mustRun(t, "audit", "verify", "--file", export)
	e.whole(offline.BoltScheme + e.path("running"))
}

// A restore that is killed leaves a database that no server takes for a deployment or for an empty
// one. It does not obstruct the next restore.
func TestAKilledRestoreIntoPostgreSQLIsNotServed(t *testing.T) {
	e, embedded := newEstate(t, "")
	e.fill(embedded, 5000)
	to := newRecipient(t)
	file := filepath.Join(t.TempDir(), "all.backup")
	mustRun(t, "backup", "--store", embedded, "--kms-key-file", e.keyFile(), "--recipient", to.text, "--output", file)
	content, err := os.ReadFile(file)
	must(t, err)

	program := filepath.Join(t.TempDir(), "latticekeep") // under this name the test binary is the program
	self, err := os.Executable()
	must(t, err)
	must(t, os.Symlink(self, program))
	pipe := filepath.Join(t.TempDir(), "pipe")
	must(t, syscall.Mkfifo(pipe, 0o600))
	database := pgtest.Shared(t).URL()
	for _, part := range []int{len(content) / 2, len(content) - 1} {
		cmd := exec.Command(program, "restore", "--input", pipe, "--identity-file", to.file, "--store", database)
		must(t, cmd.Start())
		w, err := os.OpenFile(pipe, os.O_WRONLY, 0) // returns when the program reads
		must(t, err)
		_, err = w.Write(content[:part])
		must(t, err)
		e.awaitMark(database)
		must(t, cmd.Process.Kill()) // it waits for the rest
		if err := cmd.Wait(); err == nil {
			t.Fatal("it ended by itself")
		}
		_ = w.Close()
		e.refused(database, "a restore into this database")
		if _, err := run(t, "audit", "verify", "--store", database); err == nil || !strings.Contains(err.Error(), "run latticekeep restore again") {
			t.Error(err)
		}
		if _, err := run(t, "migrate", "--from", embedded, "--to", database); err == nil || !strings.Contains(err.Error(), "run latticekeep restore again") {
			t.Error(err)
		}
	}
	mustRun(t, "restore", "--input", file, "--identity-file", to.file, "--store", database)
	if !maps.Equal(e.rows(database), e.rows(embedded)) {
		t.Error("the rows differ")
	}
	e.whole(database)
}

// awaitMark returns once a store has a mark.
func (e *estate) awaitMark(at string) { e.await(at, 0) }

// A fault in a backup shows before the database is served, however much has been loaded.
func TestABackupThatDoesNotHoldIsNotServedFromPostgreSQL(t *testing.T) {
	dir, to := small(t), newRecipient(t)
	e := &estate{t: t, dir: t.TempDir()}
	must(t, os.Mkdir(e.path("keys"), 0o700))
	key, err := os.ReadFile(filepath.Join(dir, offline.KMSKeyFileName))
	must(t, err)
	machine.WriteFile(t, e.keyFile(), key)
	whole, err := os.ReadFile(backupOf(t, dir, to))
	must(t, err)
	server := pgtest.Shared(t)
	for name, c := range map[string]struct {
		content []byte
		says    string
	}{
		"cut":     {whole[:len(whole)-1], "cut off"},
		"log cut": {resigned(t, dir, dir, "audit/entry/", to), "sequence"},
		"row":     {resigned(t, dir, dir, "credential/", to), "has no row"},
	} {
		database, input := server.NewDatabase(t), filepath.Join(t.TempDir(), "in")
		machine.WriteFile(t, input, c.content)
		if _, err := run(t, "restore", "--input", input, "--identity-file", to.file, "--store", database); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		e.refused(database, "a restore into this database")
	}
}

// Two restores into one database do not mix. The later one owns it.
func TestARestoreThatWasOvertakenWritesNothing(t *testing.T) {
	dir, to := small(t), newRecipient(t)
	content, err := os.ReadFile(backupOf(t, dir, to))
	must(t, err)
	database := pgtest.Shared(t).URL()
	s, err := offline.Open(t.Context(), offline.Location{URL: database})
	must(t, err)
	defer s.Close()
	stale := func(m *offline.Mark) bool { return m.State == offline.Restoring }
	must(t, offline.Claim(t.Context(), s, &offline.Mark{State: offline.Restoring, ID: "first"}, stale))
	fill := func(id string) error {
		from, err := backup.Open(bytes.NewReader(content), to.identities(t))
		must(t, err)
		return (&restore.Restored{From: from}).Fill(t.Context(), s, id)
	}
	must(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("zzz"), []byte("of the first")) }))
	must(t, fill("first"))
	must(t, offline.Claim(t.Context(), s, &offline.Mark{State: offline.Restoring, ID: "second"}, stale))
	if err := fill("first"); err == nil || !strings.Contains(err.Error(), "taken over") {
		t.Error(err)
	}
	if err := offline.Unmark(t.Context(), s, "first"); err == nil || !strings.Contains(err.Error(), "taken over") {
		t.Error(err)
	}
	must(t, fill("second"))
	must(t, offline.Unmark(t.Context(), s, "second"))
	rows := map[string]string{}
	must(t, audit.ScanAll(t.Context(), s, store.Range{}, func(key, value []byte) error {
		rows[string(key)] = string(value)
		return nil
	}))
	if !maps.Equal(rows, contentsOf(t, dir)) {
		t.Errorf("%d rows are others", len(rows))
	}
}

// noteOf returns the newest checkpoint of a running server.
func (e *estate) noteOf(url string) string {
	e.t.Helper()
	export := filepath.Join(e.t.TempDir(), "log.jsonl")
	mustRun(e.t, "audit", "export", "--url", url, "--api-key", e.systemKey(), "--whole", "--output", export)
	return logtest.NoteOf(e.t, strings.SplitAfter(strings.TrimSuffix(readText(e.t, export), "\n"), "\n"))
}

// keepNote puts a checkpoint into a bucket, as its server does within ten seconds.
func keepNote(t *testing.T, anchors, note string) {
	t.Helper()
	bucket, err := objects.Open(t.Context(), anchors, objects.SigningOptions{})
	must(t, err)
	must(t, errors.Join(bucket.Put(t.Context(), "anchor/"+strings.Split(note, "/")[2]+"/checkpoint", []byte(note)), bucket.Close()))
}

// A restored backup is an older state, and an external anchor detects that. Nothing is served until
// the loss is accepted by naming its range.
func TestARestoredBackupIsARollbackToItsAnchor(t *testing.T) {
	t.Parallel()
	anchors := "file://" + t.TempDir()
	e, embedded := newEstate(t, fmt.Sprintf("audit: {anchor: {bucket: %q}}\n", anchors))
	to := newRecipient(t)
	url, end := e.serve(embedded)
	file := e.backUp(url, to)
	e.seal(url, 3)
	lost := e.ids[len(e.ids)-3:]
	note := e.noteOf(url)
	end()
	keepNote(t, anchors, note)

	server := pgtest.Shared(t)
	for name, target := range map[string]string{"embedded": offline.BoltScheme + e.path("restored"), "postgres": server.URL()} {
		t.Run(name, func(t *testing.T) {
			anchored, err := os.ReadDir(strings.TrimPrefix(anchors, "file://") + "/anchor")
			if err != nil || len(anchored) != 1 {
				t.Fatal(anchored, err)
			}
			place := filepath.Join(strings.TrimPrefix(anchors, "file://"), "anchor", anchored[0].Name(), "checkpoint")
			machine.WriteFile(t, place, []byte(note))
			out := mustRun(t, "restore", "--input", file, "--identity-file", to.file, "--store", target)
			head := regexp.MustCompile(`head: (\d+) `).FindStringSubmatch(out)
			e := *e
			e.t = t
			url, end := e.serve(target)
			defer end()
			c := e.connect(url, e.tenant)
			if _, err := c.UnsealCredential(t.Context(), e.ids[0]); err == nil || !strings.Contains(err.Error(), "503") {
				t.Error("a database behind its anchor is served: ", err)
			}
			accept := []string{"audit", "accept-rollback", "--url", url, "--api-key", e.systemKey(), "--reason", "the disk failed"}
			said := mustRun(t, accept...)
			var from, until, first int
			if _, err := fmt.Sscanf(said, "entries %d to %d are lost\nepoch 2 begins with entry %d", &from, &until, &first); err != nil || fmt.Sprint(from-1) != head[1] || until < from+3 {
				t.Errorf("%s after %s", said, out)
			}
			if got, err := c.UnsealCredential(t.Context(), e.ids[0]); err != nil || got.Values["v"] != "s3cret-0" {
				t.Error(err)
			}
			for _, id := range lost {
				if _, err := c.UnsealCredential(t.Context(), id); err == nil {
					t.Error("what was lost is there")
				}
			}
			verified := mustRun(t, "audit", "verify", "--url", url, "--api-key", e.systemKey(), "--whole")
			if !strings.Contains(verified, fmt.Sprintf("accepts that entries %d to %d were lost", from, until)) {
				t.Error(verified)
			}
		})
	}
}

// A keeper of backups can find faults in a backup with and without the identity.
func TestAKeptBackupIsVerified(t *testing.T) {
	dir, to := small(t), newRecipient(t)
	file := backupOf(t, dir, to)
	out := mustRun(t, "backup", "verify", "--input", file)
	if !strings.Contains(out, "is as it was signed") || !strings.Contains(out, "not verified") || !strings.Contains(out, "not compared") {
		t.Error(out)
	}
	identity := regexp.MustCompile(`identity: (\w+)`).FindStringSubmatch(out)[1]
	out = mustRun(t, "backup", "verify", "--input", file, "--identity", identity, "--verify-with", to.file)
	if !strings.Contains(out, "the pinned one") || !strings.Contains(out, "verified: the backup opens") {
		t.Error(out)
	}
	whole, err := os.ReadFile(file)
	must(t, err)
	statement, err := os.ReadFile(file + ".sig")
	must(t, err)
	cut := resignedWhole(t, dir, dir, "audit/entry/", to)
	log, ofLog := cut[:len(cut)-backup.StatementSize], cut[len(cut)-backup.StatementSize:]
	for name, c := range map[string]struct {
		file, statement []byte
		args            []string
		says            string
	}{
		"changed":         {append(bytes.Clone(whole[:len(whole)-1]), whole[len(whole)-1]^1), statement, nil, "changed"},
		"cut":             {whole[:len(whole)/2], statement, nil, "cut off"},
		"another file":    {log, statement, nil, "use another one"},
		"no statement":    {whole, []byte("x"), nil, "not the signature"},
		"forged":          {whole, append(bytes.Clone(statement[:len(statement)-1]), statement[len(statement)-1]^1), nil, "does not verify"},
		"other identity":  {whole, statement, []string{"--identity", strings.Repeat("0", 64)}, "not the pinned one"},
		"other recipient": {whole, statement, []string{"--verify-with", newRecipient(t).file}, "another recipient"},
		"log cut":         {log, ofLog, []string{"--verify-with", to.file}, "sequence"},
	} {
		t.Run(name, func(t *testing.T) {
			input := filepath.Join(t.TempDir(), "in")
			machine.WriteFile(t, input, c.file)
			machine.WriteFile(t, input+".sig", c.statement)
			_, err := run(t, append([]string{"backup", "verify", "--input", input}, c.args...)...)
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
			if left, err := filepath.Glob(filepath.Join(filepath.Dir(input), "*")); err != nil || len(left) != 2 {
				t.Errorf("it leaves %v", left)
			}
		})
	}
}

// The row that says why a store is not served stays with the store, even if the backup was taken
// while the row was there.
func TestAMarkIsNotRestored(t *testing.T) {
	e, from := newEstate(t, "")
	url, end := e.serve(from)
	to := newRecipient(t)
	file := e.backUp(url, to)
	end()
	content, err := os.ReadFile(file)
	must(t, err)
	marked := filepath.Join(t.TempDir(), "marked.backup")
	machine.WriteFile(t, marked, withRow(t, e, content, to, offline.MarkRow, []byte(`{"state":"leaving"}`)))
	target := offline.BoltScheme + e.path("restored")
	mustRun(t, "restore", "--input", marked, "--identity-file", to.file, "--store", target)
	e.whole(target)
}

// withRow returns a backup with one more row, signed by the deployment.
func withRow(t *testing.T, e *estate, file []byte, to recipient, key, value []byte) []byte {
	t.Helper()
	return rewritten(t, e, file, to, func(_ *backup.Header, all rows) rows { return append(all, row{key, value}) })
}

// rewritten returns a backup that change has changed, signed by the deployment.
func rewritten(t *testing.T, e *estate, file []byte, to recipient, change func(*backup.Header, rows) rows) []byte {
	t.Helper()
	in, err := backup.Open(bytes.NewReader(file), to.identities(t))
	must(t, err)
	var all rows
	_, err = in.Rows(func(key, value []byte) error {
		all = append(all, row{bytes.Clone(key), bytes.Clone(value)})
		return nil
	})
	must(t, err)
	var b bytes.Buffer
	e.with(offline.BoltScheme+e.path("data"), func(s store.Database) {
		all = change(&in.Header, all)
		must(t, backup.Write(t.Context(), &b, all, in.Header, in.KMSKeys, to.identities(t)[0].Recipient(), openKeys(t, s, e.keyFile())))
	})
	return b.Bytes()
}
