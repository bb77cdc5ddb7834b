package rollback

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/internal/settings"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/vault/kept"
	"github.com/latticekeep/latticekeep/internal/vault/record"
	"github.com/latticekeep/latticekeep/internal/webhooks"
)

// Options say what is rolled back to what.
type Options struct {
	KMS      []keyring.KMS // KMS keys of the deployment, the current one first
	Identity string        // id of its identity, which has signed what was restored; empty for any
	To       time.Time     // the time that was asked for

	// Later is the newest store that is known of the same deployment, and LaterReport its verification.
	// nil: none is known.
	Later       store.Database
	LaterReport verify.Report
	// Unknown says why removals may be missing in Later. Empty: Later is whole.
	Unknown string

	Revive bool // leave undone what was taken away since
	Now    func() time.Time
}

// Removal is something that was taken away after the time of a rollback.
type Removal struct {
	Event  audit.EventType // event of the entry that takes it away again
	Tenant authz.TenantID
	ID     string // resource id
	Detail string // empty for most
	Err    error  // why it could not be taken away again

	apply func(ctx context.Context) error
}

// rollback is a restored store with its keys open, beside a later one.
type rollback struct {
	Options
	store    store.Database // restored store; its deciding rows agree with the state
	later    store.Database // likewise; nil without one
	log      *writer.Log
	guard    *guard.Guard
	keys     *keyring.Ring
	identity *identity.Service
	vault    *vault.Vault
	webhooks *webhooks.Service
	sealing  *sealingkey.Service
}

// isUnknown reports whether removals may have happened that nobody knows of.
func (r *rollback) isUnknown() bool { return r.later == nil || r.Unknown != "" }

// pair is a row of the restored store, and the row under the same key in the later one. Values are
// copies; nil: there is no row.
type pair struct {
	key       []byte
	at, later []byte
	name      []string // the parts of the key behind the prefix
}

func (p pair) isGone() bool    { return p.later == nil }
func (p pair) isChanged() bool { return !bytes.Equal(p.at, p.later) }

// pairs returns the rows of a family that the later store lacks or has otherwise. parts is the number of
// parts of their names. Without a later store it returns none.
func (r *rollback) pairs(ctx context.Context, prefix string, parts int) (all []pair, err error) {
	if r.later == nil {
		return nil, nil
	}
	return r.rows(ctx, prefix, parts, pair.isChanged)
}

// rows returns the rows of a family that which selects.
func (r *rollback) rows(ctx context.Context, prefix string, parts int, which func(pair) bool) (all []pair, err error) {
	err = r.store.View(ctx, func(at store.Reader) error {
		return r.viewLater(ctx, func(later store.Reader) error {
			all = nil
			var bad error
			err := at.Scan(store.Prefix([]byte(prefix)), func(key, value []byte) bool {
				p := pair{key: bytes.Clone(key), at: bytes.Clone(value), name: strings.SplitN(string(key[len(prefix):]), "/", parts)}
				if p.later, bad = later.Get(p.key); bad != nil {
					return false
				}
				p.later = bytes.Clone(p.later)
				if len(p.name) == parts && which(p) {
					all = append(all, p)
				}
				return true
			})
			return errors.Join(err, bad)
		})
	})
	return all, err
}

// nothing is the later store that nobody knows.
type nothing struct{ store.Reader }

func (nothing) Get([]byte) ([]byte, error) { return nil, nil }

func (r *rollback) viewLater(ctx context.Context, do func(store.Reader) error) error {
	if r.later == nil {
		return do(nothing{})
	}
	return r.later.View(ctx, do)
}

// decode reads the JSON of a row under a MAC. It leaves content as it is when there is no row.
func (r *rollback) decode(key, row []byte, content any) error {
	b, err := r.keys.OpenRow(key, row)
	if err != nil || b == nil {
		return err
	}
	if err := json.Unmarshal(b, content); err != nil {
		return fmt.Errorf("reading the row %q: %w", key, err)
	}
	return nil
}

// systemIn is the deployment as it acts in a tenant.
func systemIn(tenant string) authz.Principal { return authz.SystemPrincipal(authz.TenantID(tenant)) }

