package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"go.opentelemetry.io/otel"
	spanpb "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/test/otlptest"
)

func TestTracesLeadFromARequestToItsCommitAndItsLog(t *testing.T) {
	r := otlptest.NewReceiver(t)
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
	stop() // sends the remaining spans

	unseals, commits := r.Of("GET /api/v2/vault/:credential_id"), r.Of("store commit")
	if len(unseals) != 2 || len(r.Of("POST /api/v2/vault/seal")) != 1 || len(r.Of("KMS unwrap"))+len(r.Of("KMS wrap")) == 0 {
		t.Fatal(r.Spans)
	}
	of := func(parent *spanpb.Span) func(*spanpb.Span) bool {
		return func(s *spanpb.Span) bool {
			return bytes.Equal(s.GetTraceId(), parent.GetTraceId()) && bytes.Equal(s.GetParentSpanId(), parent.GetSpanId())
		}
	}
	if !slices.ContainsFunc(commits, of(unseals[0])) { // the commit of its audit entry
		t.Error("no commit belongs to the request")
	}
	for _, commit := range commits {
		if len(commit.GetParentSpanId()) == 0 {
			t.Error("a commit that nobody waits for is a trace")
		}
	}
	if r.Whose["service.name"] != "latticekeep" || r.Whose["service.version"] != buildinfo.Version() {
		t.Error(r.Whose)
	}
	found := false
	for text := range strings.Lines(s.log.String()) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(text), &entry); err != nil {
			t.Fatal(err)
		}
		if entry["request_id"] == otlptest.AttributeOf(unseals[0], "latticekeep.request_id") {
			found = entry["trace_id"] == fmt.Sprintf("%x", unseals[0].GetTraceId()) && entry["span_id"] == fmt.Sprintf("%x", unseals[0].GetSpanId())
		}
	}
	if !found {
		t.Error("no line of the log is of the request's trace")
	}
	for _, secret := range []string{"canary", id, tenant, key, system, strings.TrimPrefix(key, "lk_live_"), "127.0.0.1", line.DataDir} {
		for _, body := range r.Bodies {
			if bytes.Contains(body, []byte(secret)) {
				t.Errorf("%q is in the spans", secret)
			}
		}
	}
}

func TestAReceiverThatIsDownIsNoTroubleAndSaidOnce(t *testing.T) {
	s := newSite(t, closed+"tracing: {endpoint: 'http://127.0.0.1:1'}\n")
	line, stop := s.serve()
	if status, body := s.ask(s.client(), "GET", line.BaseURL+"/api/v2/sealing-key", "", ""); status != http.StatusOK {
		t.Error(status, body)
	}
	stop()
	if n := strings.Count(s.log.String(), "sending spans to tracing.endpoint failed"); n != 1 {
		t.Errorf("said %d times: %s", n, s.log.String())
	}
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
