package bolt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/commit"
)

var testLog = LogID{1, 2, 3}

func noPosition(store.Reader) ([]byte, error) { return nil, nil }

func beginLog(t *testing.T, s *Store, id LogID) {
	t.Helper()
	must(t, s.BeginLog(t.Context(), id, noPosition))
}

// replica is what records make of an earlier state.
type replica struct {
	t    *testing.T
	rows map[string]string
	last commit.Record // the last one that was applied
}

func (r *replica) apply(c Commit) {
	r.t.Helper()
	if c.First != r.last.Last+1 || c.At < r.last.At || c.Time.Before(r.last.Time) {
		r.t.Fatalf("commits %d to %d as of %d follow those up to %d as of %d", c.First, c.Last, c.At, r.last.Last, r.last.At)
	}
	for _, row := range c.Rows {
		if row.Value == nil {
			delete(r.rows, string(row.Key))
		} else {
			r.rows[string(row.Key)] = string(row.Value)
		}
	}
	r.last = c.Record
	r.last.Rows = nil
}

// follow applies all records that follow, each of about most bytes, and returns their number.
func (r *replica) follow(s *Store, most int) (records int) {
	r.t.Helper()
	for {
		found, err := s.CommitsAfter(context.Background(), testLog, r.last.Last, r.last.At, most)
		must(r.t, err)
		if len(found) == 0 {
			return records
		}
		for _, c := range found {
			r.apply(c)
			records++
		}
	}
}

func (r *replica) compare(s *Store) {
	r.t.Helper()
	if want := contents(r.t, s); !maps.Equal(r.rows, want) {
		r.t.Errorf("after commit %d there are %d rows, want %d", r.last.Last, len(r.rows), len(want))
	}
	if !r.last.Whole() {
		r.t.Errorf("the last record is of %d as of %d", r.last.Last, r.last.At)
	}
}

// changeSome puts and deletes some rows in one commit.
func changeSome(t *testing.T, s *Store) {
	t.Helper()
	err := s.Update(t.Context(), func(tx store.Tx) error {
		var all []error
		for range 1 + rand.IntN(5) {
			key := fmt.Appendf(nil, "key%d", rand.IntN(60))
			if rand.IntN(3) == 0 {
				all = append(all, tx.Delete(key))
			} else {
				all = append(all, tx.Put(key, bytes.Repeat([]byte{byte(rand.Uint32())}, rand.IntN(200))))
			}
		}
		return errors.Join(all...)
	})
	must(t, err)
}

func TestRecordsMakeTheStateOfTheirCommit(t *testing.T) {
	for name, journal := range map[string]int{"from the journal": 1 << 20, "from the list": 0, "from both": 4000} {
		t.Run(name, func(t *testing.T) {
			s := open(t, filepath.Join(t.TempDir(), "db"), Options{Journal: journal})
			changeSome(t, s)
			before := contents(t, s)
			beginLog(t, s, testLog)
			whole, parts := &replica{t: t, rows: maps.Clone(before)}, &replica{t: t, rows: maps.Clone(before)}
			for range 40 {
				for range 1 + rand.IntN(20) {
					changeSome(t, s)
				}
				whole.follow(s, 1<<20)
				whole.compare(s)
				parts.follow(s, 1+rand.IntN(1000))
				parts.compare(s)
			}
			if journal == 1<<20 && parts.follow(s, 1) != 0 {
				t.Error("there are records that nothing was committed for")
			}
		})
	}
}

// With a journal each commit has a record of its own, in which a deleted row has no value.
func TestEachCommitHasARecord(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{Journal: 1 << 20})
	beginLog(t, s, testLog)
	put(t, s, "a", []byte("1"))
	put(t, s, "a", nil)
	must(t, s.Ready(t.Context()))
	must(t, s.submit(t.Context(), true, func(store.Tx) error { return nil })) // a probe changes no row
	must(t, s.Update(t.Context(), func(tx store.Tx) error { return errors.Join(tx.Delete([]byte("a")), tx.Put([]byte("b"), []byte("2"))) }))
	if err := s.Update(t.Context(), func(tx store.Tx) error { return errors.Join(tx.Put([]byte("c"), nil), errInjected) }); err == nil {
		t.Error("a closure that fails succeeds")
	}
	found, err := s.CommitsAfter(t.Context(), testLog, 0, 0, 1<<20)
	must(t, err)
	var got []string
	for _, c := range found {
		got = append(got, fmt.Sprintf("%d %q", c.First, c.Rows))
	}
	want := `[1 [{"a" "1"}] 2 [{"a" ""}] 3 [{"a" ""} {"b" "2"}]]`
	if fmt.Sprint(got) != want || found[1].Rows[0].Value == nil || found[2].Rows[0].Value != nil {
		t.Errorf("got %s, want %s", got, want)
	}
	if _, err := s.CommitsAfter(t.Context(), LogID{9}, 0, 0, 1<<20); !errors.Is(err, ErrNoLog) {
		t.Errorf("of another log: %v", err)
	}
}

