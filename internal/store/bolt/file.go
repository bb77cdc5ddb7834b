package bolt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	bbolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// The names of the buckets carry the version of the layout. The bucket of the commit id is so small
// that bbolt keeps it inside the page of its root bucket, which every commit writes anyway.
const (
	bucketData   = "latticekeep/store/v1"
	bucketCommit = "latticekeep/commit/v1"
	keyCommit    = "id"
	bucketProbe  = "latticekeep/probe/v1" // since the first probe
	keyProbe     = "row"
)

const (
	lockTimeout = time.Second
	// mapSize is the address space mapped at once. bbolt can grow its map only while no reader is
	// open, and up to this size it need not grow.
	mapSize = 1 << 30
)

// file is one opened database file. Its os.File is the one that bbolt uses, so the lock covers what
// this package writes through it.
type file struct {
	*os.File
	db *bbolt.DB

	allocated int64 // the file has blocks up to here; 0: not known yet
	sparse    bool  // the file system cannot allocate

	// A panic of bbolt while it holds its locks leaves them locked. begin checks wedged first, one
	// caller at a time, so that no caller waits for such a lock for ever.
	beginning sync.Mutex
	wedged    atomic.Bool
}

// begin starts a transaction and returns it with the bucket of the data.
func (f *file) begin(writable bool) (tx *bbolt.Tx, data *bbolt.Bucket, err error) {
	err = guard(func() (err error) {
		f.beginning.Lock()
		defer f.beginning.Unlock()
		if f.wedged.Load() {
			return errRecovering
		}
		returned := false
		defer func() {
			if !returned {
				f.wedged.Store(true)
			}
		}()
		tx, err = f.db.Begin(writable)
		returned = true
		return err
	})
	if err == nil {
		err = guard(func() error { data = tx.Bucket([]byte(bucketData)); return nil })
	}
	if err != nil && tx != nil {
		err = errors.Join(err, f.rollback(tx))
	}
	return tx, data, err
}

// rollback ends tx without a trace. After a commit, whatever its outcome, it does nothing. A wedged
// file is abandoned with its transactions.
//
// rollback does not exclude begin: bbolt may let a reader begin only after another has ended, so
// that the map can grow.
func (f *file) rollback(tx *bbolt.Tx) error {
	if f.wedged.Load() {
		return nil
	}
	err := guard(tx.Rollback)
	if errors.Is(err, berrors.ErrTxClosed) {
		return nil
	}
	if err != nil {
		f.wedged.Store(true)
	}
	return err
}

// view reads the file with the protection that begin gives.
func (f *file) view(read func(*bbolt.Tx) error) error {
	tx, _, err := f.begin(false)
	if err != nil {
		return err
	}
	return errors.Join(guard(func() error { return read(tx) }), f.rollback(tx))
}

// abandon releases the file and its lock without bbolt. The map leaks and keeps the file open in
// the kernel, so closing the file alone would not unlock it.
func (f *file) abandon() error {
	return errors.Join(syscall.Flock(int(f.Fd()), syscall.LOCK_UN), f.File.Close())
}

// close releases the file and its lock.
func (f *file) close() error {
	if f.wedged.Load() {
		return f.abandon() // bbolt would wait for its own locks for ever
	}
	if err := guard(f.db.Close); err != nil {
		return fmt.Errorf("closing database: %w", err)
	}
	return nil
}

// create makes the database when there is none. A crash at any moment leaves either no file or a
// complete one: create writes the file under another name in the same folder, syncs it, renames it
// and syncs the folder. It locks the folder, so that of two processes that start together the
// second finds the first one's file, and so that it can remove what a crash left under the other
// name.
func create(path string, d *disk) error {
	dir, err := os.Open(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return fault.Wrap(fault.NotFound, "the data directory does not exist: create it or choose another", err)
	}
	if errors.Is(err, fs.ErrPermission) {
		return refused(filepath.Dir(path), err)
	}
	if err != nil {
		return unavailable(fmt.Errorf("opening data directory: %w", err))
	}
	defer dir.Close()
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX); err != nil {
		return unavailable(fmt.Errorf("locking data directory: %w", err))
	}

	temp := path + ".init"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return unavailable(fmt.Errorf("removing an unfinished database: %w", err))
	}
	_, err = os.Lstat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return unavailable(fmt.Errorf("looking for database: %w", err))
	}
	if err != nil {
		err := d.durably("create", func() error { return initialise(temp) })
		if errors.Is(err, fs.ErrPermission) {
			return refused(filepath.Dir(path), err)
		}
		if err != nil {
			return unavailable(fmt.Errorf("initialising database: %w", err))
		}
		if err := d.durably("rename", func() error { return os.Rename(temp, path) }); err != nil {
			return unavailable(fmt.Errorf("naming database: %w", err))
		}
	}
	// Sync also when the database exists, because a crash may have prevented this sync earlier.
	if err := d.durably("sync folder", dir.Sync); err != nil {
		return unavailable(fmt.Errorf("syncing data directory: %w", err))
	}
	return nil
}

