package nodelog

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refused fails unless err says words.
func refused(t testing.TB, what string, err error, words string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("%s: %v; want an error with %q", what, err, words)
	}
}

func newKey(t testing.TB, seed byte) *dualsig.PrivateKey {
	t.Helper()
	key, err := dualsig.NewPrivateKey(bytes.Repeat([]byte{seed}, dualsig.SeedSize))
	must(t, err)
	return key
}

var start = time.Date(2026, 3, 4, 5, 6, 7, 890e6, time.UTC)

// node is a node with a log.
type node struct {
	t      testing.TB
	dir    string
	key    *dualsig.PrivateKey
	limit  int
	logged bytes.Buffer

	required bool
	sync     func(*os.File) error
	log      *Log
}

func newNode(t testing.TB, limit int) *node {
	t.Helper()
	n := &node{t: t, dir: t.TempDir(), key: newKey(t, 7), limit: limit}
	n.open()
	t.Cleanup(func() { n.log.Close() })
	return n
}

func (n *node) open() {
	n.log = Open(n.dir, n.key, Options{
		Limit: n.limit, Required: n.required, sync: n.sync, Now: func() time.Time { return start }, Logger: slog.New(slog.NewTextHandler(&n.logged, nil)),
	})
}

// restart ends the process as kill -9 does: what is in memory is gone.
func (n *node) restart() {
	n.log.closeFile()
	n.open()
}

func (n *node) folder() string { return Folder(n.dir, n.key.Public().ID()) }

// append appends so many entries, each of which must be recorded.
func (n *node) append(count int) {
	n.t.Helper()
	for range count {
		must(n.t, n.log.Append(Wrapped, "1-ab", []byte("ciphertext")))
	}
}

// verify returns what the log has, which must verify.
func (n *node) verify() Summary {
	n.t.Helper()
	s, err := VerifyFolder(n.dir, n.key.Public())
	must(n.t, err)
	return s
}

// wants fails unless the log has so many entries, so many of which are seeds, and counts so many as
// dropped.
func (n *node) wants(entries, seeds, dropped uint64) {
	n.t.Helper()
	s := n.verify()
	if got := s.Kinds[Wrapped] + s.Kinds[Opened]; s.Count() != entries || got != seeds || s.Dropped != dropped {
		n.t.Errorf("the log has %d entries, %d seeds and %d dropped; want %d, %d and %d", s.Count(), got, s.Dropped, entries, seeds, dropped)
	}
}

func (n *node) paths() []string {
	n.t.Helper()
	paths, err := Files(n.folder())
	must(n.t, err)
	return paths
}

func (n *node) newest() string {
	paths := n.paths()
	return paths[len(paths)-1]
}

func (n *node) wantsLogged(words string) {
	n.t.Helper()
	if !strings.Contains(n.logged.String(), words) {
		n.t.Errorf("the plugin's log lacks %q: %s", words, n.logged.String())
	}
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return b
}

func writeFile(t testing.TB, path string, b []byte) {
	t.Helper()
	must(t, os.WriteFile(path, b, 0o600))
}

func damaged(t testing.TB, n *node) []string {
	t.Helper()
	found, err := filepath.Glob(n.folder() + ".damaged-*")
	must(t, err)
	return found
}

func encoded(t testing.TB, e *Entry) []byte {
	t.Helper()
	b, err := canonical.Encode(e)
	must(t, err)
	return b
}
