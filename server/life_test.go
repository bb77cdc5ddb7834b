package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/store"
)

// lines returns the log lines with that message.
func (s *service) lines(message string) []map[string]any {
	s.t.Helper()
	var lines []map[string]any
	scanner := bufio.NewScanner(strings.NewReader(s.log.String()))
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		var line map[string]any
		if err := json.Unmarshal(scanner.Bytes(), &line); err != nil {
			s.t.Fatal(err)
		}
		if line["msg"] == message {
			lines = append(lines, line)
		}
	}
	return lines
}

func TestANewServerNeedsItsParts(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("a server of nothing was made")
	}
}

func TestOneRequestIDInHeaderEnvelopeLogAndAuditLog(t *testing.T) {
	s := newService(t)
	r := s.call(request{method: "GET", path: "/api/v2/vault/x", key: s.key, header: http.Header{"X-Request-ID": {"mine"}, "X-Forwarded-For": {"203.0.113.1"}}})
	id := r.header.Get("X-Request-ID")
	if !authz.ValidID("req", id) {
		t.Fatalf("header %q", id)
	}
	if got := r.want(t, http.StatusForbidden)["error"].(map[string]any)["request_id"]; got != id {
		t.Errorf("envelope %v", got)
	}
	line := s.lines("request")[0]
	if line["request_id"] != id || line["route"] != "/api/v2/vault/:credential_id" || line["method"] != "GET" || line["status"] != 403.0 {
		t.Errorf("log %v", line)
	}
	if e := s.entries("limit=1")[0]; e["request_id"] != id || e["source_ip"] != "127.0.0.1" {
		t.Errorf("entry %v", e)
	}
	if again := s.get("/healthz").header.Get("X-Request-ID"); again == id {
		t.Error("two requests have one id")
	}
}

func TestResponsesMayBeCachedOnlyWhenPublic(t *testing.T) {
	s := newService(t)
	for path, want := range map[string]string{
		"/api/v2/sealing-key": "public, max-age=60", "/api/v2/openapi.yaml": "public, max-age=60",
		"/api/v2/vault/list": "no-store", "/api/v2/vault/" + s.seal("v"): "no-store", "/api/v2/vault/x": "no-store", "/none": "no-store",
		"/readyz": "no-store",
	} {
		r := s.get(path)
		if got := r.header.Get("Cache-Control"); got != want {
			t.Errorf("%s: %q", path, got)
		}
		if r.header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s can be sniffed", path)
		}
		if r.header.Get("Server") != "" || r.header.Get("Set-Cookie") != "" {
			t.Errorf("%s: headers %v", path, r.header)
		}
	}
}

func TestTheSealingKeyIsTheSignedDocument(t *testing.T) {
	s := newService(t)
	r := s.call(request{method: "GET", path: "/api/v2/sealing-key"})
	document, err := sealing.ParseDocument(r.body)
	if err != nil {
		t.Fatal(err)
	}
	if err := document.CheckIdentity(s.server.config.Keys.Identity().ID()); err != nil {
		t.Error(err)
	}
}

