package command

import (
	"context"
	"errors"
	"io/fs"
	"net"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// Statuses with which the program ends. [Statuses] describes them to users.
const (
	StatusFailed      = 1
	StatusUsage       = 2
	StatusUnreachable = 3
	StatusRefused     = 4
)

// Statuses is the help on exit statuses.
const Statuses = `Every command ends with one of these exit statuses:

  0  done; for a verification: all that was verified holds
  1  it does not hold: a log, a signature, a row, a manifest or a backup is not
     what it should be. Also every failure that has no status of its own
  2  usage: an unknown command or flag, or a value that is not allowed
  3  unreachable: a server, database, KMS, cluster or file does not answer or
     cannot be read, or a server answered 5xx. Nothing is known about what was
     to be verified; trying again may help
  4  refused: the server answered 4xx, as for a wrong API key, a scope that the
     key lacks, or a name that does not exist; or a KMS refused

Only 0 says that something holds. A gate that is to tell tampering from an
outage takes 1 for tampering, and fails on 3 too.`

// StatusError is an error with which the program ends with a status of its own.
type StatusError struct {
	Status int
	Err    error
}

// Error implements error.
func (e *StatusError) Error() string { return e.Err.Error() }

// Unwrap implements the errors package's interface.
func (e *StatusError) Unwrap() error { return e.Err }

// UsageError returns an error of whoever typed the command. [Strict] adds how to get help.
func UsageError(text string) error { return &StatusError{StatusUsage, errors.New(text)} }

// Status returns the status with which the program ends after a command has returned err. When
// something is broken and the rest could not be read, the status says that it is broken. An error of an
// unknown kind counts as failed: a gate must not take damage for an outage.
func Status(err error) int {
	var own *StatusError
	var answer *client.Error
	var cluster apierrors.APIStatus
	var address *net.AddrError
	_, broken := audit.IsBroken(err)
	switch {
	case err == nil:
		return 0
	case errors.As(err, &own):
		return own.Status
	case broken || errors.Is(err, audit.ErrDamagedLog):
		return StatusFailed
	case errors.As(err, &answer):
		return StatusOfHTTP(answer.Status)
	case errors.As(err, &cluster):
		return StatusOfHTTP(int(cluster.Status().Code))
	case errors.As(err, &address):
		return StatusUsage
	case isUnreachable(err):
		return StatusUnreachable
	case errors.Is(err, fault.Forbidden), errors.Is(err, fault.Unauthenticated), errors.Is(err, fault.Exhausted): // a KMS refused, or a server did and the agent says why
		return StatusRefused
	}
	return StatusFailed
}

// StatusOfHTTP returns the status for an answer that is not a success.
func StatusOfHTTP(status int) int {
	if status >= 400 && status < 500 {
		return StatusRefused
	}
	return StatusUnreachable
}

func isUnreachable(err error) bool {
	var connection net.Error
	var path *fs.PathError
	return errors.Is(err, client.ErrNoAnswer) || errors.As(err, &connection) || errors.As(err, &path) || fault.Of(err) == fault.Unavailable ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
