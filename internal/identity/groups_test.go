package identity

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/access"
	"github.com/latticekeep/latticekeep/internal/store"
)

// group makes a group that has these policies and these members.
func (f *people) group(by authz.Principal, name string, policies []string, members ...string) string {
	f.t.Helper()
	made, err := f.Access.CreateGroup(f.t.Context(), by, name)
	must(f.t, err)
	if policies != nil {
		f.bind(by, made.ID, policies...)
	}
	for _, m := range members {
		f.enter(by, made.ID, m)
	}
	return made.ID
}

func (f *people) enter(by authz.Principal, group, member string) {
	f.t.Helper()
	_, err := f.Access.AddMember(f.t.Context(), by, group, member)
	must(f.t, err)
}

func (f *people) leave(by authz.Principal, group, member string) {
	f.t.Helper()
	_, err := f.Access.RemoveMember(f.t.Context(), by, group, member)
	must(f.t, err)
}

// limits returns what limits a subject now.
func (f *people) limits(tenant authz.TenantID, subjects ...string) (is authz.Access) {
	f.t.Helper()
	must(f.t, f.store.View(f.t.Context(), func(r store.Reader) (err error) {
		is, err = f.policies.Of(r, tenant, subjects...)
		return err
	}))
	return is
}

// A group adds for whoever has a binding, and for the keys that they made, from the next request on.
func TestAGroupOnlyEverAdds(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com").Principal
	f.join(f.verified("ada2@example.com"), "zoe@example.com", authz.Member) // of another tenant
	bob := f.join(f.caller(f.signIn("ada@example.com", goodPassword)), "bob@example.com", authz.Admin)
	pod := access.ServiceAccount("shop", "app")
	a, b, c := f.policy(owner, "a", "a/*"), f.policy(owner, "b", "b/*"), f.policy(owner, "c", "c")
	_, secretKey, _ := f.newKey(f.caller(f.signIn("bob@example.com", goodPassword)).Principal, 0, authz.VaultRead)
	is := func(want string) {
		t.Helper()
		session := f.caller(f.signIn("bob@example.com", goodPassword)).Principal
		account := authz.Principal{Tenant: owner.Tenant, Kind: authz.ServiceAccount, Scopes: authz.TenantScopes(), Access: f.limits(owner.Tenant, pod)}
		for _, p := range []authz.Principal{session, f.present(secretKey), account} {
			if got := reads(p, "a/x", "b/x", "c", "d"); got != want {
				t.Errorf("a %s reads %q, want %q", p.Kind, got, want)
			}
		}
	}
	group := f.group(owner, "readers of b", []string{b}, bob.ID, pod)
	other := f.group(owner, "nobody's", nil, bob.ID, pod)
	is("a/x b/x c d") // nobody loses anything by joining
	for _, subject := range []string{bob.ID, pod} {
		f.bind(owner, subject, a)
	}
	is("a/x b/x")
	f.bind(owner, other, c)
	is("a/x b/x c")
	f.bind(owner, group)
	is("a/x c")
	f.bind(owner, group, b)
	for _, subject := range []string{bob.ID, pod} {
		f.leave(owner, other, subject)
	}
	is("a/x b/x")
	_, err := f.Access.RenameGroup(t.Context(), owner, group, "others")
	must(t, err)
	if err := f.Access.DeletePolicy(t.Context(), owner, b); !errors.Is(err, fault.Conflict) {
		t.Error("a policy of a group is deleted:", err)
	}
	found, err := f.Access.Group(t.Context(), owner, group)
	must(t, err)
	if members := []string{pod, bob.ID}; found.Name != "others" || !slices.Equal(found.Members, members) || !slices.Equal(found.Policies, []string{b}) {
		t.Errorf("%+v", found)
	}
	must(t, f.Access.DeleteGroup(t.Context(), owner, group))
	is("a/x")
	if left := f.rows("access/member/"); len(left) != 0 {
		t.Error("memberships of a deleted group:", left)
	}
	must(t, f.Access.DeletePolicy(t.Context(), owner, b))
	for _, subject := range []string{bob.ID, pod} {
		must(t, f.Access.Unbind(t.Context(), owner, subject))
	}
	is("a/x b/x c d")
	f.enter(owner, other, bob.ID)
	must(t, f.RemoveMember(t.Context(), owner, bob.ID))
	if left := f.rows("access/member/"); len(left) != 0 {
		t.Error("memberships of nobody:", left)
	}
}

