package state_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// betweenViews is a store in which something happens before each View.
type betweenViews struct {
	store.Store
	before func(view int)
	views  int
}

func (s *betweenViews) View(ctx context.Context, fn func(store.Reader) error) error {
	s.before(s.views)
	s.views++
	return s.Store.View(ctx, fn)
}

// A start reads a state in several Views while another process writes, and trims the journal.
func TestAStateIsReadWhileItChanges(t *testing.T) {
	defer state.SetPageBytes(4 << 10)()
	f := newFixture(t)
	fill := func(commits, rows int) {
		for n := range commits {
			batch := make(map[string][]byte)
			for k := range rows {
				batch[fmt.Sprintf("user/email/%d/%d", n, (n*7+k)%5000)] = fmt.Appendf(nil, "%d of %d", k, len(f.rows))
			}
			f.must(f.update(audit.APIKeyCreated, batch))
		}
	}
	fill(20, 400)
	other := state.New(nil)
	views := &betweenViews{Store: f.raw, before: func(view int) {
		switch {
		case view == 2 && !testing.Short():
			fill(1600, 1) // the journal is trimmed of what was to be read next
		case view < 60:
			fill(1, 300)
		}
	}}
	f.must(other.Use(t.Context(), views, f.key))
	if views.views < 10 {
		t.Fatalf("the state was read in %d Views", views.views)
	}
	guarded := other.Guard(f.raw)
	f.must(guarded.View(t.Context(), func(r store.Reader) error {
		for key, value := range f.rows {
			if got, err := r.Get([]byte(key)); err != nil || string(got) != value {
				t.Fatalf("%s: %q instead of %q, %v", key, got, value, err)
			}
		}
		return nil
	}))
	if found, err := other.Scan(t.Context(), f.raw, 1); err != nil || len(found.Refused) > 0 {
		t.Fatal(found.Refused, err)
	}
}
