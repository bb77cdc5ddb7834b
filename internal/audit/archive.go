package audit

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Retention: old entries move to object storage, one segment after the other.
//
// The order of the steps is what keeps everything that was ever written. The
// object is written, under a name of its own history, so that it takes the place of
// no other one; it is read back and verified, which goes on from the base
// that the segment before ended with; then one transaction moves the base to its
// end, enters it as a [Segment] and adds an entry to the log that says so; only
// then are the entries removed. A crash before the transaction leaves an object
// that no row names, and the next run writes a new one; a crash after it leaves
// entries that the next run removes.

const (
	// segmentEntries is how many entries a segment has, if there are as many that
	// are old enough.
	segmentEntries = 4096

	// lateness is how much longer than asked for an entry may stay until enough of
	// them fill a segment. So a quiet log makes one a day, and not one for each
	// entry that says that there is another.
	lateness = 24 * time.Hour
)

// Cutter moves entries that are older than Keep to the archive. Of several that
// run at the same time on one database, one comes through: each removes only what it
// has itself read back from there.
type Cutter struct {
	Log     *Log
	Reader  *Reader
	Archive Archive
	// Keep is how long an entry stays in the database at the least; a day later it
	// is in the archive only. Zero keeps all for ever.
	Keep time.Duration
	// Before is called before the entries up to a sequence are cut: what somebody
	// still needs of them is to be taken now. On its error nothing is cut. It may
	// be called again with the same sequence. Nil does nothing.
	Before func(ctx context.Context, to uint64) error
	Now    func() time.Time // nil: the log's
	Logger *slog.Logger     // nil: none

	most int // entries of a segment; 0: segmentEntries
}

var (
	// errAltered stops a cut although nothing is wrong here.
	errAltered = fault.New(fault.Internal, "the archive of the audit log does not hold what was written to it, and nothing was removed from the database: find out who else writes to its bucket")

	errMoved = fault.New(fault.Conflict, "another process has archived entries meanwhile: let it")
)

// Run archives and cuts all that is due, and returns how many entries are no
// longer in the database. What an earlier run began it ends first. Errors: those
// of the archive and of Before; a [Broken] when the entries do not hold, and
// fault.Internal when the archive has not what was written; fault.Conflict when
// another process archives; fault.Unavailable. Of a segment that an error is
// about nothing was cut, or it is in the archive whole, and the next run goes on.
func (c *Cutter) Run(ctx context.Context) (cut uint64, err error) {
	if err := c.Log.rollbacks.checkNotHalted(); err != nil {
		return 0, err
	}
	if err := c.resume(ctx); err != nil {
		return 0, err
	}
	for c.Keep > 0 {
		n, err := c.next(ctx)
		cut += n
		if err != nil || n == 0 {
			return cut, err
		}
	}
	return cut, nil
}

// resume removes what is in the archive already, after making sure that it still
// is.
func (c *Cutter) resume(ctx context.Context) error {
	newest, found, err := c.leftOver(ctx)
	if err != nil || !found {
		return err
	}
	data, err := c.Archive.Get(ctx, newest.Name)
	if err != nil {
		return fmt.Errorf("reading %s before its entries are removed: %w", newest.Name, err)
	}
	digest := newLineDigest()
	err = unzip(data, func(lines io.Reader) error {
		_, err := io.Copy(digest, lines)
		return err
	})
	if err != nil || digest.sum() != newest.Digest {
		return fmt.Errorf("reading %s before its entries are removed: %w", newest.Name, errAltered)
	}
	return c.removeArchived(ctx, newest.To)
}

