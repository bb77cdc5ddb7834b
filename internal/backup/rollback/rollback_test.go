package rollback_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup/rollback"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/settings"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/vault/kept"
	"github.com/latticekeep/latticekeep/internal/webhooks"
	"github.com/latticekeep/latticekeep/test/servertest"
)

type fields = map[string]any

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is a deployment in which people work.
type world struct {
	*servertest.Service
	t      *testing.T
	owner  servertest.Account
	tenant authz.TenantID
}

func newWorld(t *testing.T) *world {
	w := &world{Service: servertest.Start(t), t: t}
	w.owner = w.RegisterVerified("owner@example.com")
	w.tenant = w.TenantOf(w.owner)
	return w
}

// member adds a member of the owner's tenant, who signs in.
func (w *world) member(name, role string) (a servertest.Account, id string) {
	w.t.Helper()
	address := name + "@example.com"
	w.Send("POST", "/api/v2/members/invite", w.owner.Access, fields{"email": address, "role": role}).Want(w.t, http.StatusCreated)
	w.Send("POST", "/api/v2/auth/accept-invitation", "", fields{"token": w.TokenMailedTo(address, 1), "password": servertest.Password}).Want(w.t, http.StatusCreated)
	a = w.Login(address, servertest.Password)
	return a, w.Me(a.Access)["user"].(map[string]any)["user_id"].(string)
}

func (w *world) key() (id, key string) {
	w.t.Helper()
	made := w.Send("POST", "/api/v2/api-keys", w.owner.Access, fields{"name": "a key", "scopes": []string{"vault:read"}}).Want(w.t, http.StatusCreated)
	return made["key_id"].(string), made["api_key"].(string)
}

func (w *world) sealed() (id string) {
	w.t.Helper()
	made := w.Send("POST", "/api/v2/vault/seal", w.owner.Access, fields{"name": "db", "credential_type": "api_key", "values": fields{"key": "s3cret"}, "ttl_days": 10}).Want(w.t, http.StatusCreated)
	return made["credential_id"].(string)
}

// limitedKey is an API key that a policy is to limit.
type limitedKey struct{ ID, secret string }

func (w *world) limitedKey() limitedKey {
	id, key := w.key()
	return limitedKey{id, key}
}

func rulesOf(paths []string) (rules []fields) {
	for _, path := range paths {
		rules = append(rules, fields{"path": path, "verbs": []string{"read"}})
	}
	return rules
}

func (w *world) policy(paths ...string) (id string) {
	w.t.Helper()
	made := w.send("POST", "/api/v2/access/policies", fields{"name": authz.NewID("x"), "rules": rulesOf(paths)}, http.StatusCreated)
	return made["policy"].(fields)["policy_id"].(string)
}

func (w *world) rules(id string, paths ...string) {
	w.t.Helper()
	w.send("PUT", "/api/v2/access/policies/"+id, fields{"name": authz.NewID("x"), "rules": rulesOf(paths)}, http.StatusOK)
}

func (w *world) bind(subject string, policies ...string) {
	w.t.Helper()
	w.send("PUT", "/api/v2/access/bindings/"+subject, fields{"policies": policies}, http.StatusOK)
}

func (w *world) group() (id string) {
	w.t.Helper()
	made := w.send("POST", "/api/v2/groups", fields{"name": authz.NewID("x")}, http.StatusCreated)
	return made["group"].(fields)["group_id"].(string)
}

// memberOf returns a limited user who is a member of the groups.
func (w *world) memberOf(groups ...string) (user string) {
	w.t.Helper()
	_, user = w.member(authz.NewID("x"), "limited")
	for _, group := range groups {
		w.send("PUT", "/api/v2/groups/"+group+"/members/"+user, nil, http.StatusOK)
	}
	return user
}

// wantReads compares what a user reads with what it read at the time of the rollback, or since.
func (r *restored) wantReads(tenant authz.TenantID, user string, revived bool, was, is string) {
	r.t.Helper()
	got := ""
	for _, path := range []string{"a/x", "b/x", "c/x"} {
		j, err := r.identity.Access.Check(r.t.Context(), authz.SystemPrincipal(tenant), identity.Question{Path: path, Verb: authz.ReadPath, Subject: user})
		if must(r.t, err); j.Allowed {
			got += path + " "
		}
	}
	if want := map[bool]string{true: was, false: is}[revived]; got != want {
		r.t.Errorf("the user reads %q, want %q", got, want)
	}
}

// reads returns which of the paths an API key reads.
func (r *restored) reads(key string, paths ...string) (allowed string) {
	r.t.Helper()
	c, err := r.identity.Authenticate(r.t.Context(), key)
	must(r.t, err)
	for _, path := range paths {
		if c.Reaches(authz.UnsealCredential, path) {
			allowed += path + " "
		}
	}
	return allowed
}

// snapshot copies all rows to a new database file.
func (w *world) snapshot() string {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), "latticekeep.db")
	to, err := bolt.Open(path, bolt.Options{})
	must(w.t, err)
	var families []string
	for _, f := range state.Families {
		families = append(families, f.Prefix)
	}
	must(w.t, to.Update(w.t.Context(), func(tx store.Tx) (err error) {
		for key, value := range w.Rows.Copy(families...) {
			err = errors.Join(err, tx.Put([]byte(key), value))
		}
		return err
	}))
	must(w.t, to.Close())
	return path
}

// restored is a store after a rollback.
type restored struct {
	t        *testing.T
	result   rollback.Result
	identity *identity.Service
	vault    *vault.Vault
	keys     *keyring.Ring
	store    store.Database
	entries  []*audit.Entry // of the new epoch
}

