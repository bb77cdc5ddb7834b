package verify_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// verifiedRow verifies the log and returns the row of the progress.
func verifiedRow(f *audittest.Fixture) []byte {
	f.T.Helper()
	if p, err := f.Log.Verify(f.T.Context()); err != nil || p.Status != verify.ProofVerified {
		f.T.Fatal(p, err)
	}
	if err := f.Log.KeepProgress(f.T.Context(), 1); err != nil {
		f.T.Fatal(err)
	}
	return audittest.RowOf(f, audit.VerifiedKey)
}

// on returns the log as another process finds it in a store.
func on(f *audittest.Fixture, s store.Store, now func() time.Time) *audittest.Parts {
	log := audittest.NewParts(now)
	_ = log.Use(f.T.Context(), s, f.Log.Signer, f.Log.Chain.ChainID) // some tests show it a damaged log
	return log
}

// The next process verifies only the new entries, and ends in the same state as one that has
// verified all of them.
func TestAVerificationGoesOnInTheNextProcess(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Sealed(audittest.TenantA, "cred_a", "1", strings.Repeat("a", 64))
	f.Record(audit.Event{Type: audit.SealingKeyCreated, Outcome: audit.Success, Principal: audittest.Principal(authz.SystemTenant), Resource: audit.Resource{Type: audit.SealingKeyResource, ID: "key"}})
	f.Fill(300)
	f.RollBack(304, 310)
	f.Fill(verify.LiveStep)
	kept := verifiedRow(f)
	f.Fill(20)
	f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal("ten_new")})

	rows := &audittest.CountingStore{Store: audittest.CopyStore(t, f.Store)}
	log := on(f, rows, f.Now)
	if resumed, err := log.Resume(t.Context(), time.Hour); !resumed || err != nil {
		t.Fatal(resumed, err)
	}
	p, err := log.Verify(t.Context())
	head, err2 := f.Log.Chain.StoredHead(t.Context())
	if err != nil || err2 != nil || p.Status != verify.ProofVerified || p.VerifiedTo != head.Sequence || p.Hash != head.PreviousHash() {
		t.Fatal(p, err, err2)
	}
	whole := verify.NewVerifier(verify.Options{PublicKey: f.Log.Signer.Public()}.WithEntriesOnly())
	if err := whole.AddRange(t.Context(), f.Store, audit.EntryRange); err != nil {
		t.Fatal(err)
	}
	want, err := whole.Base()
	got, err2 := log.Current().Base()
	if err != nil || err2 != nil || !got.Equal(want) {
		t.Errorf("it does not know what one from the beginning does: %v %v", err, err2)
	}
	if log.Current().Verified() != 21 {
		t.Errorf("%d entries were verified, want 21", log.Current().Verified())
	}
	// Without new entries, nothing is written. New progress is kept.
	if err := f.Log.KeepProgress(t.Context(), 1); err != nil || !bytes.Equal(audittest.RowOf(f, audit.VerifiedKey), kept) {
		t.Error("it is written again", err)
	}
	if _, err := f.Log.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.Log.KeepProgress(t.Context(), 100); err != nil || !bytes.Equal(audittest.RowOf(f, audit.VerifiedKey), kept) {
		t.Error("a few entries are kept at once", err)
	}
	if err := f.Log.KeepProgress(t.Context(), 21); err != nil || bytes.Equal(audittest.RowOf(f, audit.VerifiedKey), kept) {
		t.Error("it is not kept", err)
	}
	if _, err := f.Verify(); err != nil {
		t.Error(err)
	}
}

