// Package doctor examines the stored rows of a deployment that no server uses. It says which of them
// are damaged, missing, or not those that the audit log commits to, and what the log has about them.
// It also takes rows into the state as they are, or removes them, when the operator has decided so.
//
// An examination reads every row. Without a KMS key it checks what needs no key: the rows that the
// log names, and that no key is missing. With one it opens all keys, checks the MAC of every row that
// has one, and compares every deciding row with the state. It changes nothing. Its memory grows with
// the state, with the credentials and API keys that the log names, and with what it finds.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault/compare"
)

// Examine examines the rows of s. Nothing may write to the store meanwhile. Errors:
// fault.Unavailable when the store or the KMS does not answer.
func Examine(ctx context.Context, s store.Store, o Options) (*Examination, error) {
	if o.Row == nil {
		o.Row = func() {}
	}
	x := &Examination{store: s, options: o, state: o.State, byKey: make(map[string]*Finding)}
	if len(o.without) > 0 {
		s = withoutRows{s, o.without}
		x.store = s
	}
	if x.state == nil {
		x.state = state.New(nil)
	}
	err := errors.Join(
		compare.Rows(ctx, s, o.Report, x.fault),
		identity.CompareRows(ctx, s, o.Report, x.fault),
	)
	if err == nil {
		err = x.openKeys(ctx, o)
	}
	if err == nil && x.ring != nil {
		err = x.checkMACs(ctx, o.Row)
	}
	if err == nil && x.ring != nil {
		err = x.compareState(ctx)
	}
	if err == nil {
		err = x.nameFindings(ctx)
	}
	if err != nil {
		return nil, err
	}
	for _, f := range x.byKey {
		x.Findings = append(x.Findings, f)
	}
	slices.SortFunc(x.Findings, func(a, b *Finding) int {
		if (a.Key == nil) != (b.Key == nil) {
			if a.Key == nil {
				return 1
			}
			return -1
		}
		return strings.Compare(string(a.Key)+a.Row(), string(b.Key)+b.Row())
	})
	return x, nil
}

// openKeys opens all keys. Without a KMS key it looks for missing ones only.
func (x *Examination) openKeys(ctx context.Context, o Options) error {
	var current keyring.KMS
	var c keyring.Config
	if len(o.KMS) == 0 {
		if some, err := x.hasKeys(ctx); err != nil || !some {
			return err
		}
	} else {
		current, c.Previous = o.KMS[0], o.KMS[1:]
	}
	v := keyring.NewVerifier(x.store, current, c, x.report)
	ring, err := v.Ring(ctx, o.Report.ChainID)
	if err != nil {
		return fmt.Errorf("opening the deployment's keys: %w", err)
	}
	x.ring, x.Keys = ring, ring != nil
	tenants := make(map[authz.TenantID]bool)
	for n := range o.Report.APIKeys {
		tenants[n.Tenant] = true
	}
	for n, c := range o.Report.Credentials {
		if !c.Deleted {
			tenants[n.Tenant] = true
		}
	}
	owners := make([]authz.TenantID, 0, len(tenants))
	for t := range tenants {
		owners = append(owners, t)
	}
	if err := v.Sets(ctx, owners...); err != nil {
		return err
	}
	if x.ring == nil {
		return nil
	}
	if err := v.SealingKeys(ctx); err != nil {
		return err
	}
	return transit.VerifyKeys(ctx, x.store, x.ring, x.fault)
}

// hasKeys reports whether the store has a row of the deployment or of its keys. One without any may be
// a copy of a log.
func (x *Examination) hasKeys(ctx context.Context) (some bool, err error) {
	err = x.store.View(ctx, func(r store.Reader) error {
		b, err := r.Get([]byte("deployment"))
		if some = b != nil; err != nil {
			return err
		}
		return r.Scan(store.Prefix([]byte("key/")), func(_, _ []byte) bool {
			some = true
			return false
		})
	})
	if err != nil {
		return false, fmt.Errorf("reading keys: %w", err)
	}
	return some, nil
}

// checkMACs reads every row outside the log and checks the MAC of those that have one.
func (x *Examination) checkMACs(ctx context.Context, read func()) error {
	log, own := store.Prefix([]byte("audit/")), store.Prefix([]byte("state/"))
	for _, rng := range []store.Range{{To: log.From}, {From: log.To, To: own.From}, {From: own.To}} {
		err := audit.ScanAll(ctx, x.store, rng, func(key, value []byte) error {
			x.Rows++
			read()
			if f, ok := state.FamilyOf(key); ok && f.HasMAC(key) {
				if _, err := x.ring.OpenRow(key, value); err != nil {
					x.report(key, "its MAC is wrong: the row was changed, moved here, or written by another deployment")
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("reading the stored rows: %w", err)
		}
	}
	return nil
}

// compareState compares every deciding row with the state.
func (x *Examination) compareState(ctx context.Context) error {
	err := x.state.Use(ctx, x.store, x.ring.APIKeyHash())
	if fault.Of(err) == fault.Unavailable && !state.IsDamaged(err) {
		return err
	}
	if err != nil {
		x.report(state.HeadKey, err.Error())
		return nil
	}
	if !x.state.Complete() {
		gone, err := logNamesState(ctx, x.store)
		if gone && !x.state.Kept() {
			x.report(state.HeadKey, "the row is missing, and the log commits to a state: somebody has removed its rows")
		}
		x.Stateless = !gone
		return err
	}
	found, err := x.state.Scan(ctx, x.store, 1)
	if err != nil {
		return fmt.Errorf("holding the stored rows against the log: %w", err)
	}
	x.State, x.More = true, found.More
	x.unnamed = x.state.Unnamed(found.Refused)
	for key := range x.byKey { // a missing row that another check names
		_ = x.unnamed.Try([]byte(key))
	}
	for _, key := range x.options.without {
		_ = x.unnamed.Try(key)
	}
	for _, e := range found.Refused {
		if e.Key != nil {
			x.refuse(e)
		}
	}
	if err := x.tryStored(ctx); err != nil {
		return err
	}
	for _, e := range found.Refused {
		if e.Key == nil {
			f := &Finding{Family: e.Family, ID: e.ID(), Problems: []string{stateSays(e.Reason)}, Reason: e.Reason, refused: e}
			x.byKey[f.Row()] = f
		}
	}
	return nil
}

// logNamesState reports whether an entry of the log commits to a state.
func logNamesState(ctx context.Context, s store.Store) (found bool, err error) {
	err = scanLog(ctx, s, func(e *audit.Entry) { found = found || e.Attributes[audit.AttributeState] != "" })
	return found, err
}
