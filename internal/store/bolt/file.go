package bolt

import (
	"errors"
	"fmt"
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
	"github.com/latticekeep/latticekeep/internal/store/bolt/pages"
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

	recent atomic.Pointer[recent] // what Views read beside the file; nil: nothing

	allocated int64 // the file has blocks up to here; 0: not known yet
	sparse    bool  // the file system cannot allocate

	// A panic of bbolt while it holds its locks leaves them locked. begin checks wedged first, one
	// caller at a time, so that no caller waits for such a lock for ever.
	beginning sync.Mutex
	wedged    atomic.Bool

	readers sync.WaitGroup // Views that have entered
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

// syncFolder makes the name of the file at path durable.
func syncFolder(path string, d *disk) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("opening data directory: %w", err)
	}
	defer dir.Close()
	if err := d.durably("sync folder", dir.Sync); err != nil {
		return fmt.Errorf("syncing data directory: %w", err)
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
				if _, err := pages.NewestMeta(f.File); err != nil {
					return nil, err
				}
				return f.File, nil
			},
		})
		return err
	})
	if err == nil {
		err = f.prepare(path, readOnly, d)
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

// prepare checks that the file is a database of this product and still the one at path, and settles
// it.
func (f *file) prepare(path string, readOnly bool, d *disk) error {
	if !f.isAt(path) { // a compaction replaced it while this process waited for the lock
		return errors.Join(berrors.ErrTimeout, f.close())
	}
	err := f.view(func(tx *bbolt.Tx) error {
		if tx.Bucket([]byte(bucketData)) == nil || tx.Bucket([]byte(bucketCommit)) == nil {
			return fault.New(fault.Invalid, pages.Foreign)
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

// isAt reports whether path is a name of the file.
func (f *file) isAt(path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(mine, named)
}

func (f *file) settle() error {
	m, err := pages.NewestMeta(f.File)
	if err != nil {
		return err
	}
	if _, err := f.WriteAt(m.Raw, m.Offset); err != nil {
		return fmt.Errorf("settling the database: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("settling the database: %w", err)
	}
	return nil
}
