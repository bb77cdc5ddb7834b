// Package storetest is the conformance suite of [store.Store]. It tests every promise of the
// contract through the contract's methods only.
//
// A backend's test calls [Run] with a function that opens its store and obeys [Options]. The suite
// knows nothing about files, locks or SQL. Each backend has its own tests for its particular
// behaviour.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Run tests every promise of the contract on the stores that open returns.
func Run(t *testing.T, open Open) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, Open)
	}{
		{"AnAbsentKeyIsNilAndAnEmptyValueIsNot", absentAndEmpty},
		{"KeysHaveLimits", keyLimits},
		{"ScanKeepsBytewiseOrder", scanOrder},
		{"ScanGoesOnFromWhatTheVisitorWrote", scanWhileWriting},
		{"ScanBackwardsPassesEmptiedPages", scanEmptied},
		{"AViewIsASnapshot", snapshot},
		{"NobodyReadsWhatIsNotCommitted", noDirtyReads},
		{"AnUpdateReadsItsOwnWrites", ownWrites},
		{"NoUpdateIsLost", lostUpdates},
		{"NoWriteSkew", writeSkew},
		{"AFailedClosureLeavesNothing", failedClosure},
		{"APanicContinuesInItsCallerAndLeavesNothing", panickingClosure},
		{"AClosureMayRunAgain", rerun},
		{"InputsAreCopied", inputsCopied},
		{"ResultsAreCopies", resultsCopied},
		{"AReaderEndsWithItsClosure", readerEnds},
		{"TheHookJoinsItsCommit", hookJoins},
		{"TheHookRunsOncePerCommit", hookOnce},
		{"CommitsAreObserved", observed},
		{"TheHookFailsTheGroup", hookFails},
		{"OnCommitIsCalledForWhatIsDurable", onCommit},
		{"OnCommitIsNotCalledForAClosureThatFails", onCommitOfOthers},
		{"AnEndedContextIsNotServed", endedContext},
		{"AQueuedUpdateIsWithdrawn", withdrawn},
		{"AHangingCommitHangsNobody", hangingCommit},
		{"AnUpdateOutlastsTheHook", outlastsHook},
		{"AViewLastsTwoSeconds", viewLimit},
		{"AViewEndsWithItsContext", viewContext},
		{"AFailedCommitLeavesNothing", commitNotPersisted},
		{"AFailedCommitThatPersistedIsASuccess", commitPersisted},
		{"TheStoreRecoversByItself", recovers},
		{"ReopeningKeepsEverything", reopening},
		{"CloseWaitsAndEnds", closing},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, open) })
	}
}

func absentAndEmpty(t *testing.T, open Open) {
	s := start(t, open, Options{})
	check := func(r store.Reader) error {
		for _, key := range []string{"empty", "nil"} {
			if v, err := r.Get([]byte(key)); err != nil || v == nil || len(v) != 0 {
				t.Errorf("%s value: %v, %v", key, v, err)
			}
		}
		if v, err := r.Get([]byte("absent")); err != nil || v != nil {
			t.Errorf("absent key: %v, %v", v, err)
		}
		return nil
	}
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		err := errors.Join(tx.Put([]byte("empty"), []byte{}), tx.Put([]byte("nil"), nil), tx.Delete([]byte("absent")))
		return errors.Join(err, check(tx))
	}))
	must(t, s.View(t.Context(), check))
}

func keyLimits(t *testing.T, open Open) {
	s := start(t, open, Options{})
	longest := bytes.Repeat([]byte{0xff}, store.MaxKeySize)
	for _, key := range [][]byte{nil, {}, append(bytes.Clone(longest), 0)} {
		wantKind(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, nil) }), fault.Invalid)
		wantKind(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(key) }), fault.Invalid)
		wantKind(t, s.View(t.Context(), func(r store.Reader) error { _, err := r.Get(key); return err }), fault.Invalid)
	}
	put(t, s, string(longest)+"=v")
	for _, reverse := range []bool{false, true} {
		must(t, s.View(t.Context(), func(r store.Reader) error {
			if got, err := scan(r, store.Range{Reverse: reverse}); err != nil || len(got) != 1 {
				t.Errorf("reverse %v: the longest key is not found: %v", reverse, err)
			}
			return nil
		}))
	}
}

