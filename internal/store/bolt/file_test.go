package bolt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	bbolt "go.etcd.io/bbolt"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt/pages"
)

var errInjected = errors.New("injected")

func open(t *testing.T, path string, o Options) *Store {
	t.Helper()
	s, err := Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *testing.T, err error, k fault.Kind) {
	t.Helper()
	if err == nil || fault.Of(err) != k {
		t.Fatalf("got %v, want the kind %q", err, k)
	}
}

func put(t *testing.T, s *Store, key string, value []byte) {
	t.Helper()
	must(t, s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte(key), value) }))
}

// contents returns everything in s.
func contents(t *testing.T, s *Store) map[string]string {
	t.Helper()
	got := map[string]string{}
	must(t, s.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Range{}, func(k, v []byte) bool {
			got[string(k)] = string(v)
			return true
		})
	}))
	return got
}

// fill writes n values of size bytes and returns the closed file.
func fill(t *testing.T, path string, n, size int) []byte {
	t.Helper()
	s := open(t, path, Options{})
	for i := range n {
		put(t, s, "key"+string(rune('a'+i)), bytes.Repeat([]byte{byte(i)}, size))
	}
	must(t, s.Close())
	b, err := os.ReadFile(path)
	must(t, err)
	return b
}

func TestOpenMakesOnePrivateFile(t *testing.T) {
	dir := t.TempDir()
	s := open(t, filepath.Join(dir, "db"), Options{})
	put(t, s, "a", []byte("1"))
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) != 1 {
		t.Fatalf("the folder has %v", entries)
	}
	info, err := entries[0].Info()
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %o", info.Mode().Perm())
	}
}

// A crash before or after any durable step, of the first start or a later one, leaves a state that
// the next start can use.
func TestStartSurvivesACrashAtEachStep(t *testing.T) {
	for _, exists := range []bool{false, true} {
		for _, crash := range []string{"create", "rename", "sync folder", "settle"} {
			for _, after := range []bool{false, true} {
				dir := t.TempDir()
				path := filepath.Join(dir, "db")
				if exists {
					fill(t, path, 3, 10)
				}
				reached := false
				_, err := Open(path, Options{fault: func(step string, do func() error) error {
					if step != crash {
						return do()
					}
					reached = true
					if after {
						must(t, do())
					}
					return errInjected
				}})
				if exists && (crash == "create" || crash == "rename") {
					if reached || err != nil {
						t.Fatalf("an existing database was made again: %v", err)
					}
					continue
				}
				if !reached {
					t.Fatalf("step %q was not reached", crash)
				}
				if !errors.Is(err, errInjected) || fault.Of(err) != fault.Unavailable {
					t.Fatalf("step %q: %v", crash, err)
				}
				s := open(t, path, Options{})
				put(t, s, "a", []byte("1"))
				if want := map[bool]int{false: 1, true: 4}[exists]; len(contents(t, s)) != want {
					t.Errorf("step %q, after %v: %v", crash, after, contents(t, s))
				}
				if entries, _ := os.ReadDir(dir); len(entries) != 1 {
					t.Errorf("step %q, after %v: the folder has %v", crash, after, entries)
				}
				must(t, s.Close())
			}
		}
	}
}

func TestAnUnfinishedDatabaseIsRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	must(t, os.WriteFile(path+".init", []byte("half a database"), 0o600))
	s := open(t, path, Options{})
	put(t, s, "a", nil)
	if _, err := os.Stat(path + ".init"); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("it is still there: %v", err)
	}
}

