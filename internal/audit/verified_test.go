package audit

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

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
)

// verifiedRow verifies the log and returns the row of the progress.
func verifiedRow(f *fixture) []byte {
	f.t.Helper()
	if p, err := f.log.Verify(f.t.Context()); err != nil || p.Status != ProofVerified {
		f.t.Fatal(p, err)
	}
	if err := f.log.keepProgress(f.t.Context(), 1); err != nil {
		f.t.Fatal(err)
	}
	return f.row(verifiedKey)
}

// on returns the log as another process finds it in a store.
func on(f *fixture, s store.Store, now func() time.Time) *parts {
	log := newParts(now)
	_ = log.Use(f.t.Context(), s, f.log.signer, f.log.chain.chainID) // some tests show it a damaged log
	return log
}

// The next process verifies only the new entries, and ends in the same state as one that has
// verified all of them.
func TestAVerificationGoesOnInTheNextProcess(t *testing.T) {
	f := newFixture(t)
	f.sealed(tenantA, "cred_a", "1", strings.Repeat("a", 64))
	f.record(Event{Type: SealingKeyCreated, Outcome: Success, Principal: principal(authz.SystemTenant), Resource: Resource{Type: SealingKeyResource, ID: "key"}})
	f.fill(300)
	f.rollBack(304, 310)
	f.fill(liveStep)
	row := verifiedRow(f)
	f.fill(20)
	f.record(Event{Type: AuditRead, Outcome: Success, Principal: principal("ten_new")})

	rows := &countingStore{Store: copyStore(t, f.store)}
	log := on(f, rows, f.now)
	if resumed, err := log.resume(t.Context(), time.Hour); !resumed || err != nil {
		t.Fatal(resumed, err)
	}
	p, err := log.Verify(t.Context())
	head, err2 := f.log.chain.storedHead(t.Context())
	if err != nil || err2 != nil || p.Status != ProofVerified || p.VerifiedTo != head.sequence || p.Hash != head.previous() {
		t.Fatal(p, err, err2)
	}
	whole := NewVerifier(Options{PublicKey: f.log.signer.Public(), entriesOnly: true})
	if err := whole.addRange(t.Context(), f.store, entryRange); err != nil {
		t.Fatal(err)
	}
	want, err := whole.Base()
	got, err2 := log.LiveVerifier.v.Base()
	if err != nil || err2 != nil || !got.equal(want) {
		t.Errorf("it does not know what one from the beginning does: %v %v", err, err2)
	}
	if log.LiveVerifier.v.entries != 21 {
		t.Errorf("%d entries were verified, want 21", log.LiveVerifier.v.entries)
	}
	// Without new entries, nothing is written. New progress is kept.
	if err := f.log.keepProgress(t.Context(), 1); err != nil || !bytes.Equal(f.row(verifiedKey), row) {
		t.Error("it is written again", err)
	}
	if _, err := f.log.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.log.keepProgress(t.Context(), 100); err != nil || !bytes.Equal(f.row(verifiedKey), row) {
		t.Error("a few entries are kept at once", err)
	}
	if err := f.log.keepProgress(t.Context(), 21); err != nil || bytes.Equal(f.row(verifiedKey), row) {
		t.Error("it is not kept", err)
	}
	if _, err := f.verify(); err != nil {
		t.Error(err)
	}
}

