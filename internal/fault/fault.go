// Package fault defines the few root kinds of errors of the whole product, and for each a message
// that is safe to show to a caller.
//
// One table at the edge turns a [Kind] into an HTTP status or a webhook's answer. Everything else
// about an error is for the log. Messages name the remedy and never quote input.
package fault

import (
	"errors"
	"strings"
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

// Reason says what an error of kind Unavailable lacks. There are few, because each is the value of a
// label of a metric. A Reason is itself an error, which errors.Is finds in what [Outage] returned.
type Reason string

// These are the reasons.
const (
	ReasonStore    Reason = "store"    // the database, or its disk, does not answer or takes no commits
	ReasonSpace    Reason = "space"    // the disk of the database is full
	ReasonKMS      Reason = "kms"      // the key-management service gives no keys
	ReasonLog      Reason = "log"      // the audit log is halted
	ReasonRows     Reason = "rows"     // stored rows are not those that the audit log commits to
	ReasonCluster  Reason = "cluster"  // the API server of the cluster does not answer
	ReasonObjects  Reason = "objects"  // the object storage does not answer
	ReasonOverload Reason = "overload" // too many requests are waiting
	ReasonTimeout  Reason = "timeout"  // the request's time was over before its answer
	ReasonEnding   Reason = "ending"   // the server is shutting down
	ReasonOther    Reason = "other"    // none of these, such as two changes at the same time
)

// Reasons lists all reasons.
func Reasons() []Reason {
	return []Reason{ReasonStore, ReasonSpace, ReasonKMS, ReasonLog, ReasonRows, ReasonCluster, ReasonObjects, ReasonOverload, ReasonTimeout,
		ReasonEnding, ReasonOther}
}

// Error returns the reason as a word.
func (r Reason) Error() string { return string(r) }

// ReasonOf returns the outermost reason in err's tree, or ReasonOther when there is none.
func ReasonOf(err error) Reason {
	if r := ReasonOther; errors.As(err, &r) {
		return r
	}
	return ReasonOther
}

type classified struct {
	kind   Kind
	msg    string
	cause  error
	reason Reason // empty: none
}

// Error returns the message and the cause. It does not say the same twice when the cause begins with
// the message.
func (e *classified) Error() string {
	if e.cause == nil {
		return e.msg
	}
	cause := e.cause.Error()
	if strings.HasPrefix(cause, e.msg) {
		return cause
	}
	return e.msg + ": " + cause
}

func (e *classified) Unwrap() []error {
	tree := []error{e.kind}
	if e.reason != "" {
		tree = append(tree, e.reason)
	}
	if e.cause != nil {
		tree = append(tree, e.cause)
	}
	return tree
}

// New returns an error of kind k. Callers see the message, so it names the remedy and quotes no
// input.
func New(k Kind, msg string) error { return &classified{kind: k, msg: msg} }

// Wrap is [New] with a cause. The cause goes to the log and never to a caller.
func Wrap(k Kind, msg string, cause error) error {
	return &classified{kind: k, msg: msg, cause: cause}
}

// Outage returns an error of kind Unavailable. cause may be nil.
func Outage(r Reason, msg string, cause error) error {
	return &classified{kind: Unavailable, msg: msg, cause: cause, reason: r}
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
