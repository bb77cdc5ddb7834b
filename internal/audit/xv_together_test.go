package audit

import (
	"bytes"
	"testing"
	"time"
)

// All processes share one row of verified progress: the best of any process. There is none after a
// process has found the log broken.
func TestReplicasKeepWhatIsVerifiedTogether(t *testing.T) {
	f := newFixture(t)
	a, b := f.log, f.another(f.store)
	verify := func(l *parts) {
		t.Helper()
		if p, err := l.Verify(t.Context()); err != nil || p.Status != ProofVerified {
			t.Fatal(p, err)
		}
	}
	keeps := func(l *parts) {
		t.Helper()
		if err := l.keepProgress(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	row := func() []byte { return f.rowsOf(only(verifiedKey))[string(verifiedKey)] }
	verify(a)
	f.fill(3)
	verify(b)
	keeps(b)
	better := row()
	keeps(a)
	if !bytes.Equal(row(), better) {
		t.Error("what is verified further is written over")
	}
	f.fill(3)
	verify(a)
	f.advance(time.Second)
	a.LiveVerifier.since = f.now()
	keeps(a)
	if bytes.Equal(row(), better) {
		t.Error("what rests on a later pass is not kept")
	}
	b.noteBroken(&Broken{Sequence: 3, Reason: "a test"})
	keeps(b)
	if row() != nil {
		t.Error("what was verified of a broken log is kept")
	}
	f.fill(3)
	verify(a)
	keeps(a)
	if row() != nil {
		t.Error("it is kept on the word of a process that has not looked at all of it since")
	}
	a.LiveVerifier.since = f.now().Add(time.Second)
	keeps(a)
	if row() == nil {
		t.Error("nothing is kept after a later pass")
	}
}