func TestOpenRefusesWithARemedy(t *testing.T) {
	whole := fill(t, filepath.Join(t.TempDir(), "db"), 20, 3<<10)
	m := newest(t, whole)
	used := int(m.High) * int(m.PageSize)
	flip := func(b []byte, at ...int) []byte {
		b = bytes.Clone(b)
		for _, i := range at {
			b[i] ^= 1
		}
		return b
	}
	foreignFile := filepath.Join(t.TempDir(), "foreign")
	db, err := bbolt.Open(foreignFile, 0o600, nil)
	must(t, err)
	must(t, db.Update(func(tx *bbolt.Tx) error { _, err := tx.CreateBucket([]byte("other")); return err }))
	must(t, db.Close())
	foreignBytes, err := os.ReadFile(foreignFile)
	must(t, err)
	db, err = bbolt.Open(foreignFile, 0o600, &bbolt.Options{NoFreelistSync: true})
	must(t, err)
	must(t, db.Update(func(tx *bbolt.Tx) error { return tx.DeleteBucket([]byte("other")) }))
	must(t, db.Close())
	unsyncedBytes, err := os.ReadFile(foreignFile)
	must(t, err)

	for _, test := range []struct {
		name  string
		bytes []byte
		kind  fault.Kind
		words string
	}{
		{"empty", nil, fault.Internal, "truncated"},
		{"one byte", whole[:1], fault.Invalid, "not a latticekeep database"},
		{"half a meta page", whole[:40], fault.Invalid, "not a latticekeep database"},
		{"one page", whole[:m.PageSize], fault.Internal, "truncated"},
		{"two pages", whole[:2*m.PageSize], fault.Internal, "truncated"},
		{"half", whole[:used/2], fault.Internal, "truncated"},
		{"one byte less than used", whole[:used-1], fault.Internal, "truncated"},
		{"garbage", bytes.Repeat([]byte("garbage "), 8<<10), fault.Invalid, "not a latticekeep database"},
		{"zeroes", make([]byte, 64<<10), fault.Invalid, "not a latticekeep database"},
		{"both meta pages broken", flip(whole, 60, int(m.PageSize)+60), fault.Invalid, "not a latticekeep database"},
		{"another bbolt database", foreignBytes, fault.Invalid, "not a latticekeep database"},
		{"a bbolt database without freelist", unsyncedBytes, fault.Invalid, "not a latticekeep database"},
	} {
		for _, readOnly := range []bool{false, true} {
			path := filepath.Join(t.TempDir(), "db")
			must(t, os.WriteFile(path, test.bytes, 0o600))
			_, err := Open(path, Options{ReadOnly: readOnly})
			if err == nil || fault.Of(err) != test.kind || !strings.Contains(fault.Message(err), test.words) {
				t.Errorf("%s: %v", test.name, err)
			}
			if !strings.Contains(fault.Message(err), "backup") {
				t.Errorf("%s: no remedy in %q", test.name, fault.Message(err))
			}
			if strings.Contains(fault.Message(err), path) {
				t.Errorf("%s: the message quotes the path", test.name)
			}
			if got, _ := os.ReadFile(path); !bytes.Equal(got, test.bytes) {
				t.Errorf("%s: the refused file was changed", test.name)
			}
		}
	}
}

func newest(t *testing.T, b []byte) pages.Meta {
	t.Helper()
	path := filepath.Join(t.TempDir(), "copy")
	must(t, os.WriteFile(path, b, 0o600))
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	m, err := pages.NewestMeta(f)
	must(t, err)
	return m
}

// A crash in the middle of a commit tears the older meta page.
func TestATornMetaPageIsSurvived(t *testing.T) {
	whole := fill(t, filepath.Join(t.TempDir(), "db"), 5, 100)
	m := newest(t, whole)
	for _, older := range []bool{true, false} {
		at := m.Offset
		if older {
			at = m.PageSize + 2*pages.HeaderSize - m.Offset
		}
		path := filepath.Join(t.TempDir(), "db")
		b := bytes.Clone(whole)
		b[at+pages.MetaSize-1] ^= 1
		must(t, os.WriteFile(path, b, 0o600))
		s, err := Open(path, Options{})
		if !older {
			// The pages of the older meta page are wiped, so the database cannot silently go back a
			// commit.
			wantKind(t, err, fault.Internal)
			continue
		}
		must(t, err)
		if n := len(contents(t, s)); n != 5 {
			t.Errorf("%d values remain", n)
		}
		put(t, s, "x", nil)
		must(t, s.Close())
	}
}

