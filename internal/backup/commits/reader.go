package commits

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store/commit"
)

// Log says which log a [Reader] reads, and for which store.
type Log struct {
	Bucket     *objects.Bucket
	Folder     string             // place of the chain's logs: [Folder], perhaps below a prefix
	Chain      string             // fingerprint of the audit chain, as in the header of a backup
	Identity   *dualsig.PublicKey // the deployment's identity, as a verified backup has it
	Identities []backup.Identity  // one of them opens the segments

	From  commit.Head // head of the store that the records are applied to
	Place Place       // place that the store names
	Until time.Time   // later commits are not read; zero for all
}

// Reader reads the records of a log that its store lacks, in their order. Applied one after the other
// they make the state of the last of them. It returns the records of a stretch after which the state
// is whole, or none of them.
type Reader struct {
	log    Log
	prefix string

	listed     []uint64             // ordinals of segments that come after the last one that was read
	statements map[uint64]statement // statements that were checked; their segments are not read yet

	segment uint64   // the last one that was read
	digest  [32]byte // digest of that segment's statement
	linked  bool     // digest is known
	last    uint64   // number of the last commit in it

	begun   uint64          // number of the first commit that comes after the store's; 0: not known yet
	through uint64          // the state is whole after this segment
	records []commit.Record // records of the last segment, not returned yet
	reached Reached
	refused time.Time // time of the first commit that was too late
}

// Reached is up to where a log was read.
type Reached struct {
	Segment uint64
	Commit  uint64
	Time    time.Time // time of the commit; zero: nothing was read
	Head    commit.Head
}

// NewReader returns a reader. It reads nothing yet.
func NewReader(l Log) *Reader {
	r := &Reader{log: l, prefix: logPrefix(l.Folder, l.Place.Log), statements: make(map[uint64]statement), segment: l.Place.Segment, digest: l.Place.Digest, linked: true}
	return r
}

// Reached returns up to where the records make a whole state.
func (r *Reader) Reached() Reached { return r.reached }

// Refused returns the time of the next state in the log, which is later than [Log.Until]. It is zero if
// no such state was seen.
func (r *Reader) Refused() time.Time { return r.refused }

// BrokenError means that a segment is not what the deployment wrote, or is missing.
type BrokenError struct {
	Object  string  // name of the segment
	Reached Reached // up to where the log can be read
	cause   error
}

// Error implements error.
func (e *BrokenError) Error() string {
	upTo := "no commit after the backup can be read"
	if !e.Reached.Time.IsZero() {
		upTo = fmt.Sprintf("the log can be read up to %s (entry %d)", e.Reached.Time.Format(time.RFC3339Nano), e.Reached.Head.Sequence)
	}
	return fmt.Sprintf("the segment %s of the log of commits cannot be used: %v; %s", e.Object, e.cause, upTo)
}

// Unwrap implements error.
func (e *BrokenError) Unwrap() []error { return []error{fault.Invalid, e.cause} }

func (r *Reader) broken(ordinal uint64, cause error) error {
	return &BrokenError{Object: r.prefix + segmentName(ordinal), Reached: r.reached, cause: cause}
}

// Next returns the next record. Error: io.EOF when nothing more can be read yet, so that a later call
// may succeed; a [BrokenError]; and those of the bucket.
func (r *Reader) Next(ctx context.Context) (commit.Record, error) {
	for {
		if len(r.records) > 0 {
			next := r.records[0]
			if r.last != 0 && r.segment >= r.through && next.Whole() && r.isWhole() && r.tooLate(next.Time) {
				return commit.Record{}, io.EOF
			}
			r.records = r.records[1:]
			r.last = next.Last
			if next.Whole() && next.Last >= r.begun {
				r.reached = Reached{Segment: r.segment, Commit: next.Last, Time: next.Time, Head: next.Head}
			}
			return next, nil
		}
		if err := r.load(ctx); err != nil {
			return commit.Record{}, err
		}
	}
}

// isWhole reports whether the state after the last record is one of the store's.
func (r *Reader) isWhole() bool { return r.reached.Commit == r.last }