// verified opens a database file for reading and verifies it.
func verified(t *testing.T, path string) (*bolt.Store, verify.Report) {
	t.Helper()
	s, err := bolt.Open(path, bolt.Options{ReadOnly: true})
	must(t, err)
	report, err := offline.VerifyStore(t.Context(), s, verify.Options{})
	must(t, err)
	return s, report
}

// apply rolls at back, with the later file if it is not empty.
func (w *world) apply(at, later string, change func(*rollback.Options)) (rollback.Result, error) {
	w.t.Helper()
	s, report := verified(w.t, at)
	must(w.t, s.Close())
	o := rollback.Options{KMS: w.KMS, To: w.Clock.Now(), Now: w.Clock.Now}
	if later != "" {
		s, o.LaterReport = verified(w.t, later)
		o.Later = s
		defer s.Close()
	}
	if change != nil {
		change(&o)
	}
	return rollback.Apply(w.t.Context(), at, report, o)
}

// restore rolls back, verifies the result and opens it.
func (w *world) restore(at, later string, change func(*rollback.Options)) *restored {
	w.t.Helper()
	result, err := w.apply(at, later, change)
	must(w.t, err)
	s, report := verified(w.t, at)
	must(w.t, s.Close())
	if len(report.Rollbacks) != 1 || report.Rollbacks[0].Epoch != result.Epoch {
		w.t.Errorf("accepted rollbacks: %+v", report.Rollbacks)
	}
	r := &restored{t: w.t, result: result}
	bound := state.New(func(e *state.RowError) { w.t.Error(e) })
	log := writer.New(w.Clock.Now, bound)
	db, err := bolt.Open(at, bolt.Options{Hook: log.Commit})
	must(w.t, err)
	w.t.Cleanup(func() { db.Close() })
	r.store = bound.Guard(db)
	g := guard.New(log)
	r.identity, r.keys, err = identity.Open(w.t.Context(), r.store, log, g, w.KMS[0], keyring.Config{Previous: w.KMS[1:], Now: w.Clock.Now})
	must(w.t, err)
	found, err := bound.Scan(w.t.Context(), db, 1)
	must(w.t, err)
	if !bound.Complete() || len(found.Refused) > 0 {
		w.t.Errorf("rows that are not those of the log: %v", found.Refused)
	}
	r.vault = vault.New(r.store, g, r.keys, w.Clock.Now)
	r.entries = entriesFrom(w.t, db, result.Sequence)
	return r
}

// entriesFrom returns the successful entries from a sequence on, and fails the test for any other.
func entriesFrom(t *testing.T, s store.Store, from uint64) (all []*audit.Entry) {
	t.Helper()
	rng := audit.EntryRange
	rng.From = audit.EntryKey(from)
	must(t, entries.ScanAll(t.Context(), s, rng, func(row entries.Row) error {
		e, err := audit.DecodeStoredEntry(row.Row, row.Batch)
		if err != nil {
			return err
		}
		if all = append(all, e.Entry); e.Entry.Outcome != audit.Success {
			t.Errorf("the rollback recorded %s %s: %v", e.Entry.EventType, e.Entry.Outcome, e.Entry.Attributes)
		}
		return nil
	}))
	return all
}

// recorded reports whether the new epoch has an entry about a resource.
func (r *restored) recorded(event audit.EventType, id string) bool {
	for _, e := range r.entries {
		if e.EventType == event && e.Resource.ID == id {
			return true
		}
	}
	return false
}

// want fails the test unless the rollback has, or has not, taken something away again.
func (r *restored) want(event audit.EventType, id string, taken bool) {
	r.t.Helper()
	if r.recorded(event, id) != taken {
		r.t.Errorf("an entry %s of %s is %v", event, id, !taken)
	}
}

// authenticates reports whether an API key works.
func (r *restored) authenticates(key string) bool {
	r.t.Helper()
	c, err := r.identity.Authenticate(r.t.Context(), key)
	if err != nil && !errors.Is(err, fault.Unauthenticated) {
		r.t.Fatal(err)
	}
	return err == nil && len(c.Scopes) > 0
}

func (r *restored) signsIn(a servertest.Account, password string) bool {
	r.t.Helper()
	_, err := r.identity.SignIn(r.t.Context(), authz.Principal{}, a.Email, secret.Bytes(password))
	if err != nil && !errors.Is(err, fault.Unauthenticated) {
		r.t.Fatal(err)
	}
	return err == nil
}

func (r *restored) refreshes(token string) bool {
	r.t.Helper()
	_, err := r.identity.Refresh(r.t.Context(), authz.Principal{}, token)
	if err != nil && !errors.Is(err, fault.Unauthenticated) {
		r.t.Fatal(err)
	}
	return err == nil
}

func (r *restored) has(key string) (found bool) {
	r.t.Helper()
	must(r.t, r.store.View(r.t.Context(), func(rd store.Reader) error {
		return rd.Scan(store.Prefix([]byte(key)), func(_, _ []byte) bool { found = true; return false })
	}))
	return found
}

// scene is something that is there at the time of a rollback, and is taken away later.
type scene struct {
	event audit.EventType
	name  string
	// before makes it. after takes it away. check fails the test unless it is gone, or with revived is
	// there.
	before func(w *world) (after func(), check func(r *restored, revived bool))
}

func (w *world) send(method, path string, body any, status int) map[string]any {
	w.t.Helper()
	return w.Send(method, path, w.owner.Access, body).Want(w.t, status)
}

