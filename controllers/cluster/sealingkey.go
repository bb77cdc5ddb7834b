// Package cluster holds what the operator keeps in its own namespace: the published sealing key,
// serving certificates, the anchor of the audit log, and the Lease that elects the active operator.
package cluster

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers/requeue"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

const (
	// SealingKeyConfigMap and sealingKeyData locate the signed public sealing key in the cluster.
	SealingKeyConfigMap = "latticekeep-sealing-key"
	sealingKeyData      = "sealing-key.json"
)

// repairInterval is the minimum time between two repairs of the ConfigMap, so that a client that
// keeps changing it cannot make the operator write as often.
const repairInterval = 10 * time.Second

// publishInterval is the time within which a new key is published. Clients that still seal for the
// previous key should be done before that key is retired.
const publishInterval = 10 * time.Second

// publisher keeps the keyring's public sealing key in a ConfigMap. The ConfigMap is a convenience,
// not a trust anchor: a client that seals checks the signature and the identity in it.
//
// The ConfigMap is also the deployment's claim on the cluster. The publisher writes a ConfigMap
// that is missing, damaged or from the same identity, provided that it has not changed since it was
// read. So of two deployments only one wins. It never writes the ConfigMap of another identity.
// Such a ConfigMap prevents the controllers from starting, and stops them if it appears later.
type publisher struct {
	live      client.Reader // reads from the API server: a cached ConfigMap may be too old to judge the claim
	client    client.Client
	keys      *keyring.Ring
	object    client.ObjectKey
	schedule  *requeue.Schedule // neither a missing ConfigMap nor a newer key causes an event
	now       func() time.Time
	repaired  time.Time
	claimLost chan error
}

// AddPublisher claims the cluster for the deployment that has the keys, and adds the controller
// that keeps their public key published in a namespace. If the cluster belongs to another
// deployment, the error says what to do.
func AddPublisher(ctx context.Context, mgr manager.Manager, keys *keyring.Ring, namespace string, now func() time.Time) error {
	p := &publisher{
		live: mgr.GetAPIReader(), client: mgr.GetClient(), keys: keys,
		object:   client.ObjectKey{Namespace: namespace, Name: SealingKeyConfigMap},
		schedule: requeue.NewSchedule(now), now: now, claimLost: make(chan error, 1),
	}
	for claimed := false; !claimed; {
		published, want, err := p.read(ctx)
		if err == nil {
			err = p.checkClaim(published)
		}
		if err != nil {
			return err
		}
		err = p.write(ctx, published, want)
		if err != nil && !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) { // on a conflict, another replica or deployment was first
			return err
		}
		claimed = err == nil
	}
	p.schedule.Set(p.object, p.now())
	// The manager stops when one of its runnables fails.
	claimed := manager.RunnableFunc(func(ctx context.Context) error {
		select {
		case err := <-p.claimLost:
			return err
		case <-ctx.Done():
			return nil
		}
	})
	if err := mgr.Add(claimed); err != nil {
		return err
	}
	return builder.ControllerManagedBy(mgr).
		Named("sealingkey").
		For(&corev1.ConfigMap{}).
		WatchesRawSource(p.schedule).
		WithOptions(controller.Options{RateLimiter: requeue.NewRateLimiter()}).
		Complete(p)
}

// Reconcile implements reconcile.Reconciler.
func (p *publisher) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	now := p.now()
	published, want, err := p.read(ctx)
	if err != nil {
		return reconcile.Result{}, err
	}
	if err := p.checkClaim(published); err != nil {
		select {
		case p.claimLost <- err:
		default: // already reported
		}
		return reconcile.Result{}, nil
	}
	if published.Data[sealingKeyData] != want {
		// Do not wait if the clock was set back.
		if since := now.Sub(p.repaired); since >= 0 && since < repairInterval {
			p.schedule.Set(p.object, p.repaired.Add(repairInterval))
			return reconcile.Result{}, nil
		}
		err := p.write(ctx, published, want)
		if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
			return reconcile.Result{RequeueAfter: requeue.AfterConflict}, nil
		}
		if err != nil {
			return reconcile.Result{}, err
		}
		p.repaired = now
	}
	p.schedule.Set(p.object, now.Add(publishInterval))
	return reconcile.Result{}, nil
}

// read returns the current ConfigMap, empty if it is missing, and the document that it should hold.
func (p *publisher) read(ctx context.Context) (*corev1.ConfigMap, string, error) {
	document, err := p.keys.SealingDocument(ctx)
	if err != nil {
		return nil, "", fmt.Errorf("reading sealing key document: %w", err)
	}
	want, err := document.MarshalJSON()
	if err != nil {
		return nil, "", fmt.Errorf("encoding sealing key document: %w", err)
	}
	published := new(corev1.ConfigMap)
	if err := p.live.Get(ctx, p.object, published); apierrors.IsNotFound(err) {
		published = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: p.object.Namespace, Name: p.object.Name}}
	} else if err != nil {
		return nil, "", fmt.Errorf("reading ConfigMap %s: %w", p.object, err)
	}
	return published, string(want), nil
}

// checkClaim returns an error that names the remedy if the ConfigMap holds the document of another
// deployment.
func (p *publisher) checkClaim(published *corev1.ConfigMap) error {
	document, err := sealing.ParseDocument([]byte(published.Data[sealingKeyData]))
	own := p.keys.Identity().ID()
	if err != nil || document.Identity() == own {
		return nil
	}
	return fmt.Errorf("the cluster belongs to another deployment: ConfigMap %s holds the sealing key of identity %s, and this is identity %s; "+
		"stop this operator or the other one, and once the other one is gone for good (as a development server without --data-dir is when it "+
		"stops), end its claim with `kubectl delete configmap -n %s %s`", p.object, document.Identity(), own, p.object.Namespace, p.object.Name)
}

// write stores document in the ConfigMap. It does nothing if the document is already there, and
// returns a conflict if the ConfigMap has changed since it was read.
func (p *publisher) write(ctx context.Context, published *corev1.ConfigMap, document string) error {
	if published.Data[sealingKeyData] == document {
		return nil
	}
	before := published.DeepCopy()
	published.Data = map[string]string{sealingKeyData: document}
	var err error
	if published.ResourceVersion == "" {
		err = p.create(ctx, published)
	} else {
		err = p.client.Patch(ctx, published, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), client.FieldOwner(v1beta1.OperatorName))
	}
	if err != nil {
		return fmt.Errorf("writing ConfigMap %s: %w", p.object, err)
	}
	return nil
}

func (p *publisher) create(ctx context.Context, config *corev1.ConfigMap) error {
	err := p.client.Create(ctx, config, client.FieldOwner(v1beta1.OperatorName))
	if !apierrors.IsNotFound(err) {
		return err
	}
	// The namespace is missing. A deployed operator lives in it, so this operator runs outside the
	// cluster.
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.object.Namespace}}
	if err := p.client.Create(ctx, namespace); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating its namespace (create it with kubectl, or name another one): %w", err)
	}
	return p.client.Create(ctx, config, client.FieldOwner(v1beta1.OperatorName))
}
