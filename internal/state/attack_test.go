package state_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// attackRows are two rows of a family, in one group if it has groups.
func attackRows(f state.Family) (one, two string) {
	if !strings.HasSuffix(f.Prefix, "/") {
		return f.Prefix, ""
	}
	name := f.Prefix
	for n := strings.Count(name, "/"); n < f.Group; n++ {
		name += "part/"
	}
	return name + "one", name + "two"
}

// Somebody who writes the database puts rows of each family back, from the last state and from an
// older one, removes, swaps and copies them, also together with the rows of the state, under a
// running process and before a start. Nothing of it is read, and a scan names it.
func TestEachFamilyWithstandsAWriterOfTheDatabase(t *testing.T) {
	for _, family := range state.Families {
		if !family.Deciding {
			continue
		}
		t.Run(family.Prefix, func(t *testing.T) {
			f := newFixture(t)
			one, two := attackRows(family)
			old := func(version string) map[string][]byte {
				rows := map[string][]byte{one: []byte(version)}
				if two != "" {
					rows[two] = []byte("of two " + version)
				}
				return rows
			}
			f.must(f.update(audit.APIKeyCreated, old("oldest")))
			f.must(f.update(audit.APIKeyCreated, old("older")))
			before := f.own()
			f.must(f.update(audit.APIKeyCreated, old("newest")))
			right := old("newest")
			attacks := map[string]map[string][]byte{
				"put back from the last state": {one: []byte("older")},
				"put back from an older state": {one: []byte("oldest")},
				"removed":                      {one: nil},
			}
			if two != "" {
				attacks["swapped"] = map[string][]byte{one: right[two], two: right[one]}
				attacks["copied"] = map[string][]byte{one: right[two]}
				attacks["under another key"] = map[string][]byte{one + "x": right[one]}
			}
			for name, rows := range attacks {
				undo := make(map[string][]byte)
				for key := range rows {
					undo[key] = right[key]
				}
				for _, start := range []bool{false, true} {
					f.tamper(rows)
					if start {
						f.must(f.reopen())
					}
					kind := fault.Forbidden
					if family.Own {
						kind = fault.Unavailable
					}
					for key := range rows {
						if value, err := f.get(key); fault.Of(err) != kind || !isRow(err) || value != nil {
							t.Errorf("%s, start %v: %s reads %q, %v", name, start, key, value, err)
						}
					}
					result, err := f.state.Scan(context.Background(), f.raw, 1)
					if err != nil || len(result.Refused) != len(rows) {
						t.Errorf("%s, start %v: a scan finds %v, %v", name, start, result.Refused, err)
					}
					for _, e := range result.Refused {
						if e.Family != family.Prefix {
							t.Errorf("%s: a scan names the family %s", name, e.Family)
						}
					}
					if family.Own != (f.state.Halted() != nil) {
						t.Errorf("%s, start %v: halted by %v", name, start, f.state.Halted())
					}
					f.tamper(undo)
					f.must(f.reopen())
				}
			}
			newest := f.own()
			f.tamper(before)
			f.tamper(map[string][]byte{one: []byte("older")})
			if value, err := f.get(one); err == nil {
				t.Errorf("put back with the rows of the state: %q", value)
			}
			f.must(f.raw.Close())
			if err := f.open(); fault.Of(err) != fault.Internal {
				t.Errorf("a start on a row that was put back with the rows of the state: %v", err)
			}
			f.tamper(newest)
		})
	}
}

func isRow(err error) bool {
	var refused *state.RowError
	return errors.As(err, &refused)
}

// The same between replicas on PostgreSQL: what one of them has changed last is what all go by.
func TestEachFamilyWithstandsAWriterOfASharedDatabase(t *testing.T) {
	all := newReplicas(t, 3)
	for i, family := range state.Families {
		if !family.Deciding {
			continue
		}
		one, two := attackRows(family)
		writer, keys := all[i%3], []string{one}
		if two != "" {
			keys = append(keys, two)
		}
		for _, version := range []string{"oldest", "older", "newest"} {
			rows := make(map[string][]byte)
			for _, key := range keys {
				rows[key] = []byte(key + version)
			}
			if err := writer.update(audit.APIKeyCreated, rows); err != nil {
				t.Fatal(err)
			}
		}
		for name, value := range map[string][]byte{"put back": []byte(one + "older"), "from an older state": []byte(one + "oldest"), "removed": nil, "of another row": []byte(two + "newest")} {
			attacker := all[(i+1)%3].raw
			set := func(value []byte) {
				if err := attacker.Update(t.Context(), func(tx store.Tx) error { return put(tx, one, value) }); err != nil {
					t.Fatal(err)
				}
			}
			set(value)
			for n, r := range all {
				if got, err := r.get(one); !isRow(err) {
					t.Errorf("%s, %s: replica %d reads %q, %v", family.Prefix, name, n, got, err)
				}
			}
			set([]byte(one + "newest"))
		}
		for n, r := range all {
			if got, err := r.get(one); err != nil || string(got) != one+"newest" {
				t.Errorf("%s: replica %d reads %q, %v", family.Prefix, n, got, err)
			}
		}
	}
}
