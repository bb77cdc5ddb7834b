// Package requeue says when the controllers look at an object again: at a time that follows from the
// object ([Schedule]), soon after a conflict, and with growing pauses after an error.
package requeue

import (
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	// FirstRetry is the pause after the first error. Each further error doubles the pause, up to
	// LastRetry, which is also how long the operator takes to notice that the vault is back.
	FirstRetry, LastRetry = 100 * time.Millisecond, 30 * time.Second

	// AfterConflict is the pause after an object has changed while it was reconciled.
	AfterConflict = 100 * time.Millisecond

	// Timeout bounds one reconcile, so that an API server that hangs does not hold all workers.
	Timeout = time.Minute
)

// NewRateLimiter returns the pauses after errors for one controller.
func NewRateLimiter() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](FirstRetry, LastRetry)
}