func scanOrder(t *testing.T, open Open) {
	s := start(t, open, Options{})
	keys := []string{"a", "a\x00", "a\x00\xff", "a\xff", "aa", "b", "b/1", "b/10", "b/2", "b0", "\x00", "\xff", "\xff\xff", "Z", "é"}
	for _, k := range slices.Backward(keys) {
		put(t, s, k+"="+strconv.Itoa(len(k)))
	}
	slices.Sort(keys) // strings compare bytewise
	bounds := append([]string{"", "\x00\x00", "a/", "b/1\x00", "zzz"}, keys...)
	read := func(r store.Reader) error {
		for _, from := range bounds {
			for _, to := range append([]string{"unbounded"}, bounds...) {
				rg := store.Range{From: []byte(from), To: []byte(to)}
				if to == "unbounded" {
					rg.To = nil
				}
				var want []string
				for _, k := range keys {
					if k >= from && (rg.To == nil || k < to) {
						want = append(want, k+"="+strconv.Itoa(len(k)))
					}
				}
				for range 2 {
					got, err := scan(r, rg)
					if err != nil || !slices.Equal(got, want) {
						t.Fatalf("scan %+v: %q, %v, want %q", rg, got, err, want)
					}
					rg.Reverse = true
					slices.Reverse(want)
				}
			}
		}
		if got, err := scan(r, store.Prefix([]byte("b/"))); err != nil || !slices.Equal(got, []string{"b/1=3", "b/10=4", "b/2=3"}) {
			t.Fatalf("prefix: %q, %v", got, err)
		}
		visits := 0
		err := r.Scan(store.Range{}, func(_, _ []byte) bool { visits++; return visits < 3 })
		if err != nil || visits != 3 {
			t.Fatalf("visited %d after the visitor had enough at 3: %v", visits, err)
		}
		return nil
	}
	must(t, s.View(t.Context(), read))
	must(t, s.Update(t.Context(), func(tx store.Tx) error { return read(tx) }))
}

func scanWhileWriting(t *testing.T, open Open) {
	for _, reverse := range []bool{false, true} {
		s := start(t, open, Options{})
		const n = 400 // many pages of any backend with pages
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			for i := range n {
				if err := tx.Put(fmt.Appendf(nil, "k%03d", i), make([]byte, 200)); err != nil {
					return err
				}
			}
			return nil
		}))
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			visits := 0
			var werr error
			err := tx.Scan(store.Range{From: []byte("k"), To: []byte("l"), Reverse: reverse}, func(k, _ []byte) bool {
				visits++
				// Remove the visited pair. Add one after the scan's position and one in another
				// range.
				behind := fmt.Appendf(nil, "a%s", k)
				werr = errors.Join(werr, tx.Delete(k), tx.Put(behind, make([]byte, 300)), tx.Put(append([]byte("z"), k...), nil))
				clear(k)
				return true
			})
			if visits != n {
				t.Errorf("reverse %v: %d visits, want %d", reverse, visits, n)
			}
			return errors.Join(err, werr)
		}))
		if got := len(all(t, s)); got != 2*n {
			t.Errorf("reverse %v: %d pairs remain, want %d", reverse, got, 2*n)
		}
	}
}

