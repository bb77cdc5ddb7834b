// Package requeue decides when the controllers reconcile an object again: at a time derived from
// the object ([Schedule]), soon after a conflict, and with growing pauses after errors.
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

	// AfterConflict is the pause after an object changed during its reconcile.
	AfterConflict = 100 * time.Millisecond

	// Timeout bounds one reconcile, so that a hanging API server does not block all workers.
	Timeout = time.Minute
)

// NewRateLimiter returns the rate limiter of one controller, which sets the pauses after errors.
func NewRateLimiter() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](FirstRetry, LastRetry)
}
