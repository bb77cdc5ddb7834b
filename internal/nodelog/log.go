package nodelog

import (
	"crypto/sha3"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/durable"
)

const (
	maxPerFile   = 256
	defaultLimit = 10_000 // entries, of about 5 KB
)

// ErrFull says that a log has as many entries as it may have, and that none can be removed.
var ErrFull = errors.New("the log of this node is full: ship it with latticekeep kms-plugin ship-log, or copy its oldest files away and remove them")

// Options configure [Open].
type Options struct {
	Limit  int              // entries on disk, about; default 10,000
	Now    func() time.Time // default time.Now
	Logger *slog.Logger     // logs when the log stops and begins to take entries; default none

	// Required says that the caller refuses what cannot be recorded. Then it is not counted as dropped.
	Required bool

	// sync is [os.File.Sync]. A test sees when it is called, and has it fail.
	sync func(*os.File) error
}

// Log is the log of a node's key in the directory of its plugin, to which one process appends. It is
// safe for concurrent use.
//
// An entry is on disk when [Log.Append] returns. When it cannot be written, the caller may go on: what
// follows is counted, and an entry of the kind [Dropped] has the count as soon as one can be written.
// The entry that could not be written is kept and written again with the same bytes at the same place,
// because some of them may be on disk already, and another process may have read them.
type Log struct {
	folder  string
	key     *dualsig.PrivateKey
	options Options
	perFile int // entries

	mu        sync.Mutex
	ready     bool // the end of the log was found
	closed    bool
	started   bool     // there is an entry for this process, or it is unsettled
	last      *Entry   // nil: the log has none
	files     []uint64 // first sequences of the files
	newest    file     // zero: the next entry begins another
	unsettled *line    // in the newest file as a whole, in part or not at all; nil: none
	dropped   uint64   // seeds without an entry

	trouble string // why the log takes no entries; "": it does
	missed  uint64 // seeds that were dropped since the trouble began
}

// file is one that takes entries.
type file struct {
	*os.File
	size    int64 // bytes of its entries
	entries int
}

// line is an entry that is signed, and its encoding.
type line struct {
	*Entry
	encoded []byte
}

// Open opens the log in the directory of a plugin, and records the start of the process. It never fails,
// because a log must not keep an API server from its Secrets: what goes wrong is logged, and tried again
// with each entry.
func Open(dir string, key *dualsig.PrivateKey, o Options) *Log {
	if o.Limit == 0 {
		o.Limit = defaultLimit
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.sync == nil {
		o.sync = (*os.File).Sync
	}
	l := &Log{folder: Folder(dir, key.Public().ID()), key: key, options: o, perFile: max(1, min(maxPerFile, o.Limit/2))}
	l.report(l.flush(1))
	return l
}

// Append records that a seed was wrapped or opened by a generation, on disk. An entry that was signed and
// could not be written is kept: the next call writes it first, so an entry may also be of a seed that the
// caller has refused for this error. When there was no room to sign one, the seed is counted as dropped.
func (l *Log) Append(kind Kind, keyID string, ciphertext []byte) error {
	seed := sha3.Sum256(ciphertext)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return fs.ErrClosed
	}
	err := l.flush(1)
	if err == nil {
		e := l.next(kind)
		e.KeyID, e.Seed = keyID, hex.EncodeToString(seed[:])
		err = l.sign(e)
	}
	if err == nil {
		err = l.settle()
	} else if !l.options.Required {
		l.dropped++
		l.missed++
	}
	l.report(err)
	return err
}

// Drop counts seeds that were wrapped or opened and for which [Log.Append] was not called. It writes
// nothing: the next call that writes records the number.
func (l *Log) Drop(seeds uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropped += seeds
}

// Close tries to record what was dropped, logs what could not be recorded, and returns its number.
func (l *Log) Close() (lost uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dropped > 0 || l.unsettled != nil {
		l.report(l.flush(0))
	}
	lost = l.dropped
	if e := l.unsettled; e != nil && e.Kind == Dropped {
		lost += e.Count
	} else if e != nil && e.Kind != Started && !l.options.Required {
		lost++
	}
	if lost > 0 {
		l.options.Logger.Error("seeds were wrapped or opened without an entry in this node's log, and the number is not in it", "dropped", lost)
	}
	l.closeFile()
	l.closed = true
	return lost
}