var scenes = []scene{
	{audit.APIKeyRevoked, "a revoked key", func(w *world) (func(), func(*restored, bool)) {
		id, key := w.key()
		return func() { w.Send("DELETE", "/api/v2/api-keys/"+id, w.owner.Access, nil).Want(w.t, http.StatusOK) },
			func(r *restored, revived bool) {
				if r.authenticates(key) != revived {
					r.t.Errorf("the key works: %v", !revived)
				}
				r.want(audit.APIKeyRevoked, id, !revived)
			}
	}},
	{audit.APIKeySuspended, "a suspended key", func(w *world) (func(), func(*restored, bool)) {
		id, key := w.key()
		return func() { must(w.t, w.Identity.SuspendAPIKey(w.t.Context(), authz.SystemPrincipal(w.tenant), id)) },
			func(r *restored, revived bool) {
				if r.authenticates(key) != revived {
					r.t.Errorf("the key works: %v", !revived)
				}
				r.want(audit.APIKeySuspended, id, !revived)
			}
	}},
	{audit.PolicyChanged, "a policy that was narrowed", func(w *world) (func(), func(*restored, bool)) {
		id, key := w.policy("a/*", "b/*"), w.limitedKey()
		w.bind(key.ID, id)
		return func() { w.rules(id, "b/*", "c/*") }, func(r *restored, revived bool) {
			if got := r.reads(key.secret, "a/x", "b/x", "c/x"); got != map[bool]string{true: "a/x b/x ", false: "b/x "}[revived] {
				r.t.Errorf("the key reads %q", got)
			}
			r.want(audit.PolicyChanged, id, !revived)
		}
	}},
	{audit.PolicyBound, "a key that got fewer policies", func(w *world) (func(), func(*restored, bool)) {
		a, b, key := w.policy("a/*"), w.policy("b/*"), w.limitedKey()
		w.bind(key.ID, a, b)
		return func() { w.bind(key.ID, b, w.policy("c/*")) }, func(r *restored, revived bool) {
			if got := r.reads(key.secret, "a/x", "b/x", "c/x"); got != map[bool]string{true: "a/x b/x ", false: "b/x "}[revived] {
				r.t.Errorf("the key reads %q", got)
			}
			r.want(audit.PolicyBound, key.ID, !revived)
		}
	}},
	{audit.PolicyBound, "a key that no policy limited before", func(w *world) (func(), func(*restored, bool)) {
		key := w.limitedKey()
		return func() { w.bind(key.ID, w.policy("a/*")) }, func(r *restored, revived bool) {
			if got := r.reads(key.secret, "a/x"); got != map[bool]string{true: "a/x ", false: ""}[revived] {
				r.t.Errorf("the key reads %q", got)
			}
			r.want(audit.PolicyBound, key.ID, !revived)
		}
	}},
	{audit.PolicyBound, "a group that got fewer policies", func(w *world) (func(), func(*restored, bool)) {
		a, b, group := w.policy("a/*"), w.policy("b/*"), w.group()
		w.bind(group, a, b)
		user := w.memberOf(group)
		return func() { w.bind(group, b, w.policy("c/*")) }, func(r *restored, revived bool) {
			r.wantReads(w.tenant, user, revived, "a/x b/x ", "b/x ")
			r.want(audit.PolicyBound, group, !revived)
		}
	}},
	{audit.PolicyUnbound, "a group that got no policy", func(w *world) (func(), func(*restored, bool)) {
		a, group := w.policy("a/*"), w.group()
		w.bind(group, a)
		user := w.memberOf(group)
		return func() { w.send("DELETE", "/api/v2/access/bindings/"+group, nil, http.StatusOK) }, func(r *restored, revived bool) {
			r.wantReads(w.tenant, user, revived, "a/x ", "")
			r.want(audit.PolicyUnbound, group, !revived)
		}
	}},
	{audit.GroupChanged, "a member that left a group", func(w *world) (func(), func(*restored, bool)) {
		a, group, kept := w.policy("a/*"), w.group(), w.group()
		w.bind(group, a)
		w.bind(kept, w.policy("b/*"))
		user := w.memberOf(group, kept)
		return func() { w.send("DELETE", "/api/v2/groups/"+group+"/members/"+user, nil, http.StatusOK) },
			func(r *restored, revived bool) {
				r.wantReads(w.tenant, user, revived, "a/x b/x ", "b/x ")
				r.want(audit.GroupChanged, group, !revived)
			}
	}},
	{audit.GroupDeleted, "a deleted group", func(w *world) (func(), func(*restored, bool)) {
		a, group := w.policy("a/*"), w.group()
		w.bind(group, a)
		user := w.memberOf(group)
		return func() { w.send("DELETE", "/api/v2/groups/"+group, nil, http.StatusOK) }, func(r *restored, revived bool) {
			r.wantReads(w.tenant, user, revived, "a/x ", "")
			r.want(audit.GroupDeleted, group, !revived)
		}
	}},
	{audit.CredentialDeleted, "a deleted credential", func(w *world) (func(), func(*restored, bool)) {
		id := w.sealed()
		w.send("PATCH", "/api/v2/vault/"+id+"/details", map[string]any{"tags": []string{"t"}}, http.StatusOK)
		return func() { w.send("DELETE", "/api/v2/vault/"+id, nil, http.StatusOK) },
			func(r *restored, revived bool) {
				if r.has("details/"+string(w.tenant)+"/"+id) != revived {
					r.t.Errorf("what was said of it: %v", !revived)
				}
				_, err := r.vault.Read(r.t.Context(), authz.SystemPrincipal(w.tenant), vault.ByID(id))
				if (err == nil) != revived {
					r.t.Errorf("unsealing: %v", err)
				}
				r.want(audit.CredentialDeleted, id, !revived)
			}
	}},
	{audit.CredentialReencrypted, "a credential in the trash", func(w *world) (func(), func(*restored, bool)) {
		c, err := w.Vault.Seal(w.t.Context(), authz.SystemPrincipal(w.tenant), vault.SealRequest{Name: "renewed", Type: "t", Values: map[string]secret.Bytes{"k": secret.Bytes("v")}})
		must(w.t, err)
		id, renewed := w.sealed(), c.ID
		trash := func(id string) { w.send("POST", "/api/v2/vault/"+id+"/trash", nil, http.StatusOK) }
		return func() {
				trash(id)
				trash(renewed)
				_, err := w.Vault.Renew(w.t.Context(), authz.SystemPrincipal(w.tenant), renewed, 0, "")
				must(w.t, err)
			}, func(r *restored, revived bool) {
				system := authz.SystemPrincipal(w.tenant)
				if _, err := r.vault.Read(r.t.Context(), system, vault.ByID(id)); (err == nil) != revived {
					r.t.Errorf("it is read: %v", err)
				}
				if _, err := r.vault.Read(r.t.Context(), system, vault.ByID(renewed)); err != nil {
					r.t.Errorf("one that was renewed: %v", err)
				}
				r.want(audit.CredentialReencrypted, id, !revived)
				r.want(audit.CredentialReencrypted, renewed, false)
			}
	}},
	{audit.CredentialDeleted, "the credential of an object", func(w *world) (func(), func(*restored, bool)) {
		p, ctx := authz.SystemPrincipal(w.tenant), w.t.Context()
		desired := vault.Desired{Name: "of-object", Type: "api_key", TTLDays: 10, Overlap: time.Hour, SpecDigest: [32]byte{1},
			Object: vault.Object{Cluster: "c", Namespace: "shop", Name: "db"}}
		var id string
		for version := range uint64(2) { // the second keeps the first as its previous version
			desired.Values = map[string]secret.Bytes{"key": []byte(fmt.Sprint("value ", version))}
			o, err := w.Vault.Apply(ctx, p, "uid-deleted", version, desired)
			must(w.t, err)
			id = o.ID
		}
		return func() {
				_, err := w.Vault.Release(ctx, p, "uid-deleted", [32]byte{}, true)
				must(w.t, err)
			}, func(r *restored, revived bool) {
				for _, family := range []string{"credential/", "former/", "owner/", "credential-version/"} {
					if r.has(family+string(w.tenant)+"/"+id) != revived {
						r.t.Errorf("rows %s of the object's credential: %v", family, !revived)
					}
				}
				if r.has("owned/"+string(w.tenant)+"/uid-deleted") != revived {
					r.t.Errorf("the row of the object: %v", !revived)
				}
			}
	}},
	{audit.HistoryRuleChanged, "versions that a rule no longer keeps", func(w *world) (func(), func(*restored, bool)) {
		p, ctx := authz.SystemPrincipal(w.tenant), w.t.Context()
		values := func(v string) map[string]secret.Bytes { return map[string]secret.Bytes{"k": secret.Bytes(v)} }
		rule := func(path string, versions int) {
			_, err := w.Vault.Rules.Set(ctx, p, kept.Rule{Path: path, Versions: versions})
			must(w.t, err)
		}
		rule("kept/*", 3)
		rule("kept/removed", 3)
		rule("**", 0)
		var ids []string
		for _, name := range []string{"kept/lowered", "kept/narrowed", "kept/removed"} {
			c, err := w.Vault.Seal(ctx, p, vault.SealRequest{Name: name, Type: "t", Values: values("1")})
			must(w.t, err)
			_, err = w.Vault.Replace(ctx, p, c.ID, vault.ReplaceRequest{Values: values("2")})
			must(w.t, err)
			ids = append(ids, c.ID)
		}
		return func() {
				rule("kept/narrowed", 0)
				rule("kept/*", 0)
				_, err := w.Vault.Rules.Remove(ctx, p, "kept/removed")
				must(w.t, err)
			}, func(r *restored, revived bool) {
				for _, id := range ids {
					if r.has("kept/"+string(w.tenant)+"/"+id) != revived {
						r.t.Errorf("a kept version: %v", !revived)
					}
				}
				r.want(audit.HistoryRuleChanged, string(w.tenant), !revived)
			}
	}},
	{audit.SettingsChanged, "paths on which credentials may no longer never expire", func(w *world) (func(), func(*restored, bool)) {
		change := func(paths ...string) {
			_, err := w.Vault.Settings.Change(w.t.Context(), authz.SystemPrincipal(w.tenant), settings.Change{NeverExpires: &paths})
			must(w.t, err)
		}
		change("both/**", "withdrawn/**")
		return func() { change("both/**", "later/**") },
			func(r *restored, revived bool) {
				s, err := r.vault.Settings.Read(r.t.Context(), authz.SystemPrincipal(w.tenant))
				must(r.t, err)
				want := []string{"both/**"}
				if revived {
					want = []string{"both/**", "withdrawn/**"}
				}
				if !slices.Equal(s.NeverExpires, want) {
					r.t.Errorf("paths %q, want %q", s.NeverExpires, want)
				}
				r.want(audit.SettingsChanged, string(w.tenant), !revived)
			}
	}},
	{audit.SettingsChanged, "past names that were to be forgotten", func(w *world) (func(), func(*restored, bool)) {
		return func() { // the tenant's first settings
				_, err := w.Vault.Settings.Change(w.t.Context(), authz.SystemPrincipal(w.tenant), settings.Change{NamesKept: new(int)})
				must(w.t, err)
			},
			func(r *restored, revived bool) {
				s, err := r.vault.Settings.Read(r.t.Context(), authz.SystemPrincipal(w.tenant))
				must(r.t, err)
				if (s.NamesKeptDays() == settings.DefaultNamesKept) != revived {
					r.t.Errorf("past names are kept for %d days", s.NamesKeptDays())
				}
			}
	}},
	{audit.UserSignedOut, "a session that was signed out", func(w *world) (func(), func(*restored, bool)) {
		a := w.Login(w.owner.Email, w.owner.Password)
		return func() { w.Send("POST", "/api/v2/auth/logout", a.Access, nil).Want(w.t, http.StatusOK) },
			func(r *restored, revived bool) {
				if r.refreshes(a.Refresh) != revived {
					r.t.Errorf("the session goes on: %v", !revived)
				}
			}
	}},
	{audit.SessionRefreshed, "a used refresh token", func(w *world) (func(), func(*restored, bool)) {
		a := w.Login(w.owner.Email, w.owner.Password)
		return func() {
				_, err := w.Identity.Refresh(w.t.Context(), authz.Principal{}, a.Refresh)
				must(w.t, err)
			}, func(r *restored, revived bool) {
				if r.refreshes(a.Refresh) != revived {
					r.t.Errorf("the used token counts: %v", !revived)
				}
			}
	}},
	{audit.SessionEnded, "a session that its user ended", func(w *world) (func(), func(*restored, bool)) {
		a := w.Login(w.owner.Email, w.owner.Password)
		return func() {
				c, err := w.Identity.AuthenticateToken(w.t.Context(), a.Access)
				must(w.t, err)
				must(w.t, w.Identity.EndSession(w.t.Context(), c, c.Session))
			}, func(r *restored, revived bool) {
				if _, err := r.identity.AuthenticateToken(r.t.Context(), a.Access); (err == nil) != revived {
					r.t.Errorf("the session goes on: %v", err)
				}
			}
	}},
	{audit.PasswordChanged, "a changed password", func(w *world) (func(), func(*restored, bool)) {
		a, id := w.member("changes", "member")
		return func() {
				body := fields{"current_password": a.Password, "new_password": servertest.OtherPassword}
				w.Send("POST", "/api/v2/auth/change-password", a.Access, body).Want(w.t, http.StatusOK)
			}, func(r *restored, revived bool) {
				if r.signsIn(a, a.Password) != revived || r.signsIn(a, servertest.OtherPassword) {
					r.t.Error("a password signs in that should not, or none does")
				}
				r.want(audit.PasswordChanged, id, !revived)
			}
	}},
	{audit.PasswordReset, "a used token of a reset", func(w *world) (func(), func(*restored, bool)) {
		a, _ := w.member("resets", "member")
		w.Send("POST", "/api/v2/auth/forgot-password", "", fields{"email": a.Email}).Want(w.t, http.StatusOK)
		token := w.ResetTokenMailedTo(a.Email)
		return func() { w.Call(reset(w.t, token)).Want(w.t, http.StatusOK) },
			func(r *restored, revived bool) {
				err := r.identity.ResetPassword(r.t.Context(), authz.Principal{}, token, secret.Bytes(servertest.OtherPassword))
				if (err == nil) != revived {
					r.t.Errorf("the used token resets the password: %v", err)
				}
			}
	}},
	{audit.PasswordResetRequested, "a replaced token of a reset", func(w *world) (func(), func(*restored, bool)) {
		a, _ := w.member("replaces", "member")
		w.Send("POST", "/api/v2/auth/forgot-password", "", fields{"email": a.Email}).Want(w.t, http.StatusOK)
		token := w.ResetTokenMailedTo(a.Email)
		return func() {
				w.Clock.Set(w.Clock.Now().Add(16 * time.Minute))
				w.Send("POST", "/api/v2/auth/forgot-password", "", fields{"email": a.Email}).Want(w.t, http.StatusOK)
			}, func(r *restored, revived bool) {
				err := r.identity.ResetPassword(r.t.Context(), authz.Principal{}, token, secret.Bytes(servertest.OtherPassword))
				if (err == nil) != revived {
					r.t.Errorf("the replaced token resets the password: %v", err)
				}
			}
	}},
	{audit.MemberJoined, "a used invitation", func(w *world) (func(), func(*restored, bool)) {
		made := w.send("POST", "/api/v2/members/invite", fields{"email": "joins@example.com", "role": "member"}, http.StatusCreated)
		token := w.TokenMailedTo("joins@example.com", 1)
		return func() {
				w.Send("POST", "/api/v2/auth/accept-invitation", "", fields{"token": token, "password": servertest.Password}).Want(w.t, http.StatusCreated)
			}, func(r *restored, revived bool) {
				_, _, err := r.identity.AcceptInvitation(r.t.Context(), authz.Principal{}, token, secret.Bytes(servertest.Password))
				if (err == nil) != revived {
					r.t.Errorf("the used invitation is accepted: %v", err)
				}
				r.want(audit.InvitationRevoked, made["invitation_id"].(string), !revived)
			}
	}},
	{audit.InvitationRevoked, "a revoked invitation", func(w *world) (func(), func(*restored, bool)) {
		made := w.send("POST", "/api/v2/members/invite", fields{"email": "invited@example.com", "role": "admin"}, http.StatusCreated)
		token := w.TokenMailedTo("invited@example.com", 1)
		return func() {
				w.send("DELETE", "/api/v2/members/invitations/"+made["invitation_id"].(string), nil, http.StatusOK)
			},
			func(r *restored, revived bool) {
				_, _, err := r.identity.AcceptInvitation(r.t.Context(), authz.Principal{}, token, secret.Bytes(servertest.Password))
				if (err == nil) != revived {
					r.t.Errorf("the revoked invitation is accepted: %v", err)
				}
			}
	}},
	{audit.MemberChanged, "a lowered role", func(w *world) (func(), func(*restored, bool)) {
		a, id := w.member("lowered", "admin")
		return func() { w.send("PUT", "/api/v2/members/"+id, fields{"role": "auditor"}, http.StatusOK) },
			func(r *restored, revived bool) {
				c, err := r.identity.AuthenticateToken(r.t.Context(), a.Access)
				must(r.t, err)
				if c.May(authz.SealCredential) != revived {
					r.t.Errorf("the member seals credentials: %v", !revived)
				}
				r.want(audit.MemberChanged, id, !revived)
			}
	}},
	{audit.MemberRemoved, "a removed member with an API key", func(w *world) (func(), func(*restored, bool)) {
		a, id := w.member("removed", "admin")
		made := w.Send("POST", "/api/v2/api-keys", a.Access, fields{"name": "of a member", "scopes": []string{"vault:read"}}).Want(w.t, http.StatusCreated)
		key := made["api_key"].(string)
		return func() { w.send("DELETE", "/api/v2/members/"+id, nil, http.StatusOK) },
			func(r *restored, revived bool) {
				if r.authenticates(key) != revived || r.refreshes(a.Refresh) != revived || r.signsIn(a, a.Password) != revived {
					r.t.Errorf("a key, session or password of the member works: %v", !revived)
				}
				r.want(audit.MemberRemoved, id, !revived)
			}
	}},
	{audit.NamespaceMapped, "a namespace that moved to a tenant", func(w *world) (func(), func(*restored, bool)) {
		return moveNamespace(w, "moved", w.tenant)
	}},
	{audit.NamespaceMapped, "a namespace that moved to a tenant that is lost", func(w *world) (func(), func(*restored, bool)) {
		return moveNamespace(w, "lost", "")
	}},
	{audit.SealingKeyRetired, "a retired sealing key", func(w *world) (func(), func(*restored, bool)) {
		operator := authz.SystemPrincipal(authz.SystemTenant)
		operator.Scopes = authz.SystemScopes()
		id, err := w.Keys.CurrentSealingKey(w.t.Context())
		must(w.t, err)
		return func() {
				_, err := w.Sealing.Rotate(w.t.Context(), operator)
				must(w.t, err)
				_, err = w.Sealing.Retire(w.t.Context(), operator, id)
				must(w.t, err)
			}, func(r *restored, revived bool) {
				keys, err := r.keys.SealingKeys(r.t.Context())
				must(r.t, err)
				for _, k := range keys {
					if k.ID == id && (k.State == keyring.SealingKeyRetired) == revived {
						r.t.Errorf("the key is %s", k.State)
					}
				}
			}
	}},
	{audit.WebhookDeleted, "a deleted webhook", func(w *world) (func(), func(*restored, bool)) {
		create := func() string {
			made, _, err := w.Webhooks.Create(w.t.Context(), authz.SystemPrincipal(w.tenant), webhooks.Request{URL: "https://hooks.example.com/x"})
			must(w.t, err)
			return made.ID
		}
		id, kept := create(), create()
		return func() { w.send("DELETE", "/api/v2/webhooks/"+id, nil, http.StatusOK) },
			func(r *restored, revived bool) {
				there := func(id string) bool {
					found := false
					must(r.t, r.store.View(r.t.Context(), func(rd store.Reader) error {
						row, err := rd.Get([]byte(webhooks.Family + string(w.tenant) + "/" + id))
						found = row != nil
						return err
					}))
					return found
				}
				if there(id) != revived || !there(kept) {
					r.t.Errorf("it is there: %v; another one is: %v", there(id), there(kept))
				}
				r.want(audit.WebhookDeleted, id, !revived)
				r.want(audit.WebhookDeleted, kept, false)
			}
	}},
	{audit.NamesErased, "erased past names", func(w *world) (func(), func(*restored, bool)) {
		id := w.send("POST", "/api/v2/groups", fields{"name": "team"}, http.StatusCreated)["group"].(fields)["group_id"].(string)
		w.send("DELETE", "/api/v2/groups/"+id, nil, http.StatusOK)
		return func() { w.send("DELETE", "/api/v2/audit/names/"+id, nil, http.StatusOK) },
			func(r *restored, revived bool) {
				var names []past.Name
				must(r.t, r.store.View(r.t.Context(), func(rd store.Reader) (err error) {
					names, err = past.New(r.keys, w.Clock.Now).Of(rd, w.tenant, id)
					return err
				}))
				if len(names) == 1 != revived {
					r.t.Errorf("names: %v", names)
				}
			}
	}},
	{audit.ReviewNoteErased, "an erased note", func(w *world) (func(), func(*restored, bool)) {
		id := w.send("POST", "/api/v2/audit/reviews", fields{"subject": "inventory", "note": "about somebody"}, http.StatusCreated)["note_id"].(string)
		return func() { w.send("DELETE", "/api/v2/audit/review-notes/"+id, nil, http.StatusOK) },
			func(r *restored, revived bool) {
				if r.has("review-note/"+string(w.tenant)+"/"+id) != revived {
					r.t.Errorf("the note is there: %v", !revived)
				}
			}
	}},
}