// Nobody gives by a group what is wider than their own, to others or to themselves. Taking away is free.
func TestNobodyGivesMoreByAGroup(t *testing.T) {
	f := newPeople(t)
	ada := f.verified("ada@example.com")
	owner, ctx := ada.Principal, t.Context()
	f.join(ada, "bob@example.com", authz.Admin)
	eve := f.join(ada, "eve@example.com", authz.Limited)
	bob := f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	team, all := f.policy(owner, "team", "team/**"), f.policy(owner, "all", "**")
	f.bind(owner, bob.ID, team)
	bob = f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	wide, narrow := f.group(owner, "wide", []string{all}, eve.ID), f.group(owner, "narrow", []string{team})
	for name, try := range map[string]func() error{
		"himself": func() error { _, err := f.Access.AddMember(ctx, bob, wide, bob.ID); return err },
		"another": func() error { _, err := f.Access.AddMember(ctx, bob, wide, eve.ID); return err },
		"a pod": func() error {
			_, err := f.Access.AddMember(ctx, bob, wide, access.ServiceAccount("a", "b"))
			return err
		},
		"a wider binding": func() error { _, err := f.Access.Bind(ctx, bob, narrow, []string{all}); return err },
	} {
		if err := try(); !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s: %v", name, err)
		}
		if e := f.entries(owner.Tenant); e[len(e)-1].Attributes["reason"] != access.ReasonBeyond {
			t.Errorf("%s: %+v", name, e[len(e)-1])
		}
	}
	f.enter(bob, narrow, bob.ID)
	f.leave(bob, wide, eve.ID)
	must(t, f.Access.Unbind(ctx, bob, narrow))
	must(t, f.Access.DeleteGroup(ctx, bob, wide))

	// What a group adds to him, he may give.
	f.bind(owner, narrow, all)
	bob = f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	f.bind(bob, eve.ID, all)

	// API keys, other groups, strangers and users of other tenants are no members.
	key, _, _ := f.newKey(owner, 0, authz.VaultRead)
	stranger := f.verified("zoe@example.com")
	for _, id := range []string{key.ID, narrow, authz.NewID("usr"), stranger.ID, "x", ""} {
		if _, err := f.Access.AddMember(ctx, owner, narrow, id); !errors.Is(err, fault.NotFound) {
			t.Errorf("%q is a member: %v", id, err)
		}
	}
	if _, err := f.Access.Group(ctx, stranger.Principal, narrow); !errors.Is(err, fault.NotFound) {
		t.Error("a group of another tenant:", err)
	}
	if _, err := f.Access.AddMember(ctx, stranger.Principal, narrow, stranger.ID); !errors.Is(err, fault.NotFound) {
		t.Error("a member of a group of another tenant:", err)
	}
	if _, err := f.Access.CreateGroup(ctx, eveOf(f), "x"); !errors.Is(err, fault.Forbidden) {
		t.Error("a limited user makes a group:", err)
	}
}

func eveOf(f *people) authz.Principal {
	return f.caller(f.signIn("eve@example.com", goodPassword)).Principal
}

// A check about another names the groups that allow a path.
func TestACheckNamesTheGroupsThatAllow(t *testing.T) {
	f := newPeople(t)
	ada := f.verified("ada@example.com")
	owner := ada.Principal
	bob := f.join(ada, "bob@example.com", authz.Limited)
	a, b := f.policy(owner, "a", "a/*"), f.policy(owner, "b", "b/*")
	f.bind(owner, bob.ID, a)
	group := f.group(owner, "b", []string{b}, bob.ID)
	for path, want := range map[string]string{"a/x": "true []", "b/x": "true [" + group + "]", "c": "false []"} {
		j, err := f.Access.Check(t.Context(), owner, access.Question{Path: path, Verb: authz.ReadPath, Subject: bob.ID})
		if got := fmt.Sprint(j.Allowed, " ", j.Groups); err != nil || got != want {
			t.Errorf("%s: %s, %v", path, got, err)
		}
	}
	as := f.caller(f.signIn("bob@example.com", goodPassword)).Principal
	if j, err := f.Access.Check(t.Context(), as, access.Question{Path: "b/x", Verb: authz.ReadPath}); err != nil || !j.Allowed || j.Groups != nil {
		t.Errorf("himself: %+v, %v", j, err)
	}
	if j, err := f.Access.Check(t.Context(), owner, access.Question{Path: "b/x", Verb: authz.ReadPath, Subject: group}); err != nil || !j.Allowed {
		t.Errorf("the group: %+v, %v", j, err)
	}
}

