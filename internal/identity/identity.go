// Package identity keeps the tenants, their users and their API keys, and turns what a caller
// presents into a [Caller].
//
// # Model
//
// An operator makes a tenant, a registration makes one (it is on trial until an operator activates
// it), or a Kubernetes namespace gets one. A tenant has users, who sign in with a password and hold
// sessions, and API keys, which programs hold. The deployment itself is the tenant
// [authz.SystemTenant]. It has API keys only, and no other tenant's key can carry a scope of [authz.SystemScopes].
//
// Pods of a cluster present the token of their ServiceAccount. The cluster says who that is and
// what it may do ([Cluster]); of this only the name is stored, for readers of the log.
//
// # Invariants
//
//   - The store holds nothing that lets someone in. API keys and tokens are stored and looked up as
//     keyed hashes, so no comparison takes longer the more bytes agree. Passwords are stored as
//     argon2id hashes.
//   - Every row that decides who may see what carries the keyring's MAC.
//   - Every request reads the key or session and the tenant anew, so a revocation, a change of role
//     and the end of a trial take effect at once.
//   - A principal grants only what it holds itself, and on no path that its policies do not allow
//     ([access]). The deployment is the exception.
//   - An API key and an invitation name the user who answers for them. They are revoked when that
//     user is removed or may no longer grant them.
//   - Resetting the password of an account that was never verified proves ownership of its address,
//     and shares the account with nobody: its sessions end, and before the reset it could make no
//     API key and no invitation.
//
// The package limits no rates and speaks no HTTP. Mail leaves through the outbox.
package identity

import (
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/identity/access"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/identity/password"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/identity/tenant"
	"github.com/latticekeep/latticekeep/internal/identity/throttle"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/identity/token"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Service is safe for concurrent use. [Open] makes it. Each part owns the rows that it writes.
type Service struct {
	*deps
	*tenant.Service
	*sessions
	*grants
	*apiKeys
	*users
	*signIns
	*members
	serviceAccounts
	Access  *access.Service // policies of paths, and who has which
	tenants *tenant.Store
	outbox  *mail.Outbox
}

func newParts(s store.Store, guard *guard.Guard, keys *keyring.Ring, now func() time.Time) *Service {
	rows := records.New(s, guard, keys)
	policies := access.NewStore(rows)
	d := &deps{store: s, guard: guard, keys: keys, rows: rows, now: now, policies: policies, past: past.New(keys, now)}
	outbox := mail.NewOutbox(s, keys, now)
	hashes := new(password.Hasher)
	tickets := ticket.NewStore(rows, now)
	tenants := tenant.NewStore(s, guard, keys, rows, now)
	administration := tenant.NewService(tenants)
	sessions := &sessions{d, tenants, token.NewSigner(keys.TokenKey(), keys.ChainID(), now)}
	grants := &grants{d, tickets, apikey.NewStore(rows, now)}
	users := &users{
		deps: d, tenants: tenants, sessions: sessions, tickets: tickets, grants: grants,
		outbox: outbox, passwords: hashes,
	}
	members := &members{d, tenants, users, grants, tickets, outbox}
	people := access.People{Grantor: grants.currentRights, Subject: grants.subject, All: members.people, Withdraw: grants.withdraw}
	return &Service{
		deps: d, Service: administration, Access: access.NewService(policies, s, guard, rows, people, d.past, now), tenants: tenants, sessions: sessions, grants: grants, users: users,
		apiKeys:         &apiKeys{deps: d, tenants: tenants, grants: grants, members: members, outbox: outbox},
		signIns:         &signIns{d, users, sessions, tickets, throttle.New(s, rows), outbox, hashes},
		members:         members,
		serviceAccounts: serviceAccounts{deps: d, tenants: tenants, namespaces: administration, sessions: sessions, noted: new(sync.Map)},
		outbox:          outbox,
	}
}

// Outbox returns the outbox that holds the mails of the service. The program that runs the service
// also runs the outbox, which sends them.
func (s *Service) Outbox() *mail.Outbox { return s.outbox }
