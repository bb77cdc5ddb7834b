package bolt

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt/wal"
	"github.com/latticekeep/latticekeep/internal/store/commit"
	"github.com/latticekeep/latticekeep/test/storetest"
)

// openAhead opens a store that writes ahead.
func openAhead(t *testing.T, path string, o Options) *Store {
	t.Helper()
	s := open(t, path, o)
	must(t, s.WriteAhead(t.Context()))
	return s
}

// never keeps a flush from coming before the test asks for one.
func never(t *testing.T, s *Store) {
	t.Helper()
	must(t, s.queue.turn(t.Context(), func() { s.writer.ahead.flushAfter = time.Hour }))
}

func TestConformanceWhenWritingAhead(t *testing.T) {
	storetest.Run(t, func(t *testing.T, o storetest.Options) store.Store {
		opts := Options{Hook: o.Hook, Observer: o.Observer, Now: o.Now}
		if o.Commit != nil {
			opts.fault = func(step string, do func() error) error {
				if step == "commit" {
					return o.Commit(do)
				}
				return do()
			}
		}
		s, err := Open(filepath.Join(o.Dir, "db"), opts)
		must(t, err)
		must(t, s.WriteAhead(t.Context()))
		return s
	})
}

// flush makes the store apply what was written ahead.
func flush(t *testing.T, s *Store) {
	t.Helper()
	must(t, s.queue.turn(t.Context(), func() {}))
}

// retryNow makes the store try again what failed.
func retryNow(t *testing.T, s *Store) {
	t.Helper()
	must(t, s.queue.turn(t.Context(), func() { s.writer.retry.after = nil }))
}

// crash copies the files of a store as a kill would leave them.
func crash(t *testing.T, path string) (copied string) {
	t.Helper()
	copied = filepath.Join(t.TempDir(), "db")
	for _, suffix := range []string{"", walSuffix} {
		b, err := os.ReadFile(path + suffix)
		if suffix != "" && errors.Is(err, os.ErrNotExist) {
			continue
		}
		must(t, err)
		must(t, os.WriteFile(copied+suffix, b, 0o600))
	}
	return copied
}

// changes makes random changes, each in a commit of its own, and tells the state before and after each.
type changes struct {
	mu            sync.Mutex
	before, after map[string]string
}

func (c *changes) make(t *testing.T, s *Store, random *rand.Rand) {
	t.Helper()
	c.mu.Lock()
	c.after = maps.Clone(c.before)
	set := make(map[string][]byte)
	for range 1 + random.IntN(3) {
		key := fmt.Sprint("key", random.IntN(30))
		if set[key] = nil; random.IntN(4) > 0 {
			set[key] = marked(key, 1+random.IntN(3000))
		}
		if delete(c.after, key); set[key] != nil {
			c.after[key] = string(set[key])
		}
	}
	c.mu.Unlock()
	must(t, s.Update(t.Context(), func(tx store.Tx) error {
		for key, value := range set {
			var err error
			if value == nil {
				err = tx.Delete([]byte(key))
			} else {
				err = tx.Put([]byte(key), value)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}))
	c.mu.Lock()
	c.before = c.after
	c.mu.Unlock()
}

// A kill before or after any step that must reach the disk leaves all commits that were answered, and of
// the one under way all or nothing.
func TestAKillLosesNothingThatWasWrittenAhead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	random := rand.New(rand.NewPCG(1, 2))
	made := &changes{before: map[string]string{}}
	seen := make(map[string]int)
	var kills []string
	var wanted [][2]map[string]string
	kill := func(step string, of int) {
		if step == "create" || step == "rename" {
			return // there is no database yet
		}
		if seen[step]++; seen[step] > 2*of {
			return
		}
		made.mu.Lock()
		defer made.mu.Unlock()
		kills, wanted = append(kills, crash(t, path)), append(wanted, [2]map[string]string{made.before, made.after})
	}
	var one sync.Mutex // a compaction has steps of its own
	s := openAhead(t, path, Options{pace: quick(), fault: func(step string, do func() error) error {
		one.Lock()
		defer one.Unlock()
		kill(step, 5)
		err := do()
		kill(step, 5)
		return err
	}})
	for i := range 60 {
		made.make(t, s, random)
		if i%15 == 0 {
			must(t, s.Scrubbed(t.Context()))
		}
		if i%20 == 0 {
			_, _, err := s.Compact(t.Context())
			must(t, err)
		}
	}
	must(t, s.Close())
	for i, at := range kills {
		for _, ahead := range []bool{false, true} {
			again := at
			if !ahead {
				again = crash(t, at) // the store that reads the first copy changes it
			}
			readOnly, err := Open(again, Options{ReadOnly: true})
			must(t, err)
			read := contents(t, readOnly)
			must(t, readOnly.Close())
			killed := open(t, again, Options{})
			if ahead {
				must(t, killed.WriteAhead(t.Context()))
			}
			got := contents(t, killed)
			if !maps.Equal(got, wanted[i][0]) && !maps.Equal(got, wanted[i][1]) || !maps.Equal(got, read) {
				t.Errorf("kill %d left %d rows, %d when only read, want %d or %d", i, len(got), len(read), len(wanted[i][0]), len(wanted[i][1]))
			}
			put(t, killed, "later", nil)
			must(t, killed.Close())
			sound(t, again)
		}
	}
	for _, step := range []string{"commit", "flush", "wipe log", "replace", "note log"} {
		if seen[step] == 0 {
			t.Errorf("there was no step %q", step)
		}
	}
}

// A record that was not written whole is no commit; one that is missing between others is damage.
func TestATornRecordIsNoCommit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := openAhead(t, path, Options{})
	never(t, s)
	for i := range 5 {
		put(t, s, fmt.Sprint(i), marked("value", 5000))
	}
	killed := crash(t, path)
	log, err := os.ReadFile(killed + walSuffix)
	must(t, err)
	const record = 2 * wal.BlockSize
	for _, at := range []int{4 * record, 4*record + 20, 4*record + wal.BlockSize + 900} {
		again := crash(t, killed)
		torn := bytes.Clone(log)
		torn[at] ^= 1
		must(t, os.WriteFile(again+walSuffix, torn, 0o600))
		if n := len(contents(t, open(t, again, Options{}))); n != 4 {
			t.Errorf("torn at %d: %d rows", at, n)
		}
	}
	lost := bytes.Clone(log)
	lost[2*record+100] ^= 1
	must(t, os.WriteFile(killed+walSuffix, lost, 0o600))
	for _, readOnly := range []bool{false, true} {
		_, err = Open(killed, Options{ReadOnly: readOnly})
		if err == nil || fault.Of(err) != fault.Internal || !strings.Contains(err.Error(), "damaged or that of another state") {
			t.Error(err)
		}
	}
}