// operator is the deployment as it acts for itself.
func operator() authz.Principal {
	p := authz.SystemPrincipal(authz.SystemTenant)
	p.Scopes = append(p.Scopes, authz.SystemAdmin)
	return p
}

func (r *rollback) apiKeys(ctx context.Context) (all []Removal, err error) {
	keys, err := r.rows(ctx, "apikey/tenant/", 2, func(pair) bool { return true })
	if err != nil {
		return nil, err
	}
	for _, key := range keys {
		tenant, id := key.name[0], key.name[1]
		pending, suspend := false, false
		if pending, suspend, err = r.apiKeyStates(ctx, key); err != nil {
			return nil, err
		}
		one := Removal{Event: audit.APIKeyRevoked, Tenant: authz.TenantID(tenant), ID: id}
		one.apply = func(ctx context.Context) error { return r.identity.RevokeAPIKey(ctx, systemIn(tenant), id) }
		switch gone := r.later != nil && key.isGone(); {
		case gone, r.isUnknown() && tenant == string(authz.SystemTenant): // no owner could approve it
		case pending || !suspend && !r.isUnknown():
			continue
		default:
			one.Event = audit.APIKeySuspended
			one.apply = func(ctx context.Context) error { return r.identity.SuspendAPIKey(ctx, systemIn(tenant), id) }
		}
		all = append(all, one)
	}
	return all, nil
}

// apiKeyStates reports whether a listed key is pending in the restored store, and in the later one.
func (r *rollback) apiKeyStates(ctx context.Context, listed pair) (pending, later bool, err error) {
	var hash string
	if err := r.decode(listed.key, listed.at, &hash); err != nil {
		return false, false, err
	}
	keys, err := r.rows(ctx, "apikey/hash/1/"+hash, 1, func(pair) bool { return true })
	for _, key := range keys {
		var row, now struct {
			Requested []authz.Scope `json:"requested"`
		}
		err = errors.Join(err, r.decode(key.key, key.at, &row), r.decode(key.key, key.later, &now))
		pending, later = len(row.Requested) > 0, len(now.Requested) > 0
	}
	return pending, later, err
}

func (r *rollback) invitations(ctx context.Context) (all []Removal, err error) {
	found, err := r.rows(ctx, "invitation/", 2, func(p pair) bool { return r.isUnknown() || p.isChanged() })
	for _, p := range found {
		tenant, id := p.name[0], p.name[1]
		all = append(all, Removal{
			Event: audit.InvitationRevoked, Tenant: authz.TenantID(tenant), ID: id,
			apply: func(ctx context.Context) error { return r.identity.RevokeInvitation(ctx, systemIn(tenant), id) },
		})
	}
	return all, err
}

func (r *rollback) credentials(ctx context.Context) (all []Removal, err error) {
	found, err := r.pairs(ctx, "credential/", 3)
	if err != nil || len(found) == 0 {
		return nil, err
	}
	err = r.later.View(ctx, func(later store.Reader) error {
		return r.store.View(ctx, func(at store.Reader) error {
			all = nil
			for _, p := range found { // the version that is current here is gone there, at least
				tenant, id := p.name[0], p.name[1]
				now, err := record.Find(later, authz.TenantID(tenant), id)
				if err != nil {
					return err
				}
				if now != nil {
					was, err := record.At(p.key, p.at)
					if err == nil && now.IsTrashed() && !was.IsTrashed() && r.Now().Before(was.ExpiresAt) {
						all = append(all, Removal{
							Event: audit.CredentialReencrypted, Tenant: now.Tenant, ID: id, Detail: "in the trash",
							apply: func(ctx context.Context) error { _, err := r.vault.Trash(ctx, systemIn(tenant), id, ""); return err },
						})
					}
					continue
				}
				owner, err := at.Get([]byte("owner/" + tenant + "/" + id))
				if err != nil {
					return err
				}
				uid := string(owner)
				all = append(all, Removal{
					Event: audit.CredentialDeleted, Tenant: authz.TenantID(tenant), ID: id,
					apply: func(ctx context.Context) error { return r.deleteCredential(ctx, tenant, id, uid) },
				})
			}
			return nil
		})
	})
	return all, err
}

