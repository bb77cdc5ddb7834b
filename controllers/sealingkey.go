package controllers

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1apply "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/internal/keyring"
)

const (
	// sealingKeyConfigMap and sealingKeyData are where the signed public sealing key is found in the cluster.
	sealingKeyConfigMap = "latticekeep-sealing-key"
	sealingKeyData      = "sealing-key.json"
)

// publisher keeps the ConfigMap with the public sealing key as the keyring has it. The ConfigMap is a convenience, not
// a trust anchor: whoever seals checks the signature and the identity in it.
type publisher struct {
	client client.Client // reads the ConfigMap from the cache
	keys   *keyring.Ring
	object client.ObjectKey
	due    *schedule // a missing ConfigMap causes no event, and neither does a newer key
	now    func() time.Time
}

func addSealingKey(mgr manager.Manager, o Options) error {
	p := &publisher{
		client: mgr.GetClient(), keys: o.Keys,
		object: client.ObjectKey{Namespace: o.Namespace, Name: sealingKeyConfigMap},
		due:    newSchedule(o.Now), now: o.Now,
	}
	p.due.Set(p.object, p.now())
	return builder.ControllerManagedBy(mgr).
		Named("sealingkey").
		For(&corev1.ConfigMap{}).
		WatchesRawSource(p.due).
		WithOptions(controller.Options{RateLimiter: retries()}).
		Complete(p)
}

// Reconcile implements reconcile.Reconciler.
func (p *publisher) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	now := p.now()
	document, err := p.keys.SealingDocument(ctx)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("reading sealing key document: %w", err)
	}
	want, err := document.MarshalJSON()
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("encoding sealing key document: %w", err)
	}
	published := new(corev1.ConfigMap)
	if err := p.client.Get(ctx, p.object, published); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("reading ConfigMap: %w", err)
	}
	if published.Data[sealingKeyData] != string(want) {
		if err := p.publish(ctx, string(want)); err != nil {
			return reconcile.Result{}, err
		}
	}
	p.due.Set(p.object, now.Add(recheck))
	return reconcile.Result{}, nil
}

func (p *publisher) publish(ctx context.Context, document string) error {
	config := corev1apply.ConfigMap(p.object.Name, p.object.Namespace).WithData(map[string]string{sealingKeyData: document})
	err := p.client.Apply(ctx, config, client.FieldOwner(operatorName), client.ForceOwnership)
	if apierrors.IsNotFound(err) {
		// The namespace is missing. A deployed operator lives in it, so this is one that runs outside the cluster.
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.object.Namespace}}
		if err := p.client.Create(ctx, namespace); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("creating namespace for ConfigMap %s (create it with kubectl, or name another one): %w", p.object, err)
		}
		err = p.client.Apply(ctx, config, client.FieldOwner(operatorName), client.ForceOwnership)
	}
	if err != nil {
		return fmt.Errorf("writing ConfigMap %s: %w", p.object, err)
	}
	return nil
}
