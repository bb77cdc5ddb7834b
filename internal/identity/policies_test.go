package identity

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/access"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// policy makes a policy with all verbs on the paths.
func (f *people) policy(by authz.Principal, name string, paths ...string) string {
	f.t.Helper()
	made, err := f.Access.CreatePolicy(f.t.Context(), by, policyRequest(name, paths...))
	must(f.t, err)
	return made.ID
}

func policyRequest(name string, paths ...string) access.PolicyRequest {
	r := access.PolicyRequest{Name: name}
	for _, path := range paths {
		r.Rules = append(r.Rules, authz.Rule{Path: path, Verbs: authz.Verbs()})
	}
	return r
}

func (f *people) bind(by authz.Principal, subject string, policies ...string) {
	f.t.Helper()
	_, err := f.Access.Bind(f.t.Context(), by, subject, policies)
	must(f.t, err)
}

// reads returns which of the paths a principal reads, separated by spaces.
func reads(p authz.Principal, paths ...string) string {
	return strings.Join(slices.DeleteFunc(slices.Clone(paths), func(path string) bool { return !p.Reaches(authz.UnsealCredential, path) }), " ")
}

// present returns the principal of an API key as of now.
func (f *people) present(secretKey string) authz.Principal {
	f.t.Helper()
	c, err := f.Authenticate(f.t.Context(), secretKey)
	must(f.t, err)
	return c.Principal
}

// A release that knows no policies would let everybody reach everything. So the first binding keeps it
// away from the store, and there is none while such a replica runs.
func TestABindingKeepsReleasesWithoutPoliciesAway(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	k, _, _ := f.newKey(owner.Principal, 0, authz.VaultRead)
	id := f.policy(owner.Principal, "a", "a/*")
	writer := func() int {
		t.Helper()
		is, err := format.Of(t.Context(), f.store)
		must(t, err)
		return is.Writer
	}
	alone := false
	f.Access.Ready = func(context.Context) (bool, error) { return alone, nil }
	if _, err := f.Access.Bind(t.Context(), owner.Principal, k.ID, []string{id}); fault.Of(err) != fault.Conflict || writer() >= format.Policies {
		t.Errorf("beside an older replica: %v, format %d", err, writer())
	}
	alone = true
	f.bind(owner.Principal, k.ID, id)
	if writer() != format.Policies {
		t.Errorf("after a binding the format is %d", writer())
	}

	f = newPeople(t)
	owner = f.verified("ada@example.com")
	if f.join(owner, "eve@example.com", authz.Limited); writer() != format.Policies {
		t.Errorf("after a limited user joined the format is %d", writer())
	}
}

// Each request of a key reads what limits all who made it, so the line of makers has an end.
func TestALineOfKeysHasAnEnd(t *testing.T) {
	f := newPeople(t)
	by := f.verified("ada@example.com").Principal
	made := 0
	for ; made < 20; made++ {
		_, key, err := f.CreateAPIKey(t.Context(), by, APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.AccountAdmin}})
		if err != nil {
			if fault.Of(err) != fault.Conflict {
				t.Error(err)
			}
			break
		}
		by = f.present(key)
	}
	if made != maxMakers+2 { // the makers, the last one's own maker, and the first key, which a user made
		t.Errorf("%d keys, each made by the one before", made)
	}
}

