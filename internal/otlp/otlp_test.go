package otlp

import (
	"compress/gzip"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

func export(t *testing.T, url string) error {
	t.Helper()
	e, err := New(t.Context(), url, 10*time.Second)
	if err != nil {
		t.Fatalf("making an exporter: %v", err)
	}
	defer func() {
		if err := e.Shutdown(t.Context()); err != nil {
			t.Errorf("shutting down: %v", err)
		}
	}()
	return e.ExportSpans(t.Context(), []sdktrace.ReadOnlySpan{tracetest.SpanStub{Name: "one"}.Snapshot()})
}

func TestTheEnvironmentSetsHeadersAuthorityAndCompression(t *testing.T) {
	var got http.Header
	names := []string(nil)
	server := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		got = r.Header
		plain, err := gzip.NewReader(r.Body)
		if err != nil {
			t.Errorf("the body is not compressed: %v", err)
			return
		}
		body, err := io.ReadAll(plain)
		data := new(tracepb.TracesData)
		if err != nil || proto.Unmarshal(body, data) != nil {
			t.Errorf("the body cannot be read: %v", err)
		}
		for _, of := range data.GetResourceSpans() {
			for _, in := range of.GetScopeSpans() {
				for _, s := range in.GetSpans() {
					names = append(names, s.GetName())
				}
			}
		}
	}))
	defer server.Close()
	authority := filepath.Join(t.TempDir(), "ca.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(authority, text, 0o600); err != nil {
		t.Fatalf("writing the authority's certificate: %v", err)
	}
	if err := export(t, server.URL); err == nil {
		t.Error("a certificate of an unknown authority is accepted")
	}
	t.Setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", authority)
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=for-all-signals")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "api-key=a%20key, other = two")
	t.Setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
	if err := export(t, server.URL); err != nil {
		t.Fatalf("exporting: %v", err)
	}
	if got.Get("api-key") != "a key" || got.Get("other") != "two" || got.Get("Content-Type") != "application/x-protobuf" {
		t.Errorf("the headers are %v", got)
	}
	if len(names) != 1 || names[0] != "one" {
		t.Errorf("the spans are %q, want one", names)
	}
}

func TestAVariableThatCannotBeUsedIsAnError(t *testing.T) {
	for name, value := range map[string]string{
		"OTEL_EXPORTER_OTLP_HEADERS":            "no-value",
		"OTEL_EXPORTER_OTLP_CERTIFICATE":        filepath.Join(t.TempDir(), "absent"),
		"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": filepath.Join(t.TempDir(), "absent"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, value)
			if _, err := New(t.Context(), "http://127.0.0.1:1", time.Second); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("the error is %v, want one that names %s", err, name)
			}
		})
	}
}

func TestARequestIsRepeatedWhenTheReceiverAsksForIt(t *testing.T) {
	for status, want := range map[int]int{
		http.StatusServiceUnavailable: 2, http.StatusTooManyRequests: 2, http.StatusBadRequest: 1, http.StatusInternalServerError: 1,
	} {
		requests := 0
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if requests++; requests == 1 {
				w.Header().Set("Retry-After", "0")
				w.WriteHeader(status)
			}
		}))
		err := export(t, server.URL)
		server.Close()
		if requests != want || (err == nil) != (want == 2) {
			t.Errorf("status %d: %d requests and error %v, want %d requests", status, requests, err, want)
		}
	}
}

func TestAPauseIsNeverShorterAndDiffersBetweenProcesses(t *testing.T) {
	pauses := map[time.Duration]bool{}
	for range 100 {
		pause := spread(retryPause)
		if pause < retryPause || pause > retryPause*3/2 {
			t.Fatalf("the pause is %v, want from %v to half more", pause, retryPause)
		}
		pauses[pause] = true
	}
	if len(pauses) == 1 {
		t.Error("all pauses are the same")
	}
	if pause := spread(0); pause != 0 {
		t.Errorf("no pause became %v", pause)
	}
}

func TestSpansThatAReceiverRefusesAreAnError(t *testing.T) {
	partial := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 3)
	partial = protowire.AppendString(protowire.AppendTag(partial, 2, protowire.BytesType), "too old")
	for _, c := range []struct {
		name   string
		answer []byte
		want   string
	}{
		{"all taken", nil, ""},
		{"nothing in the message", protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), nil), ""},
		{"an unknown field", protowire.AppendFixed64(protowire.AppendTag(nil, 9, protowire.Fixed64Type), 1), ""},
		{"three refused", protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), partial), "3 spans: too old"},
		{"cut off", []byte{0x0a, 0x05}, "reading the answer"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/x-protobuf")
			_, _ = w.Write(c.answer)
		}))
		err := export(t, server.URL)
		server.Close()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: the error is %v, want %q", c.name, err, c.want)
		}
	}
}