func TestADamagedPageIsAnErrorNeverAPanic(t *testing.T) {
	whole := fill(t, filepath.Join(t.TempDir(), "db"), 20, 3<<10)
	m := newest(t, whole)
	for id := 2; id < int(m.High); id++ {
		for _, fill := range []byte{0, 0xff} {
			b := bytes.Clone(whole[:m.High*uint64(m.PageSize)])
			page := b[id*int(m.PageSize):][:m.PageSize]
			copy(page, bytes.Repeat([]byte{fill}, len(page)))
			path := filepath.Join(t.TempDir(), "db")
			must(t, os.WriteFile(path, b, 0o600))
			s, err := Open(path, Options{})
			if err != nil {
				if k := fault.Of(err); k != fault.Internal && k != fault.Invalid {
					t.Errorf("page %d: %v", id, err)
				}
				continue
			}
			scan := func(r store.Reader) error {
				return r.Scan(store.Range{}, func(_, _ []byte) bool { return true })
			}
			for _, err := range []error{
				s.View(t.Context(), scan),
				s.Update(t.Context(), func(tx store.Tx) error { return errors.Join(scan(tx), tx.Delete([]byte("keyb"))) }),
				s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("keyc"), nil) }),
			} {
				if err != nil && fault.Of(err) != fault.Internal && fault.Of(err) != fault.Invalid {
					t.Errorf("page %d: %v", id, err)
				}
			}
			_ = s.Close() // the last scrub may find the damage too
		}
	}
}

func TestAnotherProcessIsKeptOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s := open(t, path, Options{}) // flock belongs to the open file, so a second open in this process is as foreign as another process
	put(t, s, "a", []byte("1"))
	for _, readOnly := range []bool{false, true} {
		_, err := Open(path, Options{ReadOnly: readOnly})
		wantKind(t, err, fault.Unavailable)
		if !strings.Contains(fault.Message(err), "in use by another latticekeep process") {
			t.Errorf("message %q", fault.Message(err))
		}
	}
	put(t, s, "b", []byte("1"))
	must(t, s.Close())
	open(t, path, Options{})
}

func TestReadOnlyIsSharedAndWritesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	before := fill(t, path, 3, 100)
	a, b := open(t, path, Options{ReadOnly: true}), open(t, path, Options{ReadOnly: true})
	for _, s := range []*Store{a, b} {
		if n := len(contents(t, s)); n != 3 {
			t.Errorf("%d values, want 3", n)
		}
		wantKind(t, s.Update(t.Context(), func(store.Tx) error { return nil }), fault.Internal)
		must(t, s.Ready(t.Context()))
		must(t, s.Scrubbed(t.Context()))
		must(t, s.Close())
		must(t, s.Close())
		wantKind(t, s.View(t.Context(), func(store.Reader) error { return nil }), fault.Unavailable)
	}
	if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
		t.Error("the file changed")
	}
}

func TestOpenNamesWhatIsMissing(t *testing.T) {
	dir := t.TempDir()
	_, err := Open(filepath.Join(dir, "absent", "db"), Options{})
	wantKind(t, err, fault.NotFound)
	_, err = Open(filepath.Join(dir, "db"), Options{ReadOnly: true})
	wantKind(t, err, fault.NotFound)
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("a read-only open made %v", entries)
	}
	must(t, os.Mkdir(filepath.Join(dir, "db"), 0o700))
	_, err = Open(filepath.Join(dir, "db"), Options{})
	wantKind(t, err, fault.Unavailable)
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	_, err = Open(filepath.Join(dir, "file", "db"), Options{})
	wantKind(t, err, fault.Unavailable)
}