// A binding counts from the next request on, for users, API keys and ServiceAccounts, and only for
// those that have one.
func TestABindingCountsFromTheNextRequestOn(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	bob := f.join(owner, "bob@example.com", authz.Member)
	session := f.signIn("bob@example.com", goodPassword)
	k, secretKey, _ := f.newKey(owner.Principal, 0, authz.VaultRead)
	_, other, _ := f.newKey(owner.Principal, 0, authz.VaultRead)
	p := newPods()
	f.UseCluster(p, map[string]authz.TenantID{"shop": owner.Tenant})
	pod := func() authz.Principal {
		t.Helper()
		c, err := f.AuthenticateBearer(t.Context(), podToken, true)
		must(t, err)
		c, err = f.Permit(t.Context(), c, authz.UnsealCredential, "", "")
		must(t, err)
		return c.Principal
	}
	ids := []string{f.policy(owner.Principal, "a", "a/*"), f.policy(owner.Principal, "b", "b/*")}
	for subject, now := range map[string]func() authz.Principal{
		bob.ID:                               func() authz.Principal { return f.caller(session).Principal },
		k.ID:                                 func() authz.Principal { return f.present(secretKey) },
		access.ServiceAccount("shop", "app"): pod,
	} {
		is := func(want string) {
			t.Helper()
			if got := reads(now(), "a/x", "b/x", "c"); got != want {
				t.Errorf("%s reads %q, want %q", subject, got, want)
			}
		}
		is("a/x b/x c")
		f.bind(owner.Principal, subject, ids[0])
		is("a/x")
		f.bind(owner.Principal, subject, ids...)
		is("a/x b/x")
		if err := f.Access.DeletePolicy(t.Context(), owner.Principal, ids[1]); !errors.Is(err, fault.Conflict) {
			t.Error("a bound policy is deleted:", err)
		}
		_, err := f.Access.ChangePolicy(t.Context(), owner.Principal, ids[1], policyRequest("b", "c"))
		must(t, err)
		is("a/x c")
		_, err = f.Access.ChangePolicy(t.Context(), owner.Principal, ids[1], policyRequest("b", "b/*"))
		must(t, err)
		f.bind(owner.Principal, subject)
		is("")
		if got := reads(f.present(other), "a/x", "c"); got != "a/x c" {
			t.Error("somebody without a binding reads", got)
		}
		must(t, f.Access.Unbind(t.Context(), owner.Principal, subject))
		is("a/x b/x c")
		if err := f.Access.Unbind(t.Context(), owner.Principal, subject); !errors.Is(err, fault.NotFound) {
			t.Error(err)
		}
	}
	must(t, f.Access.DeletePolicy(t.Context(), owner.Principal, ids[1]))
	f.bind(owner.Principal, bob.ID, ids[0])
	must(t, f.RemoveMember(t.Context(), owner.Principal, bob.ID))
	if left := f.rows("access/binding/"); len(left) != 0 {
		t.Error("bindings of nobody:", left)
	}
}

// A limited user reads nothing until a policy is bound, and has one ever after.
func TestALimitedUserReadsNothingUntilAPolicyIsBound(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	id := f.policy(owner.Principal, "a", "a/*")
	bob := f.join(owner, "bob@example.com", authz.Limited)
	eve := f.join(owner, "eve@example.com", authz.Member)
	now := func(name string) string {
		t.Helper()
		return reads(f.caller(f.signIn(name+"@example.com", goodPassword)).Principal, "a/x", "b")
	}
	if now("bob") != "" || now("eve") != "a/x b" {
		t.Errorf("bob reads %q, eve %q", now("bob"), now("eve"))
	}
	if err := f.Access.Unbind(t.Context(), owner.Principal, bob.ID); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	f.bind(owner.Principal, bob.ID, id)
	_, secretKey, _ := f.newKey(f.caller(f.signIn("ada@example.com", goodPassword)).Principal, 0, authz.VaultRead)
	_, err := f.ChangeMember(t.Context(), owner.Principal, eve.ID, authz.Limited)
	must(t, err)
	if now("bob") != "a/x" || now("eve") != "" || reads(f.present(secretKey), "b") != "b" {
		t.Errorf("bob reads %q, eve %q", now("bob"), now("eve"))
	}
	// Another role leaves the policies as they are. Owners have none.
	_, err = f.ChangeMember(t.Context(), owner.Principal, eve.ID, authz.Member)
	if must(t, err); now("eve") != "" {
		t.Error("another role gives eve", now("eve"))
	}
	_, err = f.ChangeMember(t.Context(), owner.Principal, eve.ID, authz.Owner)
	if must(t, err); now("eve") != "a/x b" {
		t.Error("an owner reads", now("eve"))
	}
	if _, err := f.Access.Bind(t.Context(), owner.Principal, eve.ID, nil); !errors.Is(err, fault.Conflict) {
		t.Error("an owner is bound:", err)
	}
	// Without its row of the binding, the role alone still lets nobody in.
	f.commit(func(tx store.Tx) error { return f.policies.Forget(tx, owner.Tenant, bob.ID) })
	if now("bob") != "" {
		t.Error("without a binding bob reads", now("bob"))
	}
}

