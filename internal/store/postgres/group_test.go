package postgres

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// awaitLock returns when want sessions of the database wait for a lock.
func awaitLock(t *testing.T, s *Store, want int64) {
	t.Helper()
	c, err := s.server.connect(t.Context(), reading)
	if err != nil {
		t.Fatal(err)
	}
	defer c.kill()
	eventually(t, "the lock is not waited for", func() bool {
		n, err := c.number(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")
		return err == nil && n == want
	})
}

// An Update that arrives while a group waits for the lock on the head joins that group, and reads
// what the previous holder wrote.
func TestWhoComesWhileTheLockIsWaitedForSharesTheCommit(t *testing.T) {
	s := openAt(t, pgtest.Shared(t).URL(), Options{Hook: chain})
	update := func(key string) error {
		return s.Update(t.Context(), func(tx store.Tx) error {
			if _, err := bump(tx, key); err != nil {
				return err
			}
			tx.Enqueue(key)
			_, err := bump(tx, "common")
			return err
		})
	}
	if err := update("first"); err != nil {
		t.Fatal(err)
	}
	holder, err := s.server.connect(t.Context(), tending)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(holder.kill)
	do := func(statement string) {
		t.Helper()
		if err := holder.do(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	do("BEGIN")
	do("UPDATE latticekeep_head SET fence = fence + 1, commit_id = 'another'")
	const late = 10
	for i := range late {
		do(fmt.Sprintf(`INSERT INTO latticekeep_kv VALUES ('late/%d', '\x0000000000000064')`, i))
	}
	do(`UPDATE latticekeep_kv SET value = '\x0000000000000064' WHERE key = 'common'`)

	before := s.Commits()
	var wg sync.WaitGroup
	write := func(key string) {
		wg.Go(func() {
			if err := update(key); err != nil {
				t.Errorf("%s: %v", key, err)
			}
		})
	}
	write("first")
	awaitLock(t, s, 1)
	for i := range late {
		write(fmt.Sprintf("late/%d", i))
	}
	eventually(t, "they have not joined", func() bool {
		s.writer.queue.mu.Lock()
		defer s.writer.queue.mu.Unlock()
		return s.writer.queue.pending != nil && len(s.writer.queue.pending.requests) == 1+late
	})
	do("COMMIT")
	wg.Wait()
	if n := s.Commits() - before; n != 1 {
		t.Errorf("%d commits instead of one", n)
	}
	err = s.View(t.Context(), func(r store.Reader) error {
		want := map[string]uint64{"first": 2, "common": 100 + 1 + late, "head": 1 + 1 + late}
		for i := range late {
			want[fmt.Sprintf("late/%d", i)] = 101
		}
		for key, n := range want {
			if v, err := r.Get([]byte(key)); err != nil || v == nil || binary.BigEndian.Uint64(v) != n {
				t.Errorf("%s is %x, want %d: %v", key, v, n, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// A failed attempt to take the lock fails no Update that has joined meanwhile: the group that is
// retried includes it.
func TestWhoHasJoinedIsTriedAgainWithTheGroup(t *testing.T) {
	s := openAt(t, pgtest.Shared(t).URL(), Options{Hook: chain})
	holder, err := s.server.connect(t.Context(), tending)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(holder.kill)
	if err := holder.do(t.Context(), "BEGIN; SELECT 1 FROM latticekeep_head WHERE id = 1 FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	write := func() {
		wg.Go(func() {
			err := s.Update(t.Context(), func(tx store.Tx) error {
				_, err := bump(tx, "common")
				tx.Enqueue("one")
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	write()
	awaitLock(t, s, 1)
	write()
	eventually(t, "it has not joined", func() bool {
		s.writer.queue.mu.Lock()
		defer s.writer.queue.mu.Unlock()
		return s.writer.queue.pending != nil && len(s.writer.queue.pending.requests) == 2
	})
	err = holder.do(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "nobody noticed", func() bool { return s.server.failed.Load() })
	if err := holder.do(t.Context(), "ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	err = s.View(t.Context(), func(r store.Reader) error {
		v, err := r.Get([]byte("common"))
		if v == nil || binary.BigEndian.Uint64(v) != 2 {
			t.Errorf("the counter is %x", v)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestWhatSeveralAskForIsReadOnce(t *testing.T) {
	s := openAt(t, pgtest.Shared(t).URL(), Options{})
	err := s.Update(t.Context(), func(tx store.Tx) error {
		for i := range 5 {
			if err := tx.Put(key("row", i), key("value", i)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := s.server.connect(t.Context(), reading)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	all := store.Prefix([]byte("row/"))
	back, from := all, all
	back.Reverse, from.From = true, key("row", 3)
	open := store.Range{From: all.From}
	asks := []*ask{newPage(all, 3), newPage(all, 3), newPage(all, 2), newPage(back, 3), newPage(from, 3), newPage(open, 3), newPage(back, 3)}
	if err := c.read(readWait, nil, asks); err != nil {
		t.Fatal(err)
	}
	want := [][]int{{0, 1, 2}, {0, 1, 2}, {0, 1}, {4, 3, 2}, {3, 4}, {0, 1, 2}, {4, 3, 2}}
	for i, a := range asks {
		var got, keys [][]byte
		for _, r := range a.rows {
			got = append(got, r.key)
		}
		for _, n := range want[i] {
			keys = append(keys, key("row", n))
		}
		if fmt.Sprintf("%s", got) != fmt.Sprintf("%s", keys) {
			t.Errorf("page %d is %s, want %s", i, got, keys)
		}
	}
	if &asks[0].rows[0] != &asks[1].rows[0] || &asks[3].rows[0] != &asks[6].rows[0] {
		t.Error("a page was read twice")
	}
}

func TestTheHooksHabits(t *testing.T) {
	var h habits
	read := func(keys ...string) {
		w := &wants{}
		for _, key := range keys {
			w.key([]byte(key))
		}
		h.note(w)
	}
	usual := func(when string, want ...string) {
		t.Helper()
		if got := slices.Sorted(maps.Keys(h.usual.keys)); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	read("head", "entry/1", "seldom")
	usual("after one group")
	for i := range 16 {
		read("head", fmt.Sprint("entry/", i+2))
	}
	usual("after several", "head")
	read("head", "seldom")
	usual("read a second time", "head", "seldom")
	for i := range 32 {
		read("head", fmt.Sprint("entry/", i+20))
	}
	usual("much later", "head")
	for i := range 33 {
		read(fmt.Sprint("entry/", i+60))
	}
	usual("when the head is not read any more")
}
