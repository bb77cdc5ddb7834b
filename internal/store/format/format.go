// Package format says which programs may open a store.
//
// The row `format` of a store names the least format that a program must read to open the store,
// and the least that it must write to change it. It is JSON without a MAC, so a program without any
// key can read it. A store without the row has format 1. The row is raised when a feature that needs
// it is first used, in the same transaction, which may be soon after a start. An older program can
// open the store until then. The row is never lowered.
//
// The row keeps programs from misunderstanding a store. It is no protection against an attacker:
// whoever writes the database can change it.
package format

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Formats of this program.
const (
	Reads  = 6 // newest format that this program reads; it reads all older ones too
	Writes = 6 // newest format that this program writes; at most Reads

	// State is the format of a store whose rows are bound to the log: a program that does not bind
	// what it writes must not write there, and one that does not know the rows of the state would
	// take a row that was put back for a right one.
	State = 2

	// Packs is the format of a store with packs of entries (package entries): a program that does not
	// know them takes the entries in them for lost.
	Packs = 3

	// Bases is the format of a store in which the base of the archived entries has its lists in rows
	// (package audit): a program that does not know them takes the base for damaged.
	Bases = 4

	// Policies is the format of a store with policies of paths that are bound to somebody: a program
	// that does not know them would let everybody reach everything.
	Policies = 5

	// Paths is the format of a store with an index of the paths of credentials: a program that does not
	// know it writes credentials that lists would miss. No release has one of the two and not the other.
	Paths = 5

	// Kept is the format of a store with kept versions of credentials (package vault/kept): a program that
	// does not know them deletes a credential and leaves its earlier values. No release has this alone.
	Kept = 5

	// Settings is the format of a store with settings of a tenant (package settings): a program that does
	// not know them gives a credential that never expires a lifetime when it changes it. No release has this
	// alone.
	Settings = 5

	// Details is the format of a store with details of credentials (package vault/details): a program that
	// does not know them deletes a credential and leaves what was said of it. No release has this alone.
	Details = 5

	// Ahead is the format of an embedded store that commits to a write-ahead log (package store/bolt/wal): a
	// program that does not know the log takes the store for one of an earlier time.
	Ahead = 6
)

// Readers reports whether all processes that use the database read a format: whether no replica of an
// earlier release still runs. Nil: they do.
type Readers func(context.Context) (bool, error)

// All calls r. Error: fault.Unavailable.
func (r Readers) All(ctx context.Context) (bool, error) {
	if r == nil {
		return true, nil
	}
	all, err := r(ctx)
	if err != nil {
		return false, fmt.Errorf("asking which releases run: %w", err)
	}
	return all, nil
}

// Row is the key of the row.
var Row = []byte("format")

// Format is the content of the row.
type Format struct {
	Reader    int    `json:"reader"`     // least format that a program must read to open the store
	Writer    int    `json:"writer"`     // least format that a program must write to change it; at least Reader
	WrittenBy string `json:"written_by"` // version of the program that wrote the row: 1 to 255 printable ASCII characters
}

// first is the format of a store without the row.
var first = Format{Reader: 1, Writer: 1}

var errDamaged = fault.New(fault.Internal, "the row that says which release may open the store is damaged: restore a backup")

// Parse returns the content of the row. It returns format 1 for nil. Error: fault.Internal.
func Parse(row []byte) (Format, error) {
	if row == nil {
		return first, nil
	}
	var f Format
	if err := json.Unmarshal(row, &f); err != nil {
		return Format{}, errDamaged
	}
	printable := !strings.ContainsFunc(f.WrittenBy, func(r rune) bool { return r < ' ' || r > '~' })
	if f.Reader < 1 || f.Writer < f.Reader || !printable || len(f.WrittenBy) == 0 || len(f.WrittenBy) > 255 {
		return Format{}, errDamaged
	}
	return f, nil
}

// Read returns the format of a store. Errors: fault.Internal for a damaged row, or that of r.
func Read(r store.Reader) (Format, error) {
	row, err := r.Get(Row)
	if err != nil {
		return Format{}, err
	}
	return Parse(row)
}

// Of reads the format in its own transaction.
func Of(ctx context.Context, s store.Store) (f Format, err error) {
	err = s.View(ctx, func(r store.Reader) (err error) {
		f, err = Read(r)
		return err
	})
	if err != nil {
		return Format{}, fmt.Errorf("reading the format of the store: %w", err)
	}
	return f, nil
}

// Raised reports whether a row keeps some release away from the store. A damaged row does.
func Raised(row []byte) bool {
	f, err := Parse(row)
	return err != nil || f.Writer > 1
}

