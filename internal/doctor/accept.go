package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// rowsPerEntry bounds the rows that one entry names. With the longest keys, spelled as '\xff', an
// entry has about 132 KiB, and a line of an export 1 MiB.
const rowsPerEntry = 32

// maxReason is the length of the longest reason in bytes.
const maxReason = 200

var errReason = fault.New(fault.Invalid, "the reason has 1 to 200 printable ASCII characters: say why, since the log keeps it")

// Attributes of an entry STATE_ROWS_ACCEPTED or STATE_ROWS_REMOVED.
const (
	attributeRows   = "rows"   // number of rows that were accepted or removed together
	attributeDigest = "digest" // SHA-256 over the keyed hashes of them all, lower-case hex
	attributePage   = "page"   // 1, 2, …: several entries name many rows
	attributePages  = "pages"
	attributeRow    = "row_" // followed by 1, 2, …: a row, as [Finding.Row] spells it
)

// Resolved is what [Examination.Accept] or [Examination.Remove] did.
type Resolved struct {
	Rows        int
	First, Last uint64 // sequences of the entries
}

// Accept takes rows into the state as the store holds them: the log then commits to their values, or
// to their absence. Rows are named with their digests, as [Finding.Named] does. One commit has the
// change and the entries that name the rows. log is that of the examined store and bound to the state
// of the options, and takes its key here. Errors: [ErrNoRow]; fault.Invalid for the reason, for a row
// without a digest, and for one that stays wrong all the same; fault.Conflict for a row that has
// changed since it got the digest; fault.Unavailable.
func (x *Examination) Accept(ctx context.Context, log *writer.Log, rows []string, reason string) (Resolved, error) {
	named, err := x.named(rows, reason, func(f *Finding) error {
		if !f.Acceptable() {
			return fault.New(fault.Invalid, fmt.Sprintf("the row %s stays wrong when it is accepted (%s): restore a backup", f.Row(), f.Problems[0]))
		}
		return nil
	})
	if err != nil {
		return Resolved{}, err
	}
	return x.resolve(ctx, log, audit.StateRowsAccepted, named, reason, x.state.Accept)
}

// Remove deletes rows: the log then commits to their absence. Parameters and errors are those of
// [Examination.Accept]. The rows are removed together, and only if nothing is wrong without them that
// is not wrong now: the store is examined again as if they were missing, so the KMS keys of the options are still open.
func (x *Examination) Remove(ctx context.Context, log *writer.Log, rows []string, reason string) (Resolved, error) {
	named, err := x.named(rows, reason, func(f *Finding) error {
		switch {
		case f.Removable():
			return nil
		case f.Digest == state.Absent:
			return fault.New(fault.Invalid, fmt.Sprintf("the row %s is missing: there is nothing to remove", f.Row()))
		}
		return fault.New(fault.Invalid, fmt.Sprintf("the row %s is one of the deployment itself: restore a backup", f.Row()))
	})
	if err != nil {
		return Resolved{}, err
	}
	if err := x.checkWithout(ctx, named); err != nil {
		return Resolved{}, err
	}
	return x.resolve(ctx, log, audit.StateRowsRemoved, named, reason, x.state.Remove)
}

// named returns the findings that rows name, each once.
func (x *Examination) named(rows []string, reason string, check func(*Finding) error) (all []*Finding, err error) {
	if !validReason(reason) {
		return nil, errReason
	}
	taken := make(map[*Finding]bool)
	for _, row := range rows {
		row, digest := splitDigest(row)
		f, err := x.Find(row)
		if err != nil {
			return nil, err
		}
		if digest == "" {
			return nil, fault.New(fault.Invalid, fmt.Sprintf("the row %s has no digest: look at it with latticekeep doctor, and name it as ROW@DIGEST with the digest that is printed, so that nothing counts but what you have seen", f.Row()))
		}
		if digest != f.Digest {
			return nil, state.Seen{Key: f.Key, Digest: digest, Missing: f.refused}.Changed()
		}
		if err := check(f); err != nil {
			return nil, err
		}
		if !taken[f] {
			taken[f] = true
			all = append(all, f)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("no row is named: say which rows")
	}
	return all, nil
}

// checkWithout examines the store as if rows were missing, and returns an error when something is
// wrong then that is not wrong now.
func (x *Examination) checkWithout(ctx context.Context, rows []*Finding) error {
	o := x.options
	o.State, o.Row, o.without = nil, nil, nil
	removed := make(map[string]bool)
	for _, r := range rows {
		o.without = append(o.without, r.Key)
		removed[string(r.Key)] = true
	}
	after, err := Examine(ctx, x.store, o)
	if err != nil {
		return err
	}
	before := make(map[string]*Finding)
	for _, f := range x.Findings {
		before[f.Row()] = f
	}
	var other error // about a row that is not removed
	for _, f := range after.Findings {
		for _, problem := range f.Problems {
			was := before[f.Row()]
			switch {
			case removed[string(f.Key)] && problem != stateSays(state.Removed):
				return fault.New(fault.Invalid, fmt.Sprintf("the row %s is not removed, since it would still be wrong (%s): restore a backup", f.Row(), problem))
			case !removed[string(f.Key)] && (was == nil || !slices.Contains(was.Problems, problem)):
				other = fault.New(fault.Invalid, fmt.Sprintf("no row is removed, since %s would be wrong then (%s): restore a backup", f.Row(), problem))
			}
		}
	}
	return other
}

// resolve changes the state and appends the entries that name the rows, in one commit.
func (x *Examination) resolve(ctx context.Context, log *writer.Log, event audit.EventType, rows []*Finding, reason string,
	change func(context.Context, store.Store, []state.Seen, func(store.Tx, string) error) error,
) (Resolved, error) {
	seen := make([]state.Seen, len(rows))
	for i, r := range rows {
		seen[i] = state.Seen{Key: r.Key, Digest: r.Digest, Missing: r.refused}
	}
	if err := log.Use(ctx, x.store, x.ring.Audit(), x.ring.ChainID()); err != nil {
		return Resolved{}, err
	}
	var first, last *audit.Receipt
	pages := (len(rows) + rowsPerEntry - 1) / rowsPerEntry
	err := change(ctx, x.store, seen, func(tx store.Tx, digest string) error {
		for page := range pages {
			e := audit.Event{
				Type: event, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
				Resource: audit.Resource{Type: audit.ChainResource, ID: log.ChainID()},
				Attributes: map[string]string{
					audit.AttributeReason: reason, attributeRows: strconv.Itoa(len(rows)), attributeDigest: digest,
					attributePage: strconv.Itoa(page + 1), attributePages: strconv.Itoa(pages),
				},
			}
			from := page * rowsPerEntry
			for i, r := range rows[from:min(len(rows), from+rowsPerEntry)] {
				e.Attributes[attributeRow+strconv.Itoa(from+i+1)] = r.Row()
			}
			r, err := log.Append(tx, e)
			if err != nil {
				return err
			}
			if last = r; page == 0 {
				first = r
			}
		}
		return nil
	})
	if err != nil {
		return Resolved{}, fmt.Errorf("changing rows: %w", err)
	}
	return Resolved{len(rows), first.Sequence, last.Sequence}, nil
}

func validReason(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return len(s) >= 1 && len(s) <= maxReason
}