// Nobody writes, binds or delegates more than they have.
func TestNobodyGivesMorePathsThanTheyHave(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	f.join(owner, "bob@example.com", authz.Admin)
	bob := f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	eve := f.join(owner, "eve@example.com", authz.Auditor)
	team, all := f.policy(owner.Principal, "team", "team/**"), f.policy(owner.Principal, "all", "**")
	_, open := f.invite(bob, "zoe@example.com", authz.Member)
	f.advance(2 * time.Minute)
	f.bind(owner.Principal, bob.ID, team)
	if f.accept(open) {
		t.Error("an invitation goes on that bob may no longer give")
	}
	bob = f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	ctx := t.Context()
	within := f.policy(bob, "within", "team/a/*")
	for name, try := range map[string]func() error{
		"a wider policy": func() error {
			_, err := f.Access.CreatePolicy(ctx, bob, policyRequest("w", "team/a", "*/a"))
			return err
		},
		"a policy widened": func() error {
			_, err := f.Access.ChangePolicy(ctx, bob, within, policyRequest("within", "**"))
			return err
		},
		"his own policy widened": func() error {
			_, err := f.Access.ChangePolicy(ctx, bob, team, policyRequest("team", "**"))
			return err
		},
		"a wider binding":     func() error { _, err := f.Access.Bind(ctx, bob, eve.ID, []string{within, all}); return err },
		"his own binding":     func() error { _, err := f.Access.Bind(ctx, bob, bob.ID, []string{all}); return err },
		"no binding":          func() error { return f.Access.Unbind(ctx, bob, bob.ID) },
		"a role of all paths": func() error { _, err := f.ChangeMember(ctx, bob, eve.ID, authz.Member); return err },
		"an invitation":       func() error { _, err := f.Invite(ctx, bob, "new@example.com", authz.Member); return err },
	} {
		if err := try(); !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s: %v", name, err)
		}
		if e := f.entries(owner.Tenant); e[len(e)-1].Attributes["reason"] != access.ReasonBeyond {
			t.Errorf("%s: %+v", name, e[len(e)-1])
		}
	}
	f.bind(bob, eve.ID, within)
	_, err := f.ChangeMember(ctx, bob, eve.ID, authz.Member)
	must(t, err)
	_, err = f.Invite(ctx, bob, "new@example.com", authz.Limited)
	must(t, err)

	// His keys are no wider than he is, and follow him.
	_, secretKey, k := f.newKey(bob, 0, authz.VaultRead, authz.AccountAdmin)
	_, second, _ := f.newKey(k, 0, authz.VaultRead)
	is := func(want string) {
		t.Helper()
		for _, key := range []string{secretKey, second} {
			if got := reads(f.present(key), "team/a/b", "team/x", "other"); got != want {
				t.Errorf("a key reads %q, want %q", got, want)
			}
		}
	}
	is("team/a/b team/x")
	f.bind(owner.Principal, bob.ID, within)
	is("team/a/b")
	f.bind(owner.Principal, bob.ID, team, all)
	is("team/a/b team/x other")
}