// A process ignores progress of another log, of other entries, or from too long ago.
func TestWhatWasVerifiedOfSomethingElseIsNotGoneOnFrom(t *testing.T) {
	f := newFixture(t)
	f.fill(9)
	older := copyStore(t, f.store)
	f.fill(20)
	row := verifiedRow(f)
	f.fill(5)
	whole := copyStore(t, f.store)
	other := newFixture(t)
	other.fill(29)
	b, since, err := f.log.LiveVerifier.v.history.clone(), f.log.LiveVerifier.since, error(nil)
	chain := f.log.chain.chainID
	sign := func(change func(w *verified)) []byte {
		w := verified{&Base{b.clone()}, since}
		change(&w)
		row, signErr := w.sign(f.log.signer)
		if signErr != nil {
			err = signErr
		}
		return row
	}
	for name, c := range map[string]struct {
		rows   *memory
		row    []byte
		broken bool // the entries are broken, too
	}{
		"none":                       {rows: whole},
		"cut":                        {rows: whole, row: row[:2000]},
		"another log's":              {rows: whole, row: verifiedRow(other)},
		"of another chain":           {rows: whole, row: sign(func(w *verified) { w.chainID = "chain_other" })},
		"too old":                    {rows: whole, row: sign(func(w *verified) { w.since = since.Add(-time.Hour - 1000) })},
		"of a time to come":          {rows: whole, row: sign(func(w *verified) { w.since = since.Add(time.Second) })},
		"of another entry":           {rows: whole, row: sign(func(w *verified) { w.hash = strings.Repeat("0", 64) })},
		"of an entry not there":      {rows: older, row: row},
		"of a damaged entry":         {rows: whole.with(func(tx store.Tx) error { return tx.Put(entryKey(30), []byte{1}) }), row: row, broken: true},
		"of an entry above the head": {rows: whole.with(func(tx store.Tx) error { return tx.Put(headKey, get(memoryTx{older}, headKey)) }), row: row},
		"signed for something else": {rows: whole, row: func() []byte {
			base, signErr := (&Base{b.clone()}).sign(f.log.signer, f.log.ChainID())
			if signErr != nil {
				t.Fatal(signErr)
			}
			text, signErr := (&Base{b.clone()}).json()
			if signErr != nil {
				t.Fatal(signErr)
			}
			at := len(base) - len(text)
			return append(append(bytes.Clone(base[:at]), make([]byte, 8)...), text...)
		}()},
	} {
		rows := c.rows.with(func(tx store.Tx) error {
			if c.row == nil {
				return tx.Delete(verifiedKey)
			}
			return tx.Put(verifiedKey, c.row)
		})
		log := on(f, rows, f.now)
		if resumed, _ := log.resume(t.Context(), time.Hour); resumed {
			t.Errorf("%s: it is gone on from", name)
		}
		p, err := log.Verify(t.Context())
		if want := map[bool]string{false: ProofVerified, true: ProofBroken}[c.broken]; err != nil || p.Status != want {
			t.Errorf("%s: %+v %v", name, p, err)
		} else if !c.broken && log.LiveVerifier.v.entries != uint64(log.LiveVerifier.v.tree.size) {
			t.Errorf("%s: %d of %d entries were verified", name, log.LiveVerifier.v.entries, log.LiveVerifier.v.tree.size)
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
		if _, err := parseVerified(changed, chain, f.log.signer.Public()); err == nil {
			t.Fatalf("byte %d can be changed", i)
		}
	}
}

// A start continues from the kept progress at once and also verifies all entries. So it finds an
// entry that was changed meanwhile, and the next start does not take the log as sound.
func TestAStartVerifiesAllOfItBeside(t *testing.T) {
	f := newFixture(t)
	f.fill(20)
	whole := copyStore(t, f.store)
	synctest.Test(t, func(t *testing.T) {
		var said bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&said, nil))
		run := func(rows store.Store, d time.Duration) Proof {
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
		rows := whole.with(func(store.Tx) error { return nil })
		if p := run(rows, time.Minute); p.Status != ProofVerified {
			t.Fatal(p)
		}
		first := get(memoryTx{rows}, verifiedKey)
		if p := run(rows, time.Minute); p.Status != ProofVerified || bytes.Equal(get(memoryTx{rows}, verifiedKey), first) {
			t.Error("the start did not verify all of it: ", p)
		}
		changed := rows.with(func(tx store.Tx) error { return tx.Delete(entryKey(7)) })
		log := on(f, changed, time.Now)
		if resumed, err := log.resume(t.Context(), 48*time.Hour); !resumed || err != nil {
			t.Fatal(resumed, err)
		}
		if p := run(changed, time.Minute); p.Status != ProofBroken || p.Broken.Sequence != 7 {
			t.Error(p)
		}
		if _, kept := changed.find(verifiedKey); kept {
			t.Error("the next start takes it for whole")
		}
		if n := strings.Count(said.String(), "level="); n != 1 {
			t.Errorf("it is said:\n%s", &said)
		}
		// Progress that is too old is ignored, so all entries are verified.
		time.Sleep(49 * time.Hour) // synctest clock
		if resumed, err := on(f, rows, time.Now).resume(t.Context(), 48*time.Hour); resumed || err != nil {
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
	var j baseJSON
	if err := json.Unmarshal(row[1+dualsig.SignatureSize+8:], &j); err != nil {
		t.Fatal(err)
	}
	named, err := j.base()
	if err != nil {
		t.Fatal(err)
	}
	w, err := parseVerified(row, "chain_test", named.public)
	if err != nil {
		t.Fatal(err)
	}
	if w.Sequence() != 311 || w.Size() != 304 || !w.since.Equal(time.Date(2026, 11, 21, 12, 0, 0, 123456000, time.UTC)) || len(w.tenants) != 3 || len(w.epochs) != 2 || len(w.credentials)+len(w.kept) != 0 {
		t.Fatalf("%d %d %v %d %d", w.Sequence(), w.Size(), w.since, len(w.tenants), len(w.epochs))
	}
}

// A verification can continue from any signed progress and keep it again.
func FuzzDecodeVerified(f *testing.F) {
	key, err := dualsig.NewPrivateKey(make([]byte, dualsig.SeedSize))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, since uint64, text []byte) {
		w, err := decodeVerified(binary.BigEndian.AppendUint64(nil, since), text, "chain_test", key.Public())
		if err != nil {
			return
		}
		v := NewVerifier(Options{PublicKey: key.Public(), Base: w.Base, entriesOnly: true})
		b, err := v.Base()
		if err != nil || b.Sequence() != w.Sequence() || !b.equal(w.Base) {
			t.Fatal(b, err)
		}
		if _, err := b.json(); err != nil {
			t.Fatal(err)
		}
	})
}
