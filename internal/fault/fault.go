// Package fault defines the few root kinds of errors of the whole product, and for each a message
// that is safe to show to a caller.
//
// One table at the edge turns a [Kind] into an HTTP status or a webhook's answer. Everything else
// about an error is for the log. Messages name the remedy and never quote input.
package fault

import (
	"errors"
	"fmt"
)

// Kind is a root cause of an error, as the edge distinguishes it. A Kind is itself an error, so
// code checks for it with errors.Is(err, fault.NotFound).
type Kind uint8

// These are the kinds. The zero value is Internal: an unclassified error counts as internal.
const (
	Internal        Kind = iota // a defect or damaged data
	Invalid                     // the request as written cannot be carried out
	Unauthenticated             // no principal
	Forbidden                   // the principal is known but not allowed to do this
	NotFound                    // the named thing does not exist
	Conflict                    // the object changed meanwhile or exists already
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

// New returns an error of kind k. Callers see the message, so it names the remedy and quotes no
// input.
func New(k Kind, msg string) error { return &classified{kind: k, msg: msg} }

// Wrap is [New] with a cause. The cause goes to the log and never to a caller.
func Wrap(k Kind, msg string, cause error) error {
	return &classified{kind: k, msg: msg, cause: cause}
}

// Of returns the kind of the outermost classified error in err's tree, or Internal when there is
// none.
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

// Message returns the text of err that a caller may see: the message of the outermost classified
// error, otherwise the generic message of err's kind.
func Message(err error) string {
	var c *classified
	if errors.As(err, &c) {
		return c.msg
	}
	return Of(err).Error()
}
