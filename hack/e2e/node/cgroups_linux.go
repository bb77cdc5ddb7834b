package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// removalTimeout bounds the time in which the kernel releases the cgroups of ended processes.
const removalTimeout = 30 * time.Second

// cgroupHierarchies returns the mounted hierarchies: one of version 2, or several of version 1.
func cgroupHierarchies() []string {
	const root = "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err == nil {
		return []string{root}
	}
	procs, _ := filepath.Glob(filepath.Join(root, "*", "cgroup.procs")) // fails only for a malformed pattern
	hierarchies := make([]string, len(procs))
	for i, p := range procs {
		hierarchies[i] = filepath.Dir(p)
	}
	return hierarchies
}

// removeCgroups removes the folder name from each hierarchy, leaves first. No process runs in them
// any more, but the kernel may need a moment to notice.
func removeCgroups(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), removalTimeout)
	defer cancel()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		var failed error
		for _, hierarchy := range cgroupHierarchies() {
			var folders []string
			_ = filepath.WalkDir(filepath.Join(hierarchy, name), func(path string, entry fs.DirEntry, err error) error {
				if err == nil && entry.IsDir() {
					folders = append(folders, path)
				}
				return nil // already gone
			})
			for _, folder := range slices.Backward(folders) {
				if err := syscall.Rmdir(folder); err != nil && !errors.Is(err, fs.ErrNotExist) {
					failed = fmt.Errorf("removing %s: %w", folder, err)
				}
			}
		}
		if failed == nil {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return failed
		}
	}
}
