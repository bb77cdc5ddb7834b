package credential

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// previousObjects knows which objects are gone and have left a credential in the vault.
//
// An object is identified by its UID, so one that was deleted and restored is a new object. It must
// not silently get new values while a database still has the old ones. So a new object first looks
// here for one of its name: of its tenant, of an earlier namespace of that name, or of a cluster
// that the store was moved from.
type previousObjects struct {
	vault   *vault.Vault
	cluster string // UID of the cluster
	now     func() time.Time

	// release keeps the credential of an object that is gone and was never finalized. It does nothing
	// when the object exists.
	release func(context.Context, vault.Owner) error

	mu     sync.Mutex
	read   time.Time // when byName was read; zero if it has to be read again
	byName map[types.NamespacedName]namesakes
}

// namesakes are the objects of one name.
type namesakes struct {
	previous []vault.PreviousObject
	owners   []vault.Owner // owners in this cluster; all but one are gone
}

// previousAge is how long a finding counts, because REST may have deleted the credential since.
// An empty finding counts until changed or stored is called.
const previousAge = 10 * time.Second

// of returns the previous objects with the namespace and the name of sc. It first releases those
// that went without their finalizer, which the sweeper has not found yet.
func (p *previousObjects) of(ctx context.Context, sc *v1beta1.SealedCredential) ([]vault.PreviousObject, error) {
	name := client.ObjectKeyFromObject(sc)
	found, err := p.find(ctx, name)
	if err != nil {
		return nil, err
	}
	gone := slices.DeleteFunc(slices.Clone(found.owners), func(o vault.Owner) bool { return o.UID == string(sc.UID) })
	if len(gone) == 0 {
		return found.previous, nil
	}
	for _, owner := range gone {
		if err := p.release(ctx, owner); err != nil {
			return nil, err
		}
	}
	p.changed()
	found, err = p.find(ctx, name)
	return found.previous, err
}

func (p *previousObjects) find(ctx context.Context, name types.NamespacedName) (namesakes, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if found, some := p.byName[name]; !p.read.IsZero() && (!some || p.now().Sub(p.read) < previousAge) {
		return found, nil
	}
	at := p.now()
	owners, all, err := p.vault.Objects(ctx, p.cluster)
	if err != nil {
		return namesakes{}, err
	}
	p.byName, p.read = make(map[types.NamespacedName]namesakes), at
	for _, o := range all {
		if o.Name == "" {
			// A new object of that name does not find its values, and the name is unknown.
			log.FromContext(ctx).Error(nil, "the row of a previous object is damaged: run latticekeep doctor", "tenant", o.Tenant, "credential", o.Credential)
			continue
		}
		p.add(o.Owner, func(n *namesakes) { n.previous = append(n.previous, o) })
	}
	for _, o := range owners {
		p.add(o, func(n *namesakes) { n.owners = append(n.owners, o) })
	}
	return p.byName[name], nil
}

// add changes what is known of the objects with the name of o, while mu is held.
func (p *previousObjects) add(o vault.Owner, change func(*namesakes)) {
	key := types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
	n := p.byName[key]
	change(&n)
	p.byName[key] = n
}

// stored notes that sc owns a credential from now on.
func (p *previousObjects) stored(tenant authz.TenantID, sc *v1beta1.SealedCredential) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.read.IsZero() {
		return
	}
	o := vault.Owner{Object: vault.Object{Cluster: p.cluster, Namespace: sc.Namespace, Name: sc.Name}, UID: string(sc.UID), Tenant: tenant}
	p.add(o, func(n *namesakes) { n.owners = append(n.owners, o) })
}

// changed has the previous objects read again, because an object is gone or another goes on with its
// credential.
func (p *previousObjects) changed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.read = time.Time{}
}
