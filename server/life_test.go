package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gin-gonic/gin"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/connections"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

func TestANewServerNeedsItsParts(t *testing.T) {
	if _, err := server.New(server.Config{}); err == nil {
		t.Error("a server of nothing was made")
	}
}

func TestOneRequestIDInHeaderEnvelopeLogAndAuditLog(t *testing.T) {
	s := newService(t)
	r := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/x", Key: s.Key, Header: http.Header{"X-Request-ID": {"mine"}, "X-Forwarded-For": {"203.0.113.1"}}})
	id := r.Header.Get("X-Request-ID")
	if !authz.ValidID("req", id) {
		t.Fatalf("header %q", id)
	}
	if got := r.Want(t, http.StatusForbidden)["error"].(map[string]any)["request_id"]; got != id {
		t.Errorf("envelope %v", got)
	}
	line := s.LogLines("request")[0]
	if line["request_id"] != id || line["route"] != "/api/v2/vault/:credential_id" || line["method"] != "GET" || line["status"] != 403.0 {
		t.Errorf("log %v", line)
	}
	e := s.Entries("limit=1")[0]
	if e["request_id"] != id || e["source_ip"] != "127.0.0.1" {
		t.Errorf("entry %v", e)
	}
	if line["tenant_id"] != e["tenant_id"] || line["tenant_id"] != string(s.Tenant) || line["principal_id"] != e["actor"].(fields)["id"] || line["source_ip"] != e["source_ip"] {
		t.Errorf("the log says %v, and the audit log %v", line, e)
	}
	if again := s.Get("/healthz").Header.Get("X-Request-ID"); again == id {
		t.Error("two requests have one id")
	}
}

// The clock of the test stands still, so the service gets one that does not.
func TestTheLineOfARequestSaysHowLongItTookInMilliseconds(t *testing.T) {
	var late atomic.Int64
	s := newService(t, func(c *server.Config) {
		now := c.Now
		c.Now = func() time.Time { return now().Add(time.Duration(late.Load())) }
	})
	s.Server.Engine().GET("/test/slow", func(*gin.Context) { late.Add(int64(1500 * time.Microsecond)) })
	servertest.GetStatus(t, s.URL+"/test/slow")
	if line := s.LogLines("request")[0]; line["duration_ms"] != 1.5 {
		t.Errorf("%v", line)
	}
}

func TestTheLogNamesNoClientIfItMayNot(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.HideClients = true })
	s.Get("/api/v2/vault/list").Want(t, http.StatusOK)
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list"}).Message(t, http.StatusUnauthorized)
	lines := s.LogLines("request")
	if len(lines) != 2 || lines[0]["tenant_id"] != string(s.Tenant) || lines[1]["tenant_id"] != nil || lines[1]["principal_id"] != nil {
		t.Error("the caller is not named, or a stranger is:", lines)
	}
	if strings.Contains(s.Logged.String(), "127.0.0.1") {
		t.Error("an address is in the log")
	}
}

func TestAValidCredentialKeepsItsConnection(t *testing.T) {
	s := assemble(t)
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := connections.Listen(inner, connections.Options{Most: 100, PerAddress: 1})
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Server.Serve(ctx, l) }()
	for _, c := range []struct {
		path, key string
		kept      int
	}{{"/api/v2/sealing-key", "", 0}, {"/api/v2/vault/list", "lk_live_wrong", 0}, {"/api/v2/vault/list", s.Key, 1}} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+l.Addr().String()+c.path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		if c.key != "" {
			r.Header.Set("X-API-Key", c.key)
		}
		fresh := &http.Client{Transport: &http.Transport{}}
		answer, err := fresh.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		_ = answer.Body.Close()
		if got := l.Counts().Kept; got != c.kept {
			t.Errorf("%s with key %q: %d connections are kept", c.path, c.key, got)
		}
		fresh.CloseIdleConnections()
	}
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestResponsesMayBeCachedOnlyWhenPublic(t *testing.T) {
	s := newService(t)
	for path, want := range map[string]string{
		"/api/v2/sealing-key": "public, max-age=60", "/api/v2/openapi.yaml": "public, max-age=60",
		"/api/v2/vault/list": "no-store", "/api/v2/vault/" + s.Seal("v"): "no-store", "/api/v2/vault/x": "no-store", "/none": "no-store",
		"/readyz": "no-store",
	} {
		r := s.Get(path)
		if got := r.Header.Get("Cache-Control"); got != want {
			t.Errorf("%s: %q", path, got)
		}
		if r.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s can be sniffed", path)
		}
		if r.Header.Get("Server") != "" || r.Header.Get("Set-Cookie") != "" {
			t.Errorf("%s: headers %v", path, r.Header)
		}
	}
}

