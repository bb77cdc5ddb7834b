package postgres

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// TestACopyWhoseTakerIsSlowEnds has a receiver that waits until PostgreSQL no longer keeps rows for
// the copy.
func TestACopyWhoseTakerIsSlowEnds(t *testing.T) {
	url := pgtest.Shared(t).URL()
	s := openAt(t, url, Options{copyLimit: 100 * time.Millisecond})
	if err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("a"), nil) }); err != nil {
		t.Fatal(err)
	}
	if err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("b"), nil) }); err != nil {
		t.Fatal(err)
	}
	emitted := 0
	err := s.Copy(t.Context(), func(_, _ []byte) error {
		emitted++
		eventually(t, "PostgreSQL still keeps a snapshot", func() bool {
			return answers(t, url, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
				AND pid <> pg_backend_pid() AND state = 'idle in transaction'`) == "0"
		})
		return nil
	})
	if fault.Of(err) != fault.Unavailable || emitted > 1 {
		t.Errorf("after %d rows: %v", emitted, err)
	}
}

func TestAStoppedCopyIsEndedByTheServer(t *testing.T) {
	if got := tending.parameters(application)["idle_in_transaction_session_timeout"]; got != "3600000" {
		t.Errorf("after %s ms", got)
	}
}
