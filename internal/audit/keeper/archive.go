package keeper

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// Retention: old entries move to object storage, one segment after the other.
//
// The order of the steps makes sure that no entry is lost. First, the object is written. Its name
// contains the hash of its last entry, so that the object of another history is never replaced.
// Second, the object is read back and verified, starting from the base at the end of the previous
// segment. Third, one transaction moves the base to the end of the segment, adds the
// [audit.Segment], and appends an entry about it to the log. Only then are the entries removed. A
// crash before the transaction leaves an object that no row names, and the next run writes a new
// one. A crash after the transaction leaves entries that the next run removes.

const (
	// segmentEntries is the number of entries in a segment, if that many are old enough.
	segmentEntries = 4096

	// lateness is how much longer than Cutter.Keep an entry may stay until enough entries fill a
	// segment. It lets a quiet log make one segment a day. Without it, the entry about each segment
	// would in turn become a segment.
	lateness = 24 * time.Hour

	// leastKeep is how long an entry stays in the database whatever the number of entries: for
	// whoever looks into what just happened, and for tails and exports that are on their way.
	leastKeep = time.Hour
)

// Cutter moves entries that are older than Keep, and the oldest beyond MaxEntries, to the archive. If several cutters run on one
// database at the same time, only one of them cuts a given segment. Each cutter removes only
// entries that it has read back from the archive itself.
type Cutter struct {
	Log     *writer.Log
	Reader  *reader.Reader
	Archive audit.Archive
	// Keep is the minimum time that an entry stays in the database. At most a day later the entry
	// moves to the archive. Zero moves no entry for its age.
	Keep time.Duration
	// MaxEntries is the number of entries that stay in the database, at most a segment more. The
	// oldest beyond it move before Keep, but none that is younger than an hour. Zero moves no entry
	// for the number of entries.
	MaxEntries uint64
	// Before is called before the entries up to a sequence are cut, so that the caller can copy
	// what it still needs. An error prevents the cut. Before may be called again with the same
	// sequence. Nil does nothing.
	Before func(ctx context.Context, to uint64) error
	// Ready reports whether all processes that use the database read [format.Bases]. Nil: they do.
	Ready  func(ctx context.Context) (bool, error)
	Now    func() time.Time // nil: the log's clock
	Logger *slog.Logger     // nil: no logging

	most int // maximum number of entries in a segment; 0: segmentEntries
}

var (
	// errAltered stops a cut because of the archive. The entries in the database are intact.
	errAltered = fault.New(fault.Internal, "the archive of the audit log does not hold what was written to it, and nothing was removed from the database: find out who else writes to its bucket")

	errFull = errors.New("the segment is full") // ends the scan for its entries

	errMoved = fault.New(fault.Conflict, "another process has archived entries meanwhile: let it")
)

// Run archives and cuts all entries that are due, and returns how many it has cut. It first
// finishes what an earlier run began. Errors: those of the archive and of Before; an [audit.Broken]
// when the entries do not verify; fault.Internal when the archive does not contain what was
// written; fault.Conflict when another process archives; fault.Unavailable. After an error, a
// segment is either not cut or completely in the archive, and the next run continues.
func (c *Cutter) Run(ctx context.Context) (cut uint64, err error) {
	if err := c.Log.Detector.CheckNotHalted(); err != nil {
		return 0, err
	}
	if err := c.resume(ctx); err != nil {
		return 0, err
	}
	for c.Keep > 0 || c.MaxEntries > 0 {
		n, err := c.next(ctx)
		cut += n
		if err != nil || n == 0 {
			return cut, err
		}
	}
	return cut, nil
}

// resume removes entries that an earlier run archived. It first makes sure that they are still in
// the archive.
func (c *Cutter) resume(ctx context.Context) error {
	newest, found, err := c.leftOver(ctx)
	if err != nil || !found {
		return err
	}
	data, err := c.Archive.Get(ctx, newest.Name)
	if err != nil {
		return fmt.Errorf("reading %s before its entries are removed: %w", newest.Name, err)
	}
	digest := audit.NewLineDigest()
	err = audit.Unzip(data, func(lines io.Reader) error {
		_, err := io.Copy(digest, lines)
		return err
	})
	if err != nil || digest.Sum() != newest.Digest {
		return fmt.Errorf("reading %s before its entries are removed: %w", newest.Name, errAltered)
	}
	return removeArchived(ctx, c.Log.Chain, newest.To)
}