// deleteCredential deletes a credential, and what an object with the UID remembers of it.
func (r *rollback) deleteCredential(ctx context.Context, tenant, id, uid string) error {
	if uid == "" {
		return r.vault.Delete(ctx, systemIn(tenant), id)
	}
	_, err := r.vault.Release(ctx, systemIn(tenant), uid, [32]byte{}, true)
	return err
}

func (r *rollback) notes(ctx context.Context) (all []Removal, err error) {
	found, err := r.pairs(ctx, "review-note/", 2)
	for _, p := range found {
		tenant, id := p.name[0], p.name[1]
		all = append(all, Removal{
			Event: audit.ReviewNoteErased, Tenant: authz.TenantID(tenant), ID: id,
			apply: func(ctx context.Context) error {
				return assessor.EraseNote(ctx, r.store, r.guard, r.keys.OpenRow, systemIn(tenant), id)
			},
		})
	}
	return all, err
}

// pastNames finds what had past names that were erased later, or whose time was over.
func (r *rollback) pastNames(ctx context.Context) (all []Removal, err error) {
	found, err := r.pairs(ctx, past.Family, 3)
	erased := map[string]bool{}
	for _, p := range found {
		tenant, id := p.name[0], p.name[1]
		if !p.isGone() || erased[tenant+"/"+id] {
			continue
		}
		erased[tenant+"/"+id] = true
		all = append(all, Removal{
			Event: audit.NamesErased, Tenant: authz.TenantID(tenant), ID: id,
			apply: func(ctx context.Context) error {
				return past.New(r.keys, r.Now).Erase(ctx, r.store, r.guard, systemIn(tenant), id)
			},
		})
	}
	return all, err
}

// deletedWebhooks finds the webhooks that were deleted later. What waits to be sent to the others and is
// older than an attempt may be becomes a dead letter when the server starts.
func (r *rollback) deletedWebhooks(ctx context.Context) (all []Removal, err error) {
	found, err := r.pairs(ctx, webhooks.Family, 2)
	for _, p := range found {
		system, id := systemIn(p.name[0]), p.name[1]
		if !p.isGone() {
			continue
		}
		all = append(all, Removal{
			Event: audit.WebhookDeleted, Tenant: system.Tenant, ID: id,
			apply: func(ctx context.Context) error { return r.webhooks.Delete(ctx, system, id) },
		})
	}
	return all, err
}

func (r *rollback) namespaces(ctx context.Context) (all []Removal, err error) {
	found, err := r.pairs(ctx, "namespace/", 2)
	for _, p := range found {
		cluster, uid := p.name[0], p.name[1]
		before, err1 := r.keys.OpenRow(p.key, p.at)
		now, err2 := r.keys.OpenRow(p.key, p.later)
		if err := errors.Join(err, err1, err2); err != nil {
			return nil, err
		}
		all = append(all, Removal{
			Event: audit.NamespaceMapped, Tenant: authz.TenantID(before), ID: uid,
			apply: func(ctx context.Context) error { return r.moveNamespace(ctx, cluster, uid, authz.TenantID(now)) },
		})
	}
	return all, err
}

// moveNamespace makes a namespace part of the tenant that it was part of later. If that tenant is lost,
// the namespace gets a new one.
func (r *rollback) moveNamespace(ctx context.Context, cluster, uid string, tenant authz.TenantID) error {
	err := r.identity.MapNamespaceUID(ctx, cluster, uid, tenant)
	if !errors.Is(err, fault.NotFound) {
		return err
	}
	made, err := r.identity.CreateTenant(ctx, operator(), "namespace "+uid)
	if err != nil {
		return err
	}
	return r.identity.MapNamespaceUID(ctx, cluster, uid, made.ID)
}

func (r *rollback) sealingKeys(ctx context.Context) (all []Removal, err error) {
	found, err := r.pairs(ctx, "sealing/key/", 1)
	for _, p := range found {
		id := p.name[0]
		var row, now struct {
			RetiredAt time.Time `json:"retired_at"`
		}
		if err := errors.Join(err, r.decode(p.key, p.at, &row), r.decode(p.key, p.later, &now)); err != nil {
			return nil, err
		}
		if row.RetiredAt.IsZero() && !now.RetiredAt.IsZero() {
			all = append(all, Removal{
				Event: audit.SealingKeyRetired, Tenant: authz.SystemTenant, ID: id,
				apply: func(ctx context.Context) error { return r.retire(ctx, id) },
			})
		}
	}
	return all, err
}