// clone copies the file as a kill leaves it.
func clone(t *testing.T, path string, o Options) *Store {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	to := filepath.Join(t.TempDir(), "db")
	must(t, os.WriteFile(to, b, 0o600))
	return open(t, to, o)
}

func TestWhatWasNotShippedBeforeAKillIsInTheList(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{Journal: 1 << 20})
	beginLog(t, s, testLog)
	r := &replica{t: t, rows: map[string]string{}}
	for range 30 {
		changeSome(t, s)
	}
	r.follow(s, 1<<20)
	s.Shipped(testLog, r.last.Last, []byte("here"))
	for range 30 {
		changeSome(t, s)
	}
	at, err := s.Log(t.Context())
	must(t, err)
	killed := clone(t, path, Options{Journal: 1 << 20})
	l, err := killed.Log(t.Context())
	must(t, err)
	if l.ID != testLog || l.Shipped != r.last.Last || l.Newest != at.Newest || l.Newest <= l.Shipped || string(l.Position) != "here" || l.Oldest.IsZero() {
		t.Errorf("after the kill the log is %+v", l)
	}
	before, first := contents(t, killed), l.Newest
	put(t, killed, "first", nil) // before anything was shipped
	found, err := killed.CommitsAfter(t.Context(), testLog, r.last.Last, r.last.At, 1<<20)
	must(t, err)
	for _, c := range found {
		if r.apply(c); c.Last == first && (!c.Whole() || !maps.Equal(r.rows, before)) {
			t.Errorf("the state that the kill left is that of no record: %d as of %d", c.Last, c.At)
		}
	}
	if r.last.First != first+1 {
		t.Errorf("the last record begins with %d, want %d", r.last.First, first+1)
	}
	r.compare(killed)
	put(t, killed, "second", nil) // changeSome may change nothing
	if n := r.follow(killed, 1<<20); n != 1 {
		t.Errorf("there are %d records, want one", n)
	}
	r.compare(killed)
}

// What an earlier process left may be shipped in parts, and what exceeds the journal is in the list.
func TestWhatAnEarlierProcessLeftMakesItsState(t *testing.T) {
	for name, journal := range map[string]int{"in the journal": 1 << 20, "in the list": 2000} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "db")
			s := open(t, path, Options{Journal: 1 << 20})
			beginLog(t, s, testLog)
			whole, parts := &replica{t: t, rows: map[string]string{}}, &replica{t: t, rows: map[string]string{}}
			for range 40 {
				for range 20 {
					changeSome(t, s)
				}
				must(t, s.Close())
				s = open(t, path, Options{Journal: journal})
				for range rand.IntN(3) {
					changeSome(t, s)
				}
				whole.follow(s, 1<<20)
				whole.compare(s)
				parts.follow(s, 1+rand.IntN(1000))
				parts.compare(s)
				s.Shipped(testLog, whole.last.Last, nil)
			}
		})
	}
}

func TestShippedCommitsLeaveTheList(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{})
	beginLog(t, s, testLog)
	for range 3 * trimRows / 2 {
		put(t, s, "a", nil)
	}
	s.Shipped(testLog, 3*trimRows/2, nil)
	if l, err := s.Log(t.Context()); err != nil || !l.Oldest.IsZero() {
		t.Errorf("nothing is left to ship, and the log is %+v: %v", l, err)
	}
	put(t, s, "b", nil)
	put(t, s, "b", nil)
	must(t, s.Close())
	db, err := bbolt.Open(path, 0o600, nil)
	must(t, err)
	must(t, db.View(func(tx *bbolt.Tx) error {
		l, ok := logOf(tx)
		rows, size := 0, uint64(0)
		must(t, tx.Bucket([]byte(bucketList)).ForEach(func(_, row []byte) error { rows++; size += uint64(len(row)); return nil }))
		if !ok || rows != 2 || size != l.bytes {
			t.Errorf("%d rows of %d bytes are left, and the log says %d", rows, size, l.bytes)
		}
		return nil
	}))
	must(t, db.Close())
}