func TestAWriteAheadLogThatIsMissingIsToldOf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := openAhead(t, path, Options{})
	never(t, s)
	put(t, s, "a", nil)
	flush(t, s)
	put(t, s, "b", nil)
	other := crash(t, path)
	put(t, s, "c", nil)
	killed := crash(t, path)
	must(t, os.Remove(killed+walSuffix))
	_, err := Open(killed, Options{})
	if err == nil || fault.Of(err) != fault.Internal || !strings.Contains(err.Error(), killed+walSuffix+" is missing") {
		t.Fatal(err)
	}
	must(t, os.WriteFile(killed+walSuffix, nil, 0o600))
	if got := contents(t, open(t, killed, Options{})); len(got) != 1 {
		t.Errorf("without the log: %v", got)
	}
	// An older copy of the database, which lacks a commit that was not written ahead.
	flush(t, s)
	older := crash(t, path)
	must(t, s.submit(t.Context(), true, func(tx store.Tx) error { return tx.Put([]byte("probe"), nil) }))
	put(t, s, "ahead", nil)
	must(t, os.Rename(crash(t, path)+walSuffix, older+walSuffix))
	if _, err = Open(older, Options{}); err == nil || fault.Of(err) != fault.Internal {
		t.Error("the log of a later state:", err)
	}
	// The log of a database that has gone on elsewhere.
	put(t, open(t, other, Options{}), "else", nil)
	elsewhere := crash(t, path)
	flush(t, s)
	put(t, s, "d", nil)
	must(t, os.Rename(crash(t, path)+walSuffix, elsewhere+walSuffix))
	if _, err = Open(elsewhere, Options{}); err == nil || fault.Of(err) != fault.Internal {
		t.Error("the log of another state:", err)
	}
}

// What is deleted leaves the log as well as the file, and a clean end leaves no log.
func TestADeletedRowLeavesTheWriteAheadLog(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "db")
	s := openAhead(t, path, Options{pace: quick()})
	never(t, s)
	must(t, s.Scrubbed(t.Context()))
	put(t, s, "secret", marked("secret", 3000))
	put(t, s, "other", marked("other", 3000))
	if !found(t, path+walSuffix, "secret") {
		t.Fatal("the test shows nothing")
	}
	remove(t, s, "secret")
	must(t, s.Scrubbed(t.Context()))
	for _, file := range []string{path, path + walSuffix} {
		if found(t, file, "secret") {
			t.Errorf("%s still has the row", file)
		}
	}
	must(t, s.Close())
	alone(t, path)
}

