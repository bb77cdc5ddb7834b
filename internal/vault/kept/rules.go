package kept

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Keeper reads and changes the rules of tenants.
type Keeper struct {
	store store.Store
	guard *guard.Guard
	rows  Rows

	Ready format.Readers // asks about [format.Kept]
}

// NewKeeper returns the rules among the rows of a store.
func NewKeeper(s store.Store, guard *guard.Guard, rows Rows) *Keeper {
	return &Keeper{store: s, guard: guard, rows: rows}
}

var (
	errLimited  = fault.New(fault.Forbidden, "your policies do not allow all paths, so you change no rule of the history")
	errTooMany  = fault.New(fault.Conflict, fmt.Sprintf("the tenant has %d rules, the most there can be: remove one first", MaxRules))
	errErasing  = fault.New(fault.Conflict, "another change of the rules still erases versions: try again in a moment")
	errReplicas = fault.New(fault.Conflict, "a replica of an earlier release still runs, which would leave kept versions behind: end it first")
)

// Reasons in audit entries.
const (
	reasonTooMany  = "too_many_rules"
	reasonReplicas = "earlier_replicas"
	reasonErasing  = "still_erasing"
)

// Attributes of the entry of a change.
const (
	attributeRule   = "rule"          // keyed hash of the path; the entries of further deletions have none
	attributeKept   = "versions_kept" // "" in the entry of a rule that was removed
	attributeErased = "erased"        // number of versions that were deleted
)

func event(t audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{
		Type: t, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.TenantResource, ID: string(p.Tenant)},
		Attributes: map[string]string{},
	}
}