// initialise writes an empty database and syncs it.
func initialise(path string) error {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockTimeout})
	if err != nil {
		return err
	}
	return errors.Join(db.Update(func(tx *bbolt.Tx) error { // syncs the file including its size
		_, data := tx.CreateBucket([]byte(bucketData))
		_, commit := tx.CreateBucket([]byte(bucketCommit))
		return errors.Join(data, commit)
	}), db.Sync(), db.Close())
}

// openFile locks, checks and maps an existing database.
//
// The check comes before the map, because reading a page beyond the end of the file would be a
// SIGBUS. Then openFile settles the newest meta page, unless it opens the file for reading only: it
// writes the page again unchanged and syncs it. A process that died between writing and syncing it,
// or whose sync failed, leaves a meta page that is in the page cache but perhaps not on disk.
// Continuing from it would overwrite pages that the meta page on disk still uses. Writing the same
// bytes twice cannot tear them.
func openFile(path string, readOnly bool, d *disk) (*file, error) {
	var (
		f    = &file{}
		flag int
	)
	err := guard(func() (err error) {
		f.db, err = bbolt.Open(path, 0o600, &bbolt.Options{
			Timeout:         lockTimeout,
			ReadOnly:        readOnly,
			FreelistType:    bbolt.FreelistMapType,
			InitialMmapSize: mapSize,
			NoStatistics:    true,
			OpenFile: func(name string, given int, mode os.FileMode) (*os.File, error) {
				flag = given &^ os.O_CREATE // create has made the file; a missing file is an error
				if f.File, err = os.OpenFile(name, flag, mode); err != nil {
					return nil, err
				}
				if _, err := newestMeta(f.File); err != nil {
					return nil, err
				}
				return f.File, nil
			},
		})
		return err
	})
	if err == nil {
		err = f.prepare(readOnly, d)
	}
	if err == nil {
		return f, nil
	}
	if f.File != nil {
		_ = f.abandon() // bbolt has closed the file already, unless it panicked
	}
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		err = fault.Wrap(fault.Unavailable, "the data directory is in use by another latticekeep process: stop it or choose another directory", err)
	case errors.Is(err, fs.ErrNotExist):
		err = fault.Wrap(fault.NotFound, "there is no database in the data directory: check its path or restore a backup", err)
	case errors.Is(err, fs.ErrPermission):
		err = refused(path, err)
	}
	return nil, unavailable(err)
}

// prepare checks that the file is a database of this product, and settles it.
func (f *file) prepare(readOnly bool, d *disk) error {
	err := f.view(func(tx *bbolt.Tx) error {
		if tx.Bucket([]byte(bucketData)) == nil || tx.Bucket([]byte(bucketCommit)) == nil {
			return fault.New(fault.Invalid, foreign)
		}
		return nil
	})
	if err == nil && !readOnly {
		err = d.durably("settle", f.settle)
	}
	if err != nil {
		return errors.Join(err, f.close())
	}
	return nil
}

