package cluster

import (
	"crypto/rand"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// leaseName is the Lease in the operator's own namespace that names the active operator.
const leaseName = "latticekeep"

// NewLease returns the lock with which the operators of one store elect the active one. The lock
// records no events: they would need an additional right, and the Lease itself names its holder.
func NewLease(cfg *rest.Config, namespace string) (resourcelock.Interface, error) {
	leases, err := coordinationv1.NewForConfig(rest.AddUserAgent(rest.CopyConfig(cfg), "leader-election"))
	if err != nil {
		return nil, fmt.Errorf("making a client for the Lease: %w", err)
	}
	return &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: namespace, Name: leaseName},
		Client:     leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: v1beta1.OperatorName + "-" + rand.Text()},
	}, nil
}
