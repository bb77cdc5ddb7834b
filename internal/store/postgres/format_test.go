package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

const schemaOf = "SELECT version FROM latticekeep_schema"

// former is the writer of a release that looks at the version of the tables alone.
type former struct {
	t  *testing.T
	pg *pgconn.PgConn
}

func newFormer(t *testing.T, url string) *former {
	t.Helper()
	pg, err := pgconn.Connect(t.Context(), with(t, url, "application_name", application))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pg.Close(context.Background()) })
	_, err = pg.Prepare(t.Context(), "lock", "SELECT fence, (SELECT version FROM latticekeep_schema WHERE id = 1), commit_id FROM latticekeep_head WHERE id = 1 FOR UPDATE", nil)
	if err != nil {
		t.Fatal(err)
	}
	return &former{t, pg}
}

// lock begins a transaction with the lock on the head and returns the version that it reads then.
func (f *former) lock() string {
	if err := f.pg.Exec(f.t.Context(), "BEGIN").Close(); err != nil {
		f.t.Error(err)
	}
	r := f.pg.ExecPrepared(f.t.Context(), "lock", nil, nil, nil).Read()
	if r.Err != nil || len(r.Rows) != 1 {
		f.t.Errorf("%d rows, %v", len(r.Rows), r.Err)
		return ""
	}
	return string(r.Rows[0][1])
}

func (f *former) end() {
	if err := f.pg.Exec(f.t.Context(), "COMMIT").Close(); err != nil {
		f.t.Error(err)
	}
}

func raiseFormat(t *testing.T, s store.Store) error {
	return s.Update(t.Context(), func(tx store.Tx) error {
		_, err := bump(tx, "raised")
		return errors.Join(err, format.Raise(tx, 2, 2))
	})
}

// A writer of an earlier release that waits for the lock while the format is raised does not commit
// after the raise, although its statement began before.
func TestARaiseExcludesWritersThatWait(t *testing.T) {
	url := pgtest.Shared(t).URL()
	var armed atomic.Bool
	committing, proceed := make(chan struct{}), make(chan struct{})
	s := openAt(t, url, Options{fault: func(_ string, do func() error) error {
		if armed.Load() {
			close(committing)
			<-proceed
		}
		return do()
	}})
	if err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("k"), nil) }); err != nil {
		t.Fatal(err)
	}
	f := newFormer(t, url)
	if version := f.lock(); version != "1" {
		t.Fatalf("before the raise a writer reads the version %s", version)
	}
	f.end()
	armed.Store(true)
	raised := make(chan error, 1)
	go func() { raised <- raiseFormat(t, s) }()
	<-committing
	armed.Store(false)
	read := make(chan string, 1)
	go func() { read <- f.lock() }()
	awaitLock(t, s, 1)
	close(proceed)
	if err := <-raised; err != nil {
		t.Fatal(err)
	}
	if version := <-read; version != "2" {
		t.Errorf("after the raise a writer that waited reads the version %s", version)
	}
	f.end()
	if got := answers(t, url, "SELECT get_byte(value, 7) FROM latticekeep_kv WHERE key = 'raised'"); got != "1" {
		t.Errorf("the closure counted %s times", got)
	}
}

// A writer that has the lock, or has waited for it longer than the raise, ends first.
func TestARaiseWaitsForWritersBeforeIt(t *testing.T) {
	url := pgtest.Shared(t).URL()
	s := openAt(t, url, Options{})
	f := newFormer(t, url)
	if version := f.lock(); version != "1" {
		t.Fatalf("it reads the version %s", version)
	}
	raised := make(chan error, 1)
	go func() { raised <- raiseFormat(t, s) }()
	awaitLock(t, s, 1)
	if got := answers(t, url, schemaOf); got != "1" {
		t.Errorf("the version is %s while a writer has the lock", got)
	}
	f.end()
	if err := <-raised; err != nil {
		t.Fatal(err)
	}
	if version := f.lock(); version != "2" {
		t.Errorf("afterwards it reads the version %s", version)
	}
	f.end()
}

// Only a raise changes the version of the tables, and this program works with both.
func TestOnlyARaiseChangesTheVersionOfTheTables(t *testing.T) {
	url := pgtest.Shared(t).URL()
	write := func(s *Store) {
		t.Helper()
		if err := s.Update(t.Context(), func(tx store.Tx) error { _, err := bump(tx, "n"); return err }); err != nil {
			t.Error(err)
		}
	}
	s := openAt(t, url, Options{})
	write(s)
	if err := s.Update(t.Context(), format.PutFirst); err != nil {
		t.Fatal(err)
	}
	write(openAt(t, url, Options{}))
	if got := answers(t, url, schemaOf); got != "1" {
		t.Errorf("the version is %s before a raise", got)
	}
	rolledBack := errors.New("rolled back")
	err := s.Update(t.Context(), func(tx store.Tx) error { return errors.Join(format.Raise(tx, 2, 2), rolledBack) })
	if got := answers(t, url, schemaOf); !errors.Is(err, rolledBack) || got != "1" {
		t.Errorf("the version is %s after a raise that failed with %v", got, err)
	}
	if err := raiseFormat(t, s); err != nil {
		t.Fatal(err)
	}
	if got := answers(t, url, schemaOf); got != "2" {
		t.Errorf("the version is %s after a raise", got)
	}
	write(s)
	write(openAt(t, url, Options{}))
	if _, err := Open(t.Context(), url, Options{ReadOnly: true}); err != nil {
		t.Error(err)
	}
	if err := raiseFormat(t, s); err != nil {
		t.Error(err)
	}
	answers(t, url, "UPDATE latticekeep_schema SET version = 3")
	if _, err := Open(t.Context(), url, Options{}); err == nil || !strings.Contains(err.Error(), "run the newer latticekeep") {
		t.Errorf("the version 3: %v", err)
	}
}

