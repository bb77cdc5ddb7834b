package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/latticekeep/latticekeep/internal/app"
)

const memory = 256 << 20

// memoryGroup makes a control group whose processes have so much memory, and returns its folder.
// Error: why this machine has none to give.
func memoryGroup(t *testing.T) (string, error) {
	t.Helper()
	own := regexp.MustCompile(`(?m)^\d+:(memory)?:(/.*)$`).FindStringSubmatch(readText(t, "/proc/self/cgroup"))
	if own == nil {
		return "", fmt.Errorf("this process is in no group")
	}
	parent, limit := filepath.Join("/sys/fs/cgroup", own[2]), "memory.max"
	if own[1] != "" {
		parent, limit = filepath.Join("/sys/fs/cgroup/memory", own[2]), "memory.limit_in_bytes"
	}
	dir, err := os.MkdirTemp(parent, "latticekeep-test-")
	if err != nil {
		return "", err
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil { // the processes in it have ended
			t.Error(err)
		}
	})
	return dir, os.WriteFile(filepath.Join(dir, limit), []byte(strconv.Itoa(memory)), 0o600)
}

// run runs the server as a process of its own until the end of the test. command gets the path of the
// program.
func (s *site) run(command func(program string) *exec.Cmd) (line app.Ready) {
	s.t.Helper()
	program := s.path("latticekeep") // under this name the test binary is the program
	binary, err := os.Executable()
	must(s.t, err)
	must(s.t, os.Symlink(binary, program))
	cmd := command(program)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = &s.log
	stdout, err := cmd.StdoutPipe()
	must(s.t, err)
	must(s.t, cmd.Start())
	s.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	if err := json.NewDecoder(stdout).Decode(&line); err != nil {
		s.t.Fatal("the server is not ready:", err, s.log.String())
	}
	return line
}

// Sixteen clients with large bodies do not kill a small server: it finds its memory limit by itself,
// and keeps within it.
func TestASmallServerAnswersLargeBodies(t *testing.T) {
	s := newSite(t, closed+"operations: {listen: '127.0.0.1:0'}\n")
	group, none := memoryGroup(t)
	line := s.run(func(program string) *exec.Cmd {
		if none != nil {
			t.Log("without a control group, since ", none)
			cmd := exec.CommandContext(t.Context(), program, "server", "--config", s.file)
			cmd.Env = append(os.Environ(), "GOMEMLIMIT="+strconv.Itoa(memory/10*8))
			return cmd
		}
		return exec.CommandContext(t.Context(), "/bin/sh", "-c", `echo $$ >"$1/cgroup.procs" && shift && exec "$@"`, "sh", group, program, "server", "--config", s.file)
	})
	c := s.client()
	_, body := s.ask(c, "POST", line.BaseURL+"/api/v2/system/tenants", s.systemKey(), `{"name":"shop"}`)
	_, body = s.ask(c, "POST", line.BaseURL+"/api/v2/system/tenants/"+field(t, body, "tenant_id")+"/api-keys", s.systemKey(), `{"name":"k","scopes":["crypto:encrypt"]}`)
	key := field(t, body, "api_key")

	large := `{"data":"` + strings.Repeat("x", 700<<10) + `"}`
	var clients sync.WaitGroup
	for range 16 {
		clients.Go(func() {
			for answered := 0; answered < 8; {
				request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, line.BaseURL+"/api/v2/encryption/encrypt", strings.NewReader(large))
				if err != nil {
					t.Error(err)
					return
				}
				request.Header.Set("X-API-Key", key)
				request.Header.Set("Content-Type", "application/json")
				answer, err := s.client().Do(request)
				if err != nil {
					t.Error("no answer:", err)
					return
				}
				_ = answer.Body.Close()
				switch answer.StatusCode {
				case http.StatusOK:
					answered++
				case http.StatusServiceUnavailable: // not within its 900 ms on a busy machine
				default:
					t.Error(answer.Status)
					return
				}
			}
		})
	}
	clients.Wait()

	_, metrics := s.ask(c, "GET", s.operations()+"/metrics", "", "")
	if !regexp.MustCompile(`(?m)^go_gc_gomemlimit_bytes 2\.14748\d*e\+08$`).MatchString(metrics) { // four fifths
		t.Error("the limit is not found:", regexp.MustCompile(`(?m)^go_gc_gomemlimit_bytes.*`).FindString(metrics))
	}
	if !strings.Contains(metrics, "\nlatticekeep_http_requests_shed_total 0\n") {
		t.Error("so few requests were shed")
	}
	// What Go has had from the kernel never falls. What else is resident are pages of files.
	peak, err := strconv.ParseFloat(regexp.MustCompile(`(?m)^go_memstats_sys_bytes (\S+)$`).FindStringSubmatch(metrics)[1], 64)
	must(t, err)
	if peak > memory {
		t.Errorf("it used %.0f MiB", peak/(1<<20))
	}
}
