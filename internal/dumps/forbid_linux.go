package dumps

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Forbid keeps the memory of the process out of core dumps and from other processes of the same user,
// which can no longer attach to it or read its memory. The files of the process in /proc belong to root
// from then on.
func Forbid() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbidding core dumps: %w", err)
	}
	// The limit does not hold for a dump that the kernel pipes to a program, and this does.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("making the process not dumpable: %w", err)
	}
	return nil
}