// retire retires a sealing key. If it is the current one, there is a new one first.
func (r *rollback) retire(ctx context.Context, id string) error {
	current, err := r.keys.CurrentSealingKey(ctx)
	if err == nil && current == id {
		_, err = r.sealing.Rotate(ctx, operator())
	}
	if err == nil {
		_, err = r.sealing.Retire(ctx, operator(), id)
	}
	return err
}

// users returns the tenant of each user, and of those who are gone later.
func (r *rollback) users(ctx context.Context) (tenants map[string]string, gone map[string]bool, err error) {
	found, err := r.rows(ctx, "user/row/", 2, func(pair) bool { return true })
	tenants, gone = make(map[string]string), make(map[string]bool)
	for _, p := range found {
		tenants[p.name[1]] = p.name[0]
		gone[p.name[1]] = r.later != nil && p.isGone()
	}
	return tenants, gone, err
}

// passwords finds the users whose password was replaced, or whose mailed token to replace it was used or
// replaced.
func (r *rollback) passwords(ctx context.Context) (all []Removal, err error) {
	tenants, gone, err1 := r.users(ctx)
	hashes, err2 := r.pairs(ctx, "user/password/", 2)
	tickets, err3 := r.resets(ctx)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, err
	}
	var changed []string
	for _, p := range append(hashes, tickets...) {
		if user := p.name[0]; tenants[user] != "" && !gone[user] && !slices.Contains(changed, user) {
			changed = append(changed, user)
		}
	}
	for _, user := range changed {
		tenant := tenants[user]
		all = append(all, Removal{
			Event: audit.PasswordChanged, Tenant: authz.TenantID(tenant), ID: user, Detail: "to be reset by mail",
			apply: func(ctx context.Context) error { return r.identity.RequireNewPassword(ctx, systemIn(tenant), user) },
		})
	}
	return all, nil
}

// resets finds the users whose mailed token would reset a password again.
func (r *rollback) resets(ctx context.Context) (valid []pair, err error) {
	found, err := r.pairs(ctx, "ticket/of/reset/", 1)
	for _, p := range found {
		var hash string
		if err := errors.Join(err, r.decode(p.key, p.at, &hash)); err != nil {
			return nil, err
		}
		rows, err := r.rows(ctx, "ticket/hash/reset/"+hash, 1, func(pair) bool { return true })
		for _, t := range rows {
			var row struct {
				ExpiresAt time.Time `json:"expires_at"`
			}
			if err := errors.Join(err, r.decode(t.key, t.at, &row)); err != nil {
				return nil, err
			}
			if r.Now().Before(row.ExpiresAt) {
				valid = append(valid, p)
			}
		}
		if err != nil {
			return nil, err
		}
	}
	return valid, err
}

func (r *rollback) sessions(ctx context.Context) (all []Removal, err error) {
	_, gone, err := r.users(ctx)
	if err != nil {
		return nil, err
	}
	found, err := r.rows(ctx, "session/row/", 2, func(p pair) bool { return r.isUnknown() || p.isChanged() })
	for _, p := range found {
		user, id := p.name[0], p.name[1]
		var row struct {
			Tenant    string    `json:"tenant"`
			ExpiresAt time.Time `json:"expires_at"`
		}
		if err := errors.Join(err, r.decode(p.key, p.at, &row)); err != nil {
			return nil, err
		}
		if gone[user] || !r.Now().Before(row.ExpiresAt) {
			continue // the session ends with the user, or has ended
		}
		all = append(all, Removal{
			Event: audit.SessionEnded, Tenant: authz.TenantID(row.Tenant), ID: id,
			apply: func(ctx context.Context) error {
				return r.identity.EndSessionOf(ctx, systemIn(row.Tenant), user, id)
			},
		})
	}
	return all, err
}

