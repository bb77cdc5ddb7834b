package bolt

import (
	"errors"
	"maps"
	"path/filepath"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/storetest"
)

func TestConformance(t *testing.T) {
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
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

// The writes of a rehearsal, and a panic in it, have no effect.
func TestARehearsalLeavesNothing(t *testing.T) {
	events := 0
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{Hook: func(_ store.Tx, e []any) error { events += len(e); return nil }})
	r := storetest.Rehearsing(s)
	runs := 0
	must(t, r.Update(t.Context(), func(tx store.Tx) error {
		if runs++; runs == 1 {
			tx.Enqueue("undone")
			return errors.Join(tx.Put([]byte("undone"), nil), errors.New("undone"))
		}
		tx.Enqueue("made")
		return tx.Put([]byte("made"), []byte("1"))
	}))
	must(t, r.Update(t.Context(), func(store.Tx) error {
		if runs++; runs == 3 {
			panic("undone")
		}
		return nil
	}))
	if got := contents(t, s); runs != 4 || events != 1 || !maps.Equal(got, map[string]string{"made": "1"}) {
		t.Errorf("%d runs and %d events left %v", runs, events, got)
	}
}

// On an overloaded machine a new request arrives at every turn.
func TestAGroupThatNeverEndsGrowingIsCommitted(t *testing.T) {
	const most = 8 // turns
	q := &queue{pending: new(group)}
	now := time.Now()
	q.now = func() time.Time {
		if len(q.pending.requests) > 2*most {
			t.Fatal("the group grows for ever")
		}
		q.pending.requests = append(q.pending.requests, nil)
		now = now.Add(longestGathering / most)
		return now
	}
	if g, _ := q.take(); len(g.requests) != most+1 {
		t.Error(len(g.requests), "were gathered")
	}
}

// What a delete frees is used before the file grows again.
func TestUsageCountsFreePages(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{})
	usage := func() store.Usage {
		t.Helper()
		u, err := s.Usage(t.Context())
		must(t, err)
		if u.Free < 0 || u.Free > u.Size {
			t.Fatalf("%+v", u)
		}
		return u
	}
	const size = 8 << 20
	put(t, s, "large", make([]byte, size))
	full := usage()
	must(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Delete([]byte("large")) }))
	put(t, s, "small", nil) // a page is free once the commit after is durable
	empty := usage()
	if full.Size < size || empty.Free < full.Free+size/2 || empty.Size != full.Size {
		t.Errorf("with 8 MiB %+v, without %+v", full, empty)
	}
	must(t, s.Close())
	if _, err := s.Usage(t.Context()); err == nil {
		t.Error("a closed store has a size")
	}
}
