package server_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/health"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// operate serves the operations of s on a listener of their own, and returns
// where, and a function that ends that.
func operate(t *testing.T, s *service) (url string, end func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Server.ServeOperations(ctx, l) }()
	end = func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		served <- nil
	}
	t.Cleanup(end)
	return "http://" + l.Addr().String(), end
}

func TestOperationsApartAreOnTheirOwnListenerAlone(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.OperationsApart = true })
	operations, _ := operate(t, s)
	for _, path := range []string{"/healthz", "/readyz", "/diagnosis", "/metrics"} {
		if code, body := servertest.GetStatus(t, s.URL+path); code != http.StatusNotFound {
			t.Errorf("%s of the interface: %d %s", path, code, body)
		}
		if code, body := servertest.GetStatus(t, operations+path); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	for _, path := range []string{"/api/v2/sealing-key", "/api/v2/openapi.yaml", "/v1/keys", "/"} {
		if code, body := servertest.GetStatus(t, operations+path); code != http.StatusNotFound {
			t.Errorf("%s among the operations: %d %s", path, code, body)
		}
	}
}

func TestProfilesAreAmongTheOperationsIfTheyAreAskedFor(t *testing.T) {
	for _, wanted := range []bool{true, false} {
		s := newService(t, func(c *server.Config) { c.OperationsApart, c.Profiling = true, wanted })
		operations, _ := operate(t, s)
		want := map[bool]int{true: http.StatusOK, false: http.StatusNotFound}[wanted]
		for _, path := range []string{"/debug/pprof/", "/debug/pprof/goroutine?debug=2", "/debug/pprof/heap", "/debug/pprof/profile?seconds=1", "/debug/pprof/trace?seconds=0.01"} {
			if code, _ := servertest.GetStatus(t, operations+path); code != want {
				t.Errorf("profiling %v: %s: %d", wanted, path, code)
			}
			if code, _ := servertest.GetStatus(t, s.URL+path); code != http.StatusNotFound {
				t.Errorf("profiling %v: %s of the interface: %d", wanted, path, code)
			}
		}
	}
}

func TestReadinessTellsWhatCannotBeServed(t *testing.T) {
	waiting := errors.New("there is no certificate yet")
	s := newService(t, func(c *server.Config) {
		c.OperationsApart = true
		c.Health = health.New(health.Check{Name: "certificate", Scope: health.Replica, Stops: health.Classes(), Ask: func(context.Context) error { return waiting }},
			health.Check{Name: "store", Scope: health.Replica, Stops: health.Classes(), Ask: c.Store.Ready})
	})
	operations, _ := operate(t, s)
	if code, body := servertest.GetStatus(t, operations+"/readyz"); code != http.StatusServiceUnavailable || strings.Contains(body, "certificate") {
		t.Error("without a certificate:", code, body)
	}
	waiting = nil
	if code, body := servertest.GetStatus(t, operations+"/readyz"); code != http.StatusOK {
		t.Error(code, body)
	}
	if err := s.Store.Close(); err != nil {
		t.Fatal(err)
	}
	if code, body := servertest.GetStatus(t, operations+"/readyz"); code != http.StatusServiceUnavailable {
		t.Error("without the store:", code, body)
	}
	if code, body := servertest.GetStatus(t, operations+"/healthz"); code != http.StatusOK {
		t.Error("a restart does not help:", code, body)
	}
	if lines := s.LogLines("request"); len(lines) != 2 || lines[0]["status"] != 503.0 || lines[0]["error"] == "" {
		t.Error("not exactly the failures are logged:", lines)
	}
}

// The list of checks names what fails. On the listener of the interface, where anybody may read it, it
// says of the reason what callers may see.
func TestTheListOfChecksNamesWhatFails(t *testing.T) {
	for _, apart := range []bool{false, true} {
		s := newService(t, func(c *server.Config) { c.OperationsApart = apart })
		s.Seal("v")
		url := s.URL
		if apart {
			url, _ = operate(t, s)
		}
		code, body := servertest.GetStatus(t, url+"/readyz?verbose")
		if want := "[+]store ok\n[+]log ok\n[+]rows ok\n[+]shutdown ok\nread calls: served\nchange calls: served\nreadyz check passed\n"; code != http.StatusOK || body != want {
			t.Error(code, body)
		}
		s.LoseEntries()
		for deadline := time.Now().Add(time.Minute); !strings.Contains(body, "[-]") && time.Now().Before(deadline); { // probes share a report for a moment
			code, body = servertest.GetStatus(t, url+"/readyz?verbose=1")
		}
		if code != http.StatusOK || !strings.Contains(body, "[-]log failed (shared; stops read and change): service temporarily unavailable") ||
			!strings.HasSuffix(body, "read calls: stopped\nchange calls: stopped\nreadyz check passed\n") || strings.Contains(body, "a test") != apart {
			t.Error(apart, code, body)
		}
		if code, body := servertest.GetStatus(t, url+"/readyz"); code != http.StatusOK || !strings.Contains(body, `"status":"ok"`) {
			t.Error("a shared fault made it unready:", code, body)
		}
	}
}

