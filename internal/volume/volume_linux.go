package volume

import (
	"errors"
	"io"
	"os"
	"slices"
	"syscall"
)

// Allocate gives the bytes of f in [from, to) blocks of their own and makes f as long. It returns
// errors.ErrUnsupported where the file system cannot do that.
func Allocate(f *os.File, from, to int64) error {
	for {
		err := syscall.Fallocate(int(f.Fd()), 0, from, to-from)
		if !errors.Is(err, syscall.EINTR) {
			return err // EOPNOTSUPP and ENOSYS are errors.ErrUnsupported
		}
	}
}

// writesAnew are the file systems that write a block to a new place each time, by their magic
// numbers (statfs(2)): there, allocated blocks promise nothing. What is below an overlay is unknown.
var writesAnew = []uint32{
	0x9123683e, // btrfs
	0x2fc12fc1, // ZFS
	0xca451a4e, // bcachefs
	0xf2f52010, // F2FS
	0x794c7630, // overlay
}

// Of returns the size of f's volume, the bytes that this process may still use, and whether blocks
// that are allocated are kept for their file.
func Of(f *os.File) (size, free int64, keeps bool, err error) {
	var fs syscall.Statfs_t
	if err := syscall.Fstatfs(int(f.Fd()), &fs); err != nil {
		return 0, 0, false, os.NewSyscallError("fstatfs", err)
	}
	return int64(fs.Blocks) * fs.Bsize, int64(fs.Bavail) * fs.Bsize, !slices.Contains(writesAnew, uint32(fs.Type)), nil
}

// inMemory are the file systems that write nothing to a disk but swap, by their magic numbers.
var inMemory = []uint32{
	0x01021994, // tmpfs
	0x858458f6, // ramfs
}

// IsInMemory reports whether what is written below path stays in memory.
func IsInMemory(path string) (bool, error) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(path, &fs); err != nil {
		return false, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return slices.Contains(inMemory, uint32(fs.Type)), nil
}

// Blocks returns the size of the blocks of a file.
func Blocks(info os.FileInfo) int64 { return info.Sys().(*syscall.Stat_t).Blocks * 512 }

// NextData returns the beginning of the data of f at or after from, and their end. Allocated bytes
// that were never written are no data. It returns io.EOF when there are no more.
func NextData(f *os.File, from int64) (begin, end int64, err error) {
	const seekData, seekHole = 3, 4
	if begin, err = f.Seek(from, seekData); errors.Is(err, syscall.ENXIO) {
		return 0, 0, io.EOF
	}
	if err == nil {
		end, err = f.Seek(begin, seekHole)
	}
	return begin, end, err
}

// SyncData makes what was written to f durable, and of its metadata what is needed to read that.
func SyncData(f *os.File) error {
	for {
		err := syscall.Fdatasync(int(f.Fd()))
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}