// members finds the users who were removed, and those whose role was lowered. They come last, since
// their API keys and invitations go with them.
func (r *rollback) members(ctx context.Context) (all []Removal, err error) {
	found, err := r.pairs(ctx, "user/row/", 2)
	for _, p := range found {
		tenant, id := p.name[0], p.name[1]
		one := Removal{
			Event: audit.MemberRemoved, Tenant: authz.TenantID(tenant), ID: id,
			apply: func(ctx context.Context) error { return r.identity.RemoveMember(ctx, systemIn(tenant), id) },
		}
		if !p.isGone() {
			var row, now struct {
				Role authz.Role `json:"role"`
			}
			if err := errors.Join(err, r.decode(p.key, p.at, &row), r.decode(p.key, p.later, &now)); err != nil {
				return nil, err
			}
			if !isLowered(row.Role, now.Role) {
				continue
			}
			one.Event, one.Detail = audit.MemberChanged, "now "+string(now.Role)
			one.apply = func(ctx context.Context) error {
				_, err := r.identity.ChangeMember(ctx, systemIn(tenant), id, now.Role)
				return err
			}
		}
		all = append(all, one)
	}
	return all, err
}

// policies finds the policies that allowed less later. Each keeps what both allow.
func (r *rollback) policies(ctx context.Context) (all []Removal, err error) {
	found, err := r.pairs(ctx, "access/policy/", 2)
	for _, p := range found {
		if p.isGone() {
			continue // nobody had it any more
		}
		tenant, id := p.name[0], p.name[1]
		var row, now identity.PolicyRequest
		if err := errors.Join(err, r.decode(p.key, p.at, &row), r.decode(p.key, p.later, &now)); err != nil {
			return nil, err
		}
		later, err := authz.NewPolicy(now.Rules)
		if err != nil {
			return nil, err
		}
		both := identity.PolicyRequest{Name: row.Name}
		narrowed := false
		for _, rule := range row.Rules {
			kept := slices.DeleteFunc(slices.Clone(rule.Verbs), func(v authz.Verb) bool {
				one, err := authz.NewPolicy([]authz.Rule{{Path: rule.Path, Verbs: []authz.Verb{v}}})
				return err != nil || !later.Covers(one)
			})
			narrowed = narrowed || len(kept) < len(rule.Verbs)
			if len(kept) > 0 {
				both.Rules = append(both.Rules, authz.Rule{Path: rule.Path, Verbs: kept})
			}
		}
		if narrowed {
			all = append(all, Removal{
				Event: audit.PolicyChanged, Tenant: authz.TenantID(tenant), ID: id, Detail: "allows what both allow",
				apply: func(ctx context.Context) error {
					_, err := r.identity.Access.ChangePolicy(ctx, systemIn(tenant), id, both)
					return err
				},
			})
		}
	}
	return all, err
}

// historyRules finds the tenants whose rules of the history kept less later. They get all rules of later in
// one commit: one by one, a rule could erase what the next one keeps.
func (r *rollback) historyRules(ctx context.Context) (all []Removal, err error) {
	found, err := r.pairs(ctx, kept.RulesFamily, 1)
	for _, p := range found {
		var row, now struct{ Rules []kept.Rule }
		if err := errors.Join(err, r.decode(p.key, p.at, &row), r.decode(p.key, p.later, &now)); err != nil {
			return nil, err
		}
		if keepsAtLeast(now.Rules, row.Rules) {
			continue
		}
		system := systemIn(p.name[0])
		all = append(all, Removal{
			Event: audit.HistoryRuleChanged, Tenant: system.Tenant, ID: string(system.Tenant), Detail: "the rules of later",
			apply: func(ctx context.Context) error { _, err := r.vault.Rules.Replace(ctx, system, now.Rules); return err },
		})
	}
	return all, err
}

// keepsAtLeast reports whether later rules keep no less than the earlier ones. It is so if no rule is gone or
// lower, and no new rule, which may be an exception, is lower than the highest earlier one.
func keepsAtLeast(later, before []kept.Rule) bool {
	most := 0
	was := make(map[string]int)
	for _, rule := range before {
		most, was[rule.Path] = max(most, rule.Versions), rule.Versions
	}
	for _, rule := range later {
		n, known := was[rule.Path]
		if rule.Versions < n || !known && rule.Versions < most {
			return false
		}
		delete(was, rule.Path)
	}
	return len(was) == 0
}

