package credential

import (
	"context"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// targetIndex is the index of SealedCredentials by the name of their target Secret.
const targetIndex = "spec.target.name"

func indexTarget(o client.Object) []string {
	sc, ok := o.(*v1beta1.SealedCredential)
	if !ok || sc.Spec.Target == nil {
		return nil
	}
	return []string{targetName(sc)}
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// targetHandler returns the handler of the Secrets that the operator may watch: it lets the objects
// whose target a changed Secret is look at it now.
func (r *reconciler) targetHandler() handler.EventHandler {
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { r.secretChanged(ctx, e.Object, false, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) { r.secretChanged(ctx, e.ObjectNew, false, q) },
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { r.secretChanged(ctx, e.Object, true, q) },
	}
}

// secretChanged enqueues the objects whose target the Secret is. It leaves out those that know the
// Secret as it is: most of all at a start, and after a write of the operator itself.
func (r *reconciler) secretChanged(ctx context.Context, is client.Object, deleted bool, q queue) {
	list := new(v1beta1.SealedCredentialList)
	err := r.reader.List(ctx, list, client.InNamespace(is.GetNamespace()), client.MatchingFields{targetIndex: is.GetName()}, client.UnsafeDisableDeepCopy)
	if err != nil { // the next look finds it
		log.FromContext(ctx).Error(err, "looking for the objects of a Secret", "namespace", is.GetNamespace(), "name", is.GetName())
		return
	}
	for i := range list.Items {
		sc := &list.Items[i]
		if !deleted && r.targets.knows(sc, is) {
			continue
		}
		r.targets.requestLook(sc)
		q.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(sc)})
	}
}

// knows reports whether the Secret is as it was last seen.
func (t *targets) knows(sc *v1beta1.SealedCredential, is client.Object) bool {
	seen := t.lastKnown(sc)
	return seen != nil && seen.UID == is.GetUID() && seen.ResourceVersion == is.GetResourceVersion() && !isOfEarlierRelease(is)
}

// requestLook gives the next look at the Secret of sc its turn now.
func (t *targets) requestLook(sc *v1beta1.SealedCredential) {
	t.remember(sc, func(m *targetMemory) { m.turn = t.now() })
}
