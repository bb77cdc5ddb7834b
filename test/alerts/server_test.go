package alerts

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/cli"
	"github.com/latticekeep/latticekeep/test/machine"
)

// server is a production server that runs in this process.
type server struct {
	t       *testing.T
	dir     string
	url     string // of the interface
	metrics string
	key     string // may seal credentials
	log     machine.Log
	stop    func()
}

// start starts a server on the embedded store, or on what more configures.
func start(t *testing.T, dataDir, more string) *server {
	t.Helper()
	s := &server{t: t, dir: t.TempDir()}
	if dataDir == "" && !strings.Contains(more, "store:") {
		dataDir = filepath.Join(s.dir, "data")
	}
	if err := os.Mkdir(filepath.Join(s.dir, "keys"), 0o700); err != nil {
		t.Fatal(err)
	}
	scheme := "http"
	if strings.Contains(more, "tls:") {
		scheme = "https"
	}
	config := "listen: 127.0.0.1:0\npublicURL: " + scheme + "://127.0.0.1:8200\noperations: {listen: '127.0.0.1:0'}\n" +
		"systemKeyFile: " + s.path("system.key") + "\n" + more
	if dataDir != "" {
		config += "\ndataDir: " + dataDir
	}
	if !strings.Contains(more, "kms:") {
		config += "\nkms: {url: 'file://" + s.path("keys/kms.key") + "'}"
	}
	if !strings.Contains(more, "registration:") && !strings.Contains(more, "mail:") {
		config += "\nregistration: {closed: true}"
	}
	machine.WriteFile(t, s.path("config.yaml"), []byte(config))
	ctx, cancel := context.WithCancel(context.Background())
	stdout, line := io.Pipe()
	done := make(chan error, 1)
	go func() {
		cmd := cli.Command()
		cmd.SetArgs([]string{"server", "--config", s.path("config.yaml")})
		cmd.SetOut(line)
		cmd.SetErr(&s.log)
		err := cmd.ExecuteContext(ctx)
		line.CloseWithError(errors.Join(err, io.EOF))
		done <- err
	}()
	var ready struct {
		URL string `json:"base_url"`
	}
	if err := json.NewDecoder(stdout).Decode(&ready); err != nil {
		cancel()
		t.Fatalf("no ready line: %v\n%s", err, s.log.Tail())
	}
	stopped := false
	s.stop = func() {
		if cancel(); !stopped {
			stopped = true
			<-done
		}
	}
	t.Cleanup(s.stop)
	s.url = ready.URL
	for line := range strings.Lines(s.log.String()) {
		var said struct {
			Operations string `json:"operations"`
		}
		if json.Unmarshal([]byte(line), &said) == nil && said.Operations != "" {
			s.metrics = said.Operations + "/metrics"
		}
	}
	if s.metrics == "" {
		t.Fatalf("the log does not tell where operations are:\n%s", s.log.Tail())
	}
	return s
}

func (s *server) path(name string) string { return filepath.Join(s.dir, name) }

// ask sends a request, and returns the status and the body.
func (s *server) ask(path, key, body string) (int, string) {
	s.t.Helper()
	r, err := http.NewRequestWithContext(context.Background(), http.MethodPost, s.url+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set("X-API-Key", key)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return answer.StatusCode, string(text)
}

// makeKey makes a tenant with a key that may seal credentials.
func (s *server) makeKey() {
	s.t.Helper()
	system, err := os.ReadFile(s.path("system.key"))
	if err != nil {
		s.t.Fatal(err)
	}
	made := func(path, body, field string) string {
		s.t.Helper()
		patient := machine.Patient{RoundTripper: http.DefaultTransport} // the machine may be busy
		r, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.url+path, strings.NewReader(body))
		if err != nil {
			s.t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("X-API-Key", strings.TrimSpace(string(system)))
		answer, err := patient.RoundTrip(r)
		if err != nil {
			s.t.Fatal(err)
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err != nil {
			s.t.Fatal(err)
		}
		found := regexp.MustCompile(`"` + field + `":"([^"]+)"`).FindSubmatch(text)
		if found == nil {
			s.t.Fatalf("%s: %d without %s", path, answer.StatusCode, field)
		}
		return string(found[1])
	}
	tenant := made("/api/v2/system/tenants", `{"name":"shop"}`, "tenant_id")
	s.key = made("/api/v2/system/tenants/"+tenant+"/api-keys", `{"name":"k","scopes":["vault:write"]}`, "api_key")
}

// seal seals a credential, and returns the status.
func (s *server) seal() int {
	s.t.Helper()
	status, _ := s.ask("/api/v2/vault/seal", s.key, `{"name":"db","credential_type":"database","values":{"user":"app"},"ttl_days":30}`)
	return status
}

// scraped returns a step of [prometheus.during]: it calls each, unless nil, and scrapes the server.
func (p *prometheus) scraped(s *server, each func()) func() {
	return func() {
		if each != nil {
			each()
		}
		p.scrape("0", get(p.t, s.metrics))
	}
}