// Rules returns the rules of p's tenant, by path. Errors: fault.Forbidden, also for everybody whom a
// policy limits, since rules name paths; fault.Unavailable.
func (k *Keeper) Rules(ctx context.Context, p authz.Principal) ([]Rule, error) {
	if err := k.guard.Admit(ctx, p, authz.ListHistoryRules); err != nil {
		return nil, err
	}
	e := event(audit.HistoryRuleListed, p)
	if p.Access.IsLimited() {
		return nil, k.refuse(ctx, e, string(authz.OutsidePolicy), errLimited)
	}
	var row *rulesRow
	err := k.store.View(ctx, func(rd store.Reader) (err error) {
		row, err = k.rows.rules(rd, p.Tenant)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the rules of the history: %w", err)
	}
	return row.list(), k.guard.Record(ctx, e)
}

func (r *rulesRow) list() []Rule {
	if r == nil {
		return []Rule{}
	}
	return append([]Rule{}, r.Rules...)
}

// change says which rules come after others.
type change struct {
	versions *int // number in the entry
	path     string
	rules    func(before []Rule) []Rule
}

// Set puts a rule in place of the one with its path. It returns the rules after that. Errors:
// fault.Forbidden, also for everybody whom a policy limits; fault.Invalid; fault.Conflict for too many
// rules, beside an earlier release, and while another change still erases; fault.Unavailable.
func (k *Keeper) Set(ctx context.Context, p authz.Principal, r Rule) ([]Rule, error) {
	if err := k.guard.Authorize(ctx, p, authz.ChangeHistoryRule); err != nil {
		return nil, err
	}
	if r.Versions < 0 || r.Versions > MaxVersions {
		return nil, fault.New(fault.Invalid, fmt.Sprintf("versions_kept must be 0 to %d", MaxVersions))
	}
	path, err := parsePath(r.Path)
	if err != nil {
		return nil, err
	}
	return k.change(ctx, p, change{&r.Versions, path, func(before []Rule) []Rule {
		return append(without(before, path), Rule{path, r.Versions})
	}})
}

// Remove removes the rule with a path, if there is one. It returns the rules after that. Errors: those
// of [Keeper.Set].
func (k *Keeper) Remove(ctx context.Context, p authz.Principal, path string) ([]Rule, error) {
	if err := k.guard.Authorize(ctx, p, authz.ChangeHistoryRule); err != nil {
		return nil, err
	}
	path, err := parsePath(path)
	if err != nil {
		return nil, err
	}
	return k.change(ctx, p, change{nil, path, func(before []Rule) []Rule { return without(before, path) }})
}

// Replace puts rules in place of all others, in one commit: what both keep stays. Errors: those of
// [Keeper.Set].
func (k *Keeper) Replace(ctx context.Context, p authz.Principal, rules []Rule) ([]Rule, error) {
	if err := k.guard.Authorize(ctx, p, authz.ChangeHistoryRule); err != nil {
		return nil, err
	}
	return k.change(ctx, p, change{rules: func([]Rule) []Rule { return slices.Clone(rules) }})
}

func parsePath(path string) (string, error) {
	if _, err := authz.ParseGlob(path); err != nil {
		return "", fault.New(fault.Invalid, "path "+err.Error())
	}
	return authz.NormalizeName(path), nil
}

func without(rules []Rule, path string) []Rule {
	return slices.DeleteFunc(slices.Clone(rules), func(r Rule) bool { return r.Path == path })
}

func (k *Keeper) change(ctx context.Context, p authz.Principal, to change) ([]Rule, error) {
	e := event(audit.HistoryRuleChanged, p)
	if p.Access.IsLimited() {
		return nil, k.refuse(ctx, e, string(authz.OutsidePolicy), errLimited)
	}
	if to.versions != nil {
		ready, err := k.Ready.All(ctx)
		switch {
		case err != nil:
			return nil, err
		case !ready:
			return nil, k.refuse(ctx, e, reasonReplicas, errReplicas)
		}
	}
	if _, err := k.finish(ctx, p.Tenant); err != nil { // first, lest a rule that keeps more brings versions back
		return nil, fmt.Errorf("changing a rule of the history: %w", err)
	}
	if to.path != "" {
		e.Attributes[attributeRule] = k.rows.KeyedHex("latticekeep/history-rule/v1", []byte(p.Tenant), []byte(to.path))[:32]
	}
	if to.versions != nil {
		e.Attributes[attributeKept] = strconv.Itoa(*to.versions)
	}
	var row *rulesRow
	after := ""
	err := k.store.Update(ctx, func(tx store.Tx) (err error) {
		if row, err = k.rows.rules(tx, p.Tenant); err != nil {
			return err
		}
		before, changes := row.list(), uint64(1)
		if row != nil {
			if changes += row.Changes; row.Erasing { // a change since finish
				return errErasing
			}
		}
		rules := to.rules(row.list())
		slices.SortFunc(rules, func(a, b Rule) int { return strings.Compare(a.Path, b.Path) })
		switch {
		case slices.Equal(rules, before):
			after = ""
			_, err := k.guard.Append(tx, e)
			return err
		case len(rules) > MaxRules:
			return errTooMany
		}
		row = &rulesRow{Rules: rules, Erasing: true, Changes: changes}
		if err := format.Raise(tx, format.Kept, format.Kept); err != nil {
			return err
		}
		after, err = k.erase(tx, p.Tenant, row, "", e)
		return err
	})
	switch {
	case errors.Is(err, errTooMany):
		return nil, k.refuse(ctx, e, reasonTooMany, errTooMany)
	case errors.Is(err, errErasing):
		return nil, k.refuse(ctx, e, reasonErasing, errErasing)
	case err != nil:
		return nil, fmt.Errorf("changing a rule of the history: %w", err)
	}
	if after != "" {
		_, _ = k.eraseAfter(ctx, p, row.Changes, after) // Sweep goes on
	}
	return row.list(), nil
}

// finish erases what a change of the rules has left. It returns the number of its transactions.
func (k *Keeper) finish(ctx context.Context, tenant authz.TenantID) (n int, err error) {
	var row *rulesRow
	err = k.store.View(ctx, func(rd store.Reader) (err error) {
		row, err = k.rows.rules(rd, tenant)
		return err
	})
	if err == nil && row != nil && row.Erasing {
		n, err = k.eraseAfter(ctx, authz.SystemPrincipal(tenant), row.Changes, "")
	}
	return n, err
}

// refuse records that a change was refused, and returns why.
func (k *Keeper) refuse(ctx context.Context, e audit.Event, reason string, why error) error {
	e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reason}
	if err := k.guard.Record(ctx, e); err != nil {
		return err
	}
	return why
}

