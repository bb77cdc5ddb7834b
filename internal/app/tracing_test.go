package app

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/otlptest"
)

func TestAPartOfTheTracesIsSent(t *testing.T) {
	r := otlptest.NewReceiver(t)
	const ratio = 0.5
	spans, err := newTracing(t.Context(), config.Tracing{Endpoint: r.URL + "/v1/traces", SampleRatio: ratio}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	const all = 1000
	for range all {
		_, span := spans.tracer.Start(t.Context(), "one")
		span.End()
	}
	spans.end(t.Context())
	if n := len(r.Of("one")); n < all/4 || n > all*3/4 { // fails by chance with a probability below 1e-50
		t.Errorf("%d of %d were sent", n, all)
	}
}

// moody is an exporter that returns the errors that the test sends to it.
type moody chan error

func (m moody) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error { return <-m }

func (m moody) Shutdown(context.Context) error { return nil }

func TestTroubleWithTheReceiverIsSaidWhenItBeginsAndEnds(t *testing.T) {
	var log machine.Log
	m := make(moody, 1)
	e := patientExporter{SpanExporter: m, logger: slog.New(slog.NewTextHandler(&log, nil))}
	bad := errors.New(strings.Repeat("long ", 1000))
	for i, c := range []struct {
		answer error
		lines  int // lines so far
	}{{nil, 0}, {bad, 1}, {bad, 1}, {nil, 2}, {nil, 2}, {bad, 3}} {
		m <- c.answer
		if err := e.ExportSpans(t.Context(), nil); err != nil {
			t.Error("a library would log it:", err)
		}
		if n := strings.Count(log.String(), "\n"); n != c.lines {
			t.Errorf("step %d: %d lines, want %d", i, n, c.lines)
		}
	}
	if len(log.String()) > 2000 {
		t.Error("what a receiver answers is logged in full")
	}
}

func TestAReceiverThatHangsHoldsNothingUp(t *testing.T) {
	release := make(chan struct{})
	hangs := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	defer hangs.Close()
	defer close(release)
	spans, err := newTracing(t.Context(), config.Tracing{Endpoint: hangs.URL, SampleRatio: 1}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for range 10_000 { // more than the queue holds
		_, span := spans.tracer.Start(t.Context(), "one")
		span.End()
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	spans.end(ended)
}