// A closure that fails after others were written ahead undoes what it did, and no more.
func TestAFailedClosureUndoesOnlyItsGroup(t *testing.T) {
	fails := false
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{Hook: func(tx store.Tx, _ []any) error {
		if fails {
			return errors.Join(tx.Put([]byte("hook"), nil), errInjected)
		}
		return nil
	}})
	never(t, s)
	put(t, s, "a", []byte("1"))
	put(t, s, "b", []byte("1"))
	must(t, s.between(t.Context(), func() { fails = true }))
	err := s.Update(t.Context(), func(tx store.Tx) error {
		return errors.Join(tx.Put([]byte("a"), []byte("2")), tx.Delete([]byte("b")), tx.Put([]byte("c"), nil))
	})
	if !errors.Is(err, errInjected) {
		t.Fatal(err)
	}
	must(t, s.queue.turn(t.Context(), func() { fails = false }))
	put(t, s, "d", nil)
	if got := contents(t, s); !maps.Equal(got, map[string]string{"a": "1", "b": "1", "d": ""}) {
		t.Error(got)
	}
}

// Views see the rows of the file and of the commits after it in one order, in both directions and from
// any key to any.
func TestAScanMergesWhatWasWrittenAhead(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{})
	never(t, s)
	model := make(map[string]string)
	key := func() string { return fmt.Sprintf("%02d", random.IntN(60)) }
	for round := range 150 {
		if random.IntN(10) == 0 {
			flush(t, s)
		}
		k := key()
		if random.IntN(3) == 0 {
			remove(t, s, k)
			delete(model, k)
		} else {
			v := fmt.Sprint(round)
			put(t, s, k, []byte(v))
			model[k] = v
		}
		rg := store.Range{Reverse: random.IntN(2) == 0}
		if random.IntN(3) > 0 {
			rg.From = []byte(key())
		}
		if random.IntN(3) > 0 {
			rg.To = []byte(key())
		}
		var want, got []string
		for _, k := range slices.Sorted(maps.Keys(model)) {
			if k >= string(rg.From) && (rg.To == nil || k < string(rg.To)) {
				want = append(want, k+"="+model[k])
			}
		}
		if rg.Reverse {
			slices.Reverse(want)
		}
		must(t, s.View(t.Context(), func(r store.Reader) error {
			value, err := r.Get([]byte(k))
			if model[k] != string(value) {
				t.Fatalf("round %d: %q is %q", round, k, value)
			}
			return errors.Join(err, r.Scan(rg, func(k, v []byte) bool { got = append(got, string(k)+"="+string(v)); return true }))
		}))
		if !slices.Equal(got, want) {
			t.Fatalf("round %d, %q to %q, reverse %v:\n got %q\nwant %q", round, rg.From, rg.To, rg.Reverse, got, want)
		}
	}
}

// Views beside commits and flushes see each state whole.
func TestViewsBesideFlushesSeeWholeCommits(t *testing.T) {
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{})
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			last := ""
			for {
				select {
				case <-done:
					return
				default:
				}
				err := s.View(t.Context(), func(r store.Reader) error {
					a, err := r.Get([]byte("a"))
					z, errz := r.Get([]byte("z"))
					if string(a) != string(z) || string(a) < last {
						t.Errorf("a is %q, z is %q, before it was %q", a, z, last)
					}
					last = string(a)
					return errors.Join(err, errz)
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range 150 {
		n := fmt.Appendf(nil, "%05d", i)
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			return errors.Join(tx.Put([]byte("a"), n), tx.Put([]byte("z"), n))
		}))
		if i%3 == 0 {
			flush(t, s)
		}
		err := s.View(t.Context(), func(r store.Reader) error {
			a, err := r.Get([]byte("a"))
			if !bytes.Equal(a, n) {
				t.Errorf("after %q was answered, a View sees %q", n, a)
			}
			return err
		})
		must(t, err)
	}
	close(done)
	wg.Wait()
}

// A View that was open when the log began keeps its pages.
func TestAViewFromBeforeTheLogIsNotWiped(t *testing.T) {
	for size := range 9 { // the position makes the row of the log of commits longer, and so moves pages
		s := open(t, filepath.Join(t.TempDir(), "db"), Options{pace: quick()})
		must(t, s.BeginLog(t.Context(), LogID{1}, func(store.Reader) ([]byte, error) { return make([]byte, size), nil }))
		for i := range 300 {
			put(t, s, fmt.Sprintf("%04d", i), marked("v", 1000))
		}
		must(t, s.Scrubbed(t.Context()))
		must(t, s.View(t.Context(), func(r store.Reader) error {
			must(t, s.WriteAhead(t.Context()))
			must(t, s.queue.turn(t.Context(), func() { s.scrubber.request() }))
			flush(t, s) // a scrub would have come by now
			n := 0
			err := r.Scan(store.Range{}, func(_, _ []byte) bool { n++; return true })
			if n != 300 {
				t.Errorf("the View reads %d of 300 rows", n)
			}
			return err
		}))
	}
}