func reset(t *testing.T, token string) servertest.Request {
	return servertest.Request{Method: "POST", Path: "/api/v2/auth/reset-password", Body: servertest.Marshal(t, fields{"token": token, "new_password": servertest.OtherPassword})}
}

// moveNamespace has a namespace leave the tenant for another one, or for one that is made later.
func moveNamespace(w *world, uid string, from authz.TenantID) (func(), func(*restored, bool)) {
	operator := authz.SystemPrincipal(authz.SystemTenant)
	operator.Scopes = authz.SystemScopes()
	create := func(name string) authz.TenantID {
		made, err := w.Identity.CreateTenant(context.Background(), operator, name)
		must(w.t, err)
		return made.ID
	}
	to := authz.TenantID("")
	if from != "" {
		to = create("there before")
	} else {
		from = w.tenant
	}
	must(w.t, w.Identity.MapNamespaceUID(w.t.Context(), "cluster", uid, from))
	return func() {
			if to == "" {
				to = create("made later")
			}
			must(w.t, w.Identity.MapNamespaceUID(w.t.Context(), "cluster", uid, to))
		}, func(r *restored, revived bool) {
			now, err := r.identity.FindNamespaceTenant(r.t.Context(), "cluster", uid)
			must(r.t, err)
			if (now == from) != revived || now == "" {
				r.t.Errorf("the namespace is part of %s, and was of %s", now, from)
			}
		}
}