func TestTheSealingKeyIsTheSignedDocument(t *testing.T) {
	s := newService(t)
	r := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/sealing-key"})
	document, err := sealing.ParseDocument(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	if err := document.CheckIdentity(s.Config.Keys.Identity().ID()); err != nil {
		t.Error(err)
	}
}

func TestMetricsSpeakOfTemplatesOnly(t *testing.T) {
	s := newService(t)
	id := s.Seal("v")
	s.Get("/api/v2/vault/"+id).Want(t, http.StatusOK)
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + id}).Message(t, http.StatusUnauthorized)
	s.Call(servertest.Request{Method: "FROBNICATE", Path: "/none/such"})
	got := s.Metrics()
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
	for _, unwanted := range []string{id, string(s.Tenant), "FROBNICATE", "such"} {
		if strings.Contains(got, unwanted) {
			t.Errorf("%s is in the metrics", unwanted)
		}
	}
}

func TestProbes(t *testing.T) {
	s := newService(t)
	s.Get("/healthz").Want(t, http.StatusOK)
	s.Get("/readyz").Want(t, http.StatusOK)
	if err := s.Store.Close(); err != nil {
		t.Fatal(err)
	}
	s.Get("/healthz").Want(t, http.StatusOK)
	for deadline := time.Now().Add(time.Minute); s.Get("/readyz").Status == http.StatusOK && time.Now().Before(deadline); { // strangers share a report
		time.Sleep(10 * time.Millisecond) // asks again
	}
	s.Get("/readyz").Message(t, http.StatusServiceUnavailable)
}

func TestWithoutTheStoreNothingLeaves(t *testing.T) {
	s := newService(t)
	id := s.Seal("v")
	if err := s.Store.Close(); err != nil {
		t.Fatal(err)
	}
	want := ""
	for _, r := range []servertest.Request{
		{Method: "GET", Path: "/api/v2/vault/" + id},
		{Method: "GET", Path: "/api/v2/vault/" + authz.NewID("cred")},
		{Method: "GET", Path: "/api/v2/vault/x"},
		{Method: "GET", Path: "/api/v2/vault/list"},
		{Method: "POST", Path: "/api/v2/vault/rotate/" + id},
		{Method: "DELETE", Path: "/api/v2/vault/" + id},
		{Method: "POST", Path: "/api/v2/vault/seal", Body: `{"name":"n","credential_type":"t","values":{"k":"v"}}`},
		{Method: "GET", Path: "/api/v2/audit/logs"},
		{Method: "GET", Path: "/api/v2/sealing-key"},
	} {
		r.Key = s.Key
		answer := s.Call(r)
		answer.Message(t, http.StatusServiceUnavailable)
		got := servertest.WithoutRequest(t, answer)
		if want == "" {
			want = got
		}
		if got != want {
			t.Errorf("%s %s: %s", r.Method, r.Path, got)
		}
	}
	if line := s.LogLines("request")[1]; line["level"] != "ERROR" || line["error"] == nil {
		t.Errorf("the cause is not in the log: %v", line)
	}
}

func TestAPanicIsA500AndItsValueStaysOut(t *testing.T) {
	s := newService(t)
	const canary = "tr0ub4dor"
	s.Server.Engine().GET("/test/panic", func(*gin.Context) { panic(errors.New(canary)) })
	s.Server.Engine().GET("/test/panic-late", func(c *gin.Context) {
		c.String(http.StatusOK, "half")
		panic(canary)
	})
	resp, err := http.Get(s.URL + "/test/panic")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if m := (servertest.Reply{Status: resp.StatusCode, Header: resp.Header, Body: body}).Message(t, http.StatusInternalServerError); m != "internal error" || err != nil {
		t.Errorf("message %q, %v", m, err)
	}
	if lines := s.LogLines("panic"); len(lines) != 1 || lines[0]["type"] != "*errors.errorString" || !strings.Contains(lines[0]["stack"].(string), "life_test.go") {
		t.Errorf("log %v", lines)
	}
	once := http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // a kept connection would be tried again
	if resp, err := once.Get(s.URL + "/test/panic-late"); err == nil {
		var b bytes.Buffer
		if _, err := b.ReadFrom(resp.Body); err == nil {
			t.Errorf("a broken response arrived whole: %q", b.String())
		}
		resp.Body.Close()
	}
	s.Get("/healthz").Want(t, http.StatusOK)
	if strings.Contains(s.Logged.String(), canary) {
		t.Error("the value is in the log")
	}
	if n := len(s.LogLines("request")); n != 2 { // a probe that is answered well has none
		t.Errorf("%d access log lines for 2 requests", n)
	}
}

