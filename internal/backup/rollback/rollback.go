// Package rollback makes a restored store of an earlier time one that may be served.
//
// A rollback gives back what the operator asks for: the values, keys and members of that time. It must
// not give back what somebody took away since. So the package compares the store with a later one of
// the same deployment, and removes again what the later store lacks: deleted credentials, revoked API
// keys and invitations, removed members, ended sessions, erased notes. Roles that were lowered are
// lowered, retired sealing keys are retired, namespaces are part of the tenant that they moved to, and
// a password that was replaced is worthless: neither the earlier one nor the later one signs in, since
// the operator may go back because of whoever set the later one.
//
// The two stores are compared, and not the entries between them, since rows are complete: a member who
// is removed takes API keys along that have no entry of their own, and a new password ends sessions.
// The state that the signed log commits to says of both stores that their rows are the deployment's.
// [Effects] says for each type of entry which of its consequences stay.
//
// Without a later store, or with one that ends early, nobody knows what was taken away. Then all
// sessions end, and API keys wait for an owner's approval; those of the deployment itself are revoked.
//
// Every change is made by the service that makes it in a running server, with its own entry, in a new
// epoch of the log that begins with an entry ROLLBACK_ACCEPTED. A store in which [Apply] failed must be
// thrown away.
package rollback

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/webhooks"
)

// Result is what a rollback did.
type Result struct {
	audit.Rollback
	Kept    []Removal               // what was taken away again, or with Options.Revive was left
	Unkept  []Removal               // what could not be taken away again
	Lost    map[audit.EventType]int // successful entries of the later store whose effect is gone, by type
	Unknown bool                    // all sessions have ended, and API keys are suspended

	Ownerless []authz.TenantID // tenants whose last owner was removed or has a lower role
}

// Apply makes the changes in a database file that nobody serves and that holds what was verified: report
// is the result. Errors: [ErrLater]; fault.Internal for a store whose rows are not those of its log; those of the KMS.
func Apply(ctx context.Context, database string, report verify.Report, o Options) (result Result, err error) {
	r, done, err := open(ctx, database, o)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, done()) }()
	if err := r.openLater(ctx, report); err != nil {
		return Result{}, err
	}
	r.vault = vault.New(r.store, r.guard, r.keys, r.Now)
	r.webhooks = webhooks.New(r.store, r.guard, r.keys, r.Now)
	r.sealing = sealingkey.New(r.store, r.guard, reader.New(r.log, r.guard), r.keys, sealingkey.Options{InUse: r.vault.SealingKeyUse, Now: r.Now})
	if result.Rollback, result.Lost, err = r.acceptLoss(ctx, report); err != nil {
		return Result{}, err
	}
	result.Unknown = r.isUnknown() && !o.Revive
	owned, err := r.owned(ctx)
	if err != nil {
		return Result{}, err
	}
	if result.Kept, result.Unkept, err = r.removeAgain(ctx); err != nil {
		return Result{}, err
	}
	still, err := r.owned(ctx)
	for _, tenant := range slices.Sorted(maps.Keys(owned)) {
		if !still[tenant] {
			result.Ownerless = append(result.Ownerless, tenant)
		}
	}
	return result, err
}

// Promote begins a new epoch in a database file that followed another one and is verified: report is the
// result. Nothing is taken away, and of the options only KMS, Identity and Now count. Errors: those of
// [Apply].
func Promote(ctx context.Context, database string, report verify.Report, o Options) (rolled audit.Rollback, err error) {
	r, done, err := open(ctx, database, o)
	if err != nil {
		return audit.Rollback{}, err
	}
	defer func() { err = errors.Join(err, done()) }()
	return r.log.AcceptRestore(ctx, lostAfter(report), "restore --promote", nil)
}

// lostAfter returns the loss of whatever came after the end of a store.
func lostAfter(report verify.Report) audit.RollbackError {
	return audit.RollbackError{LostFrom: report.Sequence + 1, LostTo: report.Sequence + 1, Epoch: report.Epoch}
}

// open opens a database file with its keys, and compares its rows with its log. done closes it.
func open(ctx context.Context, database string, o Options) (r *rollback, done func() error, err error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	bound := state.New(nil)
	r = &rollback{Options: o, log: writer.New(o.Now, bound)}
	r.guard = guard.New(r.log)
	db, err := bolt.Open(database, bolt.Options{Hook: format.Hook(r.log.Commit)})
	if err != nil {
		return nil, nil, err
	}
	r.store = bound.Guard(db)
	r.identity, r.keys, err = identity.Open(ctx, r.store, r.log, r.guard, o.KMS[0], keyring.Config{Previous: o.KMS[1:], Now: o.Now})
	switch {
	case err != nil:
		err = fmt.Errorf("opening the deployment's keys: %w", err)
	case o.Identity != "" && o.Identity != r.keys.Identity().ID():
		err = errors.New("the backup is not signed by the deployment whose data is in it: somebody else made it")
	default:
		err = checkRows(ctx, bound, db)
	}
	if err != nil {
		return nil, nil, errors.Join(err, db.Close())
	}
	return r, db.Close, nil
}