// act plays all scenes and returns the store before and after what was taken away.
func (w *world) act() (at, later string, checks []func(*restored, bool)) {
	w.t.Helper()
	var afters []func()
	for _, s := range scenes {
		after, check := s.before(w)
		afters, checks = append(afters, after), append(checks, check)
	}
	at = w.snapshot()
	for _, after := range afters {
		after()
	}
	return at, w.snapshot(), checks
}

// A rollback gives back values, and nobody's access that was taken away since.
func TestWhatWasTakenAwayStaysAway(t *testing.T) {
	w := newWorld(t)
	keptID, keptKey := w.key()
	kept := w.Login(w.owner.Email, w.owner.Password)
	rotated := w.sealed()
	at, _, checks := w.act()
	w.send("PUT", "/api/v2/vault/"+rotated, fields{"values": fields{"key": "another"}}, http.StatusOK)
	later := w.snapshot()
	revived := w.copy(at)

	r := w.restore(at, later, nil)
	for i, check := range checks {
		t.Run(scenes[i].name, func(t *testing.T) { r.t = t; check(r, false) })
	}
	r.t = t
	if len(r.result.Unkept) > 0 || r.result.Unknown {
		t.Errorf("%+v", r.result)
	}
	if !r.authenticates(keptKey) || r.recorded(audit.APIKeyRevoked, keptID) || !r.refreshes(kept.Refresh) || !r.signsIn(w.owner, w.owner.Password) {
		t.Error("somebody lost access that nobody had taken away")
	}
	u, err := r.vault.Read(t.Context(), authz.SystemPrincipal(w.tenant), vault.ByID(rotated))
	must(t, err)
	if got := string(u.Values["key"]); got != "s3cret" {
		t.Errorf("the value is %q, not that of the time", got)
	}
	if r.result.Lost[audit.CredentialRotated] != 1 || r.result.Lost[audit.TenantCreated] != 1 || r.result.Lost[audit.APIKeyRevoked] != 0 {
		t.Errorf("lost: %v", r.result.Lost)
	}
	first := r.entries[0]
	if first.EventType != audit.RollbackAccepted || first.Attributes["restored_to"] != w.Clock.Now().Format(time.RFC3339Nano) ||
		first.Attributes["removals"] != "kept" || first.Attributes["later_log"] != "whole" {
		t.Errorf("the first entry of the epoch: %+v", first)
	}
	s, report := verified(t, later)
	must(t, s.Close())
	if r.result.LostTo < report.Sequence+writer.SkippedAfterRestore || first.Attributes[audit.AttributeAnchored] != strconv.FormatUint(report.Sequence, 10) ||
		first.Attributes[audit.AttributeAnchoredHash] != report.Hash {
		t.Errorf("the epoch begins after %d, with %v; the later log ends at %d %s", r.result.LostTo, first.Attributes, report.Sequence, report.Hash)
	}

	r = w.restore(revived, later, func(o *rollback.Options) { o.Revive = true })
	for i, check := range checks {
		t.Run("revived: "+scenes[i].name, func(t *testing.T) { r.t = t; check(r, true) })
	}
	r.t = t
	if len(r.entries) != 1 || r.entries[0].Attributes["removals"] != "revived" || len(r.result.Kept) < len(scenes) {
		t.Errorf("entries: %d, removals: %d, %v", len(r.entries), len(r.result.Kept), r.entries[0].Attributes)
	}
}

