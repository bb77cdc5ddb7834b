package identity

import (
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/access"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
)

// Caller is a principal with the session and the rate limits that apply to its request.
type Caller struct {
	authz.Principal
	Session string // empty unless the caller is a user
	Limits  Limits // the rate limits of its tenant

	// ServiceAccount is the caller's identity in its cluster. It is nil for every other caller.
	ServiceAccount *ServiceAccount
}

var errUnauthenticated = fault.New(fault.Unauthenticated, "a valid API key is required")

// Tenant is one customer of the deployment, or the deployment itself.
type Tenant = tenant.Tenant

// Limits are the requests per minute that a tenant may make.
type Limits = tenant.Limits

// Policy, PolicyRequest, Binding and Question are those of package access.
type (
	Policy        = access.Policy
	PolicyRequest = access.PolicyRequest
	Binding       = access.Binding
	Group         = access.Group
	Question      = access.Question
	AccessChange  = access.Change
)

// ErrRecreated is the answer to a namespace that is not the one of its name that was meant. See
// [tenant.ErrRecreated].
var ErrRecreated = tenant.ErrRecreated

// member is a user in the list of its tenant.
type member struct {
	account
	row userRow
}

func (m member) owns() bool { return m.row.Role == authz.Owner }

// memberEvent returns the event of a change to a member. It names the member only when the id is
// well formed.
func memberEvent(t audit.EventType, p authz.Principal, id string) audit.Event {
	e := audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.UserResource}}
	if authz.ValidID(userIDPrefix, id) {
		e.Resource.ID = id
	}
	return e
}

// User is a person in a tenant. An e-mail address belongs to at most one user of the whole
// deployment.
type User struct {
	ID            string
	Tenant        authz.TenantID
	Email         string // canonical
	Role          authz.Role
	EmailVerified bool
	CreatedAt     time.Time
}

const userIDPrefix = "usr"

var (
	errEmailTaken   = fault.New(fault.Conflict, "this e-mail address has an account already: sign in, or reset its password")
	errRegistration = fault.New(fault.Forbidden, "registration is closed: ask the operator of this service for an account")
	errTrialEnded   = fault.New(fault.Forbidden, "the trial has ended and the tenant is read-only: ask the operator of this service to activate it")
	errNoSession    = fault.New(fault.Unauthenticated, "the session is over: sign in again")
	errUnverified   = fault.New(fault.Forbidden, "this takes a verified e-mail address: verify yours first")
)

// ErrTicket is the one answer to a mailed token that is not valid. See [ticket.ErrInvalid].
var ErrTicket = ticket.ErrInvalid

// Reasons in audit entries.
const (
	reasonClosed      = "registration_closed"
	reasonTaken       = "email_taken"
	reasonTrialEnded  = string(authz.TrialEnded)
	reasonCredentials = "wrong_credentials" // same for an unknown account and a wrong password
	reasonSlowed      = audit.ReasonSlowedDown
	reasonPassword    = "wrong_password"
	reasonUnknown     = "no_such_account" // or one that was mailed a moment ago
	reasonNoSession   = "no_such_session"
	reasonReused      = "reused"
	reasonNoMember    = "no_such_member"
	reasonUnverified  = "email_not_verified"
	reasonRole        = "role_beyond_own"
	reasonLastOwner   = "last_owner"
	reasonSystem      = "system_tenant"
)

// Each row starts with the keyring's MAC. A user is stored under its tenant. The account of an
// e-mail address is stored under the hash of the address. A password hash is stored under a new key
// for each password, so the previous one is wiped.
type userRow struct {
	Email     string     `json:"email"`
	Role      authz.Role `json:"role"`
	Verified  bool       `json:"verified"`
	Password  string     `json:"password"` // id of the row with its hash
	CreatedAt time.Time  `json:"created_at"`
}

// account identifies a user. API keys and the deployment have no account.
type account struct {
	Tenant authz.TenantID `json:"tenant"`
	User   string         `json:"user"`
}

func usersPrefix(tenant authz.TenantID) []byte { return []byte("user/row/" + string(tenant) + "/") }

func userKey(a account) []byte { return append(usersPrefix(a.Tenant), a.User...) }

func emailKey(hash string) []byte { return []byte("user/email/" + hash) }

func passwordKey(user, password string) []byte {
	return []byte("user/password/" + user + "/" + password)
}

func (r userRow) user(a account) User {
	return User{ID: a.User, Tenant: a.Tenant, Email: r.Email, Role: r.Role, EmailVerified: r.Verified, CreatedAt: r.CreatedAt}
}

const passwordIDPrefix = "pwd"

// principal returns the user as the principal of a request that began without one.
func (a account) principal(from authz.Principal) authz.Principal {
	return authz.Principal{Tenant: a.Tenant, Kind: authz.User, ID: a.User, RequestID: from.RequestID, SourceIP: from.SourceIP}
}

// accountOf returns the account of a principal that is a user.
func accountOf(p authz.Principal) account { return account{p.Tenant, p.ID} }

// userEvent returns the event of an action of a user on its own account.
func userEvent(t audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.UserResource, ID: p.ID}}
}
