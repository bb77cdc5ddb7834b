package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/offline"
)

// process is a server in a process of its own.
type process struct {
	app.DevReady
	cmd *exec.Cmd
}

// launch starts a server process. It returns the process once it is ready, and the time until then.
func launch(t *testing.T, program, dir string) (*process, time.Duration) {
	t.Helper()
	cmd := exec.Command(program, "server", "--dev", "--data-dir", dir, "--listen", "127.0.0.1:0")
	cmd.Env = append(os.Environ(), "KUBERNETES_SERVICE_HOST=") // the test may run in a cluster and must not be its operator
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: cmd}
	t.Cleanup(p.kill)
	if err := json.NewDecoder(stdout).Decode(&p.DevReady); err != nil {
		t.Fatal("no ready line: ", err)
	}
	return p, time.Since(began)
}

// killAtStart starts a server and kills it at a random moment before or around readiness.
func killAtStart(t *testing.T, program, dir string) {
	t.Helper()
	cmd := exec.Command(program, "server", "--dev", "--data-dir", dir, "--listen", "127.0.0.1:0")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(time.Duration(rand.Int64N(int64(30*time.Millisecond))), func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait() // killed
}

// programFor returns the path of the program: under the name latticekeep, the test binary is it.
func programFor(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "latticekeep")
	self, err := os.Executable()
	must(t, err)
	if err := os.Link(self, program); err != nil {
		must(t, os.Symlink(self, program))
	}
	return program
}

// kill kills the process, like a power cut but without the loss of the page cache.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may be dead already
	_ = p.cmd.Wait()
}

// acknowledged is what the server has confirmed and so must never lose. A credential with an
// unanswered change may be in either state.
type acknowledged struct {
	mu     sync.Mutex
	values map[string]string // credential id → value
	gone   map[string]bool
	unsure map[string]bool
}

// Nothing acknowledged is lost by kill -9, and the chain is intact.
func TestNothingAcknowledgedIsLostByAKill(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: kills the program many times")
	}
	t.Parallel()
	const kills = 20 // The checks grow with the square of it, and make chaos kills more often.

	program := programFor(t)
	dir := filepath.Join(t.TempDir(), "data")
	all := &acknowledged{values: map[string]string{}, gone: map[string]bool{}, unsure: map[string]bool{}}
	var recoveries []time.Duration
	var entries uint64
	p, _ := launch(t, program, dir)
	for i := range kills {
		load(t, p, all)
		report, err := offline.VerifyDataDir(t.Context(), dir, verify.Options{})
		if err != nil {
			t.Fatalf("kill %d: %v", i, err)
		}
		if report.Entries < entries {
			t.Fatalf("kill %d: the log shrank from %d to %d entries", i, entries, report.Entries)
		}
		entries = report.Entries
		if i%2 == 0 { // recovery itself may be interrupted, too
			killAtStart(t, program, dir)
		}
		var took time.Duration
		p, took = launch(t, program, dir)
		recoveries = append(recoveries, took)
		all.check(t, p)
	}
	p.kill()
	slices.Sort(recoveries)
	t.Logf("%d kills, %d entries, %d credentials; restart to ready: median %v, longest %v",
		kills, entries, len(all.values), recoveries[len(recoveries)/2], recoveries[len(recoveries)-1])
}

// load has eight clients seal, rotate and delete until the process is killed at a random moment.
func load(t *testing.T, p *process, all *acknowledged) {
	t.Helper()
	const clients = 8
	killAt := rand.Int64N(60) + 1
	delay := time.Duration(rand.Int64N(int64(4 * time.Millisecond)))
	var answered atomic.Int64
	var dead atomic.Bool
	var once sync.Once
	var killed sync.WaitGroup
	killed.Add(1)
	var wg sync.WaitGroup
	for client := range clients {
		wg.Go(func() {
			var mine []string
			for n := 0; !dead.Load(); n++ {
				var err error
				if n%4 == 3 && len(mine) > 0 {
					err = all.change(p.DevReady, mine[rand.IntN(len(mine))], n%8 == 7)
				} else {
					var id string
					if id, err = all.seal(p.DevReady, fmt.Sprintf("value-%d-%d", client, n)); err == nil {
						mine = append(mine, id)
					}
				}
				if errors.Is(err, errUnconfirmed) {
					continue // only confirmed answers bring the kill nearer
				}
				if err != nil {
					if !dead.Load() {
						t.Errorf("before the kill: %v", err)
					}
					return
				}
				if answered.Add(1) >= killAt {
					once.Do(func() {
						time.AfterFunc(delay, func() {
							dead.Store(true)
							p.kill()
							killed.Done()
						})
					})
				}
			}
		})
	}
	wg.Wait()
	killed.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// errUnconfirmed means that a busy machine answered 503: the outcome is unknown.
var errUnconfirmed = errors.New("not confirmed")

// seal returns the id of a new credential. Error: [errUnconfirmed].
func (a *acknowledged) seal(r app.DevReady, value string) (string, error) {
	status, answer, err := call(r, "POST", "/api/v2/vault/seal",
		fmt.Sprintf(`{"name":"n","credential_type":"t","values":{"v":%q},"ttl_days":30}`, value))
	if err != nil {
		return "", err
	}
	if status == http.StatusServiceUnavailable {
		return "", errUnconfirmed
	}
	if status != http.StatusCreated {
		return "", fmt.Errorf("seal answered %d", status)
	}
	id := answer["credential_id"].(string)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.values[id] = value
	return id, nil
}

func (a *acknowledged) change(r app.DevReady, id string, remove bool) error {
	a.mu.Lock()
	if a.gone[id] || a.unsure[id] {
		a.mu.Unlock()
		return nil
	}
	a.unsure[id] = remove // a rotation keeps the value, even without an answer
	a.mu.Unlock()
	method, path := "POST", "/api/v2/vault/rotate/"+id
	if remove {
		method, path = "DELETE", "/api/v2/vault/"+id
	}
	status, _, err := call(r, method, path, "")
	if err != nil {
		return err
	}
	if status == http.StatusServiceUnavailable {
		return errUnconfirmed
	}
	if status != http.StatusOK {
		return fmt.Errorf("%s answered %d", method, status)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.unsure, id)
	if remove {
		a.gone[id] = true
	}
	return nil
}

// check reads every credential back.
func (a *acknowledged) check(t *testing.T, p *process) {
	t.Helper()
	var wg sync.WaitGroup
	slots := make(chan struct{}, 32)
	for id := range a.values {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			status, answer, err := call(p.DevReady, "GET", "/api/v2/vault/"+id, "")
			for range 60 { // a busy machine is slow at its start
				if err != nil || status != http.StatusServiceUnavailable {
					break
				}
				status, answer, err = call(p.DevReady, "GET", "/api/v2/vault/"+id, "")
			}
			switch {
			case err != nil:
				t.Errorf("%s: %v", id, err)
			case a.unsure[id] && (status == http.StatusOK || status == http.StatusForbidden):
			case a.gone[id] && status == http.StatusForbidden:
			case !a.gone[id] && status == http.StatusOK && answer["values"].(map[string]any)["v"] == a.values[id]:
			default:
				t.Errorf("%s: status %d, deleted %v", id, status, a.gone[id])
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		p.kill()
		t.FailNow()
	}
}