// The owner of that time was removed, and the one who followed had no such role then.
func TestATenantThatIsLeftWithoutAnOwnerIsNamed(t *testing.T) {
	w := newWorld(t)
	next, id := w.member("next", "admin")
	at := w.snapshot()
	w.send("PUT", "/api/v2/members/"+id, fields{"role": "owner"}, http.StatusOK)
	removed := w.Me(w.owner.Access)["user"].(map[string]any)["user_id"].(string)
	w.Send("DELETE", "/api/v2/members/"+removed, next.Access, nil).Want(t, http.StatusOK)
	r := w.restore(at, w.snapshot(), nil)
	if !slices.Equal(r.result.Ownerless, []authz.TenantID{w.tenant}) || !r.signsIn(next, next.Password) || r.signsIn(w.owner, w.owner.Password) {
		t.Errorf("without an owner: %v", r.result.Ownerless)
	}
}

// copy copies a database file that nobody uses.
func (w *world) copy(path string) string {
	w.t.Helper()
	b, err := os.ReadFile(path)
	must(w.t, err)
	path = filepath.Join(w.t.TempDir(), "latticekeep.db")
	must(w.t, os.WriteFile(path, b, 0o600))
	return path
}

// Nobody knows then what was taken away.
func TestWithoutTheLaterLogSessionsEndAndKeysWait(t *testing.T) {
	w := newWorld(t)
	id, key := w.key()
	system := w.SystemKey()
	operator := authz.SystemPrincipal(authz.SystemTenant)
	operator.Scopes = authz.SystemScopes()
	_, err := w.Identity.ActivateTenant(t.Context(), operator, w.tenant)
	must(t, err)
	w.Clock.Set(w.Clock.Now().Add(20 * 24 * time.Hour)) // a key that was made pending would have lapsed
	w.owner = w.Login(w.owner.Email, w.owner.Password)
	session := w.Login(w.owner.Email, w.owner.Password)
	gone, goneKey := w.key()
	invitation := w.send("POST", "/api/v2/members/invite", fields{"email": "later@example.com", "role": "member"}, http.StatusCreated)["invitation_id"].(string)
	at := w.snapshot()
	w.send("DELETE", "/api/v2/api-keys/"+gone, nil, http.StatusOK)
	later := w.snapshot()
	for name, c := range map[string]struct{ later, known string }{"missing": {"", "missing"}, "partial": {later, "partial"}} {
		t.Run(name, func(t *testing.T) {
			w.t = t
			r := w.restore(w.copy(at), c.later, func(o *rollback.Options) { o.Unknown = "the bucket is gone" })
			if r.authenticates(key) || r.authenticates(goneKey) || r.authenticates(system) || r.refreshes(session.Refresh) || r.refreshes(w.owner.Refresh) {
				t.Error("a key or a session of that time works")
			}
			if !r.result.Unknown || r.entries[0].Attributes["later_log"] != c.known {
				t.Errorf("%v %v", r.result.Unknown, r.entries[0].Attributes)
			}
			r.want(audit.APIKeySuspended, id, true)
			r.want(audit.InvitationRevoked, invitation, true)
			r.want(audit.APIKeyRevoked, gone, c.later != "")
			if !slices.ContainsFunc(r.entries, func(e *audit.Entry) bool {
				return e.EventType == audit.APIKeyRevoked && e.TenantID == string(authz.SystemTenant)
			}) {
				t.Error("a key of the deployment waits for an owner, and there is none")
			}

			tokens, err := r.identity.SignIn(t.Context(), authz.Principal{}, w.owner.Email, secret.Bytes(w.owner.Password))
			must(t, err)
			owner, err := r.identity.AuthenticateToken(t.Context(), tokens.Access)
			must(t, err)
			must(t, r.identity.ApproveAPIKey(t.Context(), owner.Principal, id))
			if !r.authenticates(key) {
				t.Error("the key that an owner approved does not work")
			}
		})
	}
}