// Nobody who stores a value can make a record: the id of the log is not known. The value's block is looked at once
// a later record has overwritten the one before it.
func TestAValueThatLooksLikeARecordIsNone(t *testing.T) {
	row := func(value []byte) wal.Record {
		return wal.Record{Record: commit.Record{First: 9, Last: 9, At: 9, Time: time.Unix(1, 0), Rows: []commit.Row{{Key: []byte("k"), Value: value}}}}
	}
	forged := row([]byte("forged")).Encode()
	value := append(make([]byte, wal.BlockSize-bytes.Index(row([]byte("mark")).Encode(), []byte("mark"))), forged...)
	path := filepath.Join(t.TempDir(), "db")
	s := openAhead(t, path, Options{})
	never(t, s)
	put(t, s, "k", value)
	flush(t, s)
	put(t, s, "small", nil)
	killed := crash(t, path)
	if b, err := os.ReadFile(killed + walSuffix); err != nil || !bytes.Equal(b[wal.BlockSize:2*wal.BlockSize], forged) {
		t.Fatal("the test shows nothing", err)
	}
	if got := contents(t, open(t, killed, Options{})); len(got) != 2 || got["k"] != string(value) {
		t.Errorf("%d rows", len(got))
	}
}

// A store that was written ahead agrees with a map, whatever fails on the way: closures, the hook, and each step
// that must reach the disk, before and after it was done.
func TestAStoreThatWritesAheadAgreesWithAModel(t *testing.T) {
	steps := []string{"commit", "flush", "apply", "wipe log", "note log", "settle log"}
	random := rand.New(rand.NewPCG(0, 9))
	path := filepath.Join(t.TempDir(), "db")
	var f faults
	hookFails := false
	s := openAhead(t, path, Options{pace: quick(), fault: f.step, Hook: func(tx store.Tx, _ []any) error {
		if hookFails {
			return errors.Join(tx.Put([]byte("hook"), nil), tx.Delete([]byte("k0010")), errInjected)
		}
		return nil
	}})
	never(t, s)
	model := map[string]string{}
	for round := range 150 {
		next := maps.Clone(model)
		kind := random.IntN(20)
		hookFails = kind == 0
		failing := ""
		switch kind {
		case 2, 3:
			failing = steps[random.IntN(len(steps))]
			if random.IntN(2) == 0 {
				f.before.Store(failing, true)
			} else {
				f.after.Store(failing, true)
			}
		case 4:
			flush(t, s)
		case 5:
			if random.IntN(4) == 0 {
				_, _, err := s.Compact(t.Context())
				must(t, err)
			}
		}
		size := 400
		if kind == 6 && random.IntN(4) == 0 {
			size = wal.MaxSize
		}
		err := s.Update(t.Context(), func(tx store.Tx) error {
			for range 1 + random.IntN(40) {
				key := fmt.Sprintf("k%04d", random.IntN(400))
				if random.IntN(100) < 45 {
					must(t, tx.Delete([]byte(key)))
					delete(next, key)
					continue
				}
				next[key] = string(marked(fmt.Sprint(round), 1+random.IntN(size)))
				must(t, tx.Put([]byte(key), []byte(next[key])))
				size = 400
			}
			var got []string
			rg := store.Range{Reverse: random.IntN(2) == 0}
			must(t, tx.Scan(rg, func(k, _ []byte) bool { got = append(got, string(k)); return true }))
			want := slices.Sorted(maps.Keys(next))
			if rg.Reverse {
				slices.Reverse(want)
			}
			if !slices.Equal(got, want) {
				t.Errorf("round %d: the transaction has %d keys, want %d", round, len(got), len(want))
			}
			if kind == 1 {
				return errInjected
			}
			return nil
		})
		if failing != "" && random.IntN(2) == 0 {
			flush(t, s)
		}
		f.before.Clear()
		f.after.Clear()
		hookFails = false
		switch {
		case err == nil:
			model = next
		case failing != "":
			retryNow(t, s)
			must(t, s.WriteAhead(t.Context()))
			if got := contents(t, s); maps.Equal(got, next) { // the outcome was unknown
				model = next
			}
		case kind > 1:
			t.Fatal(err)
		}
		if failing != "" {
			retryNow(t, s)
			must(t, s.between(t.Context(), func() {}))
		}
		if got := contents(t, s); !maps.Equal(got, model) {
			t.Fatalf("round %d, kind %d %s: %d rows, want %d", round, kind, failing, len(got), len(model))
		}
		if round%40 == 7 {
			var at string
			must(t, s.between(t.Context(), func() { at = crash(t, path) }))
			killed := open(t, at, Options{})
			if got := contents(t, killed); !maps.Equal(got, model) {
				t.Fatalf("round %d: after a kill %d rows, want %d", round, len(got), len(model))
			}
			must(t, killed.Close())
		}
	}
	must(t, s.Close())
	sound(t, path)
	alone(t, path)
}

