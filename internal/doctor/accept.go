package doctor

import (
	"context"
	"errors"
	"fmt"
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

var errReason = fault.New(fault.Invalid, "the reason has 1 to 200 printable ASCII characters: say why the rows are right as they are, since the log keeps it")

// Attributes of an entry STATE_ROWS_ACCEPTED.
const (
	attributeRows   = "rows"   // number of rows that were accepted together
	attributeDigest = "digest" // SHA-256 over the keyed hashes of them all, lower-case hex
	attributePage   = "page"   // 1, 2, …: several entries name many rows
	attributePages  = "pages"
	attributeRow    = "row_" // followed by 1, 2, …: a row, as [Finding.Row] spells it
)

// Accepted is what [Examination.Accept] did.
type Accepted struct {
	Rows        int
	First, Last uint64 // sequences of the entries
}

// Accept takes rows into the state as the store holds them: the log then commits to their values, or
// to their absence. One commit has the change and the entries that name the rows. log is that of the
// examined store and bound to the state of the options, and takes its key here. Errors: [ErrNoRow];
// fault.Invalid for the reason, and for a row that stays wrong all the same; fault.Unavailable.
func (x *Examination) Accept(ctx context.Context, log *writer.Log, rows []string, reason string) (a Accepted, err error) {
	if !validReason(reason) {
		return a, errReason
	}
	var refused []*state.RowError
	var names []string
	taken := make(map[*Finding]bool)
	for _, row := range rows {
		f, err := x.Find(row)
		if err != nil {
			return a, err
		}
		if !f.Acceptable() {
			return a, fault.New(fault.Invalid, fmt.Sprintf("the row %s stays wrong when it is accepted (%s): restore a backup", f.Row(), f.Problems[0]))
		}
		if !taken[f] {
			taken[f] = true
			refused, names = append(refused, f.refused), append(names, f.Row())
		}
	}
	if len(names) == 0 {
		return a, errors.New("no row is named: say which rows to accept")
	}
	if err := log.Use(ctx, x.store, x.ring.Audit(), x.ring.ChainID()); err != nil {
		return a, err
	}
	var first, last *audit.Receipt
	pages := (len(names) + rowsPerEntry - 1) / rowsPerEntry
	err = x.state.Accept(ctx, x.store, refused, func(tx store.Tx, digest string) error {
		for page := range pages {
			e := audit.Event{
				Type: audit.StateRowsAccepted, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
				Resource: audit.Resource{Type: audit.ChainResource, ID: log.ChainID()},
				Attributes: map[string]string{
					audit.AttributeReason: reason, attributeRows: strconv.Itoa(len(names)), attributeDigest: digest,
					attributePage: strconv.Itoa(page + 1), attributePages: strconv.Itoa(pages),
				},
			}
			from := page * rowsPerEntry
			for i, name := range names[from:min(len(names), from+rowsPerEntry)] {
				e.Attributes[attributeRow+strconv.Itoa(from+i+1)] = name
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
		return a, fmt.Errorf("accepting rows: %w", err)
	}
	return Accepted{len(names), first.Sequence, last.Sequence}, nil
}

func validReason(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return len(s) >= 1 && len(s) <= maxReason
}
