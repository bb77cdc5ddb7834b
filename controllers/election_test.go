package controllers_test

import (
	"context"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit"
)

// replica is one of the operators that share a store.
type replica struct {
	stop func() error
}

func (w *world) replica() *replica {
	ctx, cancel := context.WithCancel(context.Background())
	options := w.options()
	options.Elect, options.Metrics = true, controllers.NewMetrics()
	done := make(chan error, 1)
	go func() { done <- controllers.Run(ctx, w.operator, options) }()
	return &replica{stop: func() error { cancel(); return <-done }}
}

// holder is who has the Lease, and empty when nobody has.
func (w *world) holder() string {
	w.t.Helper()
	return w.kubectl("get", "lease", "latticekeep", "--namespace", controllers.DefaultNamespace, "--ignore-not-found", "-o", "jsonpath={.spec.holderIdentity}")
}

func TestOfSeveralOperatorsOneWorksAndAnotherTakesOver(t *testing.T) {
	w := newWorld(t)
	w.kubectl("create", "rolebinding", "election", "--namespace", controllers.DefaultNamespace, "--role=latticekeep-election",
		"--serviceaccount=latticekeep-system:latticekeep") // which is bound only where several replicas run
	w.open(nil)
	defer func() { must(t, w.store.Close()) }()
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	elected := func(before string) string {
		for deadline := time.After(patience); ; {
			if now := w.holder(); now != "" && now != before {
				return now
			}
			select {
			case <-poll.C:
			case <-deadline:
				t.Fatalf("nobody but %q was elected\n%s", before, w.logs.tail())
			}
		}
	}

	first := w.replica()
	leader := elected("")
	second := w.replica()
	namespace := w.namespace()
	object := w.create(w.manifest(namespace, "shared", w.values("password")))
	object = w.awaitReady(object, 1)
	if now := w.holder(); now != leader {
		t.Fatalf("%s works, and %s had the Lease", now, leader)
	}

	must(t, first.stop()) // which gives the Lease up
	elected(leader)
	object = w.change(object, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} })
	object = w.awaitReady(object, 2)
	w.checkHistory(object, audit.CredentialSealed, audit.CredentialReencrypted)
	must(t, second.stop())
	if now := w.holder(); now != "" {
		t.Errorf("%s has the Lease and has ended", now)
	}
}