// leftOver reports whether archived entries are still in the database, and returns the newest
// segment. Error: audit.ErrDamagedLog when that segment does not end where the signed base ends: an
// unsigned row alone is no reason to remove entries.
func (c *Cutter) leftOver(ctx context.Context) (newest audit.Segment, found bool, err error) {
	var row []byte
	err = c.Log.Chain.Store.View(ctx, func(r store.Reader) error {
		if newest, err = audit.NewestSegment(r); err != nil || newest.To == 0 {
			return err
		}
		found, err = entries.Exist(r, store.Range{From: audit.EntryRange.From, To: audit.EntryKey(newest.To + 1)})
		if err == nil && found {
			row, err = r.Get(audit.BaseKey)
			row = bytes.Clone(row)
		}
		return err
	})
	if err != nil || !found {
		return audit.Segment{}, false, err
	}
	base, err := c.Log.Chain.ParseOwnBase(row)
	if err != nil {
		return audit.Segment{}, false, err
	}
	if base.Sequence() != newest.To || base.Head.Hash != newest.Hash {
		return audit.Segment{}, false, audit.ErrDamagedLog
	}
	return newest, true, nil
}

// next archives and cuts one segment, if one is due, and returns its number of entries.
func (c *Cutter) next(ctx context.Context) (n uint64, err error) {
	from, err := c.beginCut(ctx)
	if err != nil {
		return 0, fmt.Errorf("looking for entries to archive: %w", err)
	}
	if from.base == nil || !from.base.HasRows() {
		if ready, err := c.ready(ctx); err != nil || !ready {
			return 0, err
		}
	}
	s, n, touched, err := c.choose(ctx, from)
	if err != nil || n == 0 {
		return 0, err
	}
	base, changed, err := c.store(ctx, &s, from, touched)
	if err != nil {
		return 0, err
	}
	if c.Before != nil {
		if err := c.Before(ctx, s.To); err != nil {
			return 0, fmt.Errorf("preparing to cut entries %d to %d: %w", s.From, s.To, err)
		}
	}
	if err := c.cut(ctx, s, n, from.row, base, changed); err != nil {
		return 0, fmt.Errorf("cutting entries %d to %d: %w", s.From, s.To, err)
	}
	if c.Logger != nil {
		c.Logger.InfoContext(ctx, "entries of the audit log were archived", "from", s.From, "to", s.To, "object", s.Name)
	}
	return n, removeArchived(ctx, c.Log.Chain, s.To)
}

// cutFrom is where a segment begins and how far it may go.
type cutFrom struct {
	row   []byte      // row of the base; nil when nothing was cut yet
	base  *audit.Base // parsed form of row
	limit uint64      // last sequence that may be cut: covered by a checkpoint, and not the head
	over  uint64      // last sequence of those beyond MaxEntries; 0: there are no more
}

// next returns the sequence after the base.
func (f cutFrom) next() uint64 {
	if f.base == nil {
		return 1
	}
	return f.base.Sequence() + 1
}

func (c *Cutter) beginCut(ctx context.Context) (from cutFrom, err error) {
	if _, err := c.Reader.Follower.Follow(ctx); err != nil {
		return cutFrom{}, err
	}
	err = c.Log.Chain.Store.View(ctx, func(r store.Reader) error {
		row, err := r.Get(audit.BaseKey)
		if err != nil {
			return err
		}
		from.row = bytes.Clone(row)
		head, err := audit.ReadHead(r)
		if err != nil {
			return err
		}
		_, followed, err := c.Log.Chain.ReadCheckpoint(r)
		if err != nil {
			return err
		}
		from.limit = min(followed.Sequence, max(head.Sequence, 1)-1)
		if stay := int64(c.MaxEntries); stay > 0 && followed.Size > stay { // epochs skip sequences, and the tree skips nothing
			epochs, err := c.Log.Chain.Epochs(r)
			if err != nil {
				return err
			}
			from.over = audit.SequenceAt(epochs, followed.Size-stay-1)
		}
		return nil
	})
	if err == nil && from.row != nil {
		from.base, err = c.Log.Chain.ParseOwnBase(from.row)
	}
	return from, err
}

// bounds decides which entries are old enough for the archive.
type bounds struct {
	old   time.Time // entries up to this time move for their age; zero: none does
	over  uint64    // entries up to this sequence move for their number
	young time.Time // entries after this time stay
}

func (c *Cutter) bounds(from cutFrom) bounds {
	now := c.Log.Now
	if c.Now != nil {
		now = c.Now
	}
	b := bounds{over: from.over, young: now().Add(-leastKeep)}
	if c.Keep > 0 {
		b.old = now().Add(-c.Keep)
	}
	return b
}

