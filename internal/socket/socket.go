// Package socket takes a place in the file system and listens there, for the owner of the process alone.
package socket

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/latticekeep/latticekeep/internal/durable"
)

// maxSocketPath is the longest path of a socket that every Unix takes.
const maxSocketPath = 103

// Socket is a place in the file system where one process may listen. A lock on a file beside it, which
// the kernel drops when the process ends, says whether one does. The file stays.
type Socket struct {
	Path string

	lock *os.File
}

// Claim locks the place. A socket that a killed process has left there is no obstacle.
func Claim(path string) (*Socket, error) {
	switch {
	case strings.HasPrefix(path, "@") || strings.ContainsRune(path, 0):
		return nil, errors.New("--socket must not be an abstract socket, which every process of the machine could connect to: give a path in a folder, such as /run/latticekeep/s.sock")
	case !filepath.IsAbs(path):
		return nil, errors.New("--socket takes a whole path, such as /run/latticekeep/s.sock, and no URL")
	}
	if err := checkFolder(filepath.Dir(path)); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the socket: %w", durable.ExplainRefusal(path+".lock", err))
	}
	s := &Socket{path, lock}
	if err := s.claim(); err != nil {
		_ = lock.Close()
		return nil, err
	}
	return s, nil
}

// checkFolder refuses a folder in which others could put a socket in the place of ours.
func checkFolder(folder string) error {
	info, err := os.Stat(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the folder of --socket does not exist: create it for this user alone: %w", err)
	} else if err != nil {
		return fmt.Errorf("looking at the folder of --socket: %w", err)
	}
	owner := info.Sys().(*syscall.Stat_t).Uid //nolint:forcetypeassert // on every Unix
	if info.Mode().Perm()&0o022 != 0 || owner != 0 && int(owner) != os.Getuid() {
		return fmt.Errorf("others than this user may write in %s, and could take the place of the socket: give --socket a folder of its own, with mode 0700", folder)
	}
	return nil
}

func (s *Socket) claim() error {
	err := syscall.Flock(int(s.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	switch {
	case errors.Is(err, syscall.EWOULDBLOCK):
		return fmt.Errorf("another process serves at %s: stop it, or give another --socket", s.Path)
	case err != nil:
		return fmt.Errorf("locking the socket: %w", err)
	}
	info, err := os.Lstat(s.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("looking at the socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is not a socket and is left alone: give another --socket, or remove it", s.Path)
	}
	c, err := net.Dial("unix", s.Path)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED): // left by a process that is gone
		return nil
	case err != nil:
		return fmt.Errorf("looking for another program at the socket: %w", err)
	}
	_ = c.Close()
	return fmt.Errorf("another program serves at %s: stop it, or give another --socket", s.Path)
}

// Listen binds the socket in a folder that only this user can enter, gives it mode 0600 and renames
// it to its place. So nobody can connect before it has its mode, and a stale socket is replaced in
// one step.
func (s *Socket) Listen() (net.Listener, error) {
	private, err := os.MkdirTemp(filepath.Dir(s.Path), ".latticekeep-") // mode 0700
	if err != nil {
		return nil, fmt.Errorf("making a folder for the socket: %w", err)
	}
	defer os.RemoveAll(private)
	bound := filepath.Join(private, "s")
	if len(bound) > maxSocketPath {
		return nil, fmt.Errorf("the folder of --socket has a path of %d bytes, and a socket in it could have %d at most: give a shorter one", len(filepath.Dir(s.Path)), maxSocketPath)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: bound, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listening: %w", err)
	}
	l.SetUnlinkOnClose(false) // it has another name by then
	if err = os.Chmod(bound, 0o600); err == nil {
		err = os.Rename(bound, s.Path)
	}
	if err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("giving the socket its name: %w", err)
	}
	return l, nil
}

// Release removes the socket and gives up the place.
func (s *Socket) Release() error {
	err := os.Remove(s.Path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, s.lock.Close())
}
