package bolt

import (
	"errors"
	"io/fs"
	"os"
	"syscall"

	bbolt "go.etcd.io/bbolt"
)

const (
	flushBytes  = 4 << 20  // rows of one transaction of the new file
	syncBytes   = 32 << 20 // written between two syncs of it, so that those of commits need not wait for more
	fillPercent = 0.9      // used share of a page, for rows that come in order
)

// newFile is the file that a compaction fills. It is synced only on demand.
type newFile struct {
	*file
	path     string
	disk     *disk
	scrubber *scrubber

	tx       *bbolt.Tx // nil between two transactions
	data     *bbolt.Bucket
	bytes    int  // put in tx
	unsynced int  // bytes since the last sync
	deleted  bool // rows were deleted since the last wipe
}

// createBeside makes the new file for the database at path, for the same owner.
func createBeside(path string, d *disk) (*newFile, error) {
	n := &newFile{path: path + compactSuffix, disk: d, scrubber: &scrubber{disk: d}}
	if err := os.Remove(n.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	err := d.durably("create", func() error { return initialise(n.path) })
	if err == nil {
		err = likewise(n.path, path)
	}
	if err == nil {
		n.file, err = openFile(n.path, false, d)
	}
	if err != nil {
		_ = os.Remove(n.path)
		return nil, err
	}
	n.db.NoSync, n.db.NoGrowSync = true, true // writes make it longer, by no more than they need
	return n, nil
}

// likewise gives a file the owner and the mode of another one.
func likewise(path, other string) error {
	info, err := os.Stat(other)
	if err != nil {
		return err
	}
	if err := os.Chmod(path, info.Mode().Perm()); err != nil {
		return err
	}
	owner := info.Sys().(*syscall.Stat_t)
	return os.Chown(path, int(owner.Uid), int(owner.Gid))
}

// start begins a transaction if there is none.
func (n *newFile) start() (err error) {
	if n.tx != nil {
		return nil
	}
	if n.tx, n.data, err = n.begin(true); err == nil {
		n.data.FillPercent = fillPercent
	}
	return err
}

// put writes a row, or deletes it if value is nil.
func (n *newFile) put(key, value []byte) error {
	if err := n.start(); err != nil {
		return err
	}
	n.deleted = n.deleted || value == nil
	err := guard(func() error {
		if value == nil {
			return n.data.Delete(key)
		}
		return n.data.Put(key, value)
	})
	if n.bytes += len(key) + len(value); err == nil && n.bytes >= flushBytes {
		err = n.flush()
	}
	return err
}

// putOthers takes over what a database has beside the rows.
func (n *newFile) putOthers(from *bbolt.Tx) error {
	if err := n.start(); err != nil {
		return err
	}
	return from.ForEach(func(name []byte, from *bbolt.Bucket) error {
		if string(name) == bucketData {
			return nil
		}
		to, err := n.tx.CreateBucketIfNotExists(name)
		if err != nil {
			return err
		}
		return from.ForEach(func(key, value []byte) error {
			n.bytes += len(key) + len(value)
			return to.Put(key, value)
		})
	})
}

// flush ends the transaction.
func (n *newFile) flush() error {
	if n.tx == nil {
		return nil
	}
	tx := n.tx
	n.tx, n.data = nil, nil
	if err := n.disk.durably("copy", func() error { return guard(tx.Commit) }); err != nil {
		return errors.Join(err, n.rollback(tx))
	}
	n.unsynced += n.bytes
	n.bytes = 0
	if n.unsynced >= syncBytes {
		return n.sync()
	}
	return nil
}

// abort drops the transaction.
func (n *newFile) abort() {
	if n.tx != nil {
		_ = n.rollback(n.tx)
		n.tx = nil
	}
}

func (n *newFile) sync() error {
	n.unsynced = 0
	return n.disk.durably("sync copy", n.File.Sync)
}

// wipe zeroes the pages of deleted rows.
func (n *newFile) wipe() error {
	if !n.deleted {
		return nil
	}
	tx, _, err := n.begin(true)
	if err != nil {
		return err
	}
	err = n.scrubber.wipe(n.file, tx.ID())
	n.deleted = err != nil
	return errors.Join(err, n.rollback(tx))
}
