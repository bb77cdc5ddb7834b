package servertest

import (
	"context"
	"encoding/base64"
	"sync"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
)

// Pods is a cluster whose answers the test decides. server/cluster_test.go uses a real cluster.
type Pods struct {
	Mu       sync.Mutex
	Accounts map[string]identity.ServiceAccount // keyed by token
	Known    map[string]bool                    // tokens in the cache
	allow    func(namespace, verb, name string) bool
	Down     bool
	reviewed int
	asked    []string // verb, namespace and name
}

// Review returns the ServiceAccount of a token.
func (p *Pods) Review(_ context.Context, token string, ask bool) (identity.ServiceAccount, error) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.Known[token] {
		return p.Accounts[token], nil
	}
	if !ask {
		return identity.ServiceAccount{}, fault.Unauthenticated
	}
	p.reviewed++
	a, ok := p.Accounts[token]
	switch {
	case p.Down:
		return a, fault.Unavailable
	case !ok:
		return a, fault.Unauthenticated
	}
	return a, nil
}

// Allowed returns the answer that the test has set.
func (p *Pods) Allowed(_ context.Context, _ identity.ServiceAccount, verb, namespace, name string) (bool, error) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.asked = append(p.asked, verb+" "+namespace+"/"+name)
	if p.Down {
		return false, fault.Unavailable
	}
	return p.allow(namespace, verb, name), nil
}

// Allow sets the permissions in the cluster and forgets earlier questions.
func (p *Pods) Allow(allow func(namespace, verb, name string) bool) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.allow, p.asked = allow, nil
}

// TakeAsked returns the permissions that the service asked for since the last call.
func (p *Pods) TakeAsked() []string {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	asked := p.asked
	p.asked = nil
	return asked
}

// TakeReviewed returns how many tokens were reviewed since the last call.
func (p *Pods) TakeReviewed() int {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	n := p.reviewed
	p.reviewed = 0
	return n
}

// AllowAll allows everything.
func AllowAll(string, string, string) bool { return true }

// AllowNothing refuses everything.
func AllowNothing(string, string, string) bool { return false }

// AllowOnly allows one verb.
func AllowOnly(verb string) func(string, string, string) bool {
	return func(_, v, _ string) bool { return v == verb }
}

// PodToken returns a text in the format of a ServiceAccount token.
func PodToken(n string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"RS256","kid":"k"}`)) + "." + base64.RawURLEncoding.EncodeToString([]byte(n)) + ".c2ln"
}

// ShopToken belongs to a pod in the namespace shop, which UsePods maps to a tenant. NewToken
// belongs to a pod in a namespace without a tenant.
var ShopToken, NewToken = PodToken("shop"), PodToken("new")

// OrdersToken belongs to another pod in the namespace shop, and names its ServiceAccount orders as real tokens do.
var OrdersToken = PodToken(`{"sub":"system:serviceaccount:shop:orders"}`)

// UsePods accepts the ServiceAccounts of Pods. The namespace shop belongs to the tenant.
func (s *Service) UsePods(tenant authz.TenantID) *Pods {
	p := &Pods{allow: AllowNothing, Known: make(map[string]bool), Accounts: map[string]identity.ServiceAccount{
		ShopToken:   {Cluster: "cluster", Namespace: "shop", NamespaceUID: "shop-uid", Name: "app", UID: "account-shop", Pod: "pod-shop"},
		OrdersToken: {Cluster: "cluster", Namespace: "shop", NamespaceUID: "shop-uid", Name: "orders", UID: "account-orders", Pod: "pod-orders"},
		NewToken:    {Cluster: "cluster", Namespace: "new", NamespaceUID: "new-uid", Name: "app", UID: "account-new", Pod: "pod-new"},
	}}
	s.Identity.UseCluster(p, nil)
	if err := s.Identity.MapNamespace(context.Background(), "cluster", "shop", "shop-uid", tenant); err != nil {
		s.T.Fatal(err)
	}
	return p
}
