package server_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// traced is a service whose spans are kept.
func traced(t *testing.T) (*service, *tracetest.SpanRecorder) {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	return newService(t, func(c *server.Config) { c.Tracer = provider.Tracer("test") }), spans
}

func attributesOf(span sdktrace.ReadOnlySpan) map[string]string {
	all := make(map[string]string)
	for _, a := range span.Attributes() {
		all[string(a.Key)] = a.Value.String()
	}
	return all
}

func TestASpanSaysWhatWasAskedAndAnsweredAndNothingElse(t *testing.T) {
	s, spans := traced(t)
	id := s.Seal("v")
	r := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + id + "?canary-query=1", Key: s.Key, Header: http.Header{
		"Traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, "Tracestate": {"canary=state"}, "Baggage": {"canary=baggage"},
	}})
	r.Message(t, http.StatusBadRequest) // the parameter is unknown
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/canary-path"}).Message(t, http.StatusUnauthorized)
	s.Call(servertest.Request{Method: "CANARY", Path: "/canary"})
	s.Get("/healthz")
	s.Get("/readyz")
	s.Metrics()
	ended := spans.Ended()
	var got []string
	for _, span := range ended {
		a := attributesOf(span)
		got = append(got, span.Name()+" "+a["http.response.status_code"])
		if len(a) != 4 || !authz.ValidID("req", a["latticekeep.request_id"]) || len(span.Events()) != 0 || len(span.Links()) != 0 || span.Parent().IsValid() {
			t.Errorf("%+v", span)
		}
	}
	want := []string{"POST /api/v2/vault/seal 201", "GET /api/v2/vault/:credential_id 400", "GET /api/v2/vault/:credential_id 401", "other none 404"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("%q, want %q", got, want)
	}
	if id := attributesOf(ended[1])["latticekeep.request_id"]; id != r.Header.Get("X-Request-ID") {
		t.Error("the span does not lead to the log:", id)
	}
	for _, span := range ended {
		text := fmt.Sprintf("%+v %s", span, span.SpanContext().TraceID())
		for _, canary := range []string{"canary", "CANARY", id, s.Key, string(s.Tenant), "0af7651916cd43dd8448eb211c80319c", "127.0.0.1"} {
			if strings.Contains(text, canary) {
				t.Errorf("%s is in %s", canary, text)
			}
		}
	}
}

func TestAPanicIsASpanThatFailedAndDoesNotQuoteIt(t *testing.T) {
	s, spans := traced(t)
	s.Server.Engine().GET("/test/panic", func(*gin.Context) { panic("canary") })
	s.Server.Engine().GET("/test/late", func(c *gin.Context) {
		c.String(http.StatusOK, "half")
		panic("canary")
	})
	if code, _ := servertest.GetStatus(t, s.URL+"/test/panic"); code != http.StatusInternalServerError {
		t.Fatal(code)
	}
	once := http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // a kept connection would be tried again
	if answer, err := once.Get(s.URL + "/test/late"); err == nil {
		answer.Body.Close()
	}
	ended := spans.Ended()
	if len(ended) != 2 || ended[0].Status().Code != codes.Error {
		t.Fatal(ended)
	}
	for _, span := range ended {
		if len(span.Events()) != 0 || strings.Contains(fmt.Sprintf("%+v", span), "canary") {
			t.Errorf("%+v", span)
		}
	}
	if a := ended[0].Attributes(); !strings.Contains(fmt.Sprint(a), fmt.Sprint(attribute.Int("http.response.status_code", 500))) {
		t.Error(a)
	}
}
