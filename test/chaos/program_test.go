package chaos

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
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

// long reports whether the long forms of the tests run.
func long() bool { return os.Getenv("CHAOS_LONG") != "" }

// beside makes a test parallel, because these tests mostly wait. The long form is not parallel
// because its times are published.
func beside(t *testing.T) {
	if !long() {
		t.Parallel()
	}
}

// deployment is the machine of a production server: its configuration and its files.
type deployment struct {
	t       testing.TB
	dir     string
	program string

	where  []string // arguments of audit verify that name the data
	key    string   // API key of the deployment's tenant
	tenant authz.TenantID
	system string // the first system key

	mu    sync.Mutex
	shown map[string]bool // requests that were answered with plaintext
}

// newDeployment writes a configuration for a free loopback port. The location of the data is still
// missing.
func newDeployment(t testing.TB) *deployment {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: kills and restarts the program for minutes")
	}
	d := &deployment{t: t, dir: t.TempDir(), shown: make(map[string]bool)}
	d.program = d.path("bin/latticekeep")
	must(t, os.Mkdir(d.path("bin"), 0o700))
	must(t, os.Mkdir(d.path("keys"), 0o700))
	self, err := os.Executable()
	must(t, err)
	must(t, os.Symlink(self, d.program))
	must(t, os.WriteFile(d.path("config.yaml"), fmt.Appendf(nil, `
listen: 127.0.0.1:0
publicURL: http://127.0.0.1:8200
systemKeyFile: %s
registration: {closed: true}
rate: {v1: 1000000, v2: 1000000, address: 1000000}
`, d.path("system.key")), 0o600))
	return d
}

// newEmbedded returns a deployment on the embedded store with its data in a folder.
func newEmbedded(t testing.TB) *deployment {
	t.Helper()
	d := newDeployment(t)
	d.add("dataDir: %s\nkms: {url: \"file://%s\"}\n", d.path("data"), d.path("keys/kms.key"))
	d.where = []string{"--data-dir", d.path("data")}
	return d
}

func (d *deployment) path(name string) string { return filepath.Join(d.dir, name) }

// add appends to the configuration.
func (d *deployment) add(format string, args ...any) {
	d.t.Helper()
	f, err := os.OpenFile(d.path("config.yaml"), os.O_APPEND|os.O_WRONLY, 0o600)
	must(d.t, err)
	_, err = fmt.Fprintf(f, format, args...)
	must(d.t, errors.Join(err, f.Close()))
}

// process is a running server.
type process struct {
	d     *deployment
	cmd   *exec.Cmd
	url   string
	log   machine.Log
	ended chan struct{} // closed when the process has ended
}

// launch starts a server, below another command if one is given. It returns the server once it is
// ready. If the server has ended before that, it returns an error as well.
func (d *deployment) launch(below ...string) (*process, error) {
	d.t.Helper()
	argv := append(below, d.program, "server", "--config", d.path("config.yaml"))
	p := &process{d: d, cmd: exec.Command(argv[0], argv[1:]...), ended: make(chan struct{})}
	p.cmd.Stderr = &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // kill must reach the server below strace
	stdout, err := p.cmd.StdoutPipe()
	must(d.t, err)
	must(d.t, p.cmd.Start())
	d.t.Cleanup(p.kill)
	lines := bufio.NewReader(stdout)
	line, err := lines.ReadBytes('\n')
	go func() {
		defer close(p.ended)
		_, _ = io.Copy(io.Discard, lines)
		_ = p.cmd.Wait() // the process was killed, or its log says why it ended
	}()
	if err != nil {
		<-p.ended
		return p, fmt.Errorf("the server ended: %s: %s", p.cmd.ProcessState, p.log.Tail())
	}
	var ready struct {
		BaseURL string `json:"base_url"`
	}
	if err := json.Unmarshal(line, &ready); err != nil {
		return p, fmt.Errorf("its ready line: %w", err)
	}
	p.url = ready.BaseURL
	return p, nil
}

// start launches a server and fails the test if it does not become ready.
func (d *deployment) start(below ...string) *process {
	d.t.Helper()
	p, err := d.launch(below...)
	must(d.t, err)
	return p
}

// signal sends a signal to the server and to the command that it runs below.
func (p *process) signal(s syscall.Signal) {
	_ = syscall.Kill(-p.cmd.Process.Pid, s) // it may already be dead
}

// kill kills the server's processes, like a power cut but without the loss of the page cache. The
// test fails if the server took one of its own rows for somebody else's.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
	for line := range strings.Lines(p.log.String()) {
		if strings.Contains(line, "is not the one that the audit log commits to") {
			p.d.t.Errorf("a false alarm: %s", line)
		}
	}
}

// dead reports whether the server has ended.
func (p *process) dead() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// admit creates the deployment's tenant and its API key. A server that has just started may be too busy
// at first, and asks to try again.
func (d *deployment) admit(p *process) {
	d.t.Helper()
	must(d.t, again(func() error { return d.tryAdmit(p) }))
}

var errUnavailable = errors.New("the server asks to try again")