// next archives and cuts one segment, if one is due, and returns how many entries
// it has.
func (c *Cutter) next(ctx context.Context) (n uint64, err error) {
	from, err := c.beginCut(ctx)
	if err != nil {
		return 0, fmt.Errorf("looking for entries to archive: %w", err)
	}
	s, n, err := c.choose(ctx, from)
	if err != nil || n == 0 {
		return 0, err
	}
	base, err := c.store(ctx, &s, from.base)
	if err != nil {
		return 0, err
	}
	if c.Before != nil {
		if err := c.Before(ctx, s.To); err != nil {
			return 0, fmt.Errorf("preparing to cut entries %d to %d: %w", s.From, s.To, err)
		}
	}
	if err := c.cut(ctx, s, n, from.row, base); err != nil {
		return 0, fmt.Errorf("cutting entries %d to %d: %w", s.From, s.To, err)
	}
	if c.Logger != nil {
		c.Logger.InfoContext(ctx, "entries of the audit log were archived", "from", s.From, "to", s.To, "object", s.Name)
	}
	// A large base takes a while to read: not in a transaction, where everybody would wait for it.
	if _, err := c.Log.chain.readBase(ctx); err != nil {
		return n, err
	}
	return n, c.removeArchived(ctx, s.To)
}

// cutFrom is where a segment begins and how far it may go.
type cutFrom struct {
	row   []byte // of the base, nil when nothing was cut yet
	base  *Base  // the same
	limit uint64 // the last sequence that may be cut: a checkpoint covers it, and an entry follows
}

// next returns the sequence behind the base.
func (f cutFrom) next() uint64 {
	if f.base == nil {
		return 1
	}
	return f.base.Sequence() + 1
}

func (c *Cutter) beginCut(ctx context.Context) (from cutFrom, err error) {
	if _, err := c.Reader.follower.Follow(ctx); err != nil {
		return cutFrom{}, err
	}
	err = c.Log.chain.store.View(ctx, func(r store.Reader) error {
		row, err := r.Get(baseKey)
		if err != nil {
			return err
		}
		from.row = bytes.Clone(row)
		head, err := readHead(r)
		if err != nil {
			return err
		}
		_, followed, err := c.Log.chain.checkpointIn(r)
		from.limit = min(followed.Sequence, max(head.sequence, 1)-1)
		return err
	})
	if err == nil && from.row != nil {
		from.base, err = c.Log.chain.ownBase(from.row)
	}
	return from, err
}

// choose decides which entries are the next segment, and returns how many they
// are: none when no segment is due.
func (c *Cutter) choose(ctx context.Context, from cutFrom) (s Segment, n uint64, err error) {
	now := c.Log.now
	if c.Now != nil {
		now = c.Now
	}
	old := now().Add(-c.Keep)
	most := uint64(cmp.Or(c.most, segmentEntries))
	if due, err := c.due(ctx, from, old, most); err != nil || !due {
		return Segment{}, 0, err
	}
	var count, size, group uint64 // group is the last sequence of the one that is being read
	rng := store.Range{From: entryKey(from.next()), To: entryKey(from.limit + 1)}
	err = scanEntries(ctx, c.Log.chain.store, rng, func(row entryRow) error {
		at, err := decodeStored(row.row, row.batch)
		if err != nil {
			return errDamagedLog
		}
		e := at.entry
		if e.Sequence > group { // the entries of a group have one time, and stay together: s.To is never within one
			if group = e.Sequence; at.proof.n > 0 {
				group += uint64(at.proof.n - 1 - at.proof.index)
			}
			if n >= most || size >= segmentBytes || e.Time().After(old) {
				return errFull
			}
		}
		if count++; count == 1 {
			s.From = e.Sequence
		}
		size += uint64(len(row.row) + 2*len(at.signature)) // not less than that of the line
		if e.Sequence == group {
			s.To, s.Hash, n = group, at.hash, count
		}
		return nil
	})
	if err != nil && !errors.Is(err, errFull) {
		return Segment{}, 0, err
	}
	s.Name = segmentName(c.Log.ChainID(), s)
	return s, n, nil
}

