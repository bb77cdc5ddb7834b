package cli

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/cli/transfer"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

func TestADeploymentMovesBetweenStoresAndGoesOn(t *testing.T) {
	e, first := newEstate(t, "")
	database := pgtest.Shared(t).URL()
	back := offline.BoltScheme + e.path("back")
	for from, to := range map[string]string{first: database} {
		before := e.rows(from)
		out := mustRun(t, "migrate", "--from", from, "--to", to)
		proof := regexp.MustCompile(`(\d+ rows, digest \w{64}, head \d+ \w{64})`).FindAllString(out, -1)
		if len(proof) != 2 || proof[0] != proof[1] || !strings.HasPrefix(proof[0], fmt.Sprint(len(before), " rows")) || strings.Contains(out, "latticekeep:") {
			t.Errorf("%s", out)
		}
		if !maps.Equal(e.rows(to), before) {
			t.Error("the rows differ")
		}
	}
	e.refused(first, "was moved to postgres://127.0.0.1")
	if _, err := run(t, "backup", "--data-dir", e.path("data"), "--kms-key-file", e.keyFile(), "--recipient", newRecipient(t).text, "--output", e.path("b")); err == nil ||
		!strings.Contains(err.Error(), "was moved") {
		t.Error("the past was backed up: ", err)
	}
	mustRun(t, "audit", "verify", "--data-dir", e.path("data")) // it remains evidence
	if _, err := run(t, "migrate", "--from", first, "--abandon"); err == nil || !strings.Contains(err.Error(), "was moved") {
		t.Error("a migration that is done was abandoned: ", err)
	}
	if _, err := run(t, "migrate", "--from", first, "--to", database); err == nil || !strings.Contains(err.Error(), "was moved") {
		t.Error("it was moved twice: ", err)
	}
	e.whole(database)

	before := e.rows(database)
	mustRun(t, "migrate", "--from", database, "--to", back)
	if !maps.Equal(e.rows(back), before) {
		t.Error("the rows differ on the way back")
	}
	e.refused(database, "was moved to bolt:"+e.path("back"))
	e.whole(back)
	other := offline.BoltScheme + e.path("other")
	mustRun(t, "migrate", "--from", back, "--to", other)
	e.whole(other)
}

// A migration that a kill or the loss of the database interrupts leaves no store that is served,
// and continues where it stopped.
func TestAMigrationThatIsBrokenOffGoesOn(t *testing.T) {
	e, from := newEstate(t, "")
	server := pgtest.Start(t)
	to := server.URL()
	const filler = 30_000
	e.fill(from, filler)
	before := e.rows(from)

	program := filepath.Join(t.TempDir(), "latticekeep") // under this name the test binary is the program
	self, err := os.Executable()
	must(t, err)
	must(t, os.Symlink(self, program))
	cmd := exec.Command(program, "migrate", "--from", from, "--to", to)
	var said machine.Log
	cmd.Stderr = &said
	must(t, cmd.Start())
	e.await(to, 1)
	must(t, cmd.Process.Kill())
	if err := cmd.Wait(); err == nil {
		t.Fatal("it ended by itself: ", said.String())
	}
	unserved := func() {
		t.Helper()
		e.refused(from, "is being moved to postgres://127.0.0.1")
		e.refused(to, "is unfinished")
		if _, err := run(t, "audit", "verify", "--store", to); err == nil || !strings.Contains(err.Error(), "run latticekeep migrate again") {
			t.Error(err)
		}
	}
	unserved()
	copied := e.await(to, 1) // rows that were copied before the kill

	ended := make(chan error, 1)
	go func() {
		_, err := run(t, "migrate", "--from", from, "--to", to)
		ended <- err
	}()
	more := e.await(to, copied+1)
	must(t, server.Kill())
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "run the same command again to resume") {
		t.Fatal("without its database: ", err)
	}
	must(t, server.Restart())
	unserved()

	var progress strings.Builder
	last := Command()
	last.SetArgs([]string{"migrate", "--from", from, "--to", to, "--progress"})
	last.SetOut(io.Discard)
	last.SetErr(&progress)
	must(t, last.ExecuteContext(t.Context()))
	var n uint64
	if _, err := fmt.Sscanf(progress.String()[strings.LastIndex(strings.TrimSpace(progress.String()), "\n")+1:], "%d rows copied", &n); err != nil || n == 0 || n > uint64(len(before))-more {
		t.Errorf("%d of %d rows were copied, although %d were there: %v", n, len(before), more, err)
	}
	if !maps.Equal(e.rows(to), before) {
		t.Error("the rows differ")
	}
	e.whole(to)
}