// A process ignores progress of another log, of other entries, or from too long ago.
func TestWhatWasVerifiedOfSomethingElseIsNotGoneOnFrom(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(9)
	older := audittest.CopyStore(t, f.Store)
	f.Fill(20)
	row := verifiedRow(f)
	f.Fill(5)
	whole := audittest.CopyStore(t, f.Store)
	other := audittest.NewFixture(t)
	other.Fill(29)
	b, since, err := f.Log.Current().History.Clone(), f.Log.LiveVerifier.Since(), error(nil)
	chain := f.Log.Chain.ChainID
	sign := func(change func(w *verify.Progress)) []byte {
		w := verify.NewProgress(&audit.Base{History: b.Clone()}, since)
		change(&w)
		row, signErr := w.Sign(f.Log.Signer)
		if signErr != nil {
			err = signErr
		}
		return row
	}
	for name, c := range map[string]struct {
		rows   *audittest.Memory
		row    []byte
		broken bool // the entries are broken, too
	}{
		"none":                  {rows: whole},
		"cut":                   {rows: whole, row: row[:2000]},
		"another log's":         {rows: whole, row: verifiedRow(other)},
		"of another chain":      {rows: whole, row: sign(func(w *verify.Progress) { w.ChainID = "chain_other" })},
		"too old":               {rows: whole, row: sign(func(w *verify.Progress) { w.SetSince(since.Add(-time.Hour - 1000)) })},
		"of a time to come":     {rows: whole, row: sign(func(w *verify.Progress) { w.SetSince(since.Add(time.Second)) })},
		"of another entry":      {rows: whole, row: sign(func(w *verify.Progress) { w.Hash = strings.Repeat("0", 64) })},
		"of an entry not there": {rows: older, row: row},
		"of a damaged entry":    {rows: whole.With(func(tx store.Tx) error { return tx.Put(audit.EntryKey(30), []byte{1}) }), row: row, broken: true},
		"of an entry above the head": {rows: whole.With(func(tx store.Tx) error {
			return tx.Put(audit.HeadKey, audittest.Get(older.Tx(), audit.HeadKey))
		}), row: row},
		"signed for something else": {rows: whole, row: func() []byte {
			base := f.SignFormerBase(&audit.Base{History: b.Clone()})
			text, signErr := (&audit.Base{History: b.Clone()}).JSON()
			if signErr != nil {
				t.Fatal(signErr)
			}
			at := len(base) - len(text)
			return append(append(bytes.Clone(base[:at]), make([]byte, 8)...), text...)
		}()},
	} {
		rows := c.rows.With(func(tx store.Tx) error {
			if c.row == nil {
				return tx.Delete(audit.VerifiedKey)
			}
			return tx.Put(audit.VerifiedKey, c.row)
		})
		log := on(f, rows, f.Now)
		if resumed, _ := log.Resume(t.Context(), time.Hour); resumed {
			t.Errorf("%s: it is gone on from", name)
		}
		p, err := log.Verify(t.Context())
		if want := map[bool]string{false: verify.ProofVerified, true: verify.ProofBroken}[c.broken]; err != nil || p.Status != want {
			t.Errorf("%s: %+v %v", name, p, err)
		} else if !c.broken && log.Current().Verified() != uint64(log.Current().Tree.Size) {
			t.Errorf("%s: %d of %d entries were verified", name, log.Current().Verified(), log.Current().Tree.Size)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	for i := range row {
		if i > 20 && i < 3300 && i%97 > 0 {
			continue // some bits of the signature suffice
		}
		changed := bytes.Clone(row)
		changed[i] ^= 1
		if _, err := verify.ParseVerified(changed, chain, f.Log.Signer.Public()); err == nil {
			t.Fatalf("byte %d can be changed", i)
		}
	}
}

// A start continues from the kept progress at once and also verifies all entries. So it finds an
// entry that was changed meanwhile, and the next start does not take the log as sound.
func TestAStartVerifiesAllOfItBeside(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20)
	whole := audittest.CopyStore(t, f.Store)
	synctest.Test(t, func(t *testing.T) {
		var said bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&said, nil))
		run := func(rows store.Store, d time.Duration) verify.Proof {
			log := on(f, rows, time.Now)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				log.KeepVerified(ctx, 24*time.Hour, logger)
			}()
			time.Sleep(d) // synctest clock
			p := log.Proof()
			cancel()
			<-done
			return p
		}
		rows := whole.With(func(store.Tx) error { return nil })
		if p := run(rows, time.Minute); p.Status != verify.ProofVerified {
			t.Fatal(p)
		}
		first := audittest.Get(rows.Tx(), audit.VerifiedKey)
		if p := run(rows, time.Minute); p.Status != verify.ProofVerified || bytes.Equal(audittest.Get(rows.Tx(), audit.VerifiedKey), first) {
			t.Error("the start did not verify all of it: ", p)
		}
		changed := rows.With(func(tx store.Tx) error { return tx.Delete(audit.EntryKey(7)) })
		log := on(f, changed, time.Now)
		if resumed, err := log.Resume(t.Context(), 48*time.Hour); !resumed || err != nil {
			t.Fatal(resumed, err)
		}
		if p := run(changed, time.Minute); p.Status != verify.ProofBroken || p.Broken.Sequence != 7 {
			t.Error(p)
		}
		if _, kept := changed.Find(audit.VerifiedKey); kept {
			t.Error("the next start takes it for whole")
		}
		if n := strings.Count(said.String(), "level="); n != 1 {
			t.Errorf("it is said:\n%s", &said)
		}
		// Progress that is too old is ignored, so all entries are verified.
		time.Sleep(49 * time.Hour) // synctest clock
		if resumed, err := on(f, rows, time.Now).Resume(t.Context(), 48*time.Hour); resumed || err != nil {
			t.Error(resumed, err)
		}
	})
}

// The golden row must always be readable. It begins where testdata/base ends. Its key was not kept.
func TestTheGoldenVerifiedRow(t *testing.T) {
	row, err := os.ReadFile(filepath.Join("testdata", "verified"))
	if err != nil {
		t.Fatal(err)
	}
	var j audit.BaseJSON
	if err := json.Unmarshal(row[1+dualsig.SignatureSize+8:], &j); err != nil {
		t.Fatal(err)
	}
	named, err := j.Base()
	if err != nil {
		t.Fatal(err)
	}
	w, err := verify.ParseVerified(row, "chain_test", named.Public)
	if err != nil {
		t.Fatal(err)
	}
	if w.Sequence() != 311 || w.Tree.Size != 304 || !w.Since().Equal(time.Date(2026, 11, 21, 12, 0, 0, 123456000, time.UTC)) || len(w.Tenants) != 3 || len(w.Epochs) != 2 || len(w.Credentials)+len(w.Kept) != 0 {
		t.Fatalf("%d %d %v %d %d", w.Sequence(), w.Tree.Size, w.Since(), len(w.Tenants), len(w.Epochs))
	}
}

// A verification can continue from any signed progress and keep it again.
func FuzzDecodeVerified(f *testing.F) {
	key, err := dualsig.NewPrivateKey(make([]byte, dualsig.SeedSize))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, since uint64, text []byte) {
		w, err := verify.DecodeVerified(binary.BigEndian.AppendUint64(nil, since), text, "chain_test", key.Public())
		if err != nil {
			return
		}
		v := verify.NewVerifier(verify.Options{PublicKey: key.Public(), Base: w.Base}.WithEntriesOnly())
		b, err := v.Base()
		if err != nil || b.Sequence() != w.Sequence() || !b.Equal(w.Base) {
			t.Fatal(b, err)
		}
		if _, err := b.JSON(); err != nil {
			t.Fatal(err)
		}
	})
}

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
