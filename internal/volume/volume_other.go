//go:build !linux

package volume

import (
	"errors"
	"io"
	"os"
)

// Production runs on Linux. Elsewhere no room can be reserved.

func Allocate(*os.File, int64, int64) error { return errors.ErrUnsupported }

func Of(*os.File) (size, free int64, keeps bool, err error) {
	return 0, 0, false, errors.ErrUnsupported
}

func Blocks(info os.FileInfo) int64 { return info.Size() }

func NextData(f *os.File, from int64) (begin, end int64, err error) {
	info, err := f.Stat()
	if err == nil && from >= info.Size() {
		err = io.EOF
	}
	if err != nil {
		return 0, 0, err
	}
	return from, info.Size(), nil
}

func SyncData(f *os.File) error { return f.Sync() }

// IsInMemory reports whether what is written below path stays in memory. Here nothing is known of that.
func IsInMemory(string) (bool, error) { return false, nil }
