package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/offline"
)

// running is a development server inside the test.
type running struct {
	app.DevReady
	t    *testing.T
	stop context.CancelFunc
	done chan error
}

// start runs a server on dir and returns once it has printed its line.
func start(t *testing.T, dir string) *running {
	t.Helper()
	return startWith(t, app.DevConfig{DataDir: dir, Stderr: io.Discard})
}

// startWith is start for any configuration, on a free port.
func startWith(t *testing.T, c app.DevConfig) *running {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	stdout, line := io.Pipe()
	r := &running{t: t, stop: stop, done: make(chan error, 1)}
	go func() {
		c.Listen, c.Stdout, c.Patience = "127.0.0.1:0", line, time.Minute
		err := app.Dev(ctx, c)
		line.CloseWithError(errors.Join(err, io.EOF))
		r.done <- err
	}()
	decoder := json.NewDecoder(stdout)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&r.DevReady); err != nil {
		t.Fatal("no ready line: ", err)
	}
	t.Cleanup(stop)
	return r
}

func (r *running) end() {
	r.t.Helper()
	r.stop()
	if err := <-r.done; err != nil {
		r.t.Fatal(err)
	}
}

// call sends a request with the server's key and returns status and body.
func (r *running) call(method, path, body string) (int, map[string]any) {
	r.t.Helper()
	status, answer, err := call(r.DevReady, method, path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	return status, answer
}

// read reads a credential n times. Reads at the same time share commits, which is faster.
func (r *running) read(id string, n int) {
	r.t.Helper()
	var readers sync.WaitGroup
	var left atomic.Int64
	left.Store(int64(n))
	for range 16 {
		readers.Go(func() {
			for left.Add(-1) >= 0 {
				if status, _, err := call(r.DevReady, "GET", "/api/v2/vault/"+id, ""); err != nil || status != http.StatusOK {
					r.t.Errorf("reading a credential: %d %v", status, err)
				}
			}
		})
	}
	readers.Wait()
	if r.t.Failed() {
		r.t.FailNow()
	}
}

func call(r app.DevReady, method, path, body string) (int, map[string]any, error) {
	request, err := http.NewRequest(method, r.BaseURL+path, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("X-API-Key", r.APIKey)
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer answer.Body.Close()
	var fields map[string]any
	err = json.NewDecoder(answer.Body).Decode(&fields)
	return answer.StatusCode, fields, err
}

const sealBody = `{"name":"db","credential_type":"database","values":{"password":"s3cret"},"ttl_days":30}`

func TestADevelopmentServerKeepsItsDataAndReplacesItsKey(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	first := start(t, dir)
	if first.DataDir != dir || first.DashboardURL != first.BaseURL || !strings.HasPrefix(first.BaseURL, "http://127.0.0.1:") {
		t.Fatalf("%+v", first.DevReady)
	}
	status, sealed := first.call("POST", "/api/v2/vault/seal", sealBody)
	if status != http.StatusCreated || sealed["success"] != true {
		t.Fatal(status, sealed)
	}
	id := sealed["credential_id"].(string)
	first.end()

	second := start(t, dir)
	if second.TenantID != first.TenantID || second.APIKey == first.APIKey {
		t.Fatalf("%+v", second.DevReady)
	}
	status, got := second.call("GET", "/api/v2/vault/"+id, "")
	if status != http.StatusOK || got["values"].(map[string]any)["password"] != "s3cret" {
		t.Fatal(status, got)
	}
	if status, _, err := call(app.DevReady{BaseURL: second.BaseURL, APIKey: first.APIKey}, "GET", "/api/v2/vault/list", ""); err != nil || status != http.StatusUnauthorized {
		t.Fatal("the former key:", status, err)
	}
	second.end()
}

func TestATemporaryDataDirectoryIsRemoved(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	r := start(t, "")
	if _, err := os.Stat(filepath.Join(r.DataDir, offline.DatabaseFile)); err != nil {
		t.Fatal(err)
	}
	r.end()
	if _, err := os.Stat(r.DataDir); !errors.Is(err, os.ErrNotExist) {
		t.Fatal("it is still there:", err)
	}
}

// run runs the program's command line in the test and returns its output.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := Command()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // stops a server that starts unexpectedly
	defer cancel()
	err := cmd.ExecuteContext(ctx)
	return out.String(), err
}

func TestABadDataDirectoryIsRefusedWithTheRemedy(t *testing.T) {
	t.Parallel() // it mostly waits
	made := filepath.Join(t.TempDir(), "made")
	r := start(t, made)
	if status, _ := r.call("POST", "/api/v2/vault/seal", sealBody); status != http.StatusCreated {
		t.Fatal(status)
	}
	if _, err := run(t, "server", "--dev", "--data-dir", made, "--listen", "127.0.0.1:0"); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Error("two servers on one directory:", err)
	}
	r.end()
	other := filepath.Join(t.TempDir(), "other")
	start(t, other).end()
	database, err := os.ReadFile(filepath.Join(made, offline.DatabaseFile))
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(filepath.Join(made, offline.KMSKeyFileName))
	if err != nil {
		t.Fatal(err)
	}
	otherKey, err := os.ReadFile(filepath.Join(other, offline.KMSKeyFileName))
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		database, key []byte
		mode          os.FileMode
		says          string
	}{
		"another key":           {database, otherKey, 0o600, "name the key it was made with"},
		"no key":                {database, nil, 0o600, "name the key"},
		"a key others can read": {database, key, 0o644, "chmod 600"},
		"a truncated database":  {database[:6*4096], key, 0o600, "backup"},
		"a cut page":            {database[:5000], key, 0o600, "backup"},
		"an empty database":     {[]byte{}, key, 0o600, "backup"},
		"not a database":        {bytes.Repeat([]byte("junk"), 8192), key, 0o600, "backup"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, offline.DatabaseFile), c.database, 0o600); err != nil {
				t.Fatal(err)
			}
			if c.key != nil {
				if err := os.WriteFile(filepath.Join(dir, offline.KMSKeyFileName), c.key, c.mode); err != nil {
					t.Fatal(err)
				}
			}
			_, err := run(t, "server", "--dev", "--data-dir", dir, "--listen", "127.0.0.1:0")
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%v, want a word of %q", err, c.says)
			}
			after, err := os.ReadFile(filepath.Join(dir, offline.DatabaseFile))
			if err != nil || !bytes.Equal(after, c.database) {
				t.Error("the database was changed")
			}
			if _, err := os.Stat(filepath.Join(dir, offline.KMSKeyFileName)); c.key == nil && err == nil {
				t.Error("a database was given a new key")
			}
		})
	}
}

