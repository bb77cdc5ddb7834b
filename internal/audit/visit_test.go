package audit

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A visit shows what a loop over all entries finds, whichever blocks have summaries.
func TestSummariesChangeNothingInWhatIsVisited(t *testing.T) {
	f := newFixture(t)
	of := func(i int) (EventType, string) {
		switch {
		case i == 0, i == 255, i == 256, i == 900, i == 1599:
			return KeyRotated, "usr_a"
		case i/256 == 2:
			return UserSignedIn, "usr_a" // only these in a block; more than one step takes
		}
		return []EventType{UserSignedIn, CredentialUnsealed, CredentialListed}[i%3], "usr_b"
	}
	f.crowd(1600, of)
	check := func(name string, low int) {
		t.Helper()
		for _, types := range [][]EventType{{KeyRotated}, {KeyRotated, CredentialListed}, {UserSignedIn}, {KeyListed}, {}} {
			var want []string
			for i := low; i < 1600; i++ {
				if is, _ := of(i); slices.Contains(types, is) {
					want = append(want, fmt.Sprint(i))
				}
			}
			if got, err := f.visited(types...); err != nil || !slices.Equal(got, want) {
				t.Errorf("%s, %v: %d are shown, want %d; %v", name, types, len(got), len(want), err)
			}
		}
	}
	check("no summaries", 0)
	f.follow()
	check("all summaries", 0)
	remove := func(keys ...[]byte) {
		t.Helper()
		err := f.store.Update(t.Context(), func(tx store.Tx) (err error) {
			for _, key := range keys {
				err = errors.Join(err, tx.Delete(key))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	remove(summaryKey(string(tenantA), 1), summaryKey(string(tenantA), 4), summaryKey(string(tenantA), 5))
	check("some summaries", 0)
	for n := range uint64(300) { // the archived part
		remove(tenantKey(string(tenantA), n+1))
	}
	remove(summaryKey(string(tenantA), 0))
	check("after a cut", 300)
	f.forget()
	check("no summaries after a cut", 300)
}

// A start reads few rows of a long log: summaries, rows of the newest entries, and rows of the
// entries that it needs.
func TestAVisitReadsSummariesInPlaceOfRows(t *testing.T) {
	f := newFixture(t)
	f.crowd(256*20+30, func(i int) (EventType, string) {
		if i == 7 || i == 2000 {
			return KeyRotated, "usr_a"
		}
		return UserSignedIn, "usr_a"
	})
	f.follow()
	rows := &countingStore{Store: f.store}
	s := typeSweep{tenant: string(tenantA), types: []EventType{KeyRotated}, keys: []uint32{typeKey(KeyRotated)}, next: 1}
	err := rows.View(t.Context(), func(r store.Reader) error {
		more, err := s.step(r)
		if more || len(s.found) != 2 {
			t.Error(more, s.found)
		}
		return err
	})
	index, all := rows.gets["audit/tenant"]+rows.scans["audit/tenant"], rows.gets["audit/summary"]+rows.scans["audit/summary"]
	if err != nil || index > 30+2+2 || all > 20 || rows.gets["audit/entry"] > 2 || rows.scans["audit/entry"] > 0 {
		t.Errorf("%v: %s", err, rows)
	}
}

// A summary that names too many entries adds nothing. A malformed summary or a missing row is
// reported.
func TestAVisitReportsDamage(t *testing.T) {
	f := newFixture(t)
	f.crowd(600, func(i int) (EventType, string) { return []EventType{UserSignedIn, KeyListed}[i%2], "usr_a" })
	f.follow()
	whole := copyStore(t, f.store)
	all := make([]indexRow, blockSize)
	for i := range all {
		all[i].eventType = KeyListed
	}
	f.log.chain.store = whole.with(func(tx store.Tx) error { return tx.Put(summaryKey(string(tenantA), 0), summaryOf(all)) })
	if ids, err := f.visited(KeyListed); err != nil || len(ids) != 300 {
		t.Errorf("%d are shown, %v", len(ids), err)
	}
	for name, change := range map[string]func(store.Tx) error{
		"no summary":             func(tx store.Tx) error { return tx.Put(summaryKey(string(tenantA), 1), []byte{1, 0}) },
		"another version":        func(tx store.Tx) error { return tx.Put(summaryKey(string(tenantA), 1), []byte{9}) },
		"a named row is missing": func(tx store.Tx) error { return tx.Delete(tenantKey(string(tenantA), 2)) },
		"a last row is missing":  func(tx store.Tx) error { return tx.Delete(tenantKey(string(tenantA), 599)) },
		"a row is none":          func(tx store.Tx) error { return tx.Put(tenantKey(string(tenantA), 599), []byte{1}) },
		"a row is another one's": func(tx store.Tx) error {
			return tx.Put(tenantKey(string(tenantA), 2), get(tx, tenantKey(string(tenantA), 4)))
		},
	} {
		f.log.chain.store = whole.with(change)
		_, err := f.visited(KeyListed)
		if !errors.Is(err, fault.Internal) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
