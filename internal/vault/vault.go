// Package vault stores credentials: it seals, lists, unseals, rotates and deletes them, and lets
// them expire.
//
// A credential is one signed record per tenant, id and version. Only the newest version is listed
// and found by its name. Each version has its own ML-KEM-768 key pair; its seed is wrapped under
// the tenant's key, which only the KMS unwraps. Records are looked up by (tenant, id), so the
// credentials of another tenant do not exist; and a lookup that finds nothing does the same work
// as one that does.
//
// Two more sets of rows change in the transaction of the record: the name index, which holds keyed
// hashes, and the history of versions, which holds no values. A repeated seal is recognised by its
// idempotency key for a day; the rows for this that depend on the values go with the values.
//
// A credential can belong to a SealedCredential. Then only this object changes it, and the
// ServiceAccounts of other namespaces of the tenant do not see it. The object's row is the
// operator's memory: what was applied last, and the one previous version that may stay readable
// for a while after new values came.
//
// Every operation is recorded in the audit log in the transaction of its change, and reads return
// only after their entry is durable.
package vault

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Vault is safe for concurrent use.
type Vault struct {
	store  store.Store
	guard  *audit.Guard
	keys   *keyring.Ring
	now    func() time.Time
	decoys sync.Map // tenant → *record
	opener func(r *record, wrapping, signing *keyring.Keys) (map[string]secret.Bytes, error)

	records     recordStore
	previous    previousVersions
	idempotency idempotency

	pageBudget, summaryBudget readBudget
}

// New returns the vault in s.
func New(s store.Store, guard *audit.Guard, keys *keyring.Ring, now func() time.Time) *Vault {
	rows := macRows{keys}
	owners := ownerRows{rows}
	return &Vault{
		store: s, guard: guard, keys: keys, now: now, opener: (*record).open,
		records:     recordStore{macRows: rows, names: nameIndex{rows}, owners: owners},
		previous:    previousVersions{store: s, guard: guard, owners: owners, now: now},
		idempotency: idempotency{macRows: rows, store: s, now: now},
		pageBudget:  pageBudget(), summaryBudget: summaryBudget(),
	}
}

// readTimeout bounds a read, so that a read which cannot be recorded is refused within a second,
// whatever hangs.
const readTimeout = 900 * time.Millisecond

// errDenied is the one answer for a credential that does not exist for the caller, whatever the
// reason.
var errDenied = fault.New(fault.Forbidden, "access denied")

// Reasons in audit entries.
const (
	reasonMissing   = "no_such_credential" // another tenant's, deleted, and never existing alike
	reasonExpired   = "expired"
	reasonOwned     = "owned_by_object"
	reasonIntegrity = "integrity"
)

// ready checks, before anything is looked up, that the log takes entries, that p may do a, and
// that the tenant's keys can be used. It returns these keys.
func (v *Vault) ready(ctx context.Context, p authz.Principal, a authz.Action) (*keyring.Keys, error) {
	if err := v.guard.Admit(ctx, p, a); err != nil {
		return nil, err
	}
	return v.currentKeys(ctx, p.Tenant)
}

// currentKeys returns the tenant's keys. Each operation calls it once, and so asks the KMS at most
// once.
func (v *Vault) currentKeys(ctx context.Context, tenant authz.TenantID) (*keyring.Keys, error) {
	keys, err := v.keys.Current(ctx, tenant)
	if err != nil {
		return nil, fmt.Errorf("unwrapping the tenant's keys: %w", err)
	}
	return keys, nil
}

// record appends the entry of a read, or of a change that is refused, and returns errDenied unless
// the entry is one of success.
func (v *Vault) record(ctx context.Context, e audit.Event) error {
	if err := v.guard.Record(ctx, e); err != nil {
		return err
	}
	if e.Outcome != audit.Success {
		return errDenied
	}
	return nil
}

// event returns the entry of a new version.
func (r *record) event(t audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{
		Type: t, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.CredentialResource, ID: r.id},
		Attributes: map[string]string{
			audit.AttributeVersion:   strconv.FormatUint(r.version, 10),
			audit.AttributeDigest:    r.digest(),
			audit.AttributeExpiresAt: r.expiresAt.Format(time.RFC3339Nano),
			audit.AttributeTTLDays:   strconv.FormatUint(r.ttlDays, 10),
		},
	}
}

// maxAttempts bounds how often an operation starts again because another one changed the
// credential between its lookup and its commit.
const maxAttempts = 8

// retryConflicts repeats attempt while another operation changes the credential under it.
func retryConflicts(attempt func() (Credential, error)) (Credential, error) {
	for range maxAttempts {
		c, err := attempt()
		if !errors.Is(err, fault.Conflict) {
			return c, err
		}
	}
	return Credential{}, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), errMoved)
}

// Sweep forgets the idempotency keys that are a day old, ends the previous versions whose time is
// over, and returns how many of both there were. The process calls it every minute or so. An error
// in one does not stop the other.
func (v *Vault) Sweep(ctx context.Context) (int, error) {
	ended, err := v.previous.endDue(ctx)
	forgotten, err2 := v.idempotency.forgetDue(ctx)
	return ended + forgotten, errors.Join(err, err2)
}