// RaisedRow returns the row if some release must not open the store, and otherwise nil. A backup
// begins with it.
func RaisedRow(ctx context.Context, s store.Store) (row []byte, err error) {
	err = s.View(ctx, func(r store.Reader) error {
		found, err := r.Get(Row)
		if err != nil {
			return err
		}
		if row = nil; Raised(found) {
			row = bytes.Clone(found)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the format of the store: %w", err)
	}
	return row, nil
}

// CheckReader fails if this program does not read the format. Error: fault.Unavailable.
func (f Format) CheckReader() error {
	if f.Reader > Reads {
		return fault.New(fault.Unavailable, fmt.Sprintf("the store is of latticekeep %s and has format %d, and this program reads formats up to %d: install latticekeep %[1]s or a newer release",
			f.WrittenBy, f.Reader, Reads))
	}
	return nil
}

// CheckWriter fails if this program does not read or does not write the format. Error:
// fault.Unavailable.
func (f Format) CheckWriter() error {
	if err := f.CheckReader(); err != nil {
		return err
	}
	if f.Writer > Writes {
		return fault.New(fault.Unavailable, fmt.Sprintf("the store is of latticekeep %s and is written in format %d, and this program only reads it, as with audit verify or backup: install latticekeep %[1]s or a newer release",
			f.WrittenBy, f.Writer))
	}
	return nil
}

// Check fails if this program must not open the store, for reading only or for writing too. Errors:
// fault.Unavailable, fault.Internal.
func Check(ctx context.Context, s store.Store, readOnly bool) error {
	f, err := Of(ctx, s)
	switch {
	case err != nil:
		return err
	case readOnly:
		return f.CheckReader()
	}
	return f.CheckWriter()
}

// Hook returns a hook for a store that is served. It refuses all further commits once another
// process has raised the row beyond what this program writes. The row is read in the transaction of
// each commit, so no commit can come between the raise and the check. It costs nothing: the hook
// reads the row in every group, so on PostgreSQL it comes with the lock or is in memory.
func Hook(hook store.Hook) store.Hook {
	return func(tx store.Tx, events []any) error {
		f, err := Read(tx)
		if err == nil {
			err = f.CheckWriter()
		}
		if err != nil {
			return err
		}
		return hook(tx, events)
	}
}

// Releases before the row look at the member `format` of the row `deployment` instead, and open
// only a store where it is 1. It is 2 in every store whose row is above 1, whatever the row says.
const (
	DeploymentFirst  = 1
	DeploymentRaised = 2
)

// CheckDeployment fails unless the member `format` of the row `deployment` fits the row. Errors:
// fault.Invalid for a value that no release before this one has written, fault.Internal for a row
// that was lost.
func (f Format) CheckDeployment(member int) error {
	switch {
	case member != DeploymentFirst && member != DeploymentRaised:
		return fault.New(fault.Invalid, fmt.Sprintf("the store has format %d, and this program reads formats up to %d: use the release that wrote it", member, Reads))
	case member == DeploymentRaised && f.Writer == 1:
		return errDamaged
	}
	return nil
}

// deploymentRow is the key of the row that releases before this one look at. The package keyring
// owns its other members.
var deploymentRow = []byte("deployment")

// Raise makes reader and writer the least formats of the store, unless the row has higher ones. The
// transaction that first uses a feature calls it, when all living replicas read the format
// ([store.Database.ReplicasRead]). From its commit on, every program that is too old refuses the
// store, also one that is running and one that does not know the row: Raise changes the row
// `deployment` too, and a PostgreSQL store changes the version of its tables. Errors:
// fault.Internal for a damaged row, or those of tx.
func Raise(tx store.Tx, reader, writer int) error {
	f, err := Read(tx)
	if err != nil || f.Reader >= reader && f.Writer >= writer {
		return err
	}
	f.Reader = max(f.Reader, reader)
	f.Writer = max(f.Writer, writer, f.Reader)
	return errors.Join(put(tx, f), raiseDeployment(tx))
}

// raiseDeployment changes one member of the row and keeps all others.
func raiseDeployment(tx store.Tx) error {
	row, err := tx.Get(deploymentRow)
	if err != nil || row == nil {
		return err
	}
	var members map[string]json.RawMessage
	if json.Unmarshal(row, &members) != nil || members["format"] == nil {
		return fault.New(fault.Internal, "the row that names the deployment is damaged: restore a backup")
	}
	if string(members["format"]) == strconv.Itoa(DeploymentRaised) {
		return nil // a later raise needs no entry about a row that decides
	}
	members["format"] = json.RawMessage(strconv.Itoa(DeploymentRaised))
	if row, err = json.Marshal(members); err != nil {
		return err
	}
	return tx.Put(deploymentRow, row)
}

// PutFirst writes the row of a new deployment with format 1. A feature that the deployment uses from
// its first commit raises it in the same transaction.
func PutFirst(tx store.Tx) error { return put(tx, first) }

func put(tx store.Tx, f Format) error {
	f.WrittenBy = buildinfo.Version()
	row, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return tx.Put(Row, row)
}