func scanEmptied(t *testing.T, open Open) {
	s := start(t, open, Options{})
	const n = 600
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		for i := range n {
			if err := tx.Put(fmt.Appendf(nil, "%03d", i), make([]byte, 200)); err != nil {
				return err
			}
		}
		return nil
	}))
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		for i := 1; i < n; i++ {
			if err := tx.Delete(fmt.Appendf(nil, "%03d", i)); err != nil {
				return err
			}
		}
		if got, err := scan(tx, store.Range{Reverse: true}); err != nil || len(got) != 1 {
			t.Errorf("one pair is left, a reverse scan finds %d: %v", len(got), err)
		}
		if err := tx.Delete([]byte("000")); err != nil {
			return err
		}
		for _, reverse := range []bool{false, true} {
			if got, err := scan(tx, store.Range{Reverse: reverse}); err != nil || len(got) != 0 {
				t.Errorf("nothing is left, a scan finds %d: %v", len(got), err)
			}
		}
		return nil
	}))
}

func inputsCopied(t *testing.T, open Open) {
	s := start(t, open, Options{})
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		key, value := []byte("key"), []byte("value")
		err := tx.Put(key, value)
		clear(key)
		clear(value)
		if v, gerr := tx.Get([]byte("key")); gerr != nil || string(v) != "value" {
			t.Errorf("in the closure: %q, %v", v, gerr)
		}
		return err
	}))
	wantAll(t, s, "key=value")
}

func resultsCopied(t *testing.T, open Open) {
	s := start(t, open, Options{})
	put(t, s, "key=value")
	// Callers must not do this, but a store must survive it.
	spoil := func(r store.Reader) error {
		v, err := r.Get([]byte("key"))
		clear(v)
		return errors.Join(err, r.Scan(store.Range{}, func(k, v []byte) bool {
			clear(k)
			clear(v)
			return true
		}))
	}
	must(t, s.View(t.Context(), spoil))
	must(t, s.Update(t.Context(), func(tx store.Tx) error { return spoil(tx) }))
	wantAll(t, s, "key=value")
}

func readerEnds(t *testing.T, open Open) {
	s := start(t, open, Options{})
	put(t, s, "key=value")
	var r store.Reader
	var tx store.Tx
	must(t, s.View(t.Context(), func(in store.Reader) error { r = in; return nil }))
	must(t, s.Update(t.Context(), func(in store.Tx) error { tx = in; return in.Put([]byte("key"), []byte("2")) }))
	for name, err := range map[string]error{
		"View.Get":  second(r.Get([]byte("key"))),
		"View.Scan": r.Scan(store.Range{}, func(_, _ []byte) bool { return true }),
		"Tx.Get":    second(tx.Get([]byte("key"))),
		"Tx.Put":    tx.Put([]byte("key"), nil),
		"Tx.Delete": tx.Delete([]byte("key")),
	} {
		if fault.Of(err) != fault.Internal || err == nil {
			t.Errorf("%s after the closure: %v", name, err)
		}
	}
	wantAll(t, s, "key=2")
}

func reopening(t *testing.T, open Open) {
	dir := t.TempDir()
	want := []string{}
	for i := range 3 {
		s := open(t, Options{Dir: dir})
		wantAll(t, s, want...)
		pair := fmt.Sprintf("key%d=%d", i, i)
		put(t, s, pair)
		must(t, s.Close())
		want = append(want, pair)
	}
}

func closing(t *testing.T, open Open) {
	entered, goOn := make(chan struct{}), make(chan struct{})
	var once bool
	s := open(t, Options{Dir: t.TempDir(), Commit: func(do func() error) error {
		if !once {
			once = true
			close(entered)
			<-goOn
		}
		return do()
	}})
	updated := make(chan error, 1)
	go func() {
		updated <- s.Update(context.Background(), func(tx store.Tx) error { return tx.Put([]byte("key"), nil) })
	}()
	<-entered
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	close(goOn)
	must(t, <-updated)
	must(t, <-closed)
	must(t, s.Close())
	wantKind(t, s.View(t.Context(), func(store.Reader) error { return nil }), fault.Unavailable)
	wantKind(t, s.Update(t.Context(), func(store.Tx) error { return nil }), fault.Unavailable)
	wantKind(t, s.Ready(t.Context()), fault.Unavailable)
}
