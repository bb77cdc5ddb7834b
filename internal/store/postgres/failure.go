package postgres

import (
	"errors"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// kind is what can be done about a failure.
type kind int

const (
	broken kind = iota // a defect, or the tables are not ours
	again              // the server refused this attempt and did nothing; the session is good
	lost               // the session is gone, and what it was doing may have been done
	down               // the server cannot be had, or takes no writes
	full               // the server has no room; the session is good
)

// failure is an error of the database.
type failure struct {
	cause error
	kind  kind
}

func (f *failure) Error() string { return f.cause.Error() }
func (f *failure) Unwrap() error { return f.cause }

// failed classifies an error of pgconn. What is not an answer of the server is a
// lost connection.
func failed(err error) error {
	if f := (*failure)(nil); errors.As(err, &f) {
		return err
	}
	var pe *pgconn.PgError
	if !errors.As(err, &pe) {
		return &failure{err, lost}
	}
	switch class := pe.Code[:min(2, len(pe.Code))]; {
	case pe.Code == "40001", pe.Code == "40P01", pe.Code == "55P03", pe.Code == "57014":
		return &failure{err, again} // serialisation, deadlock, a lock or a statement that took too long
	case class == "57", class == "08", strings.HasPrefix(pe.Code, "25P0"), // shut down, starting up, a transaction that idled
		pe.Severity == "FATAL", pe.Severity == "PANIC":
		return &failure{err, lost}
	case class == "53", class == "58": // a full disk, no memory, an error of the disk
		return &failure{err, full}
	case pe.Code == "25006": // read-only: it is not the primary any more
		return &failure{err, down}
	}
	return &failure{err, broken}
}

// kindOf tells what can be done about err; ok says whether it is of the database.
func kindOf(err error) (k kind, ok bool) {
	var f *failure
	if errors.As(err, &f) {
		return f.kind, true
	}
	return broken, false
}

// answer is what callers get for a failure of the database.
func answer(err error) error {
	var k fault.Kind
	if errors.As(err, &k) {
		return err
	}
	if k, ok := kindOf(err); ok && k == broken {
		return fault.Wrap(fault.Internal, fault.Internal.Error(), err)
	}
	if k, ok := kindOf(err); ok && k == full {
		return fault.Wrap(fault.Unavailable, "the database could not be written: free space on PostgreSQL's disk, or repair it, then retry", err)
	}
	return fault.Wrap(fault.Unavailable, "the database cannot be reached or written: look at PostgreSQL, then retry", err)
}

func ended(err error) error {
	return fault.Wrap(fault.Unavailable, "the request ended before the store could answer: retry", err)
}

func errClosed() error { return fault.New(fault.Unavailable, "the store is closed") }

var errRecovering = fault.New(fault.Unavailable, "the store is recovering from a failure: retry")

// over is the check of a Reader whose closure has returned.
func over() error {
	return fault.Wrap(fault.Internal, fault.Internal.Error(), errors.New("a store transaction was used outside its closure"))
}