// await returns the number of rows copied to a store once it is at least n.
func (e *estate) await(at string, n uint64) uint64 {
	e.t.Helper()
	s, err := offline.Open(e.t.Context(), offline.Location{URL: at, ReadOnly: true})
	for deadline := time.Now().Add(time.Minute); err != nil; s, err = offline.Open(e.t.Context(), offline.Location{URL: at, ReadOnly: true}) {
		if time.Now().After(deadline) {
			e.t.Fatal(err)
		}
	}
	defer s.Close()
	for deadline := time.Now().Add(time.Minute); ; {
		m, err := offline.MarkOf(e.t.Context(), s)
		if err == nil && m != nil && m.Rows >= n {
			return m.Rows
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("after a minute %+v, %v", m, err)
		}
	}
}

// A server that was not stopped does not fork the log. Its store takes no more commits once the
// migration begins.
func TestAServerThatWasNotStoppedForksNothing(t *testing.T) {
	t.Parallel()
	e, first := newEstate(t, "")
	from := pgtest.Shared(t).URL()
	mustRun(t, "migrate", "--from", first, "--to", from)
	url, _ := e.serve(from)
	e.seal(url, 1)
	to := offline.BoltScheme + e.path("target")
	mustRun(t, "migrate", "--from", from, "--to", to)
	before := e.rows(from)
	c := e.connect(url, e.tenant)
	if _, err := c.SealCredential(t.Context(), v2.SealRequest{Name: "db", CredentialType: "t", Values: map[string]string{"v": "x"}}, nil); err == nil {
		t.Error("the source took a credential after it was moved")
	}
	if _, err := c.UnsealCredential(t.Context(), e.ids[0]); err == nil {
		t.Error("the source gave out a credential without an entry")
	}
	if !maps.Equal(e.rows(from), before) {
		t.Error("the source was written to")
	}
	e.whole(to)
}

func TestAMigrationRefusesWhatIsNotToBe(t *testing.T) {
	e, from := newEstate(t, "")
	other, elsewhere := newEstate(t, "")
	database := pgtest.Shared(t).URL()
	taken := other.rows(elsewhere)
	_, end := e.serve(from)
	refused := func(want string, args ...string) {
		t.Helper()
		_, err := run(t, append([]string{"migrate"}, args...)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", args, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q: the error has the password", args)
		}
	}
	refused("in use", "--from", from, "--to", database)
	end()
	before := e.rows(from)
	report, err := offline.VerifyDataDir(t.Context(), filepath.Join(other.dir, "data"), verify.Options{})
	must(t, err)
	refused("a deployment already, of the chain "+report.Fingerprint, "--from", from, "--to", elsewhere)
	refused("same store", "--from", from, "--to", from)
	refused("no deployment", "--from", offline.BoltScheme+e.path("nothing"), "--to", database)
	refused("no deployment", "--from", database, "--to", offline.BoltScheme+e.path("target"))
	refused("bolt:/var/lib/latticekeep", "--from", e.path("data"), "--to", database)
	refused("bolt:/var/lib/latticekeep", "--from", from, "--to", "mysql://root:s3cret@127.0.0.1/db")
	refused("bolt:/var/lib/latticekeep", "--from", from, "--to", "bolt://"+e.path("target"))
	refused("--to", "--from", from, "--to", "postgres://someone:s3cret@127.0.0.1:1/db?sslmode=disable")
	refused("--to", "--from", from)
	refused("nothing to abandon", "--from", from, "--abandon")
	if !maps.Equal(e.rows(from), before) || !maps.Equal(other.rows(elsewhere), taken) {
		t.Error("something was changed")
	}
	for _, name := range []string{"nothing", "target"} {
		if _, err := os.Stat(e.path(name)); err == nil {
			t.Error("a store was made: ", name)
		}
	}

	// A damaged source is found before anything is marked.
	e.with(from, func(s store.Database) {
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			var gone []byte
			err := tx.Scan(store.Prefix([]byte("credential/")), func(key, _ []byte) bool {
				gone = append(gone, key...)
				return false
			})
			return errors.Join(err, tx.Delete(gone))
		}))
	})
	damaged := e.rows(from)
	refused("has no row", "--from", from, "--to", database)
	if !maps.Equal(e.rows(from), damaged) || len(e.rows(database)) != 0 {
		t.Error("something was changed")
	}
}

