package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// ExplainRefusal adds to an error of the file system who owns path and who asks, when access was
// refused, and what to do. When path itself cannot be looked at, it describes the nearest folder that can. Other
// errors are returned as they are.
func ExplainRefusal(path string, err error) error {
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	info, statErr := os.Stat(path)
	for statErr != nil && path != filepath.Dir(path) {
		path = filepath.Dir(path)
		info, statErr = os.Stat(path)
	}
	if statErr != nil {
		return err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return err
	}
	groups, _ := os.Getgroups() // without them the rest is still true
	return fmt.Errorf("%w: %s belongs to user %d and group %d, mode %04o, and this process is user %d with group %d and further groups %v: "+
		"run as that user, or give the files to one of these groups, as fsGroup of a pod does with its volumes",
		err, path, owner.Uid, owner.Gid, info.Mode().Perm(), os.Geteuid(), os.Getegid(), groups)
}
