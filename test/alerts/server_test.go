package alerts

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/latticekeep/latticekeep/internal/cli"
	"github.com/latticekeep/latticekeep/test/machine"
)

// TestMain runs the program itself when the test binary is called by the program's name.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "latticekeep" {
		os.Exit(latticekeep())
	}
	if err := os.Unsetenv("KUBERNETES_SERVICE_HOST"); err != nil { // the test may run in a cluster and must not be its operator
		panic(err)
	}
	os.Exit(m.Run())
}

func latticekeep() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := cli.Command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "latticekeep:", err)
		return 1
	}
	return 0
}

// server is a production server in a process of its own.
type server struct {
	t       *testing.T
	dir     string
	url     string // of the interface
	metrics string
	key     string // may seal and read credentials
	kept    string // id of a credential
	log     machine.Log
	cmd     *exec.Cmd
	ended   chan struct{} // closed when the process has ended
	stop    func()        // ends it with SIGTERM
}

// start starts a server on the embedded store, or on what more configures.
func start(t *testing.T, dataDir, more string) *server {
	t.Helper()
	return startBelow(t, dataDir, more)
}

// startBelow is start below another command.
func startBelow(t *testing.T, dataDir, more string, below ...string) *server {
	t.Helper()
	s := launch(t, dataDir, more, below...)
	s.await("ready", func() bool { return s.said("ready", "base_url") != "" || s.dead() })
	if s.url = s.said("ready", "base_url"); s.url == "" {
		t.Fatalf("it is not ready:\n%s", s.log.Tail())
	}
	if s.metrics = s.said("ready", "operations"); s.metrics == "" {
		t.Fatalf("the log does not tell where operations are:\n%s", s.log.Tail())
	}
	s.metrics += "/metrics"
	return s
}

// launch is startBelow for a server that may not become ready.
func launch(t *testing.T, dataDir, more string, below ...string) *server {
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
		"systemKeyFile: " + s.path("system.key") + "\nrate: {v1: 1000000, v2: 1000000, address: 1000000}\n" + more
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
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, s.path("latticekeep")); err != nil {
		t.Fatal(err)
	}
	s.run(below...)
	t.Cleanup(func() { s.stop() })
	return s
}

// run starts the process of the server, below another command.
func (s *server) run(below ...string) {
	s.t.Helper()
	argv := append(below, s.path("latticekeep"), "server", "--config", s.path("config.yaml"))
	cmd, ended := exec.Command(argv[0], argv[1:]...), make(chan struct{})
	cmd.Stderr = &s.log
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() {
		_ = cmd.Wait() // its log and its state say why it ended
		close(ended)
	}()
	s.cmd, s.ended = cmd, ended
	s.stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		<-ended
	}
}

// dead reports whether the server has ended.
func (s *server) dead() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// said returns an attribute of the first line of the log that begins so, or nothing.
func (s *server) said(message, attribute string) string {
	for line := range strings.Lines(s.log.String()) {
		var l map[string]any
		if json.Unmarshal([]byte(line), &l) == nil && strings.HasPrefix(fmt.Sprint(l["msg"]), message) && l[attribute] != nil {
			return fmt.Sprint(l[attribute])
		}
	}
	return ""
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

// makeKey makes a tenant with a key that may seal and read credentials, and seals one.
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
	s.key = made("/api/v2/system/tenants/"+tenant+"/api-keys", `{"name":"k","scopes":["vault:read","vault:write"]}`, "api_key")
	status, body := s.ask("/api/v2/vault/seal", s.key, sealed)
	if status != http.StatusCreated {
		s.t.Fatalf("sealing: %d %s", status, body)
	}
	s.kept = regexp.MustCompile(`"credential_id":"([^"]+)"`).FindStringSubmatch(body)[1]
}

const sealed = `{"name":"db","credential_type":"database","values":{"user":"app"},"ttl_days":30}`

// seal seals a credential, and returns the status.
func (s *server) seal() int {
	s.t.Helper()
	status, _ := s.ask("/api/v2/vault/seal", s.key, sealed)
	return status
}

// read reads a credential, and returns the status.
func (s *server) read() int {
	s.t.Helper()
	r, err := http.NewRequestWithContext(context.Background(), http.MethodGet, s.url+"/api/v2/vault/"+s.kept, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	r.Header.Set("X-API-Key", s.key)
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	defer answer.Body.Close()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		s.t.Fatal(err)
	}
	return answer.StatusCode
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