func TestShutdownFinishesRequestsInFlight(t *testing.T) {
	s := assemble(t)
	began, release := make(chan struct{}), make(chan struct{})
	s.Server.Engine().GET("/test/slow", func(c *gin.Context) {
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
	go func() { served <- s.Server.Serve(ctx, l) }()
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
	if err := s.Server.Serve(t.Context(), l); err == nil {
		t.Error("serving on a closed listener succeeded")
	}
}

func TestOversizedHeadersAreRefused(t *testing.T) {
	s := newService(t)
	req, err := http.NewRequest("GET", s.URL+"/healthz", nil)
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
	s := newService(t, func(c *server.Config) { c.Limits.Patience = 0 })
	id := s.Seal("value")
	held, release := make(chan struct{}), make(chan struct{})
	hold := sync.OnceFunc(func() { close(held) })
	ended := make(chan error, 1)
	go func() {
		ended <- s.Store.Update(context.Background(), func(store.Tx) error {
			hold()
			<-release
			return nil
		})
	}()
	<-held
	answers := make(chan int, 4)
	for _, r := range []servertest.Request{
		{Method: "POST", Path: "/api/v2/vault/seal", Body: `{"name":"n","credential_type":"t","values":{"k":"v"}}`},
		{Method: "POST", Path: "/api/v2/vault/rotate/" + id},
		{Method: "DELETE", Path: "/api/v2/vault/" + id},
		{Method: "GET", Path: "/api/v2/audit/logs"},
	} {
		r.Key = s.Key
		go func() { answers <- s.Call(r).Status }()
	}
	for range cap(answers) {
		select {
		case status := <-answers:
			if status != http.StatusServiceUnavailable {
				t.Errorf("status %d", status)
			}
		case <-time.After(time.Minute): // a second, and room for a slow machine
			t.Error("a call hangs")
		}
	}
	close(release)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if got := s.Get("/api/v2/vault/" + id); got.Status != http.StatusOK {
		t.Errorf("no recovery: %d", got.Status)
	}
}

// While entries are lost nothing is answered but what brings the log back, whoever
// asks for what; afterwards all of it is, and the entry says what was lost.
func TestAServerThatLostEntriesAnswersNothingElse(t *testing.T) {
	w := newWorld(t, "plain")
	all := operations(t)
	requests := make(map[string]servertest.Request)
	for name, o := range all {
		if name != "v2 acceptRollback" {
			requests[name] = w.authorized(o, examples[name](w, o))
		}
	}
	head := w.NextSequence() - 1
	w.LoseEntries()
	for name, r := range requests {
		w.Call(r).Want(t, http.StatusServiceUnavailable)
		if w.NextSequence() != head+1 {
			t.Fatalf("%s wrote an entry", name)
		}
	}
	for path, status := range map[string]int{"/healthz": 200, "/diagnosis": 200, "/metrics": 200, "/readyz": 200} {
		if r := w.Call(servertest.Request{Method: "GET", Path: path, Key: w.keys["metrics:read"]}); r.Status != status || bytes.Contains(r.Body, []byte("anchor")) {
			t.Errorf("%s: %d %s", path, r.Status, r.Body)
		}
	}
	accept := servertest.Request{Method: "POST", Path: "/api/v2/system/audit/accept-rollback", Key: w.keys["system:admin"], Body: `{"reason":"the disk failed"}`}
	weak, wrong, nobody := accept, accept, accept
	weak.Key, nobody.Key, wrong.Body = w.keys["account:admin"], "", `{"reason":"größer"}`
	w.Call(weak).Message(t, http.StatusForbidden) // though it cannot be recorded
	w.Call(nobody).Message(t, http.StatusUnauthorized)
	if message := w.Call(wrong).Message(t, http.StatusUnprocessableEntity); !strings.Contains(message, "reason") {
		t.Error(message)
	}
	got := servertest.Decode[v2.RollbackAnswer](t, w.Call(accept))
	if got.Epoch != 2 || got.LostFrom != int64(head)+1 || got.LostTo != int64(head)+10 || got.Sequence != int64(head)+11 {
		t.Errorf("%+v after %d", got, head)
	}
	left := w.AllEntries(head + 1)
	if len(left) != 1 || left[0].Sequence != head+11 || left[0].Hash != got.Hash || left[0].EventType != audit.RollbackAccepted ||
		left[0].Attributes[audit.AttributeReason] != "the disk failed" || left[0].TenantID != string(authz.SystemTenant) {
		t.Errorf("%v", servertest.Summaries(left))
	}
	w.Call(accept).Message(t, http.StatusConflict)
	if r := w.Call(servertest.Request{Method: "GET", Path: "/readyz"}); r.Status != http.StatusOK {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	w.Call(w.authorized(all["v2 listCredentials"], servertest.Request{Method: "GET", Path: "/api/v2/vault/list"})).Want(t, http.StatusOK)
	// What was proven before is proven after, in the next epoch.
	c := w.FollowLog()
	if c.Epoch != 2 || c.Sequence <= uint64(c.Size) {
		t.Errorf("%+v", c)
	}
	if _, err := verify.Store(t.Context(), w.Store, verify.Options{}); err != nil {
		t.Error(err)
	}
}