// eraseBatch is about how many rows one transaction looks at.
const eraseBatch = 500

// erase deletes kept versions that no rule keeps, of some credentials that follow one, and writes the
// rules and the entry. It returns the last one that it looked at, or "" if none follows.
func (k *Keeper) erase(tx store.Tx, tenant authz.TenantID, row *rulesRow, after string, e audit.Event) (string, error) {
	ids, more, err := credentials(tx, tenant, after)
	if err != nil {
		return "", err
	}
	erased := 0
	for _, id := range ids {
		after = id
		current, err := record.Find(tx, tenant, id)
		if errors.Is(err, fault.Internal) || state.IsRefused(err) { // a damaged record does not say its name
			continue
		}
		if err != nil {
			return "", err
		}
		n := 0
		if current != nil {
			n = row.count(current.Name)
		}
		deleted, err := trim(tx, tenant, id, n)
		if err != nil {
			return "", err
		}
		erased += deleted
	}
	if !more {
		row.Erasing, after = false, ""
	}
	delete(e.Attributes, attributeErased) // of an attempt that did not commit
	if erased > 0 {
		e.Attributes[attributeErased] = strconv.Itoa(erased)
	}
	_, appended := k.guard.Append(tx, e)
	return after, errors.Join(k.rows.putRules(tx, tenant, row), appended)
}

// credentials returns the ids of the credentials after one that have kept versions, about eraseBatch
// rows of them, and whether others follow.
func credentials(tx store.Tx, tenant authz.TenantID, after string) (ids []string, more bool, err error) {
	prefix := tenantPrefix(tenant)
	rng := store.Prefix(prefix)
	if after != "" {
		rng.From = store.Prefix(Prefix(tenant, after)).To
	}
	n := 0
	err = tx.Scan(rng, func(key, _ []byte) bool {
		id, _, _ := bytes.Cut(key[len(prefix):], []byte("/"))
		n++
		if len(ids) > 0 && ids[len(ids)-1] == string(id) {
			return true
		}
		if more = n > eraseBatch; more {
			return false
		}
		ids = append(ids, string(id))
		return true
	})
	return ids, more, err
}

// eraseAfter goes on with the credentials after one, which a change of the rules had reached, until none
// follows. After another change it begins again, since that one may have gone no further than this. It
// returns the number of its transactions.
func (k *Keeper) eraseAfter(ctx context.Context, p authz.Principal, changes uint64, after string) (n int, err error) {
	for {
		var next string
		var seen uint64
		err = k.store.Update(ctx, func(tx store.Tx) error {
			next, seen = "", changes
			row, err := k.rows.rules(tx, p.Tenant)
			if err != nil || row == nil || !row.Erasing {
				return err
			}
			from := after
			if seen = row.Changes; seen != changes {
				from = ""
			}
			next, err = k.erase(tx, p.Tenant, row, from, event(audit.HistoryRuleChanged, p))
			return err
		})
		if err != nil {
			return n, fmt.Errorf("erasing versions that no rule keeps: %w", err)
		}
		n++
		changes = seen
		if after = next; after == "" {
			return n, nil
		}
	}
}

// Sweep erases what a change of rules that was interrupted has left.
func (k *Keeper) Sweep(ctx context.Context) (int, error) {
	var tenants []authz.TenantID
	err := k.store.View(ctx, func(rd store.Reader) error {
		tenants = nil
		return rd.Scan(store.Prefix([]byte(RulesFamily)), func(key, _ []byte) bool {
			tenants = append(tenants, authz.TenantID(key[len(RulesFamily):]))
			return true
		})
	})
	total := 0
	for _, tenant := range tenants {
		n, bad := k.finish(ctx, tenant)
		total, err = total+n, errors.Join(err, bad)
	}
	return total, err
}
