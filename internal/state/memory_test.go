package state_test

import (
	"fmt"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/memory"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/test/machine"
)

func TestARowTakesTheMemoryThatTheFormulaSays(t *testing.T) {
	const rows = 20_000
	f := newFixture(t)
	for n := 0; n < rows; {
		batch := make(map[string][]byte)
		for ; len(batch) < 2000; n++ {
			batch[fmt.Sprintf("user/email/%032x", n*7919)] = []byte("row")
		}
		f.must(f.update(audit.APIKeyCreated, batch))
		clear(f.rows)
	}
	took := machine.Heap(func() *state.State {
		s := state.New(nil)
		f.must(s.Use(t.Context(), f.raw, f.key))
		if n := s.Rows("user/email/"); n != rows {
			t.Fatal("the state counts", n)
		}
		if all := s.Rows(""); all < rows {
			t.Fatal("the state counts in all", all)
		}
		return s
	})
	machine.CheckHeap(t, rows, took, memory.Deployment{Rows: rows}.Need()-memory.Deployment{}.Need())
}