func TestAServerWithoutDevIsRefused(t *testing.T) {
	if _, err := run(t, "server"); err == nil || !strings.Contains(err.Error(), "--dev") {
		t.Fatal(err)
	}
}

func TestTheReadyLineHasExactlyItsFields(t *testing.T) {
	b, err := json.Marshal(app.DevReady{BaseURL: "b", TenantID: "t", APIKey: "k", DataDir: "d", DashboardURL: "u"})
	if err != nil || string(b) != `{"base_url":"b","tenant_id":"t","api_key":"k","data_dir":"d","dashboard_url":"u"}` {
		t.Fatal(string(b), err)
	}
}

func TestAuditVerifyFromTheCommandLine(t *testing.T) {
	t.Parallel() // it mostly waits
	dir := filepath.Join(t.TempDir(), "data")
	r := start(t, dir)
	status, sealed := r.call("POST", "/api/v2/vault/seal", sealBody)
	if status != http.StatusCreated {
		t.Fatal(status)
	}
	r.read(sealed["credential_id"].(string), 120) // more than one page
	good := func(says string, args ...string) string {
		t.Helper()
		out, err := run(t, append([]string{"audit"}, args...)...)
		if err != nil || !strings.Contains(out, says) {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		return out
	}
	bad := func(says string, args ...string) {
		t.Helper()
		if out, err := run(t, append([]string{"audit"}, args...)...); err == nil || !strings.Contains(err.Error(), says) {
			t.Fatalf("%v: %v, want %q\n%s", args, err, says, out)
		}
	}
	good("self-consistent only", "verify", "--url", r.BaseURL, "--api-key", r.APIKey)
	bad("401", "verify", "--url", r.BaseURL, "--api-key", "lk_live_x")
	bad("API key", "verify", "--url", r.BaseURL)
	bad("in use", "verify", "--data-dir", dir)
	bad("in use", "export", "--data-dir", dir)
	r.end()

	out := good("self-consistent only", "verify", "--data-dir", dir)
	fingerprint := strings.Fields(out[strings.Index(out, "chain: "):])[1]
	good("the pinned one", "verify", "--data-dir", dir, "--fingerprint", fingerprint)
	bad("sequence 1", "verify", "--data-dir", dir, "--fingerprint", strings.Repeat("0", 64))
	bad("--fingerprint is empty", "verify", "--data-dir", dir, "--fingerprint", "")
	bad("--public-key is empty", "verify", "--data-dir", dir, "--public-key=")

	pem := filepath.Join(t.TempDir(), "audit.pem")
	export := good(`{"checkpoint":`, "export", "--data-dir", dir, "--public-key-out", pem)
	file := filepath.Join(t.TempDir(), "log.jsonl")
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(export)
	good("the pinned one", "verify", "--file", file, "--public-key", pem)
	good("the pinned one", "verify", "--file", file, "--fingerprint", fingerprint)
	lines := strings.SplitAfter(export, "\n")
	write(strings.Join(append(lines[:9:9], lines[10:]...), ""))
	bad("sequence 10", "verify", "--file", file, "--public-key", pem)
	bad("no such file", "verify", "--file", file+"x")
	bad("say which log", "verify")
}

// A server that cannot listen creates nothing.
func TestAWrongAddressLeavesNothingBehind(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = taken.Close() })
	for address, want := range map[string]struct {
		status int
		says   string
	}{
		"99999":               {command.StatusUsage, "missing port in address"},
		"127.0.0.1:99999":     {command.StatusUsage, "invalid port"},
		taken.Addr().String(): {command.StatusUnreachable, "address already in use"},
		"192.0.2.1:0":         {command.StatusUnreachable, "cannot assign requested address"},
	} {
		t.Setenv("TMPDIR", t.TempDir())
		dir := filepath.Join(t.TempDir(), "data")
		for _, where := range [][]string{{"--data-dir", dir}, nil} {
			out, err := run(t, append([]string{"server", "--dev", "--listen", address}, where...)...)
			if ExitStatus(err) != want.status || !strings.Contains(err.Error(), want.says) || out != "" {
				t.Errorf("%s: %v\n%s", address, err, out)
			}
		}
		if left, err := os.ReadDir(os.Getenv("TMPDIR")); exists(dir) || err != nil || len(left) > 0 {
			t.Errorf("%s: something was created: %v %v", address, left, err)
		}
	}

	s := newSite(t, closed)
	out, err := run(t, "server", "--config", s.file, "--listen", taken.Addr().String())
	if ExitStatus(err) != command.StatusUnreachable || strings.Contains(out, "created") {
		t.Errorf("production: %v\n%s", err, out)
	}
	for _, path := range []string{"data", "keys/kms.key", "system.key"} {
		if exists(s.path(path)) {
			t.Errorf("production: %s was created", path)
		}
	}
}

// A development server usually begins with an empty database, which is no reason to warn. In
// production it may be the wrong database.
func TestANewDeploymentIsAWarningInProductionOnly(t *testing.T) {
	stderr := make(said, 10_000) // more lines than a test logs
	server := startWith(t, app.DevConfig{DataDir: t.TempDir(), Stderr: stderr})
	first := stderr.await(t, "created a new deployment")
	if !strings.Contains(first, "level=INFO") || strings.Contains(first, "not intended") {
		t.Errorf("development: %s", first)
	}
	server.end()
	for len(stderr) > 0 {
		if line := <-stderr; strings.Contains(line, "level=WARN") {
			t.Errorf("development: %s", line)
		}
	}
	s := newSite(t, closed)
	_, end := s.serve()
	end()
	if text := s.log.String(); !regexp.MustCompile(`"level":"WARN","msg":"created a new deployment [^"]*not intended`).MatchString(text) {
		t.Errorf("production does not warn:\n%s", text)
	}
}
