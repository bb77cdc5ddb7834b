package servertest

import (
	"bytes"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/statetest"
)

// Rows are the rows of the store as somebody reaches them who can write the database and has no
// key: nothing is held against the state, and the log hears nothing.
type Rows struct {
	t     testing.TB
	watch *statetest.Watch
	state *state.State
	raw   store.Database
}

// Refused returns the families of the rows that reads have refused since the last call. A refused
// row that [Rows.Attack] has not changed fails the test.
func (r *Rows) Refused() []string { return familiesOf(r.watch.Refused()) }

// Copy returns the rows whose keys begin with one of the prefixes.
func (r *Rows) Copy(prefixes ...string) map[string][]byte {
	r.t.Helper()
	rows := make(map[string][]byte)
	err := r.raw.View(r.t.Context(), func(rd store.Reader) error {
		for _, prefix := range prefixes {
			err := rd.Scan(store.Prefix([]byte(prefix)), func(key, value []byte) bool {
				rows[string(key)] = bytes.Clone(value)
				return true
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return rows
}

// Attack writes rows; a nil value deletes the row. It returns the families of the deciding rows that
// it has changed.
func (r *Rows) Attack(rows map[string][]byte) []string {
	r.t.Helper()
	var changed map[string]bool
	err := r.watch.Tamper(r.t.Context(), r.raw, func(tx store.Tx) error {
		changed = make(map[string]bool)
		for key, value := range rows {
			was, err := tx.Get([]byte(key))
			switch {
			case err != nil:
			case (was == nil) == (value == nil) && bytes.Equal(was, value):
				continue
			case value == nil:
				err = tx.Delete([]byte(key))
			default:
				err = tx.Put([]byte(key), value)
			}
			if err != nil {
				return err
			}
			if f, ok := state.FamilyOf([]byte(key)); ok && f.Deciding {
				changed[f.Prefix] = true
			}
		}
		return nil
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(changed))
}

// Scan returns the families of the rows that a scan of the store finds.
func (r *Rows) Scan() []string {
	r.t.Helper()
	result, err := r.state.Scan(r.t.Context(), r.raw, 1)
	if err != nil {
		r.t.Fatal(err)
	}
	return familiesOf(result.Refused)
}

func familiesOf(rows []*state.RowError) []string {
	all := make(map[string]bool)
	for _, e := range rows {
		all[e.Family] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// WantNoRowIn fails the test if an answer tells of stored rows: a key of rows, a family, or words of
// the error that is for the operator.
func WantNoRowIn(t testing.TB, r Reply, rows map[string][]byte) {
	t.Helper()
	var header strings.Builder
	_ = r.Header.Write(&header) // a builder takes everything
	told := []string{"stored row", "commits to"}
	for key := range rows {
		f, _ := state.FamilyOf([]byte(key))
		told = append(told, key, f.Prefix)
	}
	for _, word := range told {
		if strings.Contains(header.String(), word) || bytes.Contains(r.Body, []byte(word)) {
			t.Errorf("the answer tells of rows: %q in %s\n%s", word, header.String(), r.Body)
		}
	}
}
