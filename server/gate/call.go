package gate

import (
	"context"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/gin-gonic/gin"
	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fair"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/quota"
)

// RequestIDHeader is the response header with the request ID. The server sets it before anything
// else runs. The ID is kept nowhere else.
const RequestIDHeader = "X-Request-ID"

func requestID(c *gin.Context) string { return c.Writer.Header().Get(RequestIDHeader) }

// refusal is a transport error with a status that no [fault.Kind] has. Its message is safe to show
// to the caller.
type refusal struct {
	status  int
	message string
}

func (r *refusal) Error() string { return r.message }

// unrecorded reports whether the refused request has no audit entry yet.
func (r *refusal) unrecorded() bool {
	switch r.status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType:
		return true
	}
	return false
}

// BadRequest returns a 400 for a request that has no audit entry yet.
func BadRequest(message string) error { return &refusal{http.StatusBadRequest, message} }

// Refusal returns the error of a request that reached no operation, or that a service refused and
// recorded.
func Refusal(status int, message string) error { return &recorded{refusal{status, message}} }

// recorded is a refusal that already has its audit entry.
type recorded struct{ refusal }

// Problem is what the caller learns about an error.
type Problem struct {
	Code      int    // the HTTP status
	Message   string // generic
	Details   string // the field and the rule, and what to do; never a value that was sent
	RequestID string
	Timestamp string // RFC 3339 in UTC
}

// Scheme is how the callers of a version authenticate.
type Scheme uint8

// The schemes.
const (
	BearerKey Scheme = iota // v1: API key in Authorization
	KeyOrUser               // v2: API key in X-API-Key, access or ServiceAccount token in Authorization, or access token in a cookie
)

// challenges are the values of WWW-Authenticate in a 401 of each scheme (RFC 9110 §11.6.1). They say
// how to authenticate, and not what is wrong with a credential: the answer to one that is nearly
// right is the same as to none. ApiKey is a scheme of our own.
var challenges = map[Scheme][]string{
	BearerKey: {bearerChallenge},
	KeyOrUser: {bearerChallenge, `ApiKey realm="latticekeep", header="X-API-Key"`},
}

const bearerChallenge = `Bearer realm="latticekeep"`

// Auth is which callers an operation admits.
type Auth uint8

// The kinds of admission.
const (
	Required Auth = iota // a known principal
	Optional             // a known principal, or a caller that the operation itself recognises
	Public               // everyone, without a lookup
)

// Operation is what the gate must know about an operation besides its contract.
type Operation struct {
	Action    authz.Action // empty if everyone may call it
	Auth      Auth
	Registers bool // creates a tenant for a stranger, at a rate of its own

	// Object is the path parameter that names a SealedCredential, if any, for the review of a
	// ServiceAccount's access. Reviews means that the operation itself starts the review, because
	// only its body names the namespace. The ServiceAccount has no scope before the review.
	Object  string
	Reviews bool

	// Signed means that the query is the credential. Anything wrong with it gets the same refusal.
	Signed bool
	// Patience is the time limit of the answer; default that of the gate.
	Patience time.Duration
	// Recovers marks the operations that a halted log admits: those that bring it back, and metrics,
	// which show that it is halted.
	Recovers bool
}

// Definition describes a [Version].
type Definition struct {
	Name       string               // "v1"
	Contract   Contract             // its OpenAPI 3.0 document
	Scheme     Scheme               // how callers authenticate
	Operations map[string]Operation // by operationId: all in the document, except operational ones that need no gate
	Envelope   func(Problem) any    // the body of an error
	Schema     int                  // status for a body that does not match its schema
}

// Version is one version of the interface, with the checks of its operations.
type Version struct {
	gate       *Gate
	name       string
	scheme     Scheme
	envelope   func(Problem) any
	schema     int
	operations map[string]*operation // keyed by method and gin route
	shed       string                // see encodeShed
}

type operation struct {
	Operation
	parameters []*openapi3.Parameter
	body       *openapi3.Schema // nil if the operation takes no body
	shape      *shape           // fast check for the body; nil if the schema is too complex
	types      []string         // media types of the body; nil for none but application/json
	required   bool             // the body is required
	vault      bool             // every 403 is one and the same, in body and headers
}

// Config configures a [Gate]. Identity, Guard and Now are required.
type Config struct {
	Identity *identity.Service
	Guard    *guard.Guard
	Now      func() time.Time
	Limits   Limits
	Origin   string // scheme and host of the public URL, whose pages may send cookies; optional
	InFlight int    // requests carried out at the same time; default depends on the number of cores

	// Lender shares request limits between replicas. If it is nil, there is one replica, which
	// counts in memory.
	Lender quota.Lender
}

// Gate checks and answers the requests of all versions. It is safe for concurrent use.
type Gate struct {
	config    Config
	tenants   *quota.Limiter
	addresses *quota.Limiter
	accounts  *quota.Limiter // refusals by ServiceAccount; separate, so that a flood of addresses cannot evict them
	origins   *http.CrossOriginProtection
	entrance  *entrance
	bodies    *fair.Pool[string]  // bytes of large bodies, by [Call.source]
	parsing   *semaphore.Weighted // bounds concurrent parsing of large bodies, to keep cores free

	overAddress, overTenant atomic.Uint64 // requests beyond the rate of an address or of a tenant

	streams    context.Context // context of streamed answers
	endStreams context.CancelFunc
}

// Call is a request on its way through the gate.
type Call struct {
	// Caller is the authenticated caller. Its kind is authz.Stranger in an operation that needs no
	// caller.
	Caller identity.Caller

	gate       *Gate
	version    *Version
	operation  *operation
	byHeader   bool // authenticated by a header, which a browser cannot send for another origin's page
	exceeded   bool // over its rate
	inside     bool // holds a place in the entrance
	permitted  bool // the cluster permits the ServiceAccount's call
	unreviewed bool // the cluster gave no answer
	answer     http.Header
	waited     time.Duration // see [WaitedFor]
	body       []byte        // matches the schema once checked; overwritten after the call

	memory *fair.Loan[string] // loan for a large body

	connection context.Context // context of the request; ends when the caller disconnects
}

const callKey = "latticekeep/call"

// PrincipalOf returns the known caller of a request, if there is one.
func PrincipalOf(c *gin.Context) (p authz.Principal, known bool) {
	call, admitted := c.Value(callKey).(*Call)
	if !admitted || call.Caller.Kind == authz.Stranger {
		return authz.Principal{}, false
	}
	return call.Caller.Principal, true
}

// Limits are rates in requests per minute, and a time.
type Limits struct {
	V1      int // per tenant; default 1000
	V2      int // per tenant; default 5000
	Address int // per address, for strangers; default 1000

	Registrations int // per address, for registrations; default 30

	// Patience is the time limit of an answer. The default, 900 ms, leaves time to report a timeout
	// within a second.
	Patience time.Duration
}