// checkRows compares all deciding rows of a store with the state that its log commits to.
func checkRows(ctx context.Context, s *state.State, db store.Database) error {
	if !s.Complete() {
		return nil // a store of an earlier release, whose rows the server binds at its next start
	}
	found, err := s.Scan(ctx, db, 1)
	if err == nil && len(found.Refused) > 0 {
		err = fault.Wrap(fault.Internal, "internal error", found.Refused[0])
	}
	if err != nil {
		return fmt.Errorf("comparing the rows with the log: %w", err)
	}
	return nil
}

// ErrLater is the error of [Apply] for a later store that says nothing about this one: it is of another
// deployment, has not the last entry of this one, or has rows that are not those of its log. Nothing was
// changed then.
var ErrLater = errors.New("what happened since is not to be found in the later store")

// openLater checks that the later store is of the same deployment and goes on where this one ends.
func (r *rollback) openLater(ctx context.Context, report verify.Report) error {
	if r.Later == nil {
		return nil
	}
	s := state.New(nil)
	err := s.Use(ctx, r.Later, r.keys.APIKeyHash())
	if err == nil {
		err = checkRows(ctx, s, r.Later)
	}
	if err == nil {
		err = r.Later.View(ctx, func(rd store.Reader) error {
			hash, err := entries.ReadHash(rd, report.Sequence)
			if errors.Is(err, audit.ErrNoEntry) || err == nil && fmt.Sprintf("%x", hash) != report.Hash {
				return fmt.Errorf("it does not have entry %d of this one", report.Sequence)
			}
			return err
		})
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("%w: %w", ErrLater, err)
	}
	r.later = s.Guard(r.Later)
	return err
}

// Attributes of the entry that begins the epoch, besides those of each accepted rollback.
const (
	attributeRestoredTo = "restored_to" // RFC 3339: the time that was asked for
	attributeRemovals   = "removals"    // kept or revived
	attributeLaterLog   = "later_log"   // whole, partial or missing
)

// acceptLoss begins a new epoch above everything that the deployment is known to have had, and counts
// the lost entries.
func (r *rollback) acceptLoss(ctx context.Context, report verify.Report) (_ audit.Rollback, counts map[audit.EventType]int, err error) {
	known, removals := "whole", "kept"
	switch {
	case r.later == nil:
		known = "missing"
	case r.Unknown != "":
		known = "partial"
	}
	if r.Revive {
		removals = "revived"
	}
	lost := lostAfter(report)
	if r.later != nil && r.LaterReport.Sequence > report.Sequence {
		lost.LostTo, lost.Epoch = r.LaterReport.Sequence, r.LaterReport.Epoch
		if counts, err = r.countLost(ctx, report.Sequence, &lost); err != nil {
			return audit.Rollback{}, nil, err
		}
	}
	rolled, err := r.log.AcceptRestore(ctx, lost, "restore --to-time", map[string]string{
		attributeRestoredTo: r.To.UTC().Format(time.RFC3339Nano), attributeRemovals: removals, attributeLaterLog: known,
	})
	return rolled, counts, err
}

// countLost counts the later entries whose effect is gone, and notes the hash of the last one.
func (r *rollback) countLost(ctx context.Context, after uint64, lost *audit.RollbackError) (map[audit.EventType]int, error) {
	counts := make(map[audit.EventType]int)
	rng := audit.EntryRange
	rng.From = audit.EntryKey(after + 1)
	err := entries.ScanAll(ctx, r.Later, rng, func(row entries.Row) error {
		e, err := audit.DecodeStoredEntry(row.Row, row.Batch)
		if err != nil {
			return audit.ErrDamagedLog
		}
		if lost.Hash = e.Hash; e.Entry.Outcome == audit.Success && Effects[e.Entry.EventType] == Lost {
			counts[e.Entry.EventType]++
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the later log: %w", err)
	}
	return counts, nil
}

// removeAgain takes away what the later store lacks. Without a whole later store it also takes away
// what nobody knows of.
func (r *rollback) removeAgain(ctx context.Context) (kept, unkept []Removal, err error) {
	var all []Removal
	for _, plan := range []func(context.Context) ([]Removal, error){
		// A key that is gone limits those that it made as long as it is bound.
		r.keyBindings, r.apiKeys, r.invitations, r.credentials, r.notes, r.deletedWebhooks, r.namespaces, r.sealingKeys, r.passwords, r.sessions, r.members,
		r.policies, r.otherBindings, r.groups, r.historyRules, r.settings, r.pastNames,
	} {
		some, err := plan(ctx)
		if err != nil {
			return nil, nil, fmt.Errorf("comparing the store with the later one: %w", err)
		}
		all = append(all, some...)
	}
	if r.Revive {
		return all, nil, nil
	}
	for _, one := range all {
		switch err := one.apply(ctx); fault.Of(err) {
		case fault.Conflict:
			one.Err = err
			unkept = append(unkept, one)
		default:
			if err != nil {
				return nil, nil, fmt.Errorf("%s %s of tenant %s: %w", one.Event, one.ID, one.Tenant, err)
			}
			kept = append(kept, one)
		}
	}
	return kept, unkept, nil
}

// Types returns the types of lost entries in their order.
func (r Result) Types() []audit.EventType { return slices.Sorted(maps.Keys(r.Lost)) }