// Groups have bounds, and names that are theirs alone.
func TestGroupsAreBounded(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com").Principal
	pod := access.ServiceAccount("shop", "app")
	var made []string
	for i := range 200 {
		made = append(made, f.group(owner, fmt.Sprint(i), nil))
	}
	if _, err := f.Access.CreateGroup(t.Context(), owner, "one more"); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	if _, err := f.Access.RenameGroup(t.Context(), owner, made[0], "1"); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	for _, id := range made[:4] {
		f.enter(owner, id, pod)
		f.enter(owner, id, pod) // twice is once
	}
	if _, err := f.Access.AddMember(t.Context(), owner, made[4], pod); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	f.commit(func(tx store.Tx) (err error) {
		for i := range 999 {
			key := "access/member/" + string(owner.Tenant) + "/" + access.ServiceAccount("shop", fmt.Sprint("a", i))
			err = errors.Join(err, f.Service.rows.Put(tx, []byte(key), map[string]any{"groups": made[9:10]}))
		}
		return err
	})
	f.enter(owner, made[9], access.ServiceAccount("shop", "last"))
	f.commit(func(tx store.Tx) (err error) {
		for i := range 3999 { // with the pod and the thousand
			key := "access/member/" + string(owner.Tenant) + "/" + access.ServiceAccount("bank", fmt.Sprint("a", i))
			err = errors.Join(err, f.Service.rows.Put(tx, []byte(key), map[string]any{"groups": made[10:11]}))
		}
		return err
	})
	if _, err := f.Access.AddMember(t.Context(), owner, made[11], access.ServiceAccount("shop", "more")); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	if _, err := f.Access.AddMember(t.Context(), owner, made[9], access.ServiceAccount("shop", "b")); !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
}

// Rows that somebody else changed let nobody in, and rows that are gone add nothing.
func TestAChangedGroupLetsNobodyIn(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *people) {
		ada := f.verified("ada@example.com")
		owner := ada.Principal
		bob := f.join(ada, "bob@example.com", authz.Admin)
		_, secretKey, _ := f.newKey(f.caller(f.signIn("bob@example.com", goodPassword)).Principal, 0, authz.VaultRead)
		a, b := f.policy(owner, "a", "a/*"), f.policy(owner, "b", "b/*")
		f.bind(owner, bob.ID, a)
		group := f.group(owner, "b", []string{b}, bob.ID)
		for _, prefix := range []string{"access/member/", "access/binding/" + string(owner.Tenant) + "/" + group} {
			for key, value := range f.rows(prefix) {
				f.store.tamper(t, func(tx store.Tx) error { return tx.Put([]byte(key), []byte(value[:len(value)-2]+" }")) })
				if c, err := f.Authenticate(t.Context(), secretKey); err == nil {
					t.Errorf("%s: %+v", prefix, c)
				}
				f.store.tamper(t, func(tx store.Tx) error { return tx.Delete([]byte(key)) })
				if c, err := f.Authenticate(t.Context(), secretKey); err == nil && reads(c.Principal, "b/x", "c") != "" {
					t.Errorf("%s is gone: %q", prefix, reads(c.Principal, "b/x", "c"))
				}
				f.store.tamper(t, func(tx store.Tx) error { return tx.Put([]byte(key), []byte(value)) })
			}
		}
		if got := reads(f.present(secretKey), "a/x", "b/x", "c"); got != "a/x b/x" {
			t.Error(got)
		}
	})
}

// rowReader counts the rows that are read.
type rowReader struct {
	store.Reader
	rows int
}

func (r *rowReader) Get(key []byte) ([]byte, error) { r.rows++; return r.Reader.Get(key) }

func (r *rowReader) Scan(store.Range, func(key, value []byte) bool) error {
	return errors.New("a principal takes no scan")
}

