package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.opentelemetry.io/otel"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	spanpb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// receiver takes OTLP over HTTP on loopback.
type receiver struct {
	*httptest.Server
	t *testing.T

	mu     sync.Mutex
	bodies [][]byte
	spans  []*spanpb.Span
	whose  map[string]string // attributes of the resource
}

func newReceiver(t *testing.T) *receiver {
	r := &receiver{t: t, whose: make(map[string]string)}
	r.Server = httptest.NewServer(r)
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(request.Body)
	message := new(spanpb.TracesData) // encoded like the request of the protocol
	if err == nil {
		err = proto.Unmarshal(body, message)
	}
	if err != nil || request.URL.Path != "/v1/traces" {
		r.t.Errorf("%s: %v", request.URL.Path, err)
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bodies = append(r.bodies, body)
	for _, of := range message.GetResourceSpans() {
		for _, a := range of.GetResource().GetAttributes() {
			r.whose[a.GetKey()] = a.GetValue().GetStringValue()
		}
		for _, in := range of.GetScopeSpans() {
			r.spans = append(r.spans, in.GetSpans()...)
		}
	}
}

// of returns the spans of a name.
func (r *receiver) of(name string) (found []*spanpb.Span) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.spans {
		if s.GetName() == name {
			found = append(found, s)
		}
	}
	return found
}

func attributeOf(s *spanpb.Span, key string) string {
	for _, a := range s.GetAttributes() {
		if a.GetKey() == key {
			return a.GetValue().GetStringValue()
		}
	}
	return ""
}

func TestTracesLeadFromARequestToItsCommitAndItsLog(t *testing.T) {
	r := newReceiver(t)
	s := newSite(t, closed+"tracing: {endpoint: '"+r.URL+"'}\n")
	line, stop := s.serve()
	c := s.client()
	system := s.systemKey()
	_, body := s.ask(c, "POST", line.BaseURL+"/api/v2/system/tenants", system, `{"name":"canary-tenant"}`)
	tenant := field(t, body, "tenant_id")
	_, body = s.ask(c, "POST", line.BaseURL+"/api/v2/system/tenants/"+tenant+"/api-keys", system, `{"name":"canary-key","scopes":["vault:read","vault:write"]}`)
	key := field(t, body, "api_key")
	_, body = s.ask(c, "POST", line.BaseURL+"/api/v2/vault/seal", key,
		`{"name":"canary-name","credential_type":"canary-type","values":{"canary-field":"canary-value"},"ttl_days":30}`)
	id := field(t, body, "credential_id")
	if status, body := s.ask(c, "GET", line.BaseURL+"/api/v2/vault/"+id, key, ""); status != http.StatusOK || !strings.Contains(body, "canary-value") {
		t.Fatal(status, body)
	}
	s.ask(c, "GET", line.BaseURL+"/api/v2/vault/"+id, "lk_live_canary", "")
	stop() // sends what is left

	unseals, commits := r.of("GET /api/v2/vault/:credential_id"), r.of("store commit")
	if len(unseals) != 2 || len(r.of("POST /api/v2/vault/seal")) != 1 || len(r.of("KMS unwrap"))+len(r.of("KMS wrap")) == 0 {
		t.Fatal(r.spans)
	}
	of := func(parent *spanpb.Span) func(*spanpb.Span) bool {
		return func(s *spanpb.Span) bool {
			return bytes.Equal(s.GetTraceId(), parent.GetTraceId()) && bytes.Equal(s.GetParentSpanId(), parent.GetSpanId())
		}
	}
	if !slices.ContainsFunc(commits, of(unseals[0])) { // of its audit entry
		t.Error("no commit belongs to the request")
	}
	for _, commit := range commits {
		if len(commit.GetParentSpanId()) == 0 {
			t.Error("a commit that nobody waits for is a trace")
		}
	}
	if r.whose["service.name"] != "latticekeep" || r.whose["service.version"] != version() {
		t.Error(r.whose)
	}
	found := false
	for text := range strings.Lines(s.log.String()) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(text), &entry); err != nil {
			t.Fatal(err)
		}
		if entry["request_id"] == attributeOf(unseals[0], "latticekeep.request_id") {
			found = entry["trace_id"] == fmt.Sprintf("%x", unseals[0].GetTraceId()) && entry["span_id"] == fmt.Sprintf("%x", unseals[0].GetSpanId())
		}
	}
	if !found {
		t.Error("no line of the log is of the request's trace")
	}
	for _, secret := range []string{"canary", id, tenant, key, system, strings.TrimPrefix(key, "lk_live_"), "127.0.0.1", line.DataDir} {
		for _, body := range r.bodies {
			if bytes.Contains(body, []byte(secret)) {
				t.Errorf("%q is in the spans", secret)
			}
		}
	}
}

func TestAPartOfTheTracesIsSent(t *testing.T) {
	r := newReceiver(t)
	const ratio = 0.5
	spans, err := newTracing(t.Context(), TracingSettings{Endpoint: r.URL + "/v1/traces", SampleRatio: ratio}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	const all = 1000
	for range all {
		_, span := spans.tracer.Start(t.Context(), "one")
		span.End()
	}
	spans.end(t.Context())
	if n := len(r.of("one")); n < all/4 || n > all*3/4 { // outside with a probability below 1e-50
		t.Errorf("%d of %d were sent", n, all)
	}
}

func TestAReceiverThatIsDownIsNoTroubleAndSaidOnce(t *testing.T) {
	s := newSite(t, closed+"tracing: {endpoint: 'http://127.0.0.1:1'}\n")
	line, stop := s.serve()
	if status, body := s.ask(s.client(), "GET", line.BaseURL+"/api/v2/sealing-key", "", ""); status != http.StatusOK {
		t.Error(status, body)
	}
	stop()
	if n := strings.Count(s.log.String(), "spans cannot be sent"); n != 1 {
		t.Errorf("said %d times: %s", n, s.log.String())
	}
}

// moody is an exporter that answers with the errors that it is sent.
type moody chan error

func (m moody) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error { return <-m }
func (m moody) Shutdown(context.Context) error                             { return nil }

func TestTroubleWithTheReceiverIsSaidWhenItBeginsAndEnds(t *testing.T) {
	var log buffer
	m := make(moody, 1)
	e := patientExporter{SpanExporter: m, logger: slog.New(slog.NewTextHandler(&log, nil))}
	bad := errors.New(strings.Repeat("long ", 1000))
	for i, c := range []struct {
		answer error
		lines  int // so far
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
	spans, err := newTracing(t.Context(), TracingSettings{Endpoint: hangs.URL, SampleRatio: 1}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for range 10_000 { // more than it keeps
		_, span := spans.tracer.Start(t.Context(), "one")
		span.End()
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	spans.end(ended)
}

func TestWithoutTracingNothingIsThere(t *testing.T) {
	before := otel.GetTracerProvider()
	s := newSite(t, closed)
	line, stop := s.serve()
	s.ask(s.client(), "GET", line.BaseURL+"/api/v2/sealing-key", "", "")
	stop()
	if strings.Contains(s.log.String(), "trace_id") || otel.GetTracerProvider() != before {
		t.Error("something is traced")
	}
}