// due reports whether there are entries to archive, without looking at all that
// might be: the first one is late, or enough of them are old.
func (c *Cutter) due(ctx context.Context, from cutFrom, old time.Time, most uint64) (due bool, err error) {
	var first, last *Entry
	err = c.Log.chain.store.View(ctx, func(r store.Reader) error {
		var bad error
		err := r.Scan(store.Range{From: entryKey(from.next()), To: entryKey(from.limit + 1)}, func(_, row []byte) bool {
			var at stored
			at, bad = decodeStored(bytes.Clone(row), noSignature)
			first = at.entry
			return false
		})
		if err != nil || bad != nil || first == nil || first.Sequence+most-1 > from.limit {
			return errors.Join(err, bad)
		}
		// In an epoch that began meanwhile there is another one, or none: then it is
		// archived when it is late.
		last, err = readEntry(r, first.Sequence+most-1)
		if errors.Is(err, errNoEntry) {
			return nil
		}
		return err
	})
	switch {
	case errors.Is(err, errNotCanonical):
		return false, errDamagedLog
	case err != nil || first == nil:
		return false, err
	}
	late := first.Time().Before(old.Add(-lateness))
	return late || last != nil && !last.Time().After(old), nil
}

// store writes a segment to the archive, verifies what is then there, and returns
// what is known at its end. The base is what was known before it.
func (c *Cutter) store(ctx context.Context, s *Segment, base *Base) (*Base, error) {
	o := Options{PublicKey: c.Log.chain.key, Base: base, gentle: true}
	data, err := c.segment(ctx, s, o)
	if err != nil {
		return nil, fmt.Errorf("putting entries %d to %d together: %w", s.From, s.To, err)
	}
	if err := c.Archive.Put(ctx, s.Name, data); err != nil {
		return nil, fmt.Errorf("archiving entries %d to %d: %w", s.From, s.To, err)
	}
	if data, err = c.Archive.Get(ctx, s.Name); err != nil {
		return nil, fmt.Errorf("reading %s back: %w", s.Name, err)
	}
	_, base, err = verifySegment(data, *s, o)
	if err != nil {
		return nil, fmt.Errorf("reading %s back: %w", s.Name, fault.Wrap(fault.Internal, fault.Message(errAltered), err))
	}
	return base, nil
}

// cut moves the base to the end of a segment, which is in the archive and has n
// entries. The former base is what the segment goes on from.
func (c *Cutter) cut(ctx context.Context, s Segment, n uint64, former []byte, base *Base) error {
	signed, err := base.sign(c.Log.signer, c.Log.ChainID())
	if err != nil {
		return err
	}
	event := Event{
		Type: LogArchived, Outcome: Success,
		Principal: authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "latticekeep"},
		Resource:  Resource{Type: LogResource},
		Attributes: map[string]string{
			attributeFrom: fmt.Sprint(s.From), attributeTo: fmt.Sprint(s.To), attributeEntries: fmt.Sprint(n),
			attributeObject: s.Name, attributeSHA256: fmt.Sprintf("%x", s.Digest),
		},
	}
	return c.Log.chain.store.Update(ctx, func(tx store.Tx) error {
		row, err := tx.Get(baseKey)
		if err != nil {
			return err
		}
		if !bytes.Equal(row, former) {
			return errMoved
		}
		if err := tx.Put(baseKey, signed); err != nil {
			return err
		}
		if err := tx.Put(archiveKey(s.From), s.encode()); err != nil {
			return err
		}
		_, err = c.Log.Append(tx, event)
		return err
	})
}

// segment returns the object of a segment, whose Hash and Digest it fills in. It
// verifies what it writes as the options say. Error: a [Broken], of which there is
// no object.
func (c *Cutter) segment(ctx context.Context, s *Segment, o Options) ([]byte, error) {
	var out bytes.Buffer
	zip, digest := gzip.NewWriter(&out), newLineDigest() // without a time: the same entries compress the same
	v := NewVerifier(o)
	if err := c.Reader.exportRange(ctx, io.MultiWriter(zip, digest), v, s.From, s.To); err != nil {
		return nil, err
	}
	if err := zip.Close(); err != nil {
		return nil, fmt.Errorf("compressing a segment: %w", err)
	}
	s.Hash, s.Digest = v.head.hash, digest.sum()
	return out.Bytes(), nil
}
