package writer_test

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

func TestProgressCountsWhatIsCommittedByKind(t *testing.T) {
	f := audittest.NewFixture(t)
	event := func(what audit.EventType, o audit.Outcome) audit.Event {
		return audit.Event{Type: what, Outcome: o, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{Type: audit.CredentialResource}}
	}
	f.Record(event(audit.CredentialUnsealed, audit.Success))
	f.Record(event(audit.CredentialUnsealed, audit.Success))
	f.Record(event(audit.CredentialUnsealed, audit.Denied))
	sequence, written := f.Progress()
	if sequence != 4 || len(written) != 3 || written[writer.Kind{Type: audit.CredentialUnsealed, Outcome: audit.Success}] != 2 || written[writer.Kind{Type: audit.CredentialUnsealed, Outcome: audit.Denied}] != 1 ||
		written[writer.Kind{Type: audit.ChainStarted, Outcome: audit.Success}] != 1 {
		t.Error(sequence, written)
	}

	// Events of a failed transaction do not count.
	failed := errors.New("no")
	err := f.Store.Update(t.Context(), func(tx store.Tx) error {
		_, err := f.Log.Append(tx, event(audit.CredentialDeleted, audit.Success))
		return errors.Join(err, failed)
	})
	if !errors.Is(err, failed) {
		t.Fatal(err)
	}
	if again, written := f.Progress(); again != sequence || written[writer.Kind{Type: audit.CredentialDeleted, Outcome: audit.Success}] != 0 {
		t.Error(again, written)
	}
}

// The hook has run for a commit that then fails.
func TestAProposalCountsOnceItIsCommitted(t *testing.T) {
	f := audittest.NewFixture(t)
	kind := writer.Kind{Type: audit.CredentialUnsealed, Outcome: audit.Success}
	count := func(want uint64, when string) {
		t.Helper()
		if _, written := f.Progress(); written[kind] != want {
			t.Errorf("%s: %d, want %d", when, written[kind], want)
		}
	}
	e := audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)}
	fails := errors.New("no")
	for range 2 { // the second one settles the first
		err := f.Store.Update(t.Context(), func(tx store.Tx) error {
			return errors.Join(f.Log.Commit(tx, []any{writer.Pending(e), writer.Pending(e)}), fails)
		})
		if !errors.Is(err, fails) {
			t.Fatal(err)
		}
		count(0, "after a commit that failed")
	}
	f.Record(e)
	count(1, "committed")
	f.Record(e)
	count(2, "committed")
}