// tooLate reports whether a state is of after [Log.Until], and then keeps its time.
func (r *Reader) tooLate(at time.Time) bool {
	if r.log.Until.IsZero() || !at.After(r.log.Until) {
		return false
	}
	r.refused = at
	return true
}

// load reads the next segment. At its beginning it finds out whether the state will be whole after it
// or after which later one.
func (r *Reader) load(ctx context.Context) error {
	if r.begun == 0 {
		if err := r.begin(ctx); err != nil {
			return err
		}
	}
	next := r.segment + 1
	if next > r.through {
		end, err := r.whole(ctx, next, func(statement) bool { return true })
		if err != nil {
			return err
		}
		r.through = end
	}
	records, err := r.read(ctx, next)
	if err != nil {
		return err
	}
	r.records = slices.DeleteFunc(records, func(c commit.Record) bool { return c.Head.Sequence < r.log.From.Sequence })
	s := r.statements[next]
	delete(r.statements, next)
	r.segment, r.digest, r.linked = next, s.digest(), true
	return nil
}

// begin looks for the records with which the store can go on. They begin with those of the head that
// the store has: some of these may be in the store and some not, since not every commit has an entry.
// So the state is only known to be whole with the first commit that has a later entry.
func (r *Reader) begin(ctx context.Context) error {
	from := r.log.From
	for {
		s, err := r.statement(ctx, r.segment+1)
		if err != nil {
			return err
		}
		if s.After.Sequence >= from.Sequence {
			break
		}
		delete(r.statements, s.Ordinal)
		r.segment, r.digest, r.linked = s.Ordinal, s.digest(), true
	}
	end, err := r.whole(ctx, r.segment+1, func(s statement) bool { return s.After.Sequence > from.Sequence })
	if err != nil {
		return err
	}
	records, err := r.read(ctx, end)
	if err != nil {
		return err
	}
	first := slices.IndexFunc(records, func(c commit.Record) bool { return c.Whole() && c.Head.Sequence > from.Sequence })
	if r.tooLate(records[first].Time) {
		return io.EOF
	}
	r.begun, r.through = records[first].Last, end
	return nil
}

// whole returns the first segment from ordinal on after which the state is whole and that suits the
// caller. Error: io.EOF when there is none yet, or only one that is too late.
func (r *Reader) whole(ctx context.Context, ordinal uint64, suits func(statement) bool) (uint64, error) {
	for first := ordinal; ; ordinal++ {
		s, err := r.statement(ctx, ordinal)
		switch {
		case err != nil:
			return 0, err
		case !s.whole() || !suits(s):
			continue
		case ordinal > first && r.begun > 0 && r.tooLate(s.Time): // a stretch is read as a whole
			return 0, io.EOF
		}
		return ordinal, nil
	}
}

// statement returns the statement of a segment after it has verified that the segment follows the one
// before. Error: io.EOF when there is no such segment and no later one.
func (r *Reader) statement(ctx context.Context, ordinal uint64) (statement, error) {
	if s, known := r.statements[ordinal]; known {
		return s, nil
	}
	if err := r.find(ctx, ordinal); err != nil {
		return statement{}, err
	}
	if r.segment+1 > ordinal { // find has skipped segments that were deleted
		ordinal = r.segment + 1
	}
	b, err := r.log.Bucket.GetStart(ctx, r.prefix+segmentName(ordinal), statementSize)
	if fault.Of(err) == fault.NotFound {
		return statement{}, r.broken(ordinal, errMissing)
	}
	if err != nil {
		return statement{}, err
	}
	s, err := parseStatement(b, r.log.Identity)
	if err == nil {
		err = r.follows(s, ordinal)
	}
	if err != nil {
		return statement{}, r.broken(ordinal, err)
	}
	r.statements[ordinal] = s
	return s, nil
}

var errMissing = errors.New("it is missing, and there are later ones")

