// Package identity knows the tenants, their users and their API keys, and turns
// what a caller presents into a [Caller].
//
// # Model
//
// A tenant is made by an operator, by a registration (then it is on trial until
// an operator activates it), or for a Kubernetes namespace. It has users, who
// sign in with a password and hold sessions, and API keys, which programs hold.
// The deployment itself is the tenant [authz.SystemTenant]: it has API keys
// only, and no other tenant's key can carry system:admin.
//
// Pods of a cluster present the token of their ServiceAccount. Who that is and
// what it may do is the cluster's to say ([Cluster]); it is never stored.
//
// # Invariants
//
//   - Nothing that lets someone in is stored: of API keys and tokens only a keyed
//     hash is, by which they are looked up, so that no comparison depends on where
//     two of them differ; of passwords only their argon2id hash.
//   - Every row that decides who may see what carries the keyring's MAC.
//   - Every request reads the key or session and the tenant anew, so that
//     revoking, another role and the end of a trial count at once.
//   - Nobody gives another what it has not itself, except the deployment.
//   - An API key and an invitation name the user who answers for them, and are
//     revoked when that user is removed or may no longer give them.
//   - Whoever resets the password of an account that was never verified proves to
//     own its address, and shares the account with nobody: its sessions end, and
//     until then it could make no API key and no invitation.
//
// The package limits no rates and speaks no HTTP. Mail leaves by the outbox.
package identity

import (
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Service is safe for concurrent use. [Open] makes it. Each part owns the rows that it writes.
type Service struct {
	*records
	*tenants
	*throttle
	*tickets
	*sessions
	*grants
	*apiKeys
	*users
	*signIns
	*members
	*serviceAccounts
	outbox *mail.Outbox
}

func newParts(s store.Store, guard *audit.Guard, keys *keyring.Ring, now func() time.Time) *Service {
	r := &records{store: s, guard: guard, keys: keys, now: now}
	outbox := mail.NewOutbox(s, keys, now)
	hashes := new(passwords)
	tenants := &tenants{records: r}
	throttle := &throttle{r}
	tickets := &tickets{r}
	sessions := &sessions{r, tenants}
	grants := &grants{r, tickets}
	users := &users{
		records: r, tenants: tenants, sessions: sessions, tickets: tickets, grants: grants,
		outbox: outbox, passwords: hashes,
	}
	return &Service{
		records: r, tenants: tenants, throttle: throttle, tickets: tickets, sessions: sessions, grants: grants, users: users,
		apiKeys:         &apiKeys{records: r, tenants: tenants, grants: grants},
		signIns:         &signIns{r, users, sessions, tickets, throttle, outbox, hashes},
		members:         &members{r, tenants, users, grants, tickets, outbox},
		serviceAccounts: &serviceAccounts{records: r, tenants: tenants, sessions: sessions},
		outbox:          outbox,
	}
}

// Outbox holds the mails that the service writes; whoever runs the service
// sends them.
func (s *Service) Outbox() *mail.Outbox { return s.outbox }
