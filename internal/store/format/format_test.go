package format_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// onBoth runs a test on a store of each kind, whose commits call hook.
func onBoth(t *testing.T, hook store.Hook, test func(t *testing.T, s store.Database)) {
	t.Helper()
	t.Run("bolt", func(t *testing.T) {
		s, err := bolt.Open(filepath.Join(t.TempDir(), "latticekeep.db"), bolt.Options{Hook: hook})
		must(t, err)
		t.Cleanup(func() { must(t, s.Close()) })
		test(t, s)
	})
	t.Run("postgres", func(t *testing.T) {
		s, err := postgres.Open(t.Context(), pgtest.Shared(t).URL(), postgres.Options{Hook: hook})
		must(t, err)
		t.Cleanup(func() { must(t, s.Close()) })
		test(t, s)
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, s store.Store, key []byte, value string) {
	t.Helper()
	must(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, []byte(value)) }))
}

func row(reader, writer int) string {
	return fmt.Sprintf(`{"reader":%d,"writer":%d,"written_by":"v9.8.7"}`, reader, writer)
}

// wantRefused fails unless err is one sentence that names the release to install.
func wantRefused(t *testing.T, what string, err error) {
	t.Helper()
	if fault.Of(err) != fault.Unavailable || err == nil || strings.Contains(err.Error(), ". ") ||
		!strings.Contains(err.Error(), "of latticekeep v9.8.7") || !strings.Contains(err.Error(), "install latticekeep v9.8.7 or a newer release") {
		t.Errorf("%s: %v", what, err)
	}
}

func TestAStoreSaysWhoMayOpenIt(t *testing.T) {
	onBoth(t, nil, func(t *testing.T, s store.Database) {
		check := func(readOnly bool) error { return format.Check(t.Context(), s, readOnly) }
		must(t, errors.Join(check(true), check(false))) // a store without the row
		must(t, s.Update(t.Context(), format.PutFirst))
		must(t, errors.Join(check(true), check(false)))
		put(t, s, format.Row, row(format.Reads, format.Writes))
		must(t, errors.Join(check(true), check(false)))
		put(t, s, format.Row, row(format.Reads, format.Writes+1))
		must(t, check(true))
		wantRefused(t, "writing what it can only read", check(false))
		put(t, s, format.Row, row(format.Reads+1, format.Writes+1))
		wantRefused(t, "reading", check(true))
		wantRefused(t, "writing", check(false))
	})
}

func TestADamagedRowIsRefused(t *testing.T) {
	onBoth(t, nil, func(t *testing.T, s store.Database) {
		for _, text := range []string{
			``, `1`, `{}`, `{"reader":1,"writer":1}`, `{"reader":0,"writer":1,"written_by":"v1"}`, `{"reader":2,"writer":1,"written_by":"v1"}`,
			`{"reader":1,"writer":1,"written_by":"a\nb"}`, `{"reader":1,"writer":1,"written_by":"` + strings.Repeat("v", 256) + `"}`,
		} {
			put(t, s, format.Row, text)
			if err := format.Check(t.Context(), s, true); fault.Of(err) != fault.Internal || err == nil {
				t.Errorf("%s: %v", text, err)
			}
		}
	})
}

// A program that is overtaken while it runs commits nothing more.
func TestARunningProgramNoticesANewerOne(t *testing.T) {
	hooked := 0
	hook := format.Hook(func(store.Tx, []any) error { hooked++; return nil })
	onBoth(t, hook, func(t *testing.T, s store.Database) {
		hooked = 0
		put(t, s, []byte("k"), "v")
		if hooked != 1 {
			t.Fatalf("the hook ran %d times", hooked)
		}
		write := func(key []byte, value string) error {
			return s.Update(t.Context(), func(tx store.Tx) error { return tx.Put(key, []byte(value)) })
		}
		wantRefused(t, "raising beyond its own format", write(format.Row, row(1, format.Writes+1)))
		if hooked != 1 {
			t.Errorf("the hook ran %d times", hooked)
		}
		must(t, write([]byte("k"), "w")) // the raise was not committed
	})

	url := pgtest.Shared(t).URL()
	overtaken, err := postgres.Open(t.Context(), url, postgres.Options{Hook: hook})
	must(t, err)
	defer overtaken.Close()
	newer, err := postgres.Open(t.Context(), url, postgres.Options{})
	must(t, err)
	defer newer.Close()
	for range 8 { // so that it trusts what it has in memory
		put(t, overtaken, []byte("k"), "v")
	}
	put(t, newer, format.Row, row(1, format.Writes+1))
	wantRefused(t, "a commit after the raise", overtaken.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("k"), []byte("w")) }))
}

func TestARaiseNeverLowersAndKeepsTheDeployment(t *testing.T) {
	onBoth(t, nil, func(t *testing.T, s store.Database) {
		put(t, s, []byte("deployment"), `{"format":1,"chain_id":"chain_a","kms_key":"k","of_a_newer_release":{"a":1}}`)
		raise := func(reader, writer int) error {
			return s.Update(t.Context(), func(tx store.Tx) error { return format.Raise(tx, reader, writer) })
		}
		want := func(reader, writer, member int) {
			t.Helper()
			f, err := format.Of(t.Context(), s)
			if err != nil || f.Reader != reader || f.Writer != writer {
				t.Errorf("the row is %+v, %v, want %d and %d", f, err, reader, writer)
			}
			var got map[string]any
			must(t, s.View(t.Context(), func(r store.Reader) error {
				row, err := r.Get([]byte("deployment"))
				return errors.Join(err, json.Unmarshal(row, &got))
			}))
			if got["format"] != float64(member) || got["chain_id"] != "chain_a" || got["kms_key"] != "k" || fmt.Sprint(got["of_a_newer_release"]) != "map[a:1]" {
				t.Errorf("the deployment is %v", got)
			}
		}
		must(t, raise(1, 1))
		want(1, 1, 1)
		must(t, raise(1, 2))
		want(1, 2, 2)
		must(t, raise(3, 1)) // a program that writes a format reads it
		want(3, 3, 2)
		must(t, errors.Join(raise(1, 1), raise(2, 2), raise(2, 3)))
		want(3, 3, 2)
		must(t, raise(2, 4))
		want(3, 4, 2)
		put(t, s, []byte("deployment"), `damaged`)
		if err := raise(4, 4); fault.Of(err) != fault.Internal || err == nil {
			t.Errorf("a damaged deployment: %v", err)
		}
		put(t, s, format.Row, `damaged`)
		if err := raise(4, 4); fault.Of(err) != fault.Internal || err == nil {
			t.Errorf("a damaged row: %v", err)
		}
	})
}

// Only one process uses an embedded store. A store of PostgreSQL has its own test.
func TestAProcessReadsItsOwnFormats(t *testing.T) {
	onBoth(t, nil, func(t *testing.T, s store.Database) {
		for least := 1; least <= format.Reads+1; least++ {
			if got, err := s.ReplicasRead(t.Context(), least); err != nil || got != (least <= format.Reads) {
				t.Errorf("format %d: %v, %v", least, got, err)
			}
		}
	})
}
