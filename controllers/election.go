package controllers

import (
	"crypto/rand"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// leaseName is the Lease, in the operator's own namespace, that says which operator works.
const leaseName = "latticekeep"

// leaseOf returns the lock of the election, and nil when there is none. It writes no events: they would take a right of
// their own, and the Lease itself says who has it and since when.
func leaseOf(cfg *rest.Config, o Options) (resourcelock.Interface, error) {
	if !o.Elect {
		return nil, nil
	}
	leases, err := coordinationv1.NewForConfig(rest.AddUserAgent(rest.CopyConfig(cfg), "leader-election"))
	if err != nil {
		return nil, fmt.Errorf("making a client for the Lease: %w", err)
	}
	return &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: o.Namespace, Name: leaseName},
		Client:     leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: operatorName + "-" + rand.Text()},
	}, nil
}
