package credential

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// traced returns r with a span around each reconcile, and r itself without a tracer. The span names no object: its
// reconcile id leads to the lines of the log that do, and is the request id of its audit entries.
func traced(tracer trace.Tracer, r reconcile.Reconciler) reconcile.Reconciler {
	if tracer == nil {
		return r
	}
	return reconcile.Func(func(ctx context.Context, req reconcile.Request) (result reconcile.Result, err error) {
		ctx, span := tracer.Start(ctx, "reconcile SealedCredential", trace.WithNewRoot(),
			trace.WithAttributes(attribute.String("latticekeep.request_id", string(controller.ReconcileIDFromContext(ctx)))))
		defer func() { // End as the deferred function itself would record what is panicked with
			if err != nil {
				span.SetStatus(codes.Error, fault.Of(err).Error())
			}
			span.End()
		}()
		if s := span.SpanContext(); s.IsValid() { // a logr.Logger passes no context on to its handler
			ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues("trace_id", s.TraceID().String(), "span_id", s.SpanID().String()))
		}
		return r.Reconcile(ctx, req)
	})
}