// The read that makes a principal grows with the groups of the subject, and not with those of the tenant.
func TestAPrincipalReadsItsOwnGroupsOnly(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com").Principal
	pod, p := access.ServiceAccount("shop", "app"), f.policy(owner, "p", "p")
	count := func() (rows int) {
		must(t, f.store.View(t.Context(), func(r store.Reader) error {
			counted := &rowReader{Reader: r}
			_, err := f.policies.Of(counted, owner.Tenant, pod)
			rows = counted.rows
			return err
		}))
		return rows
	}
	var joined []string
	for i := range 4 {
		joined = append(joined, f.group(owner, fmt.Sprint(i), []string{p}, pod))
	}
	if n := count(); n != 1 { // its binding
		t.Errorf("without a binding %d rows", n)
	}
	f.bind(owner, pod, p)
	n := count()
	if want := 1 + 1 + len(joined) + 1; n != want { // its binding, its groups, their bindings, and the policy
		t.Errorf("%d rows, want %d", n, want)
	}
	for i := range 20 {
		g := f.group(owner, fmt.Sprint("other ", i), []string{p})
		for j := range 5 {
			f.enter(owner, g, access.ServiceAccount("shop", fmt.Sprint("pod", j+i/4*5)))
		}
	}
	if again := count(); again != n {
		t.Errorf("%d rows beside other groups, %d without", again, n)
	}
}

// What limits a subject agrees with a second, simple reading of the rule: without a binding nothing, else
// any policy of its own or of its groups.
func TestOwnAndGroupsAgreeWithBruteForce(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("ada@example.com").Principal
	random := rand.New(rand.NewPCG(1, 2))
	globs := []string{"**", "a/*", "a/b", "*/b", "c", "a/**", "*"}
	paths := []string{"a", "a/b", "a/c", "b/b", "c", "a/b/c", "a//b", "d/e"}
	some := func(n, of int) []int { return random.Perm(of)[:min(n, of)] }
	policies := make([]access.Policy, 6)
	for i := range policies {
		r := access.PolicyRequest{Name: fmt.Sprint(i)}
		for _, g := range some(1+random.IntN(2), len(globs)) {
			r.Rules = append(r.Rules, authz.Rule{Path: globs[g], Verbs: authz.Verbs()[:1+random.IntN(4)]})
		}
		var err error
		policies[i], err = f.Access.CreatePolicy(t.Context(), owner, r)
		must(t, err)
	}
	type bound []int // policies; nil: no binding
	groups, subjects := make([]string, 4), make([]string, 5)
	var groupHas, subjectHas [5]bound
	var in [5][4]bool
	for i := range groups {
		groups[i] = f.group(owner, fmt.Sprint(i), nil)
	}
	for i := range subjects {
		subjects[i] = access.ServiceAccount("shop", fmt.Sprint("app", i))
	}
	bind := func(subject string, has *bound) {
		if random.IntN(4) == 0 {
			if *has != nil {
				must(t, f.Access.Unbind(t.Context(), owner, subject))
			}
			*has = nil
			return
		}
		*has = append(bound{}, some(random.IntN(3), len(policies))...)
		var ids []string
		for _, i := range *has {
			ids = append(ids, policies[i].ID)
		}
		f.bind(owner, subject, ids...)
	}
	allows := func(has bound, v authz.Verb, path string) bool {
		return slices.ContainsFunc(has, func(i int) bool {
			p, err := authz.NewPolicy(policies[i].Rules)
			must(t, err)
			return p.Allows(v, path)
		})
	}
	for range 150 {
		i, j := random.IntN(len(subjects)), random.IntN(len(groups))
		switch random.IntN(3) {
		case 0:
			bind(subjects[i], &subjectHas[i])
		case 1:
			bind(groups[j], &groupHas[j])
		case 2:
			if in[i][j] {
				f.leave(owner, groups[j], subjects[i])
			} else {
				f.enter(owner, groups[j], subjects[i])
			}
			in[i][j] = !in[i][j]
		}
		is := f.limits(owner.Tenant, subjects[i])
		for _, path := range paths {
			for _, v := range authz.Verbs() {
				want := subjectHas[i] == nil || allows(subjectHas[i], v, path)
				for j := range groups {
					want = want || in[i][j] && allows(groupHas[j], v, path)
				}
				if got := is.Allows(v, path); got != want {
					t.Fatalf("subject %d, %s %s: %v, want %v", i, v, path, got, want)
				}
			}
		}
	}
}
