package state

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/store"
)

// storedHead is the head in a snapshot of the store, beside the newest entry of the log there.
type storedHead struct {
	head
	there  bool
	newest audit.Position
}

// foreign reports whether the log has an entry that the head does not know of. Only a program that
// keeps no state writes one.
func (d storedHead) foreign() bool { return d.there && d.log != d.newest }

var errForeign = fmt.Errorf("%w: %s is not of the newest entry of the log", errDamaged, HeadKey)

// readHead reads and verifies the head. Error: errDamaged for one that the deployment did not write.
func (h *hasher) readHead(r store.Reader) (storedHead, error) {
	newest, err := audit.ReadHead(r)
	if err != nil {
		return storedHead{}, err
	}
	return h.readHeadBeside(r, newest)
}

// readHeadBeside is readHead for a caller that knows the newest entry of the log.
func (h *hasher) readHeadBeside(r store.Reader, newest audit.Position) (d storedHead, err error) {
	d.newest = newest
	row, err := r.Get(HeadKey)
	if err != nil || row == nil {
		return d, err
	}
	d.there = true
	d.head, err = h.decodeHead(row)
	return d, err
}

// pageBytes is how much of the state is read in one View, which has two seconds. Tests have less.
var pageBytes = 4 << 20

// load reads the table of the newest head and verifies it against the head. It takes several Views,
// between which the state may change. The store must have a head. Error: errDamaged.
func (h *hasher) load(ctx context.Context, st store.Store) (t *table, at head, err error) {
	for {
		var l loading
		t, at, err = l.inPages(ctx, st, h)
		if !errors.Is(err, errOutrun) {
			return t, at, err
		}
	}
}

// errOutrun means that the journal was trimmed of changes that were not read yet.
var errOutrun = errors.New("the journal was trimmed meanwhile")

// loading is a table that is being read: the journal first, and then the runs.
type loading struct {
	journal journalReader
	changes []numberedChange
	named   map[id]namedRun // what the journal says of the runs
	runs    map[id]loadedRun
}

type numberedChange struct {
	number uint64
	change
}

type namedRun struct {
	foldedRun
	number uint64 // the change that folded it
}

type loadedRun struct {
	records []byte
	digest  [sha256.Size]byte
}

func (l *loading) inPages(ctx context.Context, st store.Store, h *hasher) (t *table, at head, err error) {
	view := func(read func(r store.Reader, d head) error) error {
		return st.View(ctx, func(r store.Reader) error {
			d, err := h.readHead(r)
			switch {
			case err != nil:
				return err
			case !d.there:
				return fmt.Errorf("%w: %s is not there", errDamaged, HeadKey)
			case d.foreign():
				return errForeign
			}
			return read(r, d.head)
		})
	}
	for more := true; more && err == nil; {
		err = view(func(r store.Reader, d head) (err error) {
			more, err = l.readJournal(r, d, pageBytes)
			return err
		})
	}
	for from := runRows.From; from != nil && err == nil; {
		err = view(func(r store.Reader, _ head) (err error) {
			from, err = l.readRuns(r, from, pageBytes)
			return err
		})
	}
	if err != nil {
		return nil, at, err
	}
	err = view(func(r store.Reader, d head) (err error) {
		t, err = l.finish(r, d)
		at = d
		return err
	})
	return t, at, err
}

// load reads the table of a head in one snapshot.
func load(r store.Reader, h head) (*table, error) {
	var l loading
	if _, err := l.readRuns(r, runRows.From, 0); err != nil {
		return nil, err
	}
	return l.finish(r, h)
}

// readJournal reads changes up to the head, at most about limit bytes of them unless it is 0. It
// reports whether there are more.
func (l *loading) readJournal(r store.Reader, h head, limit int) (more bool, err error) {
	if l.named == nil {
		l.named = make(map[id]namedRun)
		l.journal.next = max(h.oldest, 1)
	}
	if l.journal.next < h.oldest {
		return false, errOutrun
	}
	return l.journal.read(r, h, limit, func(number uint64, c change) {
		for _, f := range c.folds {
			for _, p := range f {
				l.named[p.from] = namedRun{p, number}
			}
		}
		l.changes = append(l.changes, numberedChange{number, c})
	})
}