// A 503 has a reason of few in its log line and in a metric. Metrics tell what is served, too.
func TestA503HasAReason(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.OperationsApart = true })
	id := s.Seal("v")
	operations, _ := operate(t, s)
	metrics := func() string {
		t.Helper()
		code, body := servertest.GetStatus(t, operations+"/metrics")
		if code != http.StatusOK {
			t.Fatal(code, body)
		}
		return body
	}
	has := func(wanted ...string) {
		t.Helper()
		body := metrics()
		for _, want := range wanted {
			if !strings.Contains(body, want+"\n") {
				t.Errorf("no %s", want)
			}
		}
	}
	has(`latticekeep_serving{class="read"} 1`, `latticekeep_serving{class="change"} 1`, `latticekeep_health_check{check="log",scope="shared"} 1`,
		`latticekeep_unavailable_total{reason="log"} 0`)
	s.LoseEntries()
	s.Get("/api/v2/vault/"+id).Message(t, http.StatusServiceUnavailable)
	if lines := s.LogLines("request"); lines[len(lines)-1]["reason"] != "log" {
		t.Error(lines[len(lines)-1])
	}
	has(`latticekeep_serving{class="read"} 0`, `latticekeep_serving{class="change"} 0`, `latticekeep_health_check{check="log",scope="shared"} 0`,
		`latticekeep_unavailable_total{reason="log"} 1`, `latticekeep_health_check{check="store",scope="replica"} 1`)
	s.Audit.Halt(nil)
	if err := s.Store.Close(); err != nil {
		t.Fatal(err)
	}
	s.Get("/api/v2/vault/"+id).Message(t, http.StatusServiceUnavailable)
	if lines := s.LogLines("request"); lines[len(lines)-1]["reason"] != "store" {
		t.Error(lines[len(lines)-1])
	}
	if code, body := servertest.GetStatus(t, operations+"/readyz"); code != http.StatusServiceUnavailable { // a probe is no request
		t.Error(code, body)
	}
	has(`latticekeep_health_check{check="store",scope="replica"} 0`, `latticekeep_unavailable_total{reason="store"} 1`)
}

// While requests finish, the process is alive and takes no new ones.
func TestProbesAreAnsweredWhileTheServerEnds(t *testing.T) {
	s := assemble(t, func(c *server.Config) { c.OperationsApart = true })
	operations, _ := operate(t, s)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Server.Serve(ctx, l) }()
	// A request whose body is on its way.
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const body = `{"name":"n","credential_type":"t","values":{"a":"b"}}`
	for _, part := range []string{"POST /api/v2/vault/seal HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: application/json\r\nX-API-Key: ", s.Key,
		"\r\nExpect: 100-continue\r\nContent-Length: 53\r\n\r\n"} {
		if _, err := io.WriteString(conn, part); err != nil {
			t.Fatal(err)
		}
	}
	begun := make([]byte, len("HTTP/1.1 100 Continue\r\n\r\n"))
	if _, err := io.ReadFull(conn, begun); err != nil {
		t.Fatal(err)
	}
	if code, answer := servertest.GetStatus(t, operations+"/readyz"); code != http.StatusOK {
		t.Fatal(code, answer)
	}
	stop()
	patience := time.After(time.Minute)
	for code := 0; code != http.StatusServiceUnavailable; { // Serve turns readiness off in the background
		select {
		case <-patience:
			t.Fatal("a server that ends is ready")
		default:
			code, _ = servertest.GetStatus(t, operations+"/readyz")
		}
	}
	if code, answer := servertest.GetStatus(t, operations+"/healthz"); code != http.StatusOK {
		t.Error("not alive while a request is in flight:", code, answer)
	}
	if _, err := io.WriteString(conn, body); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(conn); err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 201 ") {
		t.Errorf("%v %s", err, answer)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestMetricsOfOthersAreShownToo(t *testing.T) {
	others := prometheus.NewRegistry()
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "others_total", Help: "Of another registry."})
	others.MustRegister(c)
	s := newService(t, func(config *server.Config) { config.Gatherers = []prometheus.Gatherer{others} })
	c.Inc()
	metrics := s.Metrics()
	if !strings.Contains(metrics, "\nothers_total 1\n") || !strings.Contains(metrics, "\nlatticekeep_build_info") {
		t.Error(metrics)
	}
}
