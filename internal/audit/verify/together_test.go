package verify_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// All processes share one row of verified progress: the best of any process. There is none after a
// process has found the log broken.
func TestReplicasKeepWhatIsVerifiedTogether(t *testing.T) {
	f := audittest.NewFixture(t)
	a, b := f.Log, f.Another(f.Store)
	verify := func(l *audittest.Parts) {
		t.Helper()
		if p, err := l.Verify(t.Context()); err != nil || p.Status != verify.ProofVerified {
			t.Fatal(p, err)
		}
	}
	keeps := func(l *audittest.Parts) {
		t.Helper()
		if err := l.KeepProgress(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	row := func() []byte { return f.RowsOf(audit.KeyRange(audit.VerifiedKey))[string(audit.VerifiedKey)] }
	verify(a)
	f.Fill(3)
	verify(b)
	keeps(b)
	better := row()
	keeps(a)
	if !bytes.Equal(row(), better) {
		t.Error("what is verified further is written over")
	}
	f.Fill(3)
	verify(a)
	f.Advance(time.Second)
	a.SetSince(f.Now())
	keeps(a)
	if bytes.Equal(row(), better) {
		t.Error("what rests on a later pass is not kept")
	}
	b.NoteBroken(&audit.Broken{Sequence: 3, Reason: "a test"})
	keeps(b)
	if row() != nil {
		t.Error("what was verified of a broken log is kept")
	}
	f.Fill(3)
	verify(a)
	keeps(a)
	if row() != nil {
		t.Error("it is kept on the word of a process that has not looked at all of it since")
	}
	a.SetSince(f.Now().Add(time.Second))
	keeps(a)
	if row() == nil {
		t.Error("nothing is kept after a later pass")
	}
}
