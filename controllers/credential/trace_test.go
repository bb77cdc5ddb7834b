package credential

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/internal/fault"
)

func TestASpanOfAReconcileNamesNothing(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("test")
	request := reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "canary-namespace", Name: "canary-name"}}
	var failure any
	r := traced(tracer, reconcile.Func(func(ctx context.Context, got reconcile.Request) (reconcile.Result, error) {
		if !trace.SpanFromContext(ctx).IsRecording() || got != request {
			t.Error("not in the span, or of another object", got)
		}
		if err, ok := failure.(error); ok {
			return reconcile.Result{}, err
		} else if failure != nil {
			panic(failure)
		}
		return reconcile.Result{}, nil
	}))
	do := func(how any) (err error) {
		defer func() { _ = recover() }()
		failure = how
		_, err = r.Reconcile(t.Context(), request)
		return err
	}
	trouble := fault.Wrap(fault.Unavailable, "canary-message", errors.New("canary-cause"))
	if err := do(nil); err != nil {
		t.Error(err)
	}
	if err := do(trouble); !errors.Is(err, trouble) {
		t.Error(err)
	}
	_ = do("canary-panic")
	ended := spans.Ended()
	if len(ended) != 3 || ended[0].Status().Code != codes.Unset || ended[1].Status() != (sdktrace.Status{Code: codes.Error, Description: fault.Unavailable.Error()}) {
		t.Fatal(ended)
	}
	for _, span := range ended {
		if len(span.Events()) != 0 || strings.Contains(fmt.Sprintf("%+v", span), "canary") {
			t.Errorf("%+v", span)
		}
	}
}

func TestWithoutATracerAReconcileIsLeftAlone(t *testing.T) {
	r := new(reconciler)
	if got := traced(nil, r); got != reconcile.Reconciler(r) {
		t.Errorf("%T", got)
	}
}
