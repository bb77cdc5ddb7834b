package postgres

import (
	"errors"
	"io"
	"net"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// kind says how to handle a failure.
type kind int

const (
	broken kind = iota // a defect, or the tables are not ours
	again              // the server refused this attempt and did nothing; the session is good
	lost               // the session is gone; its statement may have taken effect
	down               // the server is unreachable, or takes no writes
	full               // the server has no room; the session is good
)

// failure is an error of the database.
type failure struct {
	cause error
	kind  kind
}

func (f *failure) Error() string { return f.cause.Error() }
func (f *failure) Unwrap() error { return f.cause }

// inOneLine is an error of pgconn, which writes a line for each attempt: to each address of each host,
// with and without TLS. It says each of them once.
type inOneLine struct{ error }

func (e inOneLine) Error() string {
	lines := strings.Split(e.error.Error(), "\n")
	var attempts []string
	for _, line := range lines[1:] {
		if line = strings.TrimSpace(line); line != "" && !slices.Contains(attempts, line) {
			attempts = append(attempts, line)
		}
	}
	return strings.TrimSpace(lines[0] + " " + strings.Join(attempts, "; "))
}

func (e inOneLine) Unwrap() error { return e.error }

// failed classifies an error of pgconn. It treats every error that is not an answer of the server
// as a lost connection.
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
		return &failure{err, again} // serialisation failure, deadlock, or timeout of a lock or statement
	case class == "57", class == "08", strings.HasPrefix(pe.Code, "25P0"), // shutting down, starting up, or a transaction that idled
		pe.Severity == "FATAL", pe.Severity == "PANIC":
		return &failure{err, lost}
	case class == "53", class == "58": // disk full, out of memory, or an error of the disk
		return &failure{err, full}
	case pe.Code == "25006": // read-only: no longer the primary
		return &failure{err, down}
	}
	return &failure{err, broken}
}

// kindOf returns the kind of err. ok reports whether err is a failure of the database.
func kindOf(err error) (k kind, ok bool) {
	var f *failure
	if errors.As(err, &f) {
		return f.kind, true
	}
	return broken, false
}

// IsAbsent reports whether [Open] failed because no server answers there that takes sessions: the
// network does not reach one, or it is starting, stopping or full. A wrong password, name or setting
// is not that.
func IsAbsent(err error) bool {
	if pe := (*pgconn.PgError)(nil); errors.As(err, &pe) {
		class := pe.Code[:min(2, len(pe.Code))]
		return class == "57" || class == "53" || class == "08"
	}
	var ne net.Error
	return errors.Is(err, fault.ReasonStore) && (errors.As(err, &ne) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF))
}

// answer returns the error that callers get for a failure of the database.
func answer(err error) error {
	var k fault.Kind
	if errors.As(err, &k) {
		return err
	}
	if k, ok := kindOf(err); ok && k == broken {
		return fault.Wrap(fault.Internal, fault.Internal.Error(), err)
	}
	if k, ok := kindOf(err); ok && k == full {
		return fault.Outage(fault.ReasonSpace, "the database could not be written: free space on PostgreSQL's disk, or repair it, then retry", err)
	}
	return fault.Outage(fault.ReasonStore, "the database cannot be reached or written: look at PostgreSQL, then retry", err)
}

func ended(err error) error {
	return fault.Outage(fault.ReasonTimeout, "the request ended before the store could answer: retry", err)
}

func errClosed() error { return fault.Outage(fault.ReasonStore, "the store is closed", nil) }

var errRecovering = fault.Outage(fault.ReasonStore, "the store is recovering from a failure: retry", nil)

// over is the check function of a Reader whose closure has returned.
func over() error {
	return fault.Wrap(fault.Internal, fault.Internal.Error(), errors.New("a store transaction was used outside its closure"))
}
