package kmsplugin

import (
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

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
		s, err := claimSocket(x.path)
		refused(t, name, err, x.words)
		if err == nil {
			must(t, s.release())
		}
	}
	long := filepath.Join(dir, strings.Repeat("x", 100))
	must(t, os.Mkdir(long, 0o700))
	s, err := claimSocket(filepath.Join(long, "s"))
	must(t, err)
	_, err = s.listen()
	refused(t, "a long path", err, "give a shorter one")
	must(t, s.release())
}

func TestOnePluginServesFromADirectory(t *testing.T) {
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	p := start(t, dir)
	another := Config{Dir: dir, Socket: p.socket + "2"}
	refused(t, "a second plugin", Serve(t.Context(), another), "another plugin serves from")
	must(t, p.stop())
	another.Dir = t.TempDir()
	refused(t, "an empty directory", Serve(t.Context(), another), "kms-plugin init")
}

func TestOnlyTheOwnerCanConnect(t *testing.T) {
	dir := t.TempDir()
	s, err := claimSocket(filepath.Join(dir, "s"))
	must(t, err)
	l, err := s.listen()
	must(t, err)
	info, err := os.Lstat(s.path)
	must(t, err)
	if info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("the socket has mode %v", info.Mode())
	}
	_, err = claimSocket(s.path)
	refused(t, "a second plugin", err, "another plugin serves")
	must(t, l.Close())
	must(t, s.release())
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
	s, err := claimSocket(path)
	must(t, err)
	l, err := s.listen()
	must(t, err)
	c, err := net.Dial("unix", path)
	must(t, err)
	must(t, c.Close())
	must(t, l.Close())
	must(t, s.release())
}
