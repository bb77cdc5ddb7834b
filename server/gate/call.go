package gate

import (
	"context"
	"net/http"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/gin-gonic/gin"
	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/quota"
)

// RequestIDHeader carries the id of a request on its response. The server sets
// it before anything else runs; it is the one place where the id is kept.
const RequestIDHeader = "X-Request-ID"

func requestID(c *gin.Context) string { return c.Writer.Header().Get(RequestIDHeader) }

// refusal is an error of the transport: a status that no [fault.Kind] stands
// for. Its message is safe for the caller.
type refusal struct {
	status  int
	message string
}

func (r *refusal) Error() string { return r.message }

// unrecorded reports whether nobody has left an entry of the request.
func (r *refusal) unrecorded() bool {
	switch r.status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType:
		return true
	}
	return false
}

// BadRequest returns a 400 that nothing has been recorded of.
func BadRequest(message string) error { return &refusal{http.StatusBadRequest, message} }

// Refusal returns the error of a request that a service has refused and
// recorded, or that reached no operation.
func Refusal(status int, message string) error { return &recorded{refusal{status, message}} }

// recorded is a refusal that has its entry.
type recorded struct{ refusal }

// Problem is what the caller is told of an error.
type Problem struct {
	Code      int    // the HTTP status
	Message   string // generic
	Details   string // which rule was broken and what to do; never what was sent
	RequestID string
	Timestamp string // RFC 3339 in UTC
}

// Scheme is how the callers of a version say who they are.
type Scheme uint8

// The schemes.
const (
	BearerKey Scheme = iota // v1: an API key in Authorization
	KeyOrUser               // v2: an API key in X-API-Key, an access or ServiceAccount token in Authorization, or an access token in a cookie
)

// Auth says whom an operation lets in.
type Auth uint8

// The ways in.
const (
	Required Auth = iota // a known principal
	Optional             // a known principal, or someone whom the operation itself recognises
	Public               // everybody; nobody is looked up
)

// Operation is what the gate has to know of an operation beside its contract.
type Operation struct {
	Action    authz.Action // empty when everybody may
	Auth      Auth
	Registers bool // it makes a tenant for a stranger, which has a rate of its own

	// For the review of a ServiceAccount's access: the path parameter that is the
	// name of a SealedCredential, if any; and whether the operation itself asks for
	// the review, since only its body says where. Until then it has no scope.
	Object  string
	Reviews bool

	// Signed says that the query is the credential: whatever is wrong with it is the
	// same refusal.
	Signed bool
	// Patience is how long the answer may take; default less than a second.
	Patience time.Duration
	// Recovers says that the operation is what a log that refuses to go on is brought
	// back by. No other is let in then.
	Recovers bool
}

// Definition of a [Version].
type Definition struct {
	Name       string               // "v1"
	Contract   string               // its OpenAPI 3.0 document
	Scheme     Scheme               // how callers say who they are
	Operations map[string]Operation // by operationId: all of the document's that are not tagged operations
	Envelope   func(Problem) any    // the body of an error
	Schema     int                  // the status of a body that is not of its schema
}

// Version is a version of the interface as the gate lets requests into it.
type Version struct {
	gate       *Gate
	name       string
	scheme     Scheme
	envelope   func(Problem) any
	schema     int
	operations map[string]*operation // by method and gin's route
	shed       string                // see encodeShed
}

type operation struct {
	Operation
	parameters []*openapi3.Parameter
	body       *openapi3.Schema // nil when the operation takes none
	shape      *shape           // of the body, when it has one
	required   bool             // the body
}

// Config of a [Gate]. Identity, Audit and Now are required.
type Config struct {
	Identity *identity.Service
	Guard    *audit.Guard
	Now      func() time.Time
	Rates    Rates
	Origin   string // scheme and host of the public URL, whose pages may send cookies; may be empty
	InFlight int    // requests that are carried out at a time; default by the number of cores

	// Lender lends the requests that replicas share; nil: there is one replica, which
	// counts in memory.
	Lender quota.Lender
}

// Gate is safe for concurrent use.
type Gate struct {
	config    Config
	tenants   *quota.Limiter
	addresses *quota.Limiter
	accounts  *quota.Limiter // what is refused to each ServiceAccount; apart, so that no flood of addresses takes its place
	origins   *http.CrossOriginProtection
	entrance  *entrance
	parsing   *semaphore.Weighted // bounds the large bodies that are parsed at a time: some cores stay for all else

	streams    context.Context // of answers that take long
	endStreams context.CancelFunc
}

// Call is a request that is on its way through the gate.
type Call struct {
	// Caller is who asks; of kind authz.Stranger in an operation that needs
	// nobody.
	Caller identity.Caller

	gate       *Gate
	version    *Version
	operation  *operation
	byHeader   bool // the caller is known by a header, which no page of another origin can make a browser send
	exceeded   bool // the request is over its rate
	inside     bool // the call has a place among those that are carried out
	permitted  bool // to a ServiceAccount, by its cluster
	unreviewed bool // the cluster did not say whether it is
	answer     http.Header
	body       []byte // well-formed, of the operation's schema, and overwritten after the call

	connection context.Context // of the request, which ends when the caller is gone
}

const callKey = "latticekeep/call"

// Rates are requests a minute.
type Rates struct {
	V1      int // of a tenant; default 1000
	V2      int // of a tenant; default 5000
	Address int // of strangers from one address; default 1000

	Registrations int // of those, registrations; default 30
}

// patience leaves room, within a second, to answer that there is no answer.
const patience = 900 * time.Millisecond
