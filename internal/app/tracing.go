package app

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/otlp"
	"github.com/latticekeep/latticekeep/internal/store"
)

// tracing creates spans and sends them in the background. There is a span for each request and each
// reconcile, and within these for each commit and each call of the KMS. A span contains our own
// names, kinds of errors, and the id that leads to the log and the audit log. It contains no text
// of a caller and no name of an object. The tracer is not registered globally: code that is given
// no tracer makes no span.
type tracing struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// Limits for sending. Spans beyond the exporter's queue are dropped.
const (
	spansPause      = 5 * time.Second // interval between batches
	exportTimeout   = 10 * time.Second
	lastSpansWithin = 3 * time.Second // timeout of the last batch
)

// newTracing returns nil when s names no endpoint.
func newTracing(ctx context.Context, s config.Tracing, logger *slog.Logger) (*tracing, error) {
	if s.Endpoint == "" {
		return nil, nil
	}
	endpoint, err := url.Parse(s.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("reading tracing.endpoint: %w", err)
	}
	if endpoint.Path == "" {
		endpoint.Path = "/v1/traces" // the standard path of OTLP receivers
	}
	exporter, err := otlp.New(ctx, endpoint.String(), exportTimeout)
	if err != nil {
		return nil, fmt.Errorf("setting up traces: %w", err)
	}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(&patientExporter{SpanExporter: exporter, logger: logger},
			sdktrace.WithBatchTimeout(spansPause), sdktrace.WithExportTimeout(exportTimeout)),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(s.SampleRatio))),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", "latticekeep"), attribute.String("service.version", buildinfo.Version()))),
	)
	return &tracing{provider, provider.Tracer("github.com/latticekeep/latticekeep")}, nil
}

// end sends the last spans with a short timeout.
func (t *tracing) end(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lastSpansWithin)
	defer cancel()
	_ = t.provider.Shutdown(ctx) // the exporter has logged the error
}

// patientExporter drops spans that cannot be sent, and logs that once.
type patientExporter struct {
	sdktrace.SpanExporter
	logger *slog.Logger
	failed atomic.Bool
}

// ExportSpans implements sdktrace.SpanExporter.
func (e *patientExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := e.SpanExporter.ExportSpans(ctx, spans)
	switch failed := err != nil; {
	case !e.failed.CompareAndSwap(!failed, failed):
	case failed:
		e.logger.Warn("sending spans to tracing.endpoint failed; dropping spans until it accepts them", "error", fmt.Sprintf("%.500s", err))
	default:
		e.logger.Info("spans can be sent again")
	}
	return nil
}

// spanHandler adds the trace and span ids to each line that is logged within a span.
type spanHandler struct{ slog.Handler }

// Handle implements slog.Handler.
func (h spanHandler) Handle(ctx context.Context, r slog.Record) error {
	if s := trace.SpanContextFromContext(ctx); s.IsValid() {
		r = r.Clone()
		r.AddAttrs(slog.String("trace_id", s.TraceID().String()), slog.String("span_id", s.SpanID().String()))
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h spanHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return spanHandler{h.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (h spanHandler) WithGroup(name string) slog.Handler {
	return spanHandler{h.Handler.WithGroup(name)}
}

// step runs do in a child span of the span in ctx. Without a recording span it only runs do.
func step(ctx context.Context, tracer trace.Tracer, name string, do func(context.Context) error) error {
	if !trace.SpanFromContext(ctx).IsRecording() {
		return do(ctx)
	}
	ctx, span := tracer.Start(ctx, name)
	var err error
	defer func() { // as the deferred function itself, End would record the panic value
		if err != nil {
			span.SetStatus(codes.Error, fault.Of(err).Error())
		}
		span.End()
	}()
	err = do(ctx)
	return err
}

// tracedStore makes a span of each commit. Most of its time is the wait for its turn.
type tracedStore struct {
	store.Store
	tracer trace.Tracer
}

// Update implements store.Store.
func (s tracedStore) Update(ctx context.Context, fn func(store.Tx) error) error {
	return step(ctx, s.tracer, "store commit", func(ctx context.Context) error { return s.Store.Update(ctx, fn) })
}

// tracedKMS makes a span of each call.
type tracedKMS struct {
	keyring.KMS
	tracer trace.Tracer
}

// Wrap implements keyring.KMS.
func (k tracedKMS) Wrap(ctx context.Context, keyContext string, key []byte) (wrapped []byte, err error) {
	err = step(ctx, k.tracer, "KMS wrap", func(ctx context.Context) error {
		wrapped, err = k.KMS.Wrap(ctx, keyContext, key)
		return err
	})
	return wrapped, err
}

// Unwrap implements keyring.KMS.
func (k tracedKMS) Unwrap(ctx context.Context, keyContext string, wrapped []byte) (key []byte, err error) {
	err = step(ctx, k.tracer, "KMS unwrap", func(ctx context.Context) error {
		key, err = k.KMS.Unwrap(ctx, keyContext, wrapped)
		return err
	})
	return key, err
}