// settings finds the tenants in which fewer paths allowed later that credentials never expire, or that kept past
// names for fewer days. Each keeps the paths that it had both times, and the fewer days.
func (r *rollback) settings(ctx context.Context) (all []Removal, err error) {
	if r.later == nil {
		return nil, nil
	}
	err = r.store.View(ctx, func(at store.Reader) error {
		return r.later.View(ctx, func(later store.Reader) error {
			all = nil
			var bad error
			err := later.Scan(store.Prefix([]byte(settings.Family)), func(key, value []byte) bool {
				var was, is settings.Settings
				var row []byte
				if row, bad = at.Get(key); bad != nil { // a tenant's first settings may be those of later
					return false
				}
				if bad = errors.Join(r.decode(key, row, &was), r.decode(key, value, &is)); bad != nil {
					return false
				}
				if c, fewer := fewerSettings(was, is); fewer {
					all = append(all, r.changeSettings(systemIn(string(key[len(settings.Family):])), c))
				}
				return true
			})
			return errors.Join(err, bad)
		})
	})
	return all, err
}

// fewerSettings returns the change by which settings allow no more than they did both times. fewer is false
// if they already do.
func fewerSettings(was, is settings.Settings) (c settings.Change, fewer bool) {
	both := slices.DeleteFunc(slices.Clone(was.NeverExpires), func(path string) bool { return !slices.Contains(is.NeverExpires, path) })
	if len(both) < len(was.NeverExpires) {
		c.NeverExpires = &both
	}
	if days := is.NamesKeptDays(); days < was.NamesKeptDays() {
		c.NamesKept = &days
	}
	return c, c != settings.Change{}
}

func (r *rollback) changeSettings(system authz.Principal, c settings.Change) Removal {
	return Removal{
		Event: audit.SettingsChanged, Tenant: system.Tenant, ID: string(system.Tenant), Detail: "paths on which credentials must expire, and the days for which past names are kept",
		apply: func(ctx context.Context) error {
			_, err := r.vault.Settings.Change(ctx, system, c)
			return err
		},
	}
}

// keyBindings finds the API keys that had fewer policies later, as bindings does.
func (r *rollback) keyBindings(ctx context.Context) ([]Removal, error) {
	return r.bindings(ctx, func(subject string) bool { return strings.HasPrefix(subject, "key_") })
}

// otherBindings finds the users, ServiceAccounts and groups that had fewer policies later, as bindings does. They
// come after the members, whose roles must be those of later.
func (r *rollback) otherBindings(ctx context.Context) ([]Removal, error) {
	return r.bindings(ctx, func(subject string) bool { return !strings.HasPrefix(subject, "key_") })
}

// bindings finds the subjects that had fewer policies later. Each keeps those that it had both times, or
// if no policy limited it, gets those of later that exist.
func (r *rollback) bindings(ctx context.Context, of func(subject string) bool) (all []Removal, err error) {
	if r.later == nil {
		return nil, nil
	}
	const family = "access/binding/"
	err = r.store.View(ctx, func(at store.Reader) error {
		return r.later.View(ctx, func(later store.Reader) error {
			all = nil
			var bad error
			err := later.Scan(store.Prefix([]byte(family)), func(key, value []byte) bool {
				tenant, subject, _ := strings.Cut(string(key[len(family):]), "/")
				if !of(subject) {
					return true
				}
				var one *Removal
				if one, bad = r.binding(at, tenant, subject, bytes.Clone(value)); one != nil {
					all = append(all, *one)
				}
				return bad == nil
			})
			return errors.Join(err, bad)
		})
	})
	return all, err
}

