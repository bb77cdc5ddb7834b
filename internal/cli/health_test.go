package cli

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/latticekeep/latticekeep/test/kmstest"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// replace changes the configuration of a site.
func (s *site) replace(old, text string) {
	s.t.Helper()
	c := readText(s.t, s.file)
	if !strings.Contains(c, old) {
		s.t.Fatalf("no %q in the configuration", old)
	}
	machine.WriteFile(s.t, s.file, []byte(strings.Replace(c, old, text, 1)))
}

// probes is what a monitor sees of a replica.
type probes struct {
	ready           int
	checks, metrics string
}

func (s *site) probe(operations string) (p probes) {
	s.t.Helper()
	c := s.client()
	p.ready, _ = s.ask(c, "GET", operations+"/readyz", "", "")
	var status int
	if status, p.checks = s.ask(c, "GET", operations+"/readyz?verbose", "", ""); status != p.ready {
		s.t.Errorf("/readyz is %d, and %d with verbose", p.ready, status)
	}
	_, p.metrics = s.ask(c, "GET", operations+"/metrics", "", "")
	lintMetrics(s.t, p.metrics)
	return p
}

// lintMetrics checks the names and types of metrics as promtool check metrics does.
func lintMetrics(t *testing.T, text string) {
	t.Helper()
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	must(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// want checks the status of /readyz and parts of the list of checks and of the metrics.
func (p probes) want(t *testing.T, name string, ready int, parts ...string) {
	t.Helper()
	if p.ready != ready {
		t.Errorf("%s: /readyz is %d\n%s", name, p.ready, p.checks)
	}
	for _, part := range parts {
		if !strings.Contains(p.checks+p.metrics, part) {
			t.Errorf("%s: no %q\n%s", name, part, p.checks)
		}
	}
}

// An outage of the key-management service is one of all replicas. Credentials that it refuses may be
// this replica's alone.
func TestReadinessTellsOutagesOfTheKMSFromWrongCredentials(t *testing.T) {
	t.Setenv("VAULT_TOKEN", "")
	server, err := kmstest.NewVault()
	must(t, err)
	t.Cleanup(server.Close)
	s := newSite(t, closed+"operations: {listen: '127.0.0.1:0'}\n")
	s.replace(`{url: "file://`+s.path("keys/kms.key")+`"}`, `{url: "`+server.URL()+`", tokenFile: `+s.path("token")+`, cacheTTL: 0s}`)
	token := func() { machine.WriteFile(t, s.path("token"), []byte(server.Token())) }
	token()
	line, stop := s.serve()
	operations := s.operations()
	// call makes a call of the service that needs the KMS.
	call := func(want int) {
		t.Helper()
		if status, body := s.ask(s.client(), "POST", line.BaseURL+"/api/v2/system/tenants", s.systemKey(), `{"name":"shop"}`); status != want {
			t.Errorf("%d %s", status, body)
		}
	}
	works := func(name string) {
		t.Helper()
		call(http.StatusCreated)
		s.probe(operations).want(t, name, http.StatusOK, "[+]kms ok\n", "[+]kms-credentials ok\n", "read calls: served\n", "change calls: served\n",
			"\nlatticekeep_serving{class=\"read\"} 1\n", "\nlatticekeep_serving{class=\"change\"} 1\n")
	}
	works("at the start")
	for _, c := range []struct {
		name  string
		begin func()
		end   func()
		ready int
		parts []string
	}{
		{"sealed", func() { server.SetSealed(true) }, func() { server.SetSealed(false) }, http.StatusOK, []string{"[-]kms failed (shared; stops read and change): ", "[+]kms-credentials ok\n"}},
		{"throttled", func() { server.SetThrottle(1) }, func() { server.SetThrottle(0) }, http.StatusOK, []string{"[-]kms failed (shared; ", "[+]kms-credentials ok\n"}},
		{"dropping", func() { server.SetDropping(true) }, func() { server.SetDropping(false) }, http.StatusOK, []string{"[-]kms failed (shared; ", "[+]kms-credentials ok\n"}},
		{"revoked for all", func() { server.SetRevoked(true) }, func() { server.SetRevoked(false) }, http.StatusOK,
			[]string{"[-]kms failed (shared; ", "[+]kms-credentials ok\n", "readyz check passed\n"}},
		{"wrong token", func() { machine.WriteFile(t, s.path("token"), []byte("s.wrong")) }, token, http.StatusServiceUnavailable,
			[]string{"[+]kms ok\n", "[-]kms-credentials failed (replica; stops read and change): ", "readyz check failed\n"}},
		{"no token file", func() { must(t, os.Remove(s.path("token"))) }, token, http.StatusServiceUnavailable,
			[]string{"[+]kms ok\n", "[-]kms-credentials failed (replica; ", "kms.tokenFile cannot be read"}},
	} {
		c.begin()
		call(http.StatusServiceUnavailable)
		parts := append(c.parts, "read calls: stopped\n", "change calls: stopped\n", "\nlatticekeep_serving{class=\"read\"} 0\n")
		s.probe(operations).want(t, c.name, c.ready, parts...)
		if !strings.Contains(s.log.String(), `"reason":"kms"`) {
			t.Errorf("%s: no reason in the log", c.name)
		}
		c.end()
		works("after " + c.name)
	}
	s.probe(operations).want(t, "all calls", http.StatusOK, "\nlatticekeep_unavailable_total{reason=\"kms\"} 6\n")
	stop()
}

// A server that starts without PostgreSQL waits for it, alive and not ready. When it is told to end
// meanwhile, it ends with status 0.
func TestAServerWaitsForPostgreSQLAtItsStart(t *testing.T) {
	server := pgtest.Start(t)
	s := newSite(t, closed+"operations: {listen: '127.0.0.1:0'}\nstore: {url: '"+server.URL()+"'}\n")
	s.replace(closed, closed+"compliance: {reports: 'file://"+s.path("reports")+"'}\n")
	s.replace("dataDir: "+s.path("data"), "")
	must(t, server.Kill())

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	begin := func() (listen, operations string) {
		s.log = machine.Log{}
		go func() {
			cmd := Command()
			cmd.SetArgs([]string{"server", "--config", s.file})
			cmd.SetOut(io.Discard)
			cmd.SetErr(&s.log)
			ended <- cmd.ExecuteContext(ctx)
		}()
		patience := time.After(time.Minute)
		for {
			for text := range strings.Lines(s.log.String()) {
				var line struct{ Msg, Listen, Operations string }
				if json.Unmarshal([]byte(text), &line) == nil && strings.HasPrefix(line.Msg, "PostgreSQL does not answer yet") {
					return line.Listen, line.Operations
				}
			}
			select {
			case err := <-ended:
				t.Fatal("it ended:", err)
			case <-patience:
				t.Fatal("it does not say that it waits:", s.log.String())
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	begin()
	stop()
	if err := <-ended; err != nil {
		t.Error("a server that waits was told to end:", err)
	}
	ctx, stop = context.WithCancel(t.Context())
	defer stop()
	listen, operations := begin()
	if status, body := s.ask(s.client(), "GET", operations+"/healthz", "", ""); status != http.StatusOK {
		t.Error("not alive:", status, body)
	}
	ready, list := s.ask(s.client(), "GET", operations+"/readyz?verbose", "", "")
	if ready != http.StatusServiceUnavailable || !strings.Contains(list, "[-]start failed (replica; stops read and change): store.url: the database cannot be opened") {
		t.Error(ready, list)
	}
	if status, body := s.ask(s.client(), "GET", "https://"+listen+"/api/v2/vault/list", "k", ""); status != http.StatusServiceUnavailable || !strings.Contains(body, "the server is starting") {
		t.Error(status, body)
	}
	must(t, server.Restart())
	for patience := time.After(time.Minute); ready != http.StatusOK; {
		select {
		case <-patience:
			t.Fatal("it does not start:", s.log.String())
		case <-time.After(50 * time.Millisecond):
			// The listener changes hands meanwhile, which may cut a probe off.
			if answer, err := s.client().Get(operations + "/readyz"); err == nil {
				ready = answer.StatusCode
				_ = answer.Body.Close()
			}
		}
	}
	if status, body := s.ask(s.client(), "POST", "https://"+listen+"/api/v2/system/tenants", s.systemKey(), `{"name":"shop"}`); status != http.StatusCreated {
		t.Error(status, body)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Without an anchor, a database that is put back is not noticed. Every start says so.
func TestAStartWithoutAnchorsWarns(t *testing.T) {
	s := newSite(t, closed)
	for n := 1; n <= 2; n++ {
		_, stop := s.serve()
		stop()
		if told := strings.Count(s.log.String(), "no checkpoint is kept outside of the database"); told != n {
			t.Errorf("told %d times in %d starts", told, n)
		}
	}
	s = newSite(t, closed+"audit: {anchor: {bucket: 'file://"+t.TempDir()+"'}}\n")
	_, stop := s.serve()
	stop()
	if strings.Contains(s.log.String(), "no checkpoint is kept") {
		t.Error("there is an anchor")
	}
}

// All replicas lose PostgreSQL together, and say so without leaving their Service.
func TestAReplicaThatLosesPostgreSQLStaysReadyAndServesNothing(t *testing.T) {
	t.Parallel()
	server := pgtest.Start(t)
	s := newSite(t, closed+"operations: {listen: '127.0.0.1:0'}\nstore: {url: '"+server.URL()+"'}\n")
	s.replace(closed, closed+"compliance: {reports: 'file://"+s.path("reports")+"'}\n")
	s.replace("dataDir: "+s.path("data"), "")
	line, stop := s.serve()
	operations := s.operations()
	s.probe(operations).want(t, "at the start", http.StatusOK, "[+]store ok\n", "[+]clock ok\n", "\nlatticekeep_health_check{check=\"store\",scope=\"shared\"} 1\n")
	must(t, server.Kill())
	if status, body := s.ask(s.client(), "POST", line.BaseURL+"/api/v2/system/tenants", s.systemKey(), `{"name":"shop"}`); status != http.StatusServiceUnavailable {
		t.Error(status, body)
	}
	s.probe(operations).want(t, "without PostgreSQL", http.StatusOK, "[-]store failed (shared; stops read and change): ", "[+]format ok\n", "[+]log ok\n", "[+]clock ok\n",
		"[+]kms ok\n", "[+]sealing-key ok\n", "\nlatticekeep_serving{class=\"read\"} 0\n", "\nlatticekeep_unavailable_total{reason=\"store\"} 1\n")
	must(t, server.Restart())
	stop()
}
