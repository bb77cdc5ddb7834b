package bolt

import (
	"errors"
	"os"
	"syscall"
)

// allocate gives the bytes of f in [from, to) blocks of their own and makes f as long. It returns
// errors.ErrUnsupported where the file system cannot do that.
func allocate(f *os.File, from, to int64) error {
	for {
		err := syscall.Fallocate(int(f.Fd()), 0, from, to-from)
		if !errors.Is(err, syscall.EINTR) {
			return err // EOPNOTSUPP and ENOSYS are errors.ErrUnsupported
		}
	}
}
