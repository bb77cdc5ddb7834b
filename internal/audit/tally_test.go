package audit

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
)

func TestProgressCountsWhatIsCommittedByKind(t *testing.T) {
	f := newFixture(t)
	event := func(what EventType, o Outcome) Event {
		return Event{Type: what, Outcome: o, Principal: principal(tenantA), Resource: Resource{Type: CredentialResource}}
	}
	f.record(event(CredentialUnsealed, Success))
	f.record(event(CredentialUnsealed, Success))
	f.record(event(CredentialUnsealed, Denied))
	sequence, written := f.progress()
	if sequence != 4 || len(written) != 3 || written[Kind{CredentialUnsealed, Success}] != 2 || written[Kind{CredentialUnsealed, Denied}] != 1 ||
		written[Kind{ChainStarted, Success}] != 1 {
		t.Error(sequence, written)
	}

	// Events of a failed transaction do not count.
	failed := errors.New("no")
	err := f.store.Update(t.Context(), func(tx store.Tx) error {
		_, err := f.log.Append(tx, event(CredentialDeleted, Success))
		return errors.Join(err, failed)
	})
	if !errors.Is(err, failed) {
		t.Fatal(err)
	}
	if again, written := f.progress(); again != sequence || written[Kind{CredentialDeleted, Success}] != 0 {
		t.Error(again, written)
	}
}

// The hook has run for a commit that then fails.
func TestAProposalCountsOnceItIsCommitted(t *testing.T) {
	f := newFixture(t)
	kind := Kind{CredentialUnsealed, Success}
	count := func(want uint64, when string) {
		t.Helper()
		if _, written := f.progress(); written[kind] != want {
			t.Errorf("%s: %d, want %d", when, written[kind], want)
		}
	}
	e := Event{Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenantA)}
	fails := errors.New("no")
	for range 2 { // the second one settles the first
		err := f.store.Update(t.Context(), func(tx store.Tx) error {
			return errors.Join(f.log.Commit(tx, []any{pending{Event: e, receipt: new(Receipt)}, pending{Event: e, receipt: new(Receipt)}}), fails)
		})
		if !errors.Is(err, fails) {
			t.Fatal(err)
		}
		count(0, "after a commit that failed")
	}
	f.record(e)
	count(1, "committed")
	f.record(e)
	count(2, "committed")
}
