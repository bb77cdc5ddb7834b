//go:build !linux

package bolt

import (
	"errors"
	"os"
)

// allocate does nothing: production runs on Linux.
func allocate(*os.File, int64, int64) error { return errors.ErrUnsupported }