// stays reports whether an entry is to stay in the database.
func (b bounds) stays(e *audit.Entry) bool {
	at := e.Time()
	return at.After(b.old) && (e.Sequence > b.over || at.After(b.young))
}

// choose selects the entries of the next segment, and returns their number and the items of the base
// that they may change. It returns 0 when no segment is due.
func (c *Cutter) choose(ctx context.Context, from cutFrom) (s audit.Segment, n uint64, touched audit.Touched, err error) {
	bounds, most := c.bounds(from), uint64(cmp.Or(c.most, segmentEntries))
	if due, err := c.due(ctx, from, bounds, most); err != nil || !due {
		return audit.Segment{}, 0, nil, err
	}
	touched = make(audit.Touched)
	var count, size, group uint64 // group: last sequence of the current group
	rng := store.Range{From: audit.EntryKey(from.next()), To: audit.EntryKey(from.limit + 1)}
	err = entries.ScanAll(ctx, c.Log.Chain.Store, rng, func(row entries.Row) error {
		at, err := audit.DecodeStoredEntry(row.Row, row.Batch)
		if err != nil {
			return audit.ErrDamagedLog
		}
		e := at.Entry
		if e.Sequence > group { // a group stays together: s.To is never inside one
			if group = e.Sequence; at.Proof.N > 0 {
				group += uint64(at.Proof.N - 1 - at.Proof.Index)
			}
			if n >= most || size >= audit.SegmentBytes || bounds.stays(e) {
				return errFull
			}
		}
		if count++; count == 1 {
			s.From = e.Sequence
		}
		touched.Note(e)
		size += uint64(len(row.Row) + 2*len(at.Signature)) // at least the size of the exported line
		if e.Sequence == group {
			s.To, s.Hash, n = group, at.Hash, count
		}
		return nil
	})
	if err != nil && !errors.Is(err, errFull) {
		return audit.Segment{}, 0, nil, err
	}
	s.Name = audit.SegmentName(c.Log.ChainID(), s)
	return s, n, touched, nil
}

// due reports whether there are entries to archive: the first one is late, or enough of them are
// old or too many. It reads two entries at most.
func (c *Cutter) due(ctx context.Context, from cutFrom, b bounds, most uint64) (due bool, err error) {
	var first, last *audit.Entry
	err = c.Log.Chain.Store.View(ctx, func(r store.Reader) error {
		var bad error
		err := entries.Scan(r, store.Range{From: audit.EntryKey(from.next()), To: audit.EntryKey(from.limit + 1)}, func(_, row []byte) bool {
			var at audit.StoredEntry
			at, bad = audit.DecodeStoredEntry(bytes.Clone(row), audit.NoSignature)
			first = at.Entry
			return false
		})
		if err != nil || bad != nil || first == nil || first.Sequence+most-1 > from.limit {
			return errors.Join(err, bad)
		}
		// An epoch that began in between skips sequences, so this can be another entry or none.
		last, err = entries.Read(r, first.Sequence+most-1)
		if errors.Is(err, audit.ErrNoEntry) {
			return nil
		}
		return err
	})
	switch {
	case errors.Is(err, audit.ErrNotCanonical):
		return false, audit.ErrDamagedLog
	case err != nil || first == nil:
		return false, err
	}
	late := first.Time().Before(b.old.Add(-lateness))
	if last == nil { // there is none, or an epoch skips it
		return late || first.Sequence+most-1 <= b.over && !b.stays(first), nil
	}
	return late || !b.stays(last), nil
}

// store writes a segment to the archive, reads it back and verifies it, starting from the base. It
// returns the base at the end of the segment, and its rows that change (see [audit.Base.Change]).
func (c *Cutter) store(ctx context.Context, s *audit.Segment, from cutFrom, touched audit.Touched) (*audit.Base, map[string][]byte, error) {
	base, err := from.base.With(touched, c.get(ctx))
	if err != nil {
		return nil, nil, c.orMoved(ctx, from, err)
	}
	o := verify.Options{PublicKey: c.Log.Chain.Key, Base: base, Gentle: true}
	data, err := c.segment(ctx, s, o)
	if err != nil {
		return nil, nil, fmt.Errorf("putting entries %d to %d together: %w", s.From, s.To, err)
	}
	if err := c.Archive.Put(ctx, s.Name, data); err != nil {
		return nil, nil, fmt.Errorf("archiving entries %d to %d: %w", s.From, s.To, err)
	}
	if data, err = c.Archive.Get(ctx, s.Name); err != nil {
		return nil, nil, fmt.Errorf("reading %s back: %w", s.Name, err)
	}
	_, next, err := verify.Segment(data, *s, o)
	if err != nil {
		return nil, nil, fmt.Errorf("reading %s back: %w", s.Name, fault.Wrap(fault.Internal, fault.Message(errAltered), err))
	}
	next, changed, err := base.Change(next, touched, c.get(ctx))
	if err != nil {
		return nil, nil, c.orMoved(ctx, from, err)
	}
	return next, changed, nil
}

