package socket

import (
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func refused(t testing.TB, what string, err error, words string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("%s: %v", what, err)
	}
}

func TestSocketsAreRefused(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Symlink(file, filepath.Join(dir, "linked.lock")))
	served := filepath.Join(dir, "served")
	l, err := net.Listen("unix", served)
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	shared := filepath.Join(dir, "shared")
	must(t, os.Mkdir(shared, 0o700))
	must(t, os.Chmod(shared, 0o770)) //nolint:gosec // what is refused
	for name, x := range map[string]struct{ path, words string }{
		"a folder of a group":   {filepath.Join(shared, "s"), "others than this user may write"},
		"nothing":               {"", "whole path"},
		"an abstract socket":    {"@latticekeep", "abstract socket"},
		"one with a NUL":        {"\x00latticekeep", "abstract socket"},
		"a URL":                 {"unix:///run/kms.sock", "whole path"},
		"a relative path":       {"kms.sock", "whole path"},
		"no folder":             {filepath.Join(dir, "none", "s"), "folder of --socket does not exist"},
		"another program's":     {served, "another program serves"},
		"a file":                {file, "is not a socket"},
		"a folder":              {dir, "is not a socket"},
		"a lock that is a link": {filepath.Join(dir, "linked"), "locking the socket"},
	} {
		s, err := Claim(x.path)
		refused(t, name, err, x.words)
		if err == nil {
			must(t, s.Release())
		}
	}
	long := filepath.Join(dir, strings.Repeat("x", 100))
	must(t, os.Mkdir(long, 0o700))
	s, err := Claim(filepath.Join(long, "s"))
	must(t, err)
	_, err = s.Listen()
	refused(t, "a long path", err, "give a shorter one")
	must(t, s.Release())
}

func TestOnlyTheOwnerCanConnect(t *testing.T) {
	dir := t.TempDir()
	s, err := Claim(filepath.Join(dir, "s"))
	must(t, err)
	l, err := s.Listen()
	must(t, err)
	info, err := os.Lstat(s.Path)
	must(t, err)
	if info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("the socket has mode %v", info.Mode())
	}
	_, err = Claim(s.Path)
	refused(t, "a second process", err, "another process serves")
	must(t, l.Close())
	must(t, s.Release())
	left, err := os.ReadDir(dir)
	must(t, err)
	if len(left) != 1 || left[0].Name() != "s.lock" {
		t.Errorf("left behind: %v", left)
	}
}

func TestAStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must(t, err)
	stale.SetUnlinkOnClose(false)
	must(t, stale.Close())
	s, err := Claim(path)
	must(t, err)
	l, err := s.Listen()
	must(t, err)
	c, err := net.Dial("unix", path)
	must(t, err)
	must(t, c.Close())
	must(t, l.Close())
	must(t, s.Release())
}
