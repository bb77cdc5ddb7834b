package writer_test

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/test/audittest"
)

func TestAFullDiskSparesReadsAndAFewDenials(t *testing.T) {
	now := time.Date(2026, 11, 24, 10, 0, 5, 0, time.UTC)
	l := writer.New(func() time.Time { return now }, nil)
	spared := func(id string, e audit.EventType, o audit.Outcome) bool {
		p := audittest.Principal(audittest.TenantA)
		p.ID = id
		return l.Spared(writer.Pending(audit.Event{Type: e, Outcome: o, Principal: p}))
	}
	count := func(id string, o audit.Outcome) (n int) {
		for range 100 {
			if spared(id, audit.CredentialSealed, o) {
				n++
			}
		}
		return n
	}
	if count("a", audit.Success) != 0 {
		t.Error("a change goes on")
	}
	if !l.Spared(state.Change{}) {
		t.Error("the change of a row without an entry does not go on")
	}
	for range 100 {
		if !spared("a", audit.CredentialUnsealed, audit.Success) || !spared("a", audit.CredentialDeleted, audit.Success) {
			t.Fatal("a read or a removal does not go on")
		}
	}
	if n := count("a", audit.Denied); n != 10 {
		t.Errorf("%d denials go on", n)
	}
	if n := count("a", audit.Failure); n != 0 {
		t.Errorf("%d failures go on after the denials", n)
	}
	if n := count("b", audit.Failure); n != 10 {
		t.Errorf("%d failures of another principal go on", n)
	}
	now = now.Add(time.Minute)
	if n := count("a", audit.Denied); n != 10 {
		t.Errorf("%d denials go on in the next minute", n)
	}
}