// groups finds the memberships that ended later, the groups that were deleted, and those whose binding was
// taken away, so that they add nothing any more.
func (r *rollback) groups(ctx context.Context) (all []Removal, err error) {
	_, gone, err1 := r.users(ctx)
	deleted, err2 := r.pairs(ctx, "access/group/", 2)
	members, err3 := r.pairs(ctx, "access/member/", 2)
	bindings, err4 := r.pairs(ctx, "access/binding/", 2)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return nil, err
	}
	wasDeleted := make(map[string]bool)
	for _, p := range deleted {
		tenant, id := p.name[0], p.name[1]
		if wasDeleted[id] = p.isGone(); p.isGone() {
			all = append(all, Removal{
				Event: audit.GroupDeleted, Tenant: authz.TenantID(tenant), ID: id,
				apply: func(ctx context.Context) error { return r.identity.Access.DeleteGroup(ctx, systemIn(tenant), id) },
			})
		}
	}
	for _, p := range bindings {
		tenant, id := p.name[0], p.name[1]
		if strings.HasPrefix(id, "grp_") && p.isGone() && !wasDeleted[id] {
			all = append(all, Removal{
				Event: audit.PolicyUnbound, Tenant: authz.TenantID(tenant), ID: id,
				apply: func(ctx context.Context) error { return r.identity.Access.Unbind(ctx, systemIn(tenant), id) },
			})
		}
	}
	for _, p := range members {
		tenant, subject := p.name[0], p.name[1]
		var row, now struct {
			Groups []string `json:"groups"`
		}
		if err := errors.Join(r.decode(p.key, p.at, &row), r.decode(p.key, p.later, &now)); err != nil {
			return nil, err
		}
		for _, id := range row.Groups {
			if slices.Contains(now.Groups, id) || wasDeleted[id] || gone[subject] {
				continue
			}
			all = append(all, Removal{
				Event: audit.GroupChanged, Tenant: authz.TenantID(tenant), ID: id, Detail: "without " + subject,
				apply: func(ctx context.Context) error {
					_, err := r.identity.Access.RemoveMember(ctx, systemIn(tenant), id, subject)
					return err
				},
			})
		}
	}
	return all, nil
}

// binding returns the removal for one subject, whose binding of later is given. It returns nil if the
// subject does not exist or had no fewer policies.
func (r *rollback) binding(at store.Reader, tenant, subject string, later []byte) (*Removal, error) {
	key := []byte("access/binding/" + tenant + "/" + subject)
	stored, err := at.Get(key)
	var before, now struct {
		Policies []string `json:"policies"`
	}
	err = errors.Join(err, r.decode(key, bytes.Clone(stored), &before), r.decode(key, later, &now))
	subjects := map[string]string{
		"usr": "user/row/" + tenant + "/" + subject, "key": "apikey/tenant/" + tenant + "/" + subject,
		"grp": "access/group/" + tenant + "/" + subject,
	}
	kind, _, _ := strings.Cut(subject, "_")
	if kind == "grp" && stored == nil { // it added nothing
		return nil, nil
	}
	row := cmp.Or(subjects[kind], "tenant/"+tenant)
	exists, err2 := at.Get([]byte(row))
	if err := errors.Join(err, err2); err != nil || exists == nil {
		return nil, err
	}
	var ids []string
	for _, id := range now.Policies {
		policy, err := at.Get([]byte("access/policy/" + tenant + "/" + id))
		if err != nil {
			return nil, err
		}
		if policy != nil && (stored == nil || slices.Contains(before.Policies, id)) {
			ids = append(ids, id)
		}
	}
	if stored != nil && len(ids) == len(before.Policies) {
		return nil, nil
	}
	return &Removal{
		Event: audit.PolicyBound, Tenant: authz.TenantID(tenant), ID: subject, Detail: fmt.Sprintf("%d policies", len(ids)),
		apply: func(ctx context.Context) error {
			_, err := r.identity.Access.Bind(ctx, systemIn(tenant), subject, ids)
			if errors.Is(err, fault.NotFound) {
				return nil // a user that this rollback has removed
			}
			return err
		},
	}, nil
}

// owned returns the tenants that have an owner.
func (r *rollback) owned(ctx context.Context) (map[authz.TenantID]bool, error) {
	all, err := r.rows(ctx, "user/row/", 2, func(pair) bool { return true })
	owned := make(map[authz.TenantID]bool)
	for _, p := range all {
		var row struct {
			Role authz.Role `json:"role"`
		}
		err = errors.Join(err, r.decode(p.key, p.at, &row))
		if row.Role == authz.Owner {
			owned[authz.TenantID(p.name[0])] = true
		}
	}
	return owned, err
}

// isLowered reports whether a role takes away anything that another one allows.
func isLowered(from, to authz.Role) bool {
	roles := authz.Roles() // the highest first
	holder := authz.Principal{Scopes: to.Scopes()}
	return slices.Index(roles, to) > slices.Index(roles, from) || !holder.Holds(from.Scopes())
}