// get returns a function that reads a row in a snapshot of its own.
func (c *Cutter) get(ctx context.Context) audit.Get {
	return func(key []byte) (row []byte, err error) {
		err = c.Log.Chain.Store.View(ctx, func(r store.Reader) error {
			b, err := r.Get(key)
			row = bytes.Clone(b)
			return err
		})
		return row, err
	}
}

// orMoved returns errMoved in place of [audit.ErrBase] when the base was another one meanwhile.
func (c *Cutter) orMoved(ctx context.Context, from cutFrom, err error) error {
	if !errors.Is(err, audit.ErrBase) {
		return err
	}
	row, failed := c.get(ctx)(audit.BaseKey)
	switch {
	case failed != nil:
		return failed
	case !bytes.Equal(row, from.row):
		return errMoved
	}
	return audit.ErrDamagedLog
}

// ready reports whether all processes that use the database read a base with lists in rows.
func (c *Cutter) ready(ctx context.Context) (bool, error) {
	if c.Ready == nil {
		return true, nil
	}
	return c.Ready(ctx)
}

// cut moves the base to the end of a segment that is in the archive and has n entries. previous is
// the row of the base before the segment, and changed are the rows of its lists that change. Error:
// errMoved when the stored base is another one.
func (c *Cutter) cut(ctx context.Context, s audit.Segment, n uint64, previous []byte, base *audit.Base, changed map[string][]byte) error {
	signed, err := c.Log.SignBase(base)
	if err != nil {
		return err
	}
	event := audit.Event{
		Type: audit.LogArchived, Outcome: audit.Success,
		Principal: authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "latticekeep"},
		Resource:  audit.Resource{Type: audit.LogResource},
		Attributes: map[string]string{
			audit.AttributeFrom: fmt.Sprint(s.From), audit.AttributeTo: fmt.Sprint(s.To), audit.AttributeEntries: fmt.Sprint(n),
			audit.AttributeObject: s.Name, audit.AttributeSHA256: fmt.Sprintf("%x", s.Digest),
		},
	}
	keys := slices.Sorted(maps.Keys(changed))
	return c.Log.Chain.Store.Update(ctx, func(tx store.Tx) error {
		row, err := tx.Get(audit.BaseKey)
		if err != nil {
			return err
		}
		if !bytes.Equal(row, previous) {
			return errMoved
		}
		if err := tx.Put(audit.BaseKey, signed); err != nil {
			return err
		}
		for _, key := range keys {
			if err := put(tx, []byte(key), changed[key]); err != nil {
				return err
			}
		}
		if err := format.Raise(tx, format.Bases, format.Bases); err != nil {
			return err
		}
		if err := tx.Put(audit.ArchiveKey(s.From), s.Encode()); err != nil {
			return err
		}
		_, err = c.Log.Append(tx, event)
		return err
	})
}

// put sets a row, or deletes it when it is nil.
func put(tx store.Tx, key, row []byte) error {
	if row == nil {
		return tx.Delete(key)
	}
	return tx.Put(key, row)
}

// segment returns the object of a segment, and sets its Hash and Digest. It verifies the entries
// with the options. Error: an [audit.Broken], and no object.
func (c *Cutter) segment(ctx context.Context, s *audit.Segment, o verify.Options) ([]byte, error) {
	var out bytes.Buffer
	zip, digest := gzip.NewWriter(&out), audit.NewLineDigest() // no timestamp: deterministic output
	v := verify.NewVerifier(o)
	if err := c.Reader.ExportRange(ctx, io.MultiWriter(zip, digest), v, s.From, s.To); err != nil {
		return nil, err
	}
	if err := zip.Close(); err != nil {
		return nil, fmt.Errorf("compressing a segment: %w", err)
	}
	s.Hash, s.Digest = v.Head.Hash, digest.Sum()
	return out.Bytes(), nil
}