// report logs trouble when it begins, when it changes and when it ends.
func (l *Log) report(err error) {
	switch {
	case err == nil && l.trouble != "":
		l.options.Logger.Info("this node's log takes entries again", "dropped", l.missed)
		l.trouble, l.missed = "", 0
	case err != nil && err.Error() != l.trouble:
		l.trouble = err.Error()
		l.options.Logger.Error("this node's log takes no entries", "refusing", l.options.Required, "error", err)
	}
}

// flush writes what has to be in the log before the next entry, when there is room for that and for more
// entries.
func (l *Log) flush(more int) error {
	if !l.ready {
		if err := l.find(); err != nil {
			return fmt.Errorf("opening the log of this node: %w", durable.ExplainRefusal(l.folder, err))
		}
		l.ready = true
	}
	if l.unsettled != nil {
		if err := l.settle(); err != nil {
			return err
		}
	}
	if !l.started {
		more++
	}
	if l.dropped > 0 {
		more++
	}
	if err := l.makeRoom(more); err != nil {
		return err
	}
	if !l.started {
		if err := l.sign(l.next(Started)); err != nil {
			return err
		}
		l.started = true
		if err := l.settle(); err != nil {
			return err
		}
	}
	if l.dropped == 0 {
		return nil
	}
	e := l.next(Dropped)
	e.Count = l.dropped
	if err := l.sign(e); err != nil {
		return err
	}
	l.dropped = 0
	return l.settle()
}

func (l *Log) next(kind Kind) *Entry {
	return Next(l.key.Public().ID(), l.last, l.options.Now(), kind)
}

// sign makes an entry the next one that settle writes.
func (l *Log) sign(e *Entry) error {
	err := e.Sign(l.key)
	var encoded []byte
	if err == nil {
		encoded, err = canonical.Encode(e)
	}
	if err != nil {
		return fmt.Errorf("signing an entry of this node's log: %w", err)
	}
	l.unsettled = &line{e, encoded}
	return nil
}

// settle writes the entry that is signed to disk.
func (l *Log) settle() error {
	err := l.prepareFile(l.unsettled.Sequence)
	if err == nil {
		_, err = l.newest.WriteAt(l.unsettled.encoded, l.newest.size)
	}
	if err == nil {
		err = l.options.sync(l.newest.File)
	}
	if err != nil {
		return fmt.Errorf("writing the log of this node: %w", durable.ExplainRefusal(l.folder, err))
	}
	l.newest.size += int64(len(l.unsettled.encoded))
	l.newest.entries++
	l.last, l.unsettled = l.unsettled.Entry, nil
	return nil
}

// prepareFile opens another file when the newest one is full or was removed.
func (l *Log) prepareFile(next uint64) error {
	if l.newest.File != nil {
		is, err := l.newest.inPlace()
		if err != nil {
			return err
		}
		if is && l.newest.entries < l.perFile {
			return nil
		}
		l.closeFile()
	}
	for _, folder := range []string{filepath.Dir(l.folder), l.folder} {
		if err := makeFolder(folder); err != nil {
			return err
		}
	}
	path := filepath.Join(l.folder, fileName(next))
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && info.Size() > 0 {
		err = fmt.Errorf("%s is not empty: move it out of the folder", path)
	}
	if err == nil {
		err = durable.SyncFolder(l.folder)
	}
	if err != nil {
		_ = f.Close() // nothing was written
		return err
	}
	l.newest = file{File: f}
	l.files = append(l.files, next)
	return nil
}

