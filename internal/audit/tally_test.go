package audit

import (
	"context"
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
)

func (f *fixture) progress() (uint64, map[Kind]uint64) {
	f.t.Helper()
	sequence, written, err := f.log.Progress(context.Background())
	if err != nil {
		f.t.Fatal(err)
	}
	return sequence, written
}

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

	// What joined a transaction that failed did not happen.
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
	var counts tally
	one := []pending{{Event: Event{Type: AuditRead, Outcome: Success}}}
	kind := Kind{AuditRead, Success}
	counts.propose(0, 1, one)
	if n := counts.at(0)[kind]; n != 0 {
		t.Error("before its commit:", n)
	}
	counts.propose(0, 2, append(one, one...)) // that failed; two try next
	if n := counts.at(0)[kind]; n != 0 {
		t.Error("after a commit that failed:", n)
	}
	if n := counts.at(2)[kind]; n != 2 {
		t.Error("committed:", n)
	}
	counts.propose(2, 3, one)
	if n := counts.at(2)[kind]; n != 2 {
		t.Error("before the next commit:", n)
	}
	if n := counts.at(3)[kind]; n != 3 {
		t.Error("after the next commit:", n)
	}
}