// A restore and a migration write the row as it is.
func TestARowThatIsCopiedRaisesTheVersionOfTheTablesToo(t *testing.T) {
	url := pgtest.Shared(t).URL()
	s := openAt(t, url, Options{})
	put := func(row string) {
		t.Helper()
		if err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put(format.Row, []byte(row)) }); err != nil {
			t.Fatal(err)
		}
	}
	put(`{"reader":1,"writer":1,"written_by":"v9.8.7"}`)
	if got := answers(t, url, schemaOf); got != "1" {
		t.Errorf("the version is %s", got)
	}
	put(`{"reader":1,"writer":2,"written_by":"v9.8.7"}`)
	if got := answers(t, url, schemaOf); got != "2" {
		t.Errorf("the version is %s", got)
	}
}

func TestTheNameOfASessionSaysWhatItsProgramReads(t *testing.T) {
	for name, want := range map[string]int{"latticekeep": 1, "latticekeep/1": 1, "latticekeep/7": 7, applicationName(12): 12, "latticekeep/": 1, "latticekeep/x": 1} {
		if reads, ok := readsOf(name); !ok || reads != want {
			t.Errorf("%q reads %d, %v", name, reads, ok)
		}
	}
	for _, name := range []string{"", "psql", "latticekeeper", "latticekeep-dump"} {
		if _, ok := readsOf(name); ok {
			t.Errorf("%q is of this product", name)
		}
	}
}

func TestReplicasThatDoNotReadAFormatAreSeen(t *testing.T) {
	server := pgtest.Shared(t)
	url := server.URL()
	s := openAt(t, url, Options{})
	reads := func(least int, want bool, when string) {
		t.Helper()
		if got, err := s.ReplicasRead(t.Context(), least); err != nil || got != want {
			t.Errorf("%s: all read format %d: %v, %v", when, least, got, err)
		}
	}
	join := func(url, name string) *pgconn.PgConn {
		t.Helper()
		c, err := pgconn.Connect(t.Context(), with(t, url, "application_name", name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close(context.Background()) })
		return c
	}
	s.server.reads = 3
	// What the store does after its start has sessions with the name from before.
	for alone := false; !alone && t.Context().Err() == nil; {
		var err error
		if alone, err = s.ReplicasRead(t.Context(), 3); err != nil {
			t.Fatal(err)
		}
	}
	reads(4, false, "alone")
	join(url, "psql")
	join(server.NewDatabase(t), "latticekeep")
	reads(3, true, "beside others")
	newer := join(url, "latticekeep/4")
	reads(3, true, "beside a newer one")
	released := join(url, "latticekeep")
	reads(3, false, "beside one of a release without numbers")
	reads(1, true, "beside one of a release without numbers")
	gone := fmt.Sprintf("SELECT count(*) FROM pg_stat_activity WHERE pid = %d", released.PID())
	if err := released.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the session does not end", func() bool { return answers(t, url, gone) == "0" })
	reads(3, true, "after it has ended")
	older := join(url, "latticekeep/2")
	reads(3, false, "beside an older one")
	reads(2, true, "beside an older one")
	_, _ = newer, older
}

// A writer that was stopped is ended, whatever its release calls its sessions.
func TestAStoppedWriterIsEndedUnderEachName(t *testing.T) {
	url := pgtest.Shared(t).URL()
	s := openAt(t, url, Options{})
	pids := map[string]uint32{}
	for _, name := range []string{"latticekeep", "latticekeep/1", "latticekeep/12", "psql"} {
		c, err := pgconn.Connect(t.Context(), with(t, url, "application_name", name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close(context.Background()) })
		if err := c.Exec(t.Context(), "BEGIN; SELECT pg_current_xact_id()").Close(); err != nil {
			t.Fatal(err)
		}
		pids[name] = c.PID()
	}
	s.server.evictOlder(0)
	living := func(name string) string {
		return answers(t, url, fmt.Sprintf("SELECT count(*) FROM pg_stat_activity WHERE pid = %d", pids[name]))
	}
	for _, name := range []string{"latticekeep", "latticekeep/1", "latticekeep/12"} {
		eventually(t, name+" is not ended", func() bool { return living(name) == "0" })
	}
	if living("psql") != "1" {
		t.Error("a session of another program was ended")
	}
}
