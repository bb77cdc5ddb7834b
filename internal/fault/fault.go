// Package fault holds the few root kinds of error that the whole product
// knows, and the message of each that is safe to show to a caller.
//
// A [Kind] decides an HTTP status or a webhook's answer in one table at the
// edge; everything else about an error is for the log. Messages name the
// remedy and never quote input.
package fault

import (
	"errors"
	"fmt"
)

// Kind is a root cause as the edge distinguishes it. A Kind is itself an
// error, so errors.Is(err, fault.NotFound) asks for it.
type Kind uint8

// The kinds. The zero value is Internal: an error nobody classified is ours.
const (
	Internal        Kind = iota // a defect or damaged data
	Invalid                     // the request cannot be carried out as it is written
	Unauthenticated             // no principal
	Forbidden                   // a principal, but not for this
	NotFound                    // the named thing does not exist
	Conflict                    // it changed meanwhile, or exists already
	Exhausted                   // a limit is used up
	Unavailable                 // a dependency is down; retrying helps
)

var messages = [...]string{
	Internal:        "internal error",
	Invalid:         "invalid request",
	Unauthenticated: "authentication required",
	Forbidden:       "access denied",
	NotFound:        "not found",
	Conflict:        "conflict with the current state",
	Exhausted:       "limit exceeded",
	Unavailable:     "service temporarily unavailable",
}

// Error returns the generic message of the kind.
func (k Kind) Error() string {
	if int(k) < len(messages) {
		return messages[k]
	}
	return messages[Internal]
}

type classified struct {
	kind  Kind
	msg   string
	cause error
}

func (e *classified) Error() string {
	if e.cause == nil {
		return e.msg
	}
	return fmt.Sprintf("%s: %v", e.msg, e.cause)
}

func (e *classified) Unwrap() []error {
	if e.cause == nil {
		return []error{e.kind}
	}
	return []error{e.kind, e.cause}
}

// New returns an error of kind k. The message is shown to callers: it names
// the remedy and quotes nothing.
func New(k Kind, msg string) error { return &classified{kind: k, msg: msg} }

// Wrap is [New] with a cause, which goes to the log and never to a caller.
func Wrap(k Kind, msg string, cause error) error {
	return &classified{kind: k, msg: msg, cause: cause}
}

// Of returns the kind of the outermost classified error in err's tree, and
// Internal when there is none.
func Of(err error) Kind {
	var c *classified
	if errors.As(err, &c) {
		return c.kind
	}
	var k Kind
	if errors.As(err, &k) {
		return k
	}
	return Internal
}

// Message returns what a caller may read of err: the message of the outermost
// classified error, and the generic one of Internal for all others.
func Message(err error) string {
	var c *classified
	if errors.As(err, &c) {
		return c.msg
	}
	return Of(err).Error()
}
