package pgtest

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// ask runs a statement as the owner of a database and returns its result.
func ask(t *testing.T, s *Server, url, statement string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.bin+"/psql", "--no-psqlrc", "-tA", "--dbname="+url, "--command="+statement)
	s.equip(cmd)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", statement, err, out)
	}
	return strings.TrimSpace(string(out))
}

func TestAServerSyncsAndItsRoleIsNoSuperuser(t *testing.T) {
	s := Start(t)
	for statement, want := range map[string]string{
		"SHOW fsync":              "on",
		"SHOW synchronous_commit": "on",
		"SELECT usesuper FROM pg_user WHERE usename = current_user": "f",
		"CREATE TABLE own (a int)":                                  "CREATE TABLE",
	} {
		if got := ask(t, s, s.URL(), statement); got != want {
			t.Errorf("%s: %q, want %q", statement, got, want)
		}
	}
	if got := ask(t, s, s.NewDatabase(t), "SELECT count(*) FROM pg_tables WHERE tablename = 'own'"); got != "0" {
		t.Errorf("a fresh database has %s tables of another", got)
	}
}

func TestWhatWasCommittedSurvivesAKill(t *testing.T) {
	s := Start(t)
	ask(t, s, s.URL(), "CREATE TABLE kept (a int)")
	for range 2 {
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
		if got := ask(t, s, s.URL(), "SELECT count(*) FROM kept"); got != "0" {
			t.Fatalf("the table answers %q", got)
		}
	}
}

func TestAFrozenServerIsSilentUntilItThaws(t *testing.T) {
	s := Start(t)
	if err := s.Freeze(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := s.Exec(ctx, "SELECT 1"); err == nil {
		t.Error("a frozen server answers")
	}
	if err := s.Thaw(); err != nil {
		t.Fatal(err)
	}
	ask(t, s, s.URL(), "SELECT 1")
}

func TestSharedGivesEachTestADatabaseOfItsOwn(t *testing.T) {
	a, b := Shared(t), Shared(t)
	if a.port != b.port || a.URL() == b.URL() {
		t.Error("the server is not shared, or the database is")
	}
	ask(t, a, a.URL(), "CREATE TABLE own (a int)")
	ask(t, b, b.URL(), "CREATE TABLE own (a int)")
}

// TestNothingOutlivesAKilledTest kills a process that has started a server and frozen it.
func TestNothingOutlivesAKilledTest(t *testing.T) {
	skipShort(t)
	if os.Getenv("PGTEST_VICTIM") != "" {
		s := Start(t)
		if err := s.Freeze(); err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString("\nready " + s.dir + "\n")
		select {}
	}
	if _, err := binaries(); err != nil {
		t.Skip(err.Error())
	}
	victim := exec.Command(os.Args[0], "-test.run=^TestNothingOutlivesAKilledTest$", "-test.v")
	victim.Env = append(os.Environ(), "PGTEST_VICTIM=1")
	out, err := victim.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	var dir string
	for lines := bufio.NewScanner(out); dir == "" && lines.Scan(); {
		dir, _ = strings.CutPrefix(lines.Text(), "ready ")
		if !strings.HasPrefix(dir, "/") {
			dir = ""
		}
	}
	_ = victim.Process.Kill()
	_ = victim.Wait()
	if dir == "" {
		t.Fatal("the server did not start")
	}
	for end := time.Now().Add(30 * time.Second); ; {
		_, err := os.Stat(dir)
		ps, _ := exec.Command("ps", "-A", "-o", "args=").Output()
		left := strings.Count(string(ps), dir)
		if errors.Is(err, os.ErrNotExist) && left == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %v, %d processes", dir, err, left)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