func TestMetricsSpeakOfTemplatesOnly(t *testing.T) {
	s := newService(t)
	id := s.seal("v")
	s.get("/api/v2/vault/"+id).want(t, http.StatusOK)
	s.call(request{method: "GET", path: "/api/v2/vault/" + id}).message(t, http.StatusUnauthorized)
	s.call(request{method: "FROBNICATE", path: "/none/such"})
	got := string(s.call(request{method: "GET", path: "/metrics"}).body)
	for _, want := range []string{
		`latticekeep_http_requests_total{method="GET",route="/api/v2/vault/:credential_id",status="200"} 1`,
		`latticekeep_http_requests_total{method="GET",route="/api/v2/vault/:credential_id",status="401"} 1`,
		`latticekeep_http_requests_total{method="POST",route="/api/v2/vault/seal",status="201"} 1`,
		`latticekeep_http_requests_total{method="other",route="none",status="404"} 1`,
		`latticekeep_http_request_duration_seconds_count{method="POST",route="/api/v2/vault/seal"} 1`,
		`latticekeep_build_info{version="test"} 1`,
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	for _, unwanted := range []string{id, string(s.tenant), "FROBNICATE", "such"} {
		if strings.Contains(got, unwanted) {
			t.Errorf("%s is in the metrics", unwanted)
		}
	}
}

func TestProbes(t *testing.T) {
	s := newService(t)
	s.get("/healthz").want(t, http.StatusOK)
	s.get("/readyz").want(t, http.StatusOK)
	if err := s.store.Close(); err != nil {
		t.Fatal(err)
	}
	s.get("/healthz").want(t, http.StatusOK)
	s.get("/readyz").message(t, http.StatusServiceUnavailable)
}

func TestWithoutTheStoreNothingLeaves(t *testing.T) {
	s := newService(t)
	id := s.seal("v")
	if err := s.store.Close(); err != nil {
		t.Fatal(err)
	}
	want := ""
	for _, r := range []request{
		{method: "GET", path: "/api/v2/vault/" + id},
		{method: "GET", path: "/api/v2/vault/" + authz.NewID("cred")},
		{method: "GET", path: "/api/v2/vault/x"},
		{method: "GET", path: "/api/v2/vault/list"},
		{method: "POST", path: "/api/v2/vault/rotate/" + id},
		{method: "DELETE", path: "/api/v2/vault/" + id},
		{method: "POST", path: "/api/v2/vault/seal", body: `{"name":"n","credential_type":"t","values":{"k":"v"}}`},
		{method: "GET", path: "/api/v2/audit/logs"},
		{method: "GET", path: "/api/v2/sealing-key"},
	} {
		r.key = s.key
		answer := s.call(r)
		answer.message(t, http.StatusServiceUnavailable)
		got := faceless(t, answer)
		if want == "" {
			want = got
		}
		if got != want {
			t.Errorf("%s %s: %s", r.method, r.path, got)
		}
	}
	if line := s.lines("request")[1]; line["level"] != "ERROR" || line["error"] == nil {
		t.Errorf("the cause is not in the log: %v", line)
	}
}

func TestAPanicIsA500AndItsValueStaysOut(t *testing.T) {
	s := newService(t)
	const canary = "tr0ub4dor"
	s.server.engine.GET("/test/panic", func(*gin.Context) { panic(errors.New(canary)) })
	s.server.engine.GET("/test/panic-late", func(c *gin.Context) {
		c.String(http.StatusOK, "half")
		panic(canary)
	})
	resp, err := http.Get(s.url + "/test/panic")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if m := (reply{resp.StatusCode, resp.Header, body}).message(t, http.StatusInternalServerError); m != "internal error" || err != nil {
		t.Errorf("message %q, %v", m, err)
	}
	if lines := s.lines("panic"); len(lines) != 1 || lines[0]["type"] != "*errors.errorString" || !strings.Contains(lines[0]["stack"].(string), "life_test.go") {
		t.Errorf("log %v", lines)
	}
	once := http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // a kept connection would be tried again
	if resp, err := once.Get(s.url + "/test/panic-late"); err == nil {
		var b bytes.Buffer
		if _, err := b.ReadFrom(resp.Body); err == nil {
			t.Errorf("a broken response arrived whole: %q", b.String())
		}
		resp.Body.Close()
	}
	s.get("/healthz").want(t, http.StatusOK)
	if strings.Contains(s.log.String(), canary) {
		t.Error("the value is in the log")
	}
	if n := len(s.lines("request")); n != 2 { // a probe that is answered well has none
		t.Errorf("%d access log lines for 2 requests", n)
	}
}

func TestShutdownFinishesRequestsInFlight(t *testing.T) {
	s := assemble(t)
	began, release := make(chan struct{}), make(chan struct{})
	s.server.engine.GET("/test/slow", func(c *gin.Context) {
		close(began)
		<-release
		c.String(http.StatusOK, "done: %v", c.Request.Context().Err())
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	served, answered := make(chan error, 1), make(chan string, 1)
	go func() { served <- s.server.Serve(ctx, l) }()
	go func() {
		resp, err := http.Get("http://" + l.Addr().String() + "/test/slow")
		if err != nil {
			answered <- err.Error()
			return
		}
		defer resp.Body.Close()
		var b bytes.Buffer
		_, err = b.ReadFrom(resp.Body)
		answered <- fmt.Sprint(resp.StatusCode, " ", b.String(), " ", err)
	}()
	<-began
	stop()
	for { // until nothing listens any more
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			break
		}
		c.Close()
	}
	select {
	case err := <-served:
		t.Fatalf("the server left a request behind: %v", err)
	default:
	}
	close(release)
	if got := <-answered; got != "200 done: <nil> <nil>" {
		t.Errorf("the request in flight: %s", got)
	}
	if err := <-served; err != nil {
		t.Errorf("serving: %v", err)
	}
}

func TestServeReturnsWhenItsListenerFails(t *testing.T) {
	s := assemble(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := s.server.Serve(t.Context(), l); err == nil {
		t.Error("serving on a closed listener succeeded")
	}
}

func TestOversizedHeadersAreRefused(t *testing.T) {
	s := newService(t)
	req, err := http.NewRequest("GET", s.url+"/healthz", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Padding", strings.Repeat("a", 32<<10))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("status %d", resp.StatusCode)
	}
}

// While the store's writer is held up, each call that has to write is answered
// and nobody waits for it.
func TestAHangingStoreIsA503(t *testing.T) {
	s := newService(t)
	id := s.seal("value")
	held, release := make(chan struct{}), make(chan struct{})
	hold := sync.OnceFunc(func() { close(held) })
	ended := make(chan error, 1)
	go func() {
		ended <- s.store.Update(context.Background(), func(store.Tx) error {
			hold()
			<-release
			return nil
		})
	}()
	<-held
	answers := make(chan int, 4)
	for _, r := range []request{
		{method: "POST", path: "/api/v2/vault/seal", body: `{"name":"n","credential_type":"t","values":{"k":"v"}}`},
		{method: "POST", path: "/api/v2/vault/rotate/" + id},
		{method: "DELETE", path: "/api/v2/vault/" + id},
		{method: "GET", path: "/api/v2/audit/logs"},
	} {
		r.key = s.key
		go func() { answers <- s.call(r).status }()
	}
	for range cap(answers) {
		select {
		case status := <-answers:
			if status != http.StatusServiceUnavailable {
				t.Errorf("status %d", status)
			}
		case <-time.After(20 * time.Second): // a second, and room for a slow machine
			t.Error("a call hangs")
		}
	}
	close(release)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if got := s.get("/api/v2/vault/" + id); got.status != http.StatusOK {
		t.Errorf("no recovery: %d", got.status)
	}
}