// Two migrations do not mix, and an abandoned migration can be started again.
func TestAnAbandonedMigrationLeavesTheSourceAsItWas(t *testing.T) {
	e, from := newEstate(t, "")
	other, elsewhere := newEstate(t, "")
	to, third := offline.BoltScheme+e.path("target"), offline.BoltScheme+e.path("third")
	before := e.rows(from)
	begun := func(from string) {
		t.Helper()
		source, err := offline.Open(t.Context(), offline.Location{URL: from})
		must(t, err)
		must(t, os.MkdirAll(strings.TrimPrefix(to, offline.BoltScheme), 0o700))
		target, err := offline.Open(t.Context(), offline.Location{URL: to})
		must(t, err)
		m := &transfer.Migration{From: source, To: target, Source: offline.Location{URL: from}, Target: offline.Location{URL: to}}
		must(t, m.Begin(t.Context()))
		must(t, m.Copy(t.Context()))
		must(t, errors.Join(source.Close(), target.Close()))
	}
	begun(from)
	for _, args := range [][]string{{"--from", from, "--to", third}, {"--from", elsewhere, "--to", to}, {"--from", to, "--to", third}} {
		if _, err := run(t, append([]string{"migrate"}, args...)...); err == nil || !strings.Contains(err.Error(), "run latticekeep migrate again") {
			t.Errorf("%q: %v", args, err)
		}
	}
	other.whole(elsewhere)
	mustRun(t, "migrate", "--from", from, "--abandon")
	if !maps.Equal(e.rows(from), before) {
		t.Error("the source is not as it was")
	}
	e.whole(from)
	e.refused(to, "is unfinished")
	// The rows that it left in the target are stale and are removed.
	e.with(to, func(s store.Database) {
		must(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("zzz"), []byte("left")) }))
	})
	e.fill(to, 2500)
	before = e.rows(from)
	mustRun(t, "migrate", "--from", from, "--to", to)
	if !maps.Equal(e.rows(to), before) {
		t.Error("the rows differ")
	}
	e.whole(to)
}

// A migration that was interrupted between its last two steps, when neither store was served any
// more, is completed by running it again.
func TestAHandOverThatWasCutOffIsFinished(t *testing.T) {
	e, from := newEstate(t, "")
	to := pgtest.Shared(t).URL()
	source, err := offline.Open(t.Context(), offline.Location{URL: from})
	must(t, err)
	m := &transfer.Migration{From: source, Source: offline.Location{URL: from}, Target: offline.Location{URL: to}}
	must(t, errors.Join(m.Begin(t.Context()), m.Copy(t.Context()), m.Prove(t.Context())))
	must(t, source.Update(t.Context(), func(tx store.Tx) error {
		left, err := offline.ReadMark(tx)
		left.State = offline.Moved
		return errors.Join(err, left.Put(tx))
	}))
	must(t, errors.Join(source.Close(), m.Close()))
	e.refused(from, "was moved")
	e.refused(to, "is unfinished")
	mustRun(t, "migrate", "--from", from, "--to", to)
	e.whole(to)
}

// A difference between the two stores is found before the target is served.
func TestAMigrationProvesWhatItCopied(t *testing.T) {
	for name, spoil := range map[string]func(tx store.Tx) error{
		"a row more":       func(tx store.Tx) error { return tx.Put([]byte("zzz"), nil) },
		"a row less":       func(tx store.Tx) error { return tx.Delete([]byte("test/00000000")) },
		"another value":    func(tx store.Tx) error { return tx.Put([]byte("test/00000000"), []byte("other")) },
		"a mark of others": func(tx store.Tx) error { return (&offline.Mark{State: offline.Receiving, ID: "other"}).Put(tx) },
	} {
		t.Run(name, func(t *testing.T) {
			e, from := newEstate(t, "")
			e.fill(from, 1)
			to := offline.BoltScheme + e.path("target")
			must(t, os.Mkdir(e.path("target"), 0o700))
			source, err := offline.Open(t.Context(), offline.Location{URL: from})
			must(t, err)
			defer source.Close()
			target, err := offline.Open(t.Context(), offline.Location{URL: to})
			must(t, err)
			m := &transfer.Migration{From: source, To: target, Source: offline.Location{URL: from}, Target: offline.Location{URL: to}}
			must(t, m.Begin(t.Context()))
			must(t, m.Copy(t.Context()))
			must(t, target.Update(t.Context(), spoil))
			err = m.Prove(t.Context())
			if err == nil {
				err = m.Finish(t.Context())
			}
			if err == nil {
				t.Error("it was not found")
			}
			if left, err := offline.MarkOf(t.Context(), source); err != nil || left == nil || left.State != offline.Leaving {
				t.Errorf("the source is marked %+v, %v", left, err)
			}
			must(t, target.Close())
			e.refused(to, "")
		})
	}
}