// The limits of an API key limit those that it made, also when it is gone.
func TestAKeyIsNoWiderThanTheKeyThatMadeIt(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	a := f.policy(owner.Principal, "a", "a/*")
	first, _, k1 := f.newKey(owner.Principal, 0, authz.VaultRead, authz.AccountAdmin)
	second, _, k2 := f.newKey(k1, 0, authz.VaultRead, authz.AccountAdmin)
	third, secretKey, _ := f.newKey(k2, 0, authz.VaultRead)
	f.bind(owner.Principal, first.ID, a)
	for _, gone := range []string{second.ID, first.ID} {
		if got := reads(f.present(secretKey), "a/x", "b"); got != "a/x" {
			t.Errorf("before %s is revoked, its key reads %q", gone, got)
		}
		must(t, f.RevokeAPIKey(t.Context(), owner.Principal, gone))
	}
	if got := reads(f.present(secretKey), "a/x", "b"); got != "a/x" {
		t.Errorf("a key whose makers are gone reads %q", got)
	}
	must(t, f.RevokeAPIKey(t.Context(), owner.Principal, third.ID))
	if left := f.rows("access/binding/"); len(left) != 0 {
		t.Error("bindings of nobody:", left)
	}
	// A key that replaces itself every day keeps no list of all that went before.
	made, _, k := f.newKey(owner.Principal, 0, authz.AccountAdmin)
	for range 5 {
		next, _, p := f.newKey(k, 0, authz.AccountAdmin)
		must(t, f.RevokeAPIKey(t.Context(), owner.Principal, made.ID))
		made, k = next, p
	}
	if n := len(made.Limiters); n > 4 {
		t.Error(n, made.Limiters)
	}
}

// The policies of a revoked key limit the keys that it made, so they can be changed and taken away.
func TestTheBindingOfARevokedKeyIsAdministered(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com").Principal
	first, _, maker := f.newKey(owner, 0, authz.VaultRead, authz.AccountAdmin)
	f.bind(owner, first.ID, f.policy(owner, "a", "a"))
	_, secretKey, _ := f.newKey(maker, 0, authz.VaultRead)
	must(t, f.RevokeAPIKey(t.Context(), owner, first.ID))
	is := func(want string) {
		t.Helper()
		if got := reads(f.present(secretKey), "a", "b"); got != want {
			t.Errorf("a key whose maker is revoked reads %q, want %q", got, want)
		}
	}
	is("a")
	f.bind(owner, first.ID, f.policy(owner, "b", "b"))
	is("b")
	must(t, f.Access.Unbind(t.Context(), owner, first.ID))
	is("a b")
	if err := f.Access.Unbind(t.Context(), owner, first.ID); fault.Of(err) != fault.NotFound {
		t.Error(err)
	}
}

// A check judges a path by scopes and policies, and tells a reason only to those who administer.
func TestAccessIsCheckedWithoutALook(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	bob := f.join(owner, "bob@example.com", authz.Limited)
	f.bind(owner.Principal, bob.ID, f.policy(owner.Principal, "a", "a/*"))
	as := f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	k, _, _ := f.newKey(owner.Principal, 0, authz.VaultRead)
	for _, one := range []struct {
		by      authz.Principal
		q       access.Question
		allowed bool
		reason  authz.Denial
	}{
		{as, access.Question{Path: "a/x", Verb: authz.ReadPath}, true, ""},
		{as, access.Question{Path: "b", Verb: authz.ReadPath, Subject: bob.ID}, false, ""},
		{owner.Principal, access.Question{Path: "b", Verb: authz.ReadPath, Subject: bob.ID}, false, authz.OutsidePolicy},
		{owner.Principal, access.Question{Path: "a/x", Verb: authz.DeletePath, Subject: bob.ID}, true, ""},
		{owner.Principal, access.Question{Path: "a/x", Verb: authz.WritePath, Subject: k.ID}, false, authz.MissingScope},
		{owner.Principal, access.Question{Path: "a/x", Verb: authz.ReadPath, Subject: access.ServiceAccount("shop", "app")}, true, ""},
	} {
		j, err := f.Access.Check(t.Context(), one.by, one.q)
		if err != nil || j.Allowed != one.allowed || j.Reason != one.reason {
			t.Errorf("%+v: %+v, %v", one.q, j, err)
		}
	}
	if _, err := f.Access.Check(t.Context(), as, access.Question{Path: "a", Verb: authz.ReadPath, Subject: owner.ID}); !errors.Is(err, fault.Forbidden) {
		t.Error("about another:", err)
	}
	for _, subject := range []string{"usr_x", k.ID + "x", "system:serviceaccount:a", "system:serviceaccount:A:b", authz.NewID("usr")} {
		if _, err := f.Access.Check(t.Context(), owner.Principal, access.Question{Path: "a", Verb: authz.ReadPath, Subject: subject}); !errors.Is(err, fault.NotFound) {
			t.Errorf("%s: %v", subject, err)
		}
	}
}

