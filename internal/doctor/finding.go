package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Options of an [Examine]. Report is required.
type Options struct {
	Report verify.Report // covers the whole log, which the caller has verified
	KMS    []keyring.KMS // the current KMS key, then the previous ones; empty: without keys
	State  *state.State  // bound to the log of a caller that will accept rows; nil: a new one
	Row    func()        // called for each row that is read; nil: not called

	without [][]byte // keys of rows that are taken as missing
}

// Examination is what was found in a store.
type Examination struct {
	Findings  []*Finding // in the order of their keys; rows without a known key come last
	More      bool       // there are other rows that the log does not commit to
	Rows      uint64     // rows that were read
	Keys      bool       // the deployment's keys are open, and every MAC was checked
	State     bool       // the deciding rows were compared with the state
	Stateless bool       // an earlier release wrote the store, which has no state yet

	store   store.Store
	options Options
	ring    *keyring.Ring
	state   *state.State
	unnamed *state.Unnamed
	byKey   map[string]*Finding
	broken  *audit.Broken
}

// Finding is a row that does not hold.
type Finding struct {
	Family   string       // prefix of the keys
	Key      []byte       // nil: unknown, see ID
	ID       string       // stands for a missing row whose key is unknown; hex
	Group    []byte       // prefix of that row's key, if it is known
	Problems []string     // what is wrong
	Reason   state.Reason // why the state refuses the row; empty: it does not
	Entry    *Entry       // newest entry of the log about it; nil: none was found
	Digest   string       // the stored row, see [state.State.Digest]; empty: the state was not checked

	sequence uint64 // entry that contradicts the row; 0: unknown
	lasting  bool   // what is wrong stays wrong when the row is accepted
	refused  *state.RowError
}

// Row returns the row as commands print and take it: the key as a quoted string, or the family, '#'
// and the id of a row whose key is unknown.
func (f *Finding) Row() string {
	if f.Key == nil {
		return f.Family + "#" + f.ID
	}
	return fmt.Sprintf("%+q", f.Key)
}

// Acceptable reports whether [Examination.Accept] takes the row.
func (f *Finding) Acceptable() bool { return f.Digest != "" && f.refused != nil && !f.lasting }

// Removable reports whether [Examination.Remove] may delete the row: it is stored, and not one that
// the deployment itself needs.
func (f *Finding) Removable() bool {
	of, ok := state.FamilyOf(f.Key)
	return f.Digest != "" && f.Digest != state.Absent && ok && of.Prefix != "state/" && (!of.Own || f.Reason == state.Added)
}

// Named returns the row with its digest, as [Examination.Accept] and [Examination.Remove] take it.
func (f *Finding) Named() string { return f.Row() + "@" + f.Digest }

// Entry is what an examination shows of an entry of the log.
type Entry struct {
	Sequence uint64
	Type     audit.EventType
	Outcome  audit.Outcome
	Time     time.Time
	Actor    string
}

func (e *Entry) String() string {
	return fmt.Sprintf("entry %d, %s of %s, by %s", e.Sequence, e.Type, e.Time.UTC().Format(time.RFC3339), e.Actor)
}

// add notes what is wrong with a row.
func (x *Examination) add(key []byte, sequence uint64, problem string) *Finding {
	f := x.byKey[string(key)]
	if f == nil {
		f = &Finding{Key: bytes.Clone(key)}
		if of, ok := state.FamilyOf(key); ok {
			f.Family = of.Prefix
		}
		x.byKey[string(key)] = f
	}
	if !slices.Contains(f.Problems, problem) {
		f.Problems = append(f.Problems, problem)
	}
	f.sequence = max(f.sequence, sequence)
	return f
}

func (x *Examination) report(key []byte, problem string) { x.add(key, 0, problem).lasting = true }

func (x *Examination) fault(f audit.RowFault) {
	x.add(f.Key, f.Sequence, f.Reason).lasting = true
	if f.Sequence > 0 && (x.broken == nil || f.Sequence < x.broken.Sequence) {
		x.broken = &audit.Broken{Sequence: f.Sequence, Reason: f.Reason}
	}
}

// Broken returns the lowest sequence whose entry contradicts a row, or nil.
func (x *Examination) Broken() *audit.Broken { return x.broken }

func (x *Examination) refuse(e *state.RowError) {
	f := x.add(e.Key, 0, stateSays(e.Reason))
	f.Reason, f.refused = e.Reason, e
}

// stateSays explains why the state refuses a row.
func stateSays(r state.Reason) string {
	switch r {
	case state.Replaced:
		return "replaced: it is not the row that was written last; an earlier one was put back, or it was changed"
	case state.Removed:
		return "removed: the row is missing, and the deployment did not delete it"
	case state.Added:
		return "added: the deployment deleted the row, or never wrote it"
	}
	return string(r)
}

func (x *Examination) get(ctx context.Context, key []byte) (value []byte, err error) {
	err = x.store.View(ctx, func(r store.Reader) error {
		b, err := r.Get(key)
		if value = nil; b != nil {
			value = append([]byte{}, b...)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading a row: %w", err)
	}
	return value, nil
}

// ParseRow returns the key that a row is spelled by: a quoted string, as [Finding.Row] and the
// server's log print it, or the plain key.
func ParseRow(row string) []byte {
	if key, err := strconv.Unquote(row); err == nil {
		return []byte(key)
	}
	return []byte(row)
}

// ErrNoRow is the error for a row that no finding is about.
var ErrNoRow = errors.New("no such row was found to be wrong: give it as latticekeep doctor prints it")

// digest returns the digest of a row that was read.
func (x *Examination) digest(key, value []byte) string {
	if !x.State {
		return ""
	}
	return x.state.Digest(key, value)
}

// rowAtDigest matches a row that is named with a digest.
var rowAtDigest = regexp.MustCompile(`(?s)^(.+)@(` + state.Absent + `|[0-9a-f]{16})$`)

// splitDigest returns the row and the digest of ROW@DIGEST. The digest is empty when there is none.
func splitDigest(named string) (row, digest string) {
	if m := rowAtDigest.FindStringSubmatch(named); m != nil {
		return m[1], m[2]
	}
	return named, ""
}

// Find returns the finding about a row, which is spelled as [Finding.Row] does or as the plain key.
func (x *Examination) Find(row string) (*Finding, error) {
	for _, f := range x.Findings {
		if f.Row() == row || f.Key != nil && string(ParseRow(row)) == string(f.Key) {
			return f, nil
		}
	}
	return nil, fmt.Errorf("%q: %w", row, ErrNoRow)
}