// again repeats do for a minute while a server on a busy machine is too slow for its own limits.
func again(do func() error) error {
	err := do()
	for end := time.Now().Add(time.Minute); errors.Is(err, errUnavailable) && time.Now().Before(end); err = do() {
		time.Sleep(100 * time.Millisecond) // The answer 503 asks for a pause.
	}
	return err
}

// tryAdmit is admit for a server that may fail.
func (d *deployment) tryAdmit(p *process) error {
	key, err := os.ReadFile(d.path("system.key"))
	if err != nil {
		return err
	}
	d.system = strings.TrimSpace(string(key))
	made, err := p.try(d.system, "POST", "/api/v2/system/tenants", `{"name":"Example Ltd"}`, "")
	if err != nil {
		return err
	}
	tenant := made["tenant"].(map[string]any)["tenant_id"].(string)
	made, err = p.try(d.system, "POST", "/api/v2/system/tenants/"+tenant+"/api-keys",
		`{"name":"chaos","scopes":["vault:read","vault:write","crypto:encrypt","crypto:decrypt","audit:read","compliance:read"]}`, "")
	if err != nil {
		return err
	}
	d.key, d.tenant = made["api_key"].(string), authz.TenantID(tenant)
	return nil
}

var client = &http.Client{
	Timeout:   10 * time.Second,
	Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true},
}

// reply is a server's answer.
type reply struct {
	status  int
	made    map[string]any
	request string // request id
}

// ask sends a request. It returns an error only for trouble with the connection.
func (p *process) ask(key, method, path, body, once string) (reply, error) {
	r, err := http.NewRequest(method, p.url+path, strings.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	r.Header.Set("X-API-Key", key)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	if once != "" {
		r.Header.Set("Idempotency-Key", once)
	}
	a, err := client.Do(r)
	if err != nil {
		return reply{}, err
	}
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	if err != nil {
		return reply{}, err
	}
	got := reply{status: a.StatusCode, request: a.Header.Get("X-Request-ID")}
	if err := json.Unmarshal(text, &got.made); err != nil {
		return got, fmt.Errorf("status %d with the body %q: %w", a.StatusCode, text, err)
	}
	return got, nil
}

// must sends a request that has to succeed. A GET, and a seal, which has an idempotency key, may be sent
// [again].
func (p *process) must(key, method, path, body string) (made map[string]any) {
	p.d.t.Helper()
	once := ""
	if path == "/api/v2/vault/seal" {
		once = rand.Text()
	}
	send := func() (err error) {
		made, err = p.try(key, method, path, body, once)
		return err
	}
	var err error
	if once != "" || method == http.MethodGet {
		err = again(send)
	} else {
		err = send()
	}
	if err != nil {
		p.d.t.Fatalf("%v\n%s", err, p.log.Tail())
	}
	return made
}

// try sends a request that may fail.
func (p *process) try(key, method, path, body, once string) (map[string]any, error) {
	got, err := p.ask(key, method, path, body, once)
	if err == nil && got.status/100 != 2 {
		err = fmt.Errorf("status %d: %v", got.status, got.made)
		if got.status == http.StatusServiceUnavailable {
			err = errors.Join(errUnavailable, err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	return got.made, nil
}

// verify runs audit verify on the data and returns the number of entries. No server may use an
// embedded store meanwhile.
func (d *deployment) verify() (entries int, err error) {
	out, err := exec.Command(d.program, append([]string{"audit", "verify"}, d.where...)...).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("audit verify: %w\n%s", err, out)
	}
	_, rest, _ := strings.Cut(string(out), "log: ")
	if _, err := fmt.Sscan(rest, &entries); err != nil {
		return 0, fmt.Errorf("reading what audit verify says: %w\n%s", err, out)
	}
	return entries, nil
}

// show records a request that was answered with plaintext.
func (d *deployment) show(request string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.shown[request] = true
}

// accounted fails the test if the audit log lacks an entry for a request that was answered with
// plaintext. It returns how many these were, and forgets them.
func (d *deployment) accounted(p *process) (all int) {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	all = len(d.shown)
	for path := "/api/v2/audit/logs?event_type=CREDENTIAL_UNSEALED&limit=100"; path != ""; {
		var page map[string]any
		must(d.t, again(func() (err error) {
			if page, err = p.try(d.key, "GET", path, "", ""); err != nil {
				err = errors.Join(errUnavailable, err) // also when there was no answer
			}
			return err
		}))
		for _, e := range page["entries"].([]any) {
			entry := e.(map[string]any)
			if entry["outcome"] == "success" {
				delete(d.shown, entry["request_id"].(string))
			}
		}
		cursor, _ := page["next_cursor"].(string)
		if path = ""; cursor != "" {
			path = "/api/v2/audit/logs?event_type=CREDENTIAL_UNSEALED&limit=100&cursor=" + cursor
		}
	}
	if len(d.shown) > 0 {
		d.t.Errorf("of %d answers with plaintext %d have no audit entry", all, len(d.shown))
		clear(d.shown)
	}
	return all
}