// Rows that somebody else changed let nobody in.
func TestAChangedPolicyLetsNobodyIn(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *people) {
		owner := f.verified("ada@example.com")
		a := f.policy(owner.Principal, "a", "a/*")
		k, secretKey, _ := f.newKey(owner.Principal, 0, authz.VaultRead)
		f.bind(owner.Principal, k.ID, a)
		for _, prefix := range []string{"access/policy/", "access/binding/"} {
			for key, value := range f.rows(prefix) {
				f.store.tamper(t, func(tx store.Tx) error { return tx.Put([]byte(key), []byte(value[:len(value)-2]+" }")) })
				if c, err := f.Authenticate(t.Context(), secretKey); err == nil {
					t.Errorf("%s: %+v", prefix, c)
				}
				f.store.tamper(t, func(tx store.Tx) error { return tx.Put([]byte(key), []byte(value)) })
			}
		}
		if got := reads(f.present(secretKey), "a/x", "b"); got != "a/x" {
			t.Error(got)
		}
	})
}

// Who is limited gives nobody what policies narrow, by a role, an invitation or an API key.
func TestTheLimitedMakeNobodyWhoReachesAllPaths(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com")
	bob := f.join(owner, "bob@example.com", authz.Admin)
	key, secretKey, _ := f.newKey(owner.Principal, 0, authz.TenantScopes()...)
	_, invited := f.invite(f.present(secretKey), "eve@example.com", authz.Admin)
	_, auditor := f.invite(f.present(secretKey), "aud@example.com", authz.Auditor)
	team := f.policy(owner.Principal, "team", "team/**")
	f.bind(owner.Principal, bob.ID, team)
	f.bind(owner.Principal, key.ID, team)
	f.advance(2 * time.Minute)
	by := f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	for _, role := range []authz.Role{authz.Admin, authz.Member, authz.Auditor} {
		if _, err := f.Invite(t.Context(), by, "new@example.com", role); !errors.Is(err, fault.Forbidden) {
			t.Errorf("inviting an %s: %v", role, err)
		}
	}
	for _, token := range []string{invited, auditor} {
		if f.accept(token) {
			t.Error("an invitation of an API key that was bound since was accepted")
		}
	}
}

// BenchmarkChecks reports how much longer it takes in a tenant with 1,000 policies than in one with ten
// to find out what a ServiceAccount may do on a path. Both are in the same store and asked in turns.
func BenchmarkChecks(b *testing.B) {
	f := newPeople(b)
	pod := access.ServiceAccount("shop", "app")
	var owners [2]authz.Principal
	for i, policies := range []int{9, 999} {
		owners[i] = f.verified(fmt.Sprintf("owner-%d@example.com", i)).Principal
		for j := range policies {
			f.policy(owners[i], fmt.Sprint(j), fmt.Sprintf("team-%d/**", j))
		}
		f.bind(owners[i], pod, f.policy(owners[i], "app", "shop/**"))
	}
	var took [2]time.Duration
	for b.Loop() {
		for i, owner := range owners {
			began := time.Now()
			j, err := f.Access.Check(b.Context(), owner, access.Question{Path: "shop/db", Verb: authz.ReadPath, Subject: pod})
			took[i] += time.Since(began)
			must(b, err)
			if !j.Allowed {
				b.Fatal(j)
			}
		}
	}
	b.ReportMetric(float64(took[1])/float64(took[0]), "1000/10")
}