// A commit that was reported as failed, and the one after, are in the log like any other.
func TestACommitThatFailedIsInTheLogIfItPersisted(t *testing.T) {
	for _, persisted := range []bool{false, true} {
		var f faults
		s := open(t, filepath.Join(t.TempDir(), "db"), Options{Journal: 1 << 20, fault: f.step})
		beginLog(t, s, testLog)
		put(t, s, "a", nil)
		step := &f.before
		if persisted {
			step = &f.after
		}
		for _, unknown := range []bool{false, true} {
			step.Store("commit", true)
			if unknown { // the file cannot be opened, so nobody learns the outcome
				f.before.Store("settle", true)
			}
			if err := s.Update(t.Context(), func(tx store.Tx) error { return tx.Put(fmt.Appendf(nil, "b%t", unknown), nil) }); (err == nil) != (persisted && !unknown) {
				t.Errorf("persisted %t, unknown %t: %v", persisted, unknown, err)
			}
			step.Delete("commit")
			f.before.Delete("settle")
			must(t, s.Ready(t.Context()))
			put(t, s, "c", nil)
		}
		r := &replica{t: t, rows: map[string]string{}}
		r.follow(s, 1<<20)
		r.compare(s)
	}
}

func TestALogWhoseListIsTooLongEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{Journal: 1 << 20})
	beginLog(t, s, testLog)
	long := bytes.Repeat([]byte("k"), store.MaxKeySize-8)
	for i := range 17 {
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			for j := range 1000 {
				if err := tx.Put(fmt.Appendf(nil, "%s%02d%04d", long, i, j), nil); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	if _, err := s.Log(t.Context()); !errors.Is(err, ErrNoLog) {
		t.Fatalf("the log goes on: %v", err)
	}
	if _, err := s.CommitsAfter(t.Context(), testLog, 0, 0, 1<<20); !errors.Is(err, ErrNoLog) {
		t.Errorf("its commits are there: %v", err)
	}
	beginLog(t, s, LogID{4})
	put(t, s, "a", nil)
	if found, err := s.CommitsAfter(t.Context(), LogID{4}, 0, 0, 1<<20); err != nil || len(found) != 1 || found[0].Last != 1 {
		t.Errorf("the next log has %v: %v", found, err)
	}
}

func TestALogEndsWhenAProgramWroteThatDoesNotKeepIt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{})
	beginLog(t, s, testLog)
	put(t, s, "a", nil)
	must(t, s.Close())
	db, err := bbolt.Open(path, 0o600, nil)
	must(t, err)
	must(t, db.Update(func(tx *bbolt.Tx) error { // as a release without logs commits
		return errors.Join(tx.Bucket([]byte(bucketData)).Put([]byte("b"), nil),
			tx.Bucket([]byte(bucketCommit)).Put([]byte(keyCommit), []byte("0123456789abcdef")))
	}))
	must(t, db.Close())
	s = open(t, path, Options{})
	for range 2 {
		if _, err := s.Log(t.Context()); !errors.Is(err, ErrNoLog) {
			t.Errorf("the log goes on: %v", err)
		}
		put(t, s, "c", nil)
	}
}

// The position of a log is that of the state before its first commit, whatever is committed meanwhile.
func TestALogBeginsAfterTheStateThatItsPositionIsOf(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{})
	put(t, s, "a", []byte("1"))
	written := make(chan error, 1)
	must(t, s.BeginLog(t.Context(), testLog, func(r store.Reader) ([]byte, error) {
		go func() {
			written <- s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("a"), []byte("2")) })
		}()
		time.Sleep(10 * time.Millisecond)
		return r.Get([]byte("a"))
	}))
	must(t, <-written)
	l, err := s.Log(t.Context())
	must(t, err)
	found, err := s.CommitsAfter(t.Context(), testLog, 0, 0, 1<<20)
	must(t, err)
	if string(l.Position) != "1" || l.Newest != 1 || len(found) != 1 || string(found[0].Rows[0].Value) != "2" {
		t.Errorf("the position is %q, and %d commits follow: %v", l.Position, l.Newest, found)
	}
	failed := errors.New("not now")
	err = s.BeginLog(t.Context(), LogID{9}, func(store.Reader) ([]byte, error) { return nil, failed })
	if l, lerr := s.Log(t.Context()); !errors.Is(err, failed) || lerr != nil || l.ID != testLog {
		t.Errorf("a log without a position: %v; the log is %x (%v)", err, l.ID, lerr)
	}
}

func TestCommitsOfAProcessThatDoesNotShipAreListed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{Journal: 1 << 20})
	beginLog(t, s, testLog)
	put(t, s, "a", nil)
	must(t, s.Close())
	s = open(t, path, Options{})
	put(t, s, "b", nil)
	must(t, s.Close())
	s = open(t, path, Options{ReadOnly: true})
	r := &replica{t: t, rows: map[string]string{}}
	r.follow(s, 1<<20)
	r.compare(s)
	first, err := s.CommitID(t.Context(), testLog, 1)
	must(t, err)
	if second, err := s.CommitID(t.Context(), testLog, 2); err != nil || second == first {
		t.Errorf("the second commit has the id %x, the first one %x: %v", second, first, err)
	}
	_, err = s.CommitID(t.Context(), testLog, 3)
	wantKind(t, err, fault.NotFound)
}