func (f *file) settle() error {
	m, err := newestMeta(f.File)
	if err != nil {
		return err
	}
	if _, err := f.WriteAt(m.raw, m.offset); err != nil {
		return fmt.Errorf("settling the database: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("settling the database: %w", err)
	}
	return nil
}

const (
	foreign   = "the file is not a latticekeep database: choose another data directory or restore a backup"
	truncated = "the database file is truncated: restore a backup"
)

// meta is a meta page of bbolt's file format, version 2. A page header of 16 bytes is followed by
// magic, version, page size and flags (4 bytes each), then root page, sequence, freelist page,
// number of pages, transaction and an FNV-1a checksum of all these (8 bytes each), in the byte
// order of the machine.
type meta struct {
	offset   int64 // position of raw in the file
	raw      []byte
	pageSize int64
	freelist uint64 // page
	high     uint64 // first page after those in use
	txid     uint64
}

const (
	pageHeader = 16
	metaSize   = 64
	metaMagic  = 0xED0CDAED
	noFreelist = 1<<64 - 1
)

// newestMeta returns the meta page that a fresh start would use. Its error names the remedy when
// there is none or when the file is shorter than the meta page says.
func newestMeta(f *os.File) (meta, error) {
	info, err := f.Stat()
	if err != nil {
		return meta{}, fmt.Errorf("reading file size: %w", err)
	}
	if info.Size() == 0 {
		return meta{}, fault.New(fault.Internal, truncated)
	}
	newest, ok := readMeta(f, 0, 0)
	for size := int64(1 << 10); size <= 1<<16; size <<= 1 {
		if ok && size != newest.pageSize {
			continue // the first page says where the second one is
		}
		if m, valid := readMeta(f, size, size); valid && (!ok || m.txid > newest.txid) {
			newest, ok = m, true
			break
		}
	}
	switch {
	case !ok:
		return meta{}, fault.Wrap(fault.Invalid, foreign, errors.New("neither meta page is valid"))
	case newest.freelist == noFreelist: // our files always have one; bbolt would now write it
		return meta{}, fault.Wrap(fault.Invalid, foreign, errors.New("the freelist is not in the file"))
	case newest.high > uint64(info.Size()/newest.pageSize):
		return meta{}, fault.Wrap(fault.Internal, truncated, fmt.Errorf("%d bytes, %d pages of %d expected", info.Size(), newest.high, newest.pageSize))
	}
	return newest, nil
}

// readMeta reads the meta page at offset; pageSize is 0 while it is unknown.
func readMeta(f io.ReaderAt, offset, pageSize int64) (m meta, valid bool) {
	m.raw = make([]byte, metaSize)
	m.offset = offset + pageHeader
	if _, err := f.ReadAt(m.raw, m.offset); err != nil {
		return m, false
	}
	u32, u64, b := binary.NativeEndian.Uint32, binary.NativeEndian.Uint64, m.raw
	sum := fnv.New64a()
	sum.Write(b[:metaSize-8])
	if u32(b) != metaMagic || u32(b[4:]) != 2 || u64(b[56:]) != sum.Sum64() {
		return m, false
	}
	m.pageSize = int64(u32(b[8:]))
	m.freelist, m.high, m.txid = u64(b[32:]), u64(b[40:]), u64(b[48:])
	return m, m.pageSize >= 1<<10 && m.pageSize <= 1<<16 && m.pageSize&(m.pageSize-1) == 0 &&
		(pageSize == 0 || pageSize == m.pageSize)
}

// freePages lists the pages that nothing reachable from m uses.
func (m meta) freePages(f io.ReaderAt) ([]uint64, error) {
	count, at, err := m.freelistAt(f)
	if err != nil {
		return nil, err
	}
	b := make([]byte, 8*count)
	if _, err := f.ReadAt(b, at); err != nil {
		return nil, fmt.Errorf("reading freelist: %w", err)
	}
	free := make([]uint64, count)
	for i := range free {
		free[i] = binary.NativeEndian.Uint64(b[8*i:])
		if free[i] < 2 || free[i] >= m.high {
			return nil, fault.Wrap(fault.Internal, damaged, fmt.Errorf("freelist has page %d", free[i]))
		}
	}
	return free, nil
}

// freelistAt returns the number of free pages, and where in the file their list begins.
func (m meta) freelistAt(f io.ReaderAt) (count uint64, at int64, err error) {
	u64 := binary.NativeEndian.Uint64
	if m.freelist >= m.high {
		return 0, 0, fault.Wrap(fault.Internal, damaged, fmt.Errorf("the freelist is on page %d of %d", m.freelist, m.high))
	}
	at = int64(m.freelist) * m.pageSize
	b := make([]byte, pageHeader+8)
	if _, err := f.ReadAt(b, at); err != nil {
		return 0, 0, fmt.Errorf("reading freelist: %w", err)
	}
	at += pageHeader
	const freelistFlag, long = 0x10, 0xffff
	flags := binary.NativeEndian.Uint16(b[8:])
	if count = uint64(binary.NativeEndian.Uint16(b[10:])); count == long { // the first element is the count
		count = u64(b[pageHeader:])
		at += 8
	}
	if flags != freelistFlag || count > m.high {
		return 0, 0, fault.Wrap(fault.Internal, damaged, fmt.Errorf("freelist has flags %#x and %d pages", flags, count))
	}
	return count, at, nil
}

// usage returns the size of the file, and how much of it the next commits use before it grows: its
// free pages and its unused tail. A commit may replace the freelist during the call, so a list that
// does not fit its meta page is read once more.
func (f *file) usage() (store.Usage, error) {
	for retry := true; ; retry = false {
		info, err := f.Stat()
		if err != nil {
			return store.Usage{}, err
		}
		m, err := newestMeta(f.File)
		if err != nil {
			return store.Usage{}, err
		}
		free, _, err := m.freelistAt(f)
		switch {
		case err == nil:
			tail := info.Size() - int64(m.high)*m.pageSize
			return store.Usage{Size: info.Size(), Free: int64(free)*m.pageSize + tail}, nil
		case !retry:
			return store.Usage{}, err
		}
	}
}
