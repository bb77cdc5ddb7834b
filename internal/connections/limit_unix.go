//go:build unix

package connections

import "syscall"

// maxFiles returns how many files the process may have open, and 0 if that is unknown. Go has raised
// the soft limit to the hard one at the start.
func maxFiles() int {
	var l syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l) != nil {
		return 0
	}
	return int(min(uint64(l.Cur), 1<<30)) //nolint:unconvert // the type differs between systems
}