// A transaction that a closure kept is over, although bbolt's goes on.
func TestAKeptTransactionIsOverBesideLaterGroups(t *testing.T) {
	s := openAhead(t, filepath.Join(t.TempDir(), "db"), Options{})
	never(t, s)
	var kept store.Tx
	must(t, s.Update(t.Context(), func(tx store.Tx) error { kept = tx; return tx.Put([]byte("b"), nil) }))
	must(t, s.Update(t.Context(), func(store.Tx) error {
		wantKind(t, kept.Put([]byte("stray"), nil), fault.Internal)
		return nil
	}))
}

// While the log cannot be applied, as on a full disk, everything can be read and nothing is committed, whether
// the process goes on or starts.
func TestALogThatCannotBeAppliedIsRead(t *testing.T) {
	var full atomic.Bool
	fails := func(step string, do func() error) error {
		if full.Load() && (step == "flush" || step == "apply" || step == "commit") {
			return syscall.ENOSPC
		}
		return do()
	}
	path := filepath.Join(t.TempDir(), "db")
	s := openAhead(t, path, Options{fault: fails})
	never(t, s)
	put(t, s, "a", []byte("1"))
	full.Store(true)
	flush(t, s)
	started := open(t, crash(t, path), Options{fault: fails, Journal: 1 << 20})
	for _, s := range []*Store{s, started} {
		if got := contents(t, s); !maps.Equal(got, map[string]string{"a": "1"}) {
			t.Error(got)
		}
		err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("b"), nil) })
		wantKind(t, err, fault.Unavailable)
		if !errors.Is(err, syscall.ENOSPC) || s.Ready(t.Context()) == nil {
			t.Errorf("the store is ready, and says %v", err)
		}
		_, _, err = s.Compact(t.Context())
		wantKind(t, err, fault.Unavailable)
	}
	full.Store(false)
	for _, s := range []*Store{s, started} {
		retryNow(t, s)
		put(t, s, "b", nil)
		if got := contents(t, s); !maps.Equal(got, map[string]string{"a": "1", "b": ""}) {
			t.Error(got)
		}
		must(t, s.Ready(t.Context()))
		must(t, s.Close())
	}
	sound(t, path)
}

// When the log fails and the database does not, one commit fails.
func TestALogThatFailsIsLeft(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := openAhead(t, path, Options{})
	never(t, s)
	put(t, s, "a", nil)
	must(t, s.queue.turn(t.Context(), func() {
		s.disk.fault = func(step string, do func() error) error {
			if step == "commit" && s.writer.ahead.log != nil && !s.writer.views.failed.Load() {
				return errInjected // to the log, not to the database
			}
			return do()
		}
	}))
	failed := 0
	for i := range 20 {
		if s.Update(t.Context(), func(tx store.Tx) error { return tx.Put(fmt.Append(nil, i), nil) }) != nil {
			failed++
		}
	}
	if failed != 1 {
		t.Errorf("%d of 20 commits failed", failed)
	}
	must(t, s.Close())
	alone(t, path)
}

// A kill between the row's removal and the file's leaves a log that the next start wipes.
func TestALogThatIsNotNamedIsWiped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	var at string
	s := openAhead(t, path, Options{fault: func(step string, do func() error) error {
		if step == "wipe log" && at == "" {
			if at = crash(t, path); !found(t, at+walSuffix, "secret") {
				at = ""
			}
		}
		return do()
	}})
	never(t, s)
	must(t, s.Scrubbed(t.Context()))
	put(t, s, "secret", marked("secret", 3000))
	must(t, s.Close())
	if at == "" {
		t.Fatal("the test shows nothing")
	}
	left := open(t, at, Options{})
	if _, err := os.Stat(at + walSuffix); !errors.Is(err, os.ErrNotExist) {
		t.Error("the log is still there:", err)
	}
	must(t, left.Close())
}