func TestFreePagesAreThoseOfBbolt(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"), Options{})
	for i := range 40 {
		put(t, s, "key"+string(rune('a'+i%20)), make([]byte, 100*i*i))
	}
	must(t, s.Close())
	db, err := bbolt.Open(s.writer.path, 0o600, &bbolt.Options{ReadOnly: true, PreLoadFreelist: true})
	must(t, err)
	defer db.Close()
	f, err := os.Open(s.writer.path)
	must(t, err)
	defer f.Close()
	m, err := pages.NewestMeta(f)
	must(t, err)
	free, err := m.FreePages(f)
	must(t, err)
	listed := map[uint64]bool{}
	for _, id := range free {
		listed[id] = true
	}
	must(t, db.View(func(tx *bbolt.Tx) error {
		if want := tx.Size() / int64(db.Info().PageSize); int64(m.High) != want {
			t.Errorf("%d pages, want %d", m.High, want)
		}
		for id := uint64(2); id < m.High; id++ {
			info, err := tx.Page(int(id))
			if err != nil {
				return err
			}
			if (info.Type == "free") != listed[id] {
				t.Errorf("page %d is %s to bbolt, listed %v", id, info.Type, listed[id])
			}
		}
		for err := range tx.Check() {
			t.Error(err)
		}
		return nil
	}))
	if len(free) < 10 {
		t.Errorf("only %d free pages: the test shows nothing", len(free))
	}
}

func TestADamagedFreelistIsAnError(t *testing.T) {
	const pageSize = 1 << 12
	page := func(flags, count uint16, ids ...uint64) []byte {
		b := make([]byte, pages.HeaderSize, 3*pageSize)
		binary.NativeEndian.PutUint16(b[8:], flags)
		binary.NativeEndian.PutUint16(b[10:], count)
		for _, id := range ids {
			b = binary.NativeEndian.AppendUint64(b, id)
		}
		return b[:cap(b)]
	}
	m := pages.Meta{PageSize: pageSize, High: 10}
	for _, good := range [][]byte{page(0x10, 2, 5, 9), page(0x10, 0xffff, 2, 5, 9)} {
		if free, err := m.FreePages(bytes.NewReader(good)); err != nil || !slices.Equal(free, []uint64{5, 9}) {
			t.Errorf("free pages %v: %v", free, err)
		}
	}
	for name, bad := range map[string][]byte{
		"another kind of page":     page(0x02, 1, 5),
		"more pages than the file": page(0x10, 11),
		"a huge count":             page(0x10, 0xffff, 1<<63),
		"a meta page":              page(0x10, 1, 1),
		"a page behind the end":    page(0x10, 1, 10),
	} {
		_, err := m.FreePages(bytes.NewReader(bad))
		if err == nil || fault.Of(err) != fault.Internal {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, cut := range []int{10, pages.HeaderSize + 8 + 8} {
		if _, err := m.FreePages(bytes.NewReader(page(0x10, 3, 4, 5, 6)[:cut])); err == nil {
			t.Errorf("no error after %d bytes", cut)
		}
	}
	m.Freelist = 10
	_, err := m.FreePages(bytes.NewReader(page(0x10, 0)))
	wantKind(t, err, fault.Internal)
}

func TestSettlingReportsItsFailure(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	fill(t, path, 1, 1)
	readOnly, err := os.Open(path)
	must(t, err)
	defer readOnly.Close()
	if err := (&file{File: readOnly}).settle(); err == nil {
		t.Error("a file that takes no writes was settled")
	}
}

// A kill cannot show whether a commit was synced, because the page cache survives it; only a power
// cut would. So this test checks the setting itself.
func TestCommitsAreSynced(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "s.db"), Options{})
	if db := s.writer.last.db; db.NoSync || db.NoGrowSync {
		t.Fatal("bbolt was told not to sync")
	}
}

// A damaged file is refused, without a panic and without reading beyond its end.
func FuzzNewestMeta(f *testing.F) {
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(t.TempDir(), "s.db")
		must(t, os.WriteFile(path, content, 0o600))
		file, err := os.Open(path)
		must(t, err)
		defer file.Close()
		m, err := pages.NewestMeta(file)
		if err == nil && m.High*uint64(m.PageSize) > uint64(len(content)) {
			t.Fatalf("%d pages of %d in %d bytes", m.High, m.PageSize, len(content))
		}
	})
}
