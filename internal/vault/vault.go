// Package vault stores credentials. It seals, lists, unseals, rotates and deletes them, and refuses
// to unseal them after they expire.
//
// A credential is one signed record per tenant, id and version. Lists and searches by name find
// only the newest version. Each version has its own ML-KEM-768 key pair. Its seed is wrapped under
// the tenant's key, which only the KMS unwraps. Records are looked up by (tenant, id), so the
// credentials of another tenant do not exist for the caller. A lookup that finds nothing does the
// same work as one that finds a credential.
//
// Two more sets of rows change in the transaction of the record: the name index, which holds keyed
// hashes, and the history of versions, which holds no values. For a day the vault recognises a
// repeated seal by its idempotency key. The row that depends on the values is deleted together with
// the values.
//
// A credential can belong to a SealedCredential. Then only this object changes it, and the
// ServiceAccounts of the tenant's other namespaces do not see it. The object's row is the
// operator's memory: it says what was applied last, and which previous version, at most one, stays
// readable for a while after new values arrive.
//
// The audit log records every operation. A change and its entry are one transaction, and a read
// returns only after its entry is durable.
package vault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/settings"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault/details"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/idempotency"
	"github.com/latticekeep/latticekeep/internal/vault/kept"
	"github.com/latticekeep/latticekeep/internal/vault/lifetime"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/nameindex"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Vault is safe for concurrent use.
type Vault struct {
	store  store.Store
	guard  *guard.Guard
	keys   *keyring.Ring
	now    func() time.Time
	decoys decoys
	opener func(r *record.Record, wrapping, signing *keyring.Keys) (map[string]secret.Bytes, error)

	records     recordStore
	previous    previousVersions
	idempotency *idempotency.Keys

	// Rules are those of the history.
	Rules *kept.Keeper

	// Settings are those of tenants: where a credential may never expire.
	Settings *settings.Keeper

	// Lifetimes looks after what expires.
	Lifetimes *lifetime.Keeper

	DetailsReady format.Readers // asks about [format.Details]

	pageBudget, summaryBudget listing.Budget
}

// New returns a vault that keeps its rows in s.
func New(s store.Store, guard *guard.Guard, keys *keyring.Ring, now func() time.Time) *Vault {
	rows := mac.New(keys)
	owners := ownerRows{rows}
	records := recordStore{Rows: rows, names: nameindex.Index{Rows: rows}, history: history.Rows{Rows: rows}, kept: kept.Rows{Rows: rows}, details: details.Rows{Rows: rows}, owners: owners, past: past.New(keys, now)}
	return &Vault{
		store: s, guard: guard, keys: keys, now: now, opener: (*record.Record).Open,
		records:     records,
		previous:    previousVersions{store: s, guard: guard, owners: owners, now: now},
		idempotency: idempotency.New(rows, s, now),
		Rules:       kept.NewKeeper(s, guard, kept.Rows{Rows: rows}),
		Settings:    settings.NewKeeper(s, guard, rows),
		Lifetimes:   lifetime.NewKeeper(s, guard, rows, records, now),
		pageBudget:  listing.PageBudget(), summaryBudget: listing.SummaryBudget(),
	}
}

// readTimeout bounds a read. If the read cannot be recorded, it is refused within a second, even
// when the store or the KMS hangs.
const readTimeout = 900 * time.Millisecond

// Reasons in audit entries.
const (
	reasonMissing   = "no_such_credential" // the same for another tenant's, a deleted and an unknown credential
	reasonExpired   = "expired"
	reasonOwned     = "owned_by_object"
	reasonIntegrity = "integrity"
	reasonReplicas  = "earlier_replicas"
)

// ready checks that the log takes entries, that p may do a, and that the tenant's keys can be used.
// It does so before anything is looked up, and returns these keys.
func (v *Vault) ready(ctx context.Context, p authz.Principal, a authz.Action) (*keyring.Keys, error) {
	if err := v.guard.Admit(ctx, p, a); err != nil {
		return nil, err
	}
	return currentKeys(ctx, v.keys, p.Tenant)
}

// currentKeys returns the tenant's keys. Each operation calls it once and therefore asks the KMS at
// most once.
func currentKeys(ctx context.Context, ring *keyring.Ring, tenant authz.TenantID) (*keyring.Keys, error) {
	keys, err := ring.Current(ctx, tenant)
	if err != nil {
		return nil, fmt.Errorf("unwrapping the tenant's keys: %w", err)
	}
	return keys, nil
}

// recordAccess appends the entry of a read or of a refused change. It returns errDenied unless the
// entry's outcome is success.
func recordAccess(ctx context.Context, g *guard.Guard, e audit.Event) error {
	if err := g.Record(ctx, e); err != nil {
		return err
	}
	if e.Outcome != audit.Success {
		return errDenied
	}
	return nil
}

// refuseChanged records that an operation met rows that somebody else changed, and returns errDenied.
// It returns every other error as it is.
func refuseChanged(ctx context.Context, g *guard.Guard, e audit.Event, err error) error {
	if !state.IsRefused(err) {
		return err
	}
	e.Outcome, e.Attributes = audit.Failure, map[string]string{audit.AttributeReason: reasonIntegrity}
	return recordAccess(ctx, g, e)
}

// recordChanged records that an operation on an object's credential met rows that somebody else
// changed, and returns err. It records an object and action once an hour, because the operator
// retries until the rows are mended. It does nothing for any other err.
func recordChanged(ctx context.Context, g *guard.Guard, p authz.Principal, a authz.Action, err error) error {
	if !state.IsRefused(err) {
		return err
	}
	return cmp.Or(g.RecordAttemptOncePerHour(ctx, p, a, audit.Failure, reasonIntegrity), err)
}

// versionEvent returns the entry of a new version.
func versionEvent(r *record.Record, t audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{
		Type: t, Outcome: audit.Success, Principal: p,
		Resource: audit.Resource{Type: audit.CredentialResource, ID: r.ID},
		Attributes: map[string]string{
			audit.AttributeVersion:   strconv.FormatUint(r.Version, 10),
			audit.AttributeDigest:    r.Digest(),
			audit.AttributeExpiresAt: r.ExpiresAt.Format(time.RFC3339Nano),
			audit.AttributeTTLDays:   strconv.FormatUint(r.TTLDays, 10),
		},
	}
}

// maxAttempts bounds how often an operation starts again because another operation changed the
// credential between its lookup and its commit.
const maxAttempts = 8

// attempt is a change of a credential, which [retryConflicts] begins again when another one comes first.
type attempt struct{ *Vault }

// retryConflicts repeats attempt while another operation changes the same credential.
func retryConflicts(attempt func() (Credential, error)) (Credential, error) {
	for range maxAttempts {
		c, err := attempt()
		if !errors.Is(err, fault.Conflict) || errors.Is(err, ErrCondition) || errors.Is(err, ErrTaken) {
			return c, err
		}
	}
	return Credential{}, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), errMoved)
}

// Sweep deletes the idempotency keys that are a day old, ends the previous versions whose time is over,
// and erases what no rule of the history keeps any more and what expired more than [lifetime.Grace] ago.
// It returns their total number. The process calls it about once a minute. An error in one part does not
// stop the others.
func (v *Vault) Sweep(ctx context.Context) (int, error) {
	ended, err := v.previous.endDue(ctx)
	forgotten, err2 := v.idempotency.ForgetDue(ctx)
	erased, err3 := v.Rules.Sweep(ctx)
	expired, err4 := v.Lifetimes.Sweep(ctx)
	return ended + forgotten + erased + expired, errors.Join(err, err2, err3, err4)
}
