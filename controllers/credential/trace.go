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

// traced returns r with a span around each reconcile, or r itself if tracer is nil. The span names
// no object. Its reconcile ID is in the log lines that name the object, and is the request ID of
// the audit entries.
func traced(tracer trace.Tracer, r reconcile.Reconciler) reconcile.Reconciler {
	if tracer == nil {
		return r
	}
	return reconcile.Func(func(ctx context.Context, req reconcile.Request) (result reconcile.Result, err error) {
		ctx, span := tracer.Start(ctx, "reconcile SealedCredential", trace.WithNewRoot(),
			trace.WithAttributes(attribute.String("latticekeep.request_id", string(controller.ReconcileIDFromContext(ctx)))))
		defer func() { // a directly deferred End would record the panic value
			if err != nil {
				span.SetStatus(codes.Error, fault.Of(err).Error())
			}
			span.End()
		}()
		if s := span.SpanContext(); s.IsValid() { // a logr.Logger passes no context to its handler
			ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues("trace_id", s.TraceID().String(), "span_id", s.SpanID().String()))
		}
		return r.Reconcile(ctx, req)
	})
}