// readRuns reads runs, at most about limit bytes of them unless it is 0. It returns the key to go on
// from, or nil at the end.
func (l *loading) readRuns(r store.Reader, from []byte, limit int) (next []byte, err error) {
	if l.runs == nil {
		l.runs = make(map[id]loadedRun)
	}
	size := 0
	var bad error
	err = r.Scan(store.Range{From: from, To: runRows.To}, func(key, row []byte) bool {
		if limit > 0 && size >= limit {
			next = bytes.Clone(key)
			return false
		}
		var from id
		if copy(from[:], key[len(runs):]); len(key) != len(runs)+idSize {
			bad = fmt.Errorf("%w: a row of state/run/ has a key of another length", errDamaged)
			return false
		}
		l.runs[from] = newLoadedRun(row)
		size += len(row)
		return true
	})
	return next, errors.Join(err, bad)
}

func newLoadedRun(row []byte) loadedRun { return loadedRun{bytes.Clone(row), sha256.Sum256(row)} }

func (r loadedRun) is(n namedRun) bool {
	return int(n.len)*recordSize == len(r.records) && r.digest == n.digest
}

// finish reads what has changed since, and makes the table.
func (l *loading) finish(r store.Reader, h head) (*table, error) {
	if _, err := l.readJournal(r, h, 0); err != nil {
		return nil, err
	}
	t := newTable()
	t.number, t.floor = h.number, h.number
	if h.number > 0 {
		t.runs = nil
	}
	for from, n := range l.named {
		is, there := l.runs[from]
		if !there || !is.is(n) { // folded meanwhile
			row, err := r.Get(runKey(from))
			if err != nil {
				return nil, err
			}
			if is = newLoadedRun(row); row == nil || !is.is(n) {
				return nil, fmt.Errorf("%w: state/run/%x is not as the journal says", errDamaged, from)
			}
		}
		delete(l.runs, from)
		t.runs = append(t.runs, &run{from: from, records: is.records, folded: n.number})
	}
	for from := range l.runs {
		return nil, fmt.Errorf("%w: state/run/%x is not in the journal", errDamaged, from)
	}
	slices.SortFunc(t.runs, func(a, b *run) int { return a.from.compare(b.from) })
	if len(t.runs) == 0 || t.runs[0].from != (id{}) {
		return nil, fmt.Errorf("%w: a row of state/run/ is missing", errDamaged)
	}
	t.replay(l.changes)
	return t, checkEntry(r, h)
}

// replay makes the changes of a journal, each in the runs that were not folded after it.
func (t *table) replay(changes []numberedChange) {
	for _, c := range changes {
		t.owe(len(c.records), len(c.folds))
		for _, rec := range c.records {
			if run := t.runs[t.runOf(rec.id)]; run.folded < c.number {
				run.changes = append(run.changes, rec)
			}
		}
	}
	for _, run := range t.runs {
		slices.SortStableFunc(run.changes, func(a, b record) int { return a.id.compare(b.id) })
		kept := run.changes[:0]
		for i, rec := range run.changes {
			if i+1 == len(run.changes) || run.changes[i+1].id != rec.id { // the last one counts
				kept = append(kept, rec)
			}
		}
		run.changes = slices.Clip(kept)
	}
}

// checkEntry returns errDamaged when the entry that a head names has another commitment. If that
// entry was archived, only the MAC of the head vouches for the commitment.
func checkEntry(r store.Reader, h head) error {
	if h.entry == 0 {
		return nil
	}
	e, err := entries.Read(r, h.entry)
	if errors.Is(err, audit.ErrNoEntry) {
		if base, read := r.Get(audit.BaseKey); read == nil && base != nil {
			return nil // it was archived
		}
	}
	if err != nil {
		return err
	}
	if e.Attributes[audit.AttributeState] != hex.EncodeToString(h.commitment[:]) {
		return fmt.Errorf("%w: entry %d names another state", errDamaged, h.entry)
	}
	return nil
}