// A backup says who signed it. Somebody else can encrypt one, but the keys inside are not theirs.
func TestAnIdentityThatIsNotTheDeploymentsIsRefused(t *testing.T) {
	w := newWorld(t)
	at := w.snapshot()
	if _, err := w.apply(at, "", func(o *rollback.Options) { o.Identity = newWorld(t).Keys.Identity().ID() }); err == nil || !strings.Contains(err.Error(), "somebody else made it") {
		t.Errorf("got %v", err)
	}
	_, err := w.apply(at, "", func(o *rollback.Options) { o.Identity = w.Keys.Identity().ID() })
	must(t, err)
}

// A store that does not go on where the restored one ends says nothing about it.
func TestAnotherLogIsNotTheLaterOne(t *testing.T) {
	w := newWorld(t)
	at := w.snapshot()
	fork := w.copy(at)
	w.key()
	ahead := w.snapshot()
	_, err := w.apply(fork, "", nil)
	must(t, err)
	if _, err := w.apply(ahead, fork, nil); !errors.Is(err, rollback.ErrLater) {
		t.Errorf("got %v", err)
	}
	other := newWorld(t).snapshot()
	if _, err := w.apply(at, other, nil); !errors.Is(err, rollback.ErrLater) {
		t.Error("the store of another deployment counts")
	}
}

