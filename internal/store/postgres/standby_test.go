package postgres

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// reload changes a setting of a running server, and returns when it applies to new sessions.
func reload(t *testing.T, server *pgtest.Server, setting, value string) {
	t.Helper()
	if err := server.Exec(t.Context(), fmt.Sprintf("ALTER SYSTEM SET %s = '%s'", setting, value), "SELECT pg_reload_conf()"); err != nil {
		t.Fatal(err)
	}
	eventually(t, setting+" has not changed", func() bool { return answers(t, server.URL(), "SHOW "+setting) == value })
}

// waiting returns the number of commits that wait for standbys.
func waiting(t *testing.T, server *pgtest.Server) string {
	t.Helper()
	return answers(t, server.SuperURL(), "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
}

// endWaits ends every wait for standbys, as an administrator can.
func endWaits(t *testing.T, server *pgtest.Server, function string) {
	t.Helper()
	eventually(t, "nobody waits for standbys", func() bool { return waiting(t, server) != "0" })
	answers(t, server.SuperURL(), "SELECT "+function+"(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
}

// lostStandby makes the server wait for a standby that does not exist.
func lostStandby(t *testing.T, server *pgtest.Server) {
	t.Helper()
	reload(t, server, "synchronous_standby_names", "ghost")
	c, err := pgconn.Connect(t.Context(), server.SuperURL())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	done := make(chan struct{})
	go func() { // until the process that applies the setting has seen it
		for {
			if _, err := c.Exec(context.Background(), "SELECT pg_logical_emit_message(true, 'probe', '')").ReadAll(); err != nil {
				close(done)
				return
			}
		}
	}()
	endWaits(t, server, "pg_terminate_backend")
	<-done
}

func count(s *Store) error {
	return s.Update(context.Background(), func(tx store.Tx) error {
		n, err := bump(tx, "n")
		tx.Enqueue(fmt.Sprint(n))
		return err
	})
}

// counted returns n, which must also be the length of the chain.
func counted(t *testing.T, s *Store) (n uint64) {
	t.Helper()
	err := s.View(t.Context(), func(r store.Reader) error {
		v, err := r.Get([]byte("n"))
		head, err2 := r.Get([]byte("head"))
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		if n = number8(v); number8(head) != n {
			t.Errorf("%d updates made %d entries", n, number8(head))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	return n
}

func TestACommitWaitsForItsStandbys(t *testing.T) {
	server := pgtest.Start(t)
	server.Configure(t, nil, "max_wal_senders = 2")
	hasty := Options{commitWait: time.Second, patience: time.Second}
	begin := func(t *testing.T, o Options) *Store {
		o.Hook = chain
		s := openAt(t, server.NewDatabase(t), o)
		if err := count(s); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // before the store is closed, which would wait
			_ = server.Exec(context.Background(), "ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
		})
		lostStandby(t, server)
		return s
	}
	recovers := func(t *testing.T, s *Store) {
		reload(t, server, "synchronous_standby_names", "")
		eventually(t, "no recovery", func() bool { return count(s) == nil })
		if n := counted(t, s); n < 3 {
			t.Errorf("there are %d updates", n)
		}
	}
	t.Run("nobody sees or acknowledges what they do not have", func(t *testing.T) {
		s := begin(t, hasty)
		if err := count(s); fault.Of(err) != fault.Unavailable {
			t.Errorf("a commit that no standby has: %v", err)
		}
		s.server.evictOlder(0)
		if got := waiting(t, server); got != "1" {
			t.Errorf("%s commits wait for standbys, and 1 was sent", got)
		}
		if n := counted(t, s); n != 1 {
			t.Errorf("what no standby has is seen: %d", n)
		}
		recovers(t, s)
	})
	for _, function := range []string{"pg_cancel_backend", "pg_terminate_backend"} {
		t.Run("not acknowledged after "+function, func(t *testing.T) {
			s := begin(t, hasty)
			result := make(chan error)
			go func() { result <- count(s) }()
			endWaits(t, server, function)
			if err := <-result; fault.Of(err) != fault.Unavailable {
				t.Errorf("a commit that no standby has: %v", err)
			}
			recovers(t, s)
		})
	}
	t.Run("acknowledged once they have it", func(t *testing.T) {
		s := begin(t, Options{commitWait: time.Minute, patience: time.Minute})
		result := make(chan error, 1)
		go func() { result <- count(s) }()
		endWaits(t, server, "pg_cancel_backend")
		eventually(t, "what was found is not committed again", func() bool { return counted(t, s) == 2 && waiting(t, server) == "1" })
		select {
		case err := <-result:
			t.Fatalf("answered before: %v", err)
		default:
		}
		reload(t, server, "synchronous_standby_names", "")
		if err := <-result; err != nil {
			t.Error(err)
		}
		if n := counted(t, s); n != 2 {
			t.Errorf("there are %d updates", n)
		}
	})
}

func TestAStoppedSessionIsEvicted(t *testing.T) {
	url := pgtest.Shared(t).URL()
	s := openAt(t, url, Options{})
	c, err := s.server.connect(t.Context(), tending)
	if err != nil {
		t.Fatal(err)
	}
	defer c.kill()
	for _, text := range []string{"BEGIN", "UPDATE latticekeep_head SET fence = 7"} {
		if err := c.do(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	s.server.evictOlder(time.Hour)
	if err := c.do(t.Context(), "SELECT 1"); err != nil {
		t.Fatalf("ended before its time: %v", err)
	}
	s.server.evictOlder(0)
	if err := c.do(t.Context(), "COMMIT"); err == nil {
		t.Error("it goes on")
	}
}

func TestSynchronousCommitIsOn(t *testing.T) {
	url := pgtest.Shared(t).URL()
	for given, want := range map[string]string{"off": "on", "local": "on", "remote_write": "on", "on": "on", "remote_apply": "remote_apply"} {
		s := openAt(t, with(t, url, "synchronous_commit", given), Options{})
		c, err := s.server.connect(t.Context(), writing)
		if err != nil {
			t.Fatal(err)
		}
		defer c.kill()
		r := c.pg.ExecParams(t.Context(), "SELECT setting, source FROM pg_settings WHERE name = 'synchronous_commit'", nil, nil, nil, nil).Read()
		if got, source := string(r.Rows[0][0]), string(r.Rows[0][1]); got != want || source != "session" {
			t.Errorf("synchronous_commit %s became %s, from the %s", given, got, source)
		}
	}
}