// follows verifies that a statement is of the segment with an ordinal.
func (r *Reader) follows(s statement, ordinal uint64) error {
	previous, linked, last, head := r.digest, r.linked, uint64(0), commit.Head{}
	if before, known := r.statements[ordinal-1]; known {
		previous, linked, last, head = before.digest(), true, before.Last, before.After
	}
	switch {
	case hex.EncodeToString(s.Chain[:]) != r.log.Chain:
		return errors.New("it is of another deployment")
	case s.Log != r.log.Place.Log || s.Ordinal != ordinal:
		return errors.New("another segment is in its place")
	case linked && s.Previous != previous:
		return errors.New("it does not follow the segment before")
	case last > 0 && (s.First != last+1 || s.Before != head):
		return errors.New("its commits do not follow those of the segment before")
	case !linked && s.Before.Sequence >= r.log.From.Sequence:
		return errors.New("segments before it are missing: they were deleted with an older backup")
	}
	return nil
}

// find makes sure that there is a segment with the ordinal. At the beginning it skips what was deleted
// with older backups.
func (r *Reader) find(ctx context.Context, ordinal uint64) error {
	r.listed = slices.DeleteFunc(r.listed, func(n uint64) bool { return n < ordinal })
	if len(r.listed) == 0 {
		names, err := r.log.Bucket.ListAfter(ctx, r.prefix, r.prefix+segmentName(ordinal-1), 1000)
		if err != nil {
			return err
		}
		for _, name := range names {
			if n, ok := ordinalOf(strings.TrimPrefix(name, r.prefix)); ok {
				r.listed = append(r.listed, n)
			}
		}
	}
	switch {
	case len(r.listed) == 0:
		return io.EOF
	case r.listed[0] == ordinal:
		return nil
	case r.begun == 0 && ordinal == r.log.Place.Segment+1 && r.segment == r.log.Place.Segment:
		r.segment, r.linked = r.listed[0]-1, false
		return nil
	}
	return r.broken(ordinal, errMissing)
}

// read returns the records of a segment whose statement was read.
func (r *Reader) read(ctx context.Context, ordinal uint64) ([]commit.Record, error) {
	s, err := r.statement(ctx, ordinal)
	if err != nil {
		return nil, err
	}
	b, err := r.log.Bucket.Get(ctx, r.prefix+segmentName(ordinal))
	if fault.Of(err) == fault.NotFound {
		return nil, r.broken(ordinal, errMissing)
	}
	if err != nil {
		return nil, err
	}
	again, err := parseStatement(b, r.log.Identity)
	if err == nil && again != s {
		err = errChanged
	}
	var records []commit.Record
	if err == nil {
		records, err = s.unseal(b, r.log.Identities)
	}
	if err != nil {
		return nil, r.broken(ordinal, err)
	}
	for _, c := range records {
		if c.Head.Sequence == r.log.From.Sequence && c.Head.Hash != r.log.From.Hash {
			return nil, r.broken(ordinal, fmt.Errorf("its entry %d is not the one of the backup, which is of another log", c.Head.Sequence))
		}
	}
	return records, nil
}

// Later is a log of the same chain as another one.
type Later struct {
	Folder string
	Began  time.Time // the last commit of its oldest segment
}

// Others returns the other logs of the chain that have commits after what was reached, oldest first.
func (r *Reader) Others(ctx context.Context) (others []Later, err error) {
	for after := ""; ; {
		names, err := r.log.Bucket.ListAfter(ctx, r.log.Folder, after, 1)
		if err != nil || len(names) == 0 {
			slices.SortFunc(others, func(a, b Later) int { return a.Began.Compare(b.Began) })
			return others, err
		}
		log, _, _ := strings.Cut(strings.TrimPrefix(names[0], r.log.Folder), "/")
		folder := r.log.Folder + log + "/"
		after = max(folder+"a", names[0]) // after all ordinals, and after whatever else somebody put there
		if folder == r.prefix {
			continue
		}
		b, err := r.log.Bucket.GetStart(ctx, names[0], statementSize)
		if err != nil {
			return nil, err
		}
		s, err := parseStatement(b, r.log.Identity)
		if err == nil && s.After.Sequence > max(r.reached.Head.Sequence, r.log.From.Sequence) {
			others = append(others, Later{folder, s.Time})
		}
	}
}