// Rows that somebody put into the later store without a key say nothing either.
func TestATamperedLaterStoreIsRefused(t *testing.T) {
	w := newWorld(t)
	id, _ := w.key()
	at := w.snapshot()
	w.send("DELETE", "/api/v2/api-keys/"+id, nil, http.StatusOK)
	later := w.snapshot()
	was, err := bolt.Open(at, bolt.Options{ReadOnly: true})
	must(t, err)
	to, err := bolt.Open(later, bolt.Options{})
	must(t, err)
	must(t, was.View(t.Context(), func(r store.Reader) error {
		return to.Update(t.Context(), func(tx store.Tx) (err error) {
			scanned := r.Scan(store.Prefix([]byte("session/")), func(key, _ []byte) bool {
				err = errors.Join(err, tx.Delete(bytes.Clone(key)))
				return true
			})
			return errors.Join(err, scanned)
		})
	}))
	must(t, errors.Join(was.Close(), to.Close()))
	if _, err := w.apply(at, later, nil); !errors.Is(err, rollback.ErrLater) {
		t.Errorf("got %v", err)
	}
}

// A new type of entry needs a decision, and what stays taken away needs a scene that shows it.
func TestEveryTypeOfEntryHasAnEffect(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "../../audit/event.go", nil, 0)
	must(t, err)
	types := 0
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if kind, ok := spec.Type.(*ast.Ident); !ok || kind.Name != "EventType" {
			return true
		}
		value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		must(t, err)
		types++
		if _, ok := rollback.Effects[audit.EventType(value)]; !ok {
			t.Errorf("%s: what becomes of it in a rollback?", value)
		}
		return true
	})
	if types != len(rollback.Effects) || types < 70 {
		t.Errorf("%d types of entries, %d effects", types, len(rollback.Effects))
	}
	for event, effect := range rollback.Effects {
		shown := false
		for _, s := range scenes {
			shown = shown || s.event == event
		}
		if shown != (effect == rollback.Kept) {
			t.Errorf("%s: its effect is %d, and a scene shows that it stays: %v", event, effect, shown)
		}
	}
}
