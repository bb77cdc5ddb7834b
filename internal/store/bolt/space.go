package bolt

import (
	"crypto/rand"
	"errors"
	"fmt"

	bbolt "go.etcd.io/bbolt"
)

// Space
//
// bbolt grows the file without allocating its blocks, so a full disk would show in the middle of a
// commit, and long after the growth. The writer therefore grows the file itself, before a commit
// that might not fit, and allocates what it adds. A commit that has no room then fails before it has
// written anything, and the file need not be opened again.

// The file grows by an eighth, within these bounds.
const (
	leastGrowth = 1 << 20
	mostGrowth  = 16 << 20
)

// makeRoom allocates the bytes that t may add to the file, and some more for the commits after it.
// It returns nil where the file system cannot allocate: there the commit finds out. The error says
// that t would not fit; nothing is written then.
func (f *file) makeRoom(t *tx) error {
	used, needed := t.bolt.Size(), t.growth()
	if f.sparse || used+needed <= f.allocated {
		return nil
	}
	err := f.allocate(used, needed)
	if errors.Is(err, errors.ErrUnsupported) {
		f.sparse = true
		return nil
	}
	if err == nil {
		return nil
	}
	free, ferr := f.freeBytes()
	// Only half of the free pages count, because a row that needs several pages in a row may find none.
	if ferr == nil && max(f.allocated-used, 0)+free/2 >= needed {
		return nil
	}
	return errors.Join(fmt.Errorf("growing the file: %w", err), ferr)
}

// allocate makes the file so long that needed bytes after the first used ones have blocks, and adds
// as much for later as there is, up to the usual step.
func (f *file) allocate(used, needed int64) (err error) {
	end := used + needed
	if info, err := f.Stat(); err != nil {
		return err
	} else if f.allocated == 0 && info.Size() > end {
		end = info.Size() // an earlier program, or bbolt, has grown it without blocks
	}
	for step := min(max(end/8, leastGrowth), mostGrowth); ; step /= 4 {
		if step < leastGrowth/16 {
			step = 0
		}
		if err = allocate(f.File, used, end+step); err == nil {
			// The commit syncs only the data of the file and what is needed to find them.
			if err = f.Sync(); err == nil {
				f.allocated = end + step
			}
			return err
		}
		if step == 0 || errors.Is(err, errors.ErrUnsupported) {
			return err
		}
	}
}

// growth returns about the number of bytes by which a commit of t makes the file longer, if no page
// is free. Each change may copy the pages on the path to its key, and a commit writes the list of
// free pages anew.
func (t *tx) growth() int64 {
	const depth = 4
	page := int64(t.bolt.DB().Info().PageSize)
	return 64*page + int64(t.bytes) + int64(len(t.log)+1)*depth*page
}

// freeBytes returns the size of all free pages of the last commit.
func (f *file) freeBytes() (int64, error) {
	m, err := newestMeta(f.File)
	if err != nil {
		return 0, err
	}
	count, _, err := m.freelistAt(f.File)
	return int64(count) * m.pageSize, err
}

// probeSize is about the size of an entry with what goes with it.
const probeSize = 16 << 10

// putProbe writes a row in place of the last probe's one. Its bytes are random, because a file
// system may store a run of zeroes in no space at all.
func putProbe(t *bbolt.Tx) error {
	b, err := t.CreateBucketIfNotExists([]byte(bucketProbe))
	if err != nil {
		return err
	}
	row := make([]byte, probeSize)
	rand.Read(row) // never fails
	return b.Put([]byte(keyProbe), row)
}