func makeFolder(path string) error {
	err := os.Mkdir(path, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil {
		err = durable.SyncFolder(filepath.Dir(path))
	}
	return err
}

func (l *Log) closeFile() {
	if l.newest.File != nil {
		_ = l.newest.Close() // every entry was synced
		l.newest = file{}
	}
}

// inPlace reports whether the file is still the one in the folder, and was not removed.
func (f file) inPlace() (bool, error) {
	there, err := os.Stat(f.Name())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	open, err := f.Stat()
	return err == nil && os.SameFile(there, open), err
}

// makeRoom removes the oldest files, as long as all their entries were shipped, until there is room for n
// entries. When there is none, it looks whether somebody has removed files.
func (l *Log) makeRoom(n int) (err error) {
	if l.room() >= n {
		return nil
	}
	if l.files, err = list(l.folder); err != nil {
		return fmt.Errorf("looking at the log of this node: %w", durable.ExplainRefusal(l.folder, err))
	}
	s := readShipped(l.folder)
	for l.room() < n {
		if len(l.files) < 2 || l.last == nil || s.Chain != l.last.Chain || s.Sequence < l.files[1]-1 {
			return ErrFull
		}
		if err := os.Remove(filepath.Join(l.folder, fileName(l.files[0]))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing what was shipped from the log of this node: %w", durable.ExplainRefusal(l.folder, err))
		}
		l.files = l.files[1:]
	}
	return nil
}

// room returns how many entries fit. All files but the newest are full.
func (l *Log) room() int {
	held := len(l.files) * l.perFile
	if l.newest.File != nil {
		held += l.newest.entries - l.perFile
	}
	return l.options.Limit - held
}

// find verifies the log, looks for its last entry, and cuts off what follows it: an entry whose writing a
// crash has ended was never answered. What does not verify is moved aside.
func (l *Log) find() error {
	for {
		files, err := list(l.folder)
		if err != nil {
			return err
		}
		l.files = files
		if len(files) == 0 {
			return l.warnIfGone()
		}
		err = l.findIn(files)
		var damaged *damagedError
		if errors.As(err, &damaged) {
			l.closeFile()
			l.last = nil
			return l.setAside(err)
		}
		if err != nil || l.last != nil {
			return err
		}
	}
}

// warnIfGone warns when the folder exists, because whoever made it has written entries.
func (l *Log) warnIfGone() error {
	_, err := os.Stat(l.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		l.options.Logger.Warn("the log of this node is gone, a new one begins", "folder", l.folder, "shipped", readShipped(l.folder).Sequence)
	}
	return err
}

// findIn verifies all files, and opens the newest one. It removes the newest one when that has no entry.
func (l *Log) findIn(files []uint64) error {
	s := readShipped(l.folder)
	w := &walk{key: l.key.Public(), visit: func(e *Entry) error { return compare(e, s) }}
	older, newest := files[:len(files)-1], files[len(files)-1]
	for _, first := range older {
		if err := w.openFrom(filepath.Join(l.folder, fileName(first)), first); err != nil {
			return err
		}
	}
	held := w.sum.Count()
	f, size, err := l.openNewest(w, newest)
	if err != nil || f == nil {
		return err
	}
	if w.last.Chain == s.Chain && w.last.Sequence < s.Sequence {
		_ = f.Close() // nothing was written
		return &damagedError{fmt.Errorf("the log ends with entry %d, and was shipped until entry %d", w.last.Sequence, s.Sequence)}
	}
	l.newest, l.last = file{f, size, int(w.sum.Count() - held)}, w.last
	return nil
}

// compare finds an entry that is another one than was shipped.
func compare(e *Entry, s *shipped) error {
	if e.Chain != s.Chain {
		return nil
	}
	if e.Sequence == s.Sequence && e.Hash() != s.Hash || e.Sequence == s.Sequence+1 && e.Previous != s.Hash {
		return &damagedError{fmt.Errorf("entry %d is not the one that was shipped, whose hash is %.64q", s.Sequence, s.Hash)}
	}
	return nil
}

// openNewest verifies the newest file as well, and returns it and the bytes of its entries. It returns no
// file when there was no entry, and removes it.
func (l *Log) openNewest(w *walk, first uint64) (*os.File, int64, error) {
	path := filepath.Join(l.folder, fileName(first))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, 0, err
	}
	before := w.last
	size, err := w.readFrom(f, first)
	empty := err == nil && w.last == before
	if empty {
		err = os.Remove(path)
	} else if err == nil {
		err = l.cut(f, size)
	}
	if err != nil || empty {
		_ = f.Close() // no entry was written
		return nil, 0, err
	}
	return f, size, nil
}

// cut shortens a file to this size, and syncs it: the last process may have ended between a write and its
// sync, and what follows must not stay on disk without what is before.
func (l *Log) cut(f *os.File, size int64) error {
	info, err := f.Stat()
	if err == nil && info.Size() != size {
		err = f.Truncate(size)
	}
	if err != nil {
		return err
	}
	return l.options.sync(f)
}

// setAside renames the folder of a log that does not verify, so that another one begins.
func (l *Log) setAside(reason error) error {
	aside := l.folder + ".damaged-" + l.options.Now().UTC().Format("20060102T150405Z")
	err := os.Rename(l.folder, aside)
	if err == nil {
		err = durable.SyncFolder(filepath.Dir(l.folder))
	}
	if err != nil {
		return fmt.Errorf("%w; moving it aside: %w", reason, err)
	}
	l.files = nil
	l.options.Logger.Error("this node's log does not verify and was moved aside; another one begins", "folder", aside, "error", reason)
	return nil
}
