package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/test/machine"
)

const memoryLimit = 256 << 20

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

// runSmall is run in a control group of its own, or with as small a limit if there can be none.
func (s *site) runSmall() (line app.Ready, group *machine.MemoryGroup) {
	s.t.Helper()
	group, none := machine.NewMemoryGroup(s.t, memoryLimit)
	line = s.run(func(program string) *exec.Cmd {
		if none != nil {
			s.t.Log("without a control group, since ", none)
			cmd := exec.CommandContext(s.t.Context(), program, "server", "--config", s.file)
			cmd.Env = append(os.Environ(), "GOMEMLIMIT="+strconv.Itoa(memoryLimit/10*8))
			return cmd
		}
		argv := append(group.Below(), program, "server", "--config", s.file)
		return exec.CommandContext(s.t.Context(), argv[0], argv[1:]...)
	})
	return line, group
}

// tenantKey makes a tenant and returns a key of it that may encrypt.
func (s *site) tenantKey(line app.Ready, name string) string {
	s.t.Helper()
	_, body := s.ask(s.client(), "POST", line.BaseURL+"/api/v2/system/tenants", s.systemKey(), `{"name":"`+name+`"}`)
	_, body = s.ask(s.client(), "POST", line.BaseURL+"/api/v2/system/tenants/"+field(s.t, body, "tenant_id")+"/api-keys", s.systemKey(), `{"name":"k","scopes":["crypto:encrypt"]}`)
	return field(s.t, body, "api_key")
}

// encrypt returns a request with a body of a size, which is -1 if it is not known.
func encrypt(t *testing.T, line app.Ready, key string, body io.Reader, size int64) *http.Request {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, line.BaseURL+"/api/v2/encryption/encrypt", body)
	must(t, err)
	request.ContentLength = size
	request.Header.Set("X-API-Key", key)
	request.Header.Set("Content-Type", "application/json")
	return request
}

var large = `{"data":"` + strings.Repeat("x", 700<<10) + `"}`

// Sixteen clients with large bodies do not kill a small server: it finds its memory limit by itself,
// keeps within it, and gives back what it does not use once they have gone.
func TestASmallServerAnswersLargeBodies(t *testing.T) {
	s := newSite(t, closed+"operations: {listen: '127.0.0.1:0'}\n")
	line, group := s.runSmall()
	key := s.tenantKey(line, "shop")
	var clients sync.WaitGroup
	for range 16 {
		clients.Go(func() {
			for answered := 0; answered < 8; {
				answer, err := s.client().Do(encrypt(t, line, key, strings.NewReader(large), int64(len(large))))
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
	busy := s.memoryKept()
	s.wantSmall(group)
	if _, metrics := s.ask(s.client(), "GET", s.operations()+"/metrics", "", ""); !strings.Contains(metrics, "\nlatticekeep_http_requests_shed_total 0\n") {
		t.Error("so few requests were shed")
	}
	for end := time.Now().Add(2 * time.Minute); s.memoryKept() > busy*2/3; time.Sleep(100 * time.Millisecond) { // The server decides every ten seconds.
		if time.Now().After(end) {
			t.Fatalf("of %d MiB it keeps %d", busy>>20, s.memoryKept()>>20)
		}
	}
}

// memoryKept returns the bytes that the server's Go runtime has from the operating system.
func (s *site) memoryKept() int64 {
	s.t.Helper()
	_, metrics := s.ask(s.client(), "GET", s.operations()+"/metrics", "", "")
	value := func(name string) int64 {
		_, rest, _ := strings.Cut(metrics, "\n"+name+" ")
		text, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.ParseFloat(text, 64)
		must(s.t, err)
		return int64(n)
	}
	return value("go_memstats_sys_bytes") - value("go_memstats_heap_released_bytes")
}

// Two tenants that hold 400 bodies just before their ends neither kill a small server nor keep out a
// third one.
func TestASmallServerServesATenantBesideHeldBodies(t *testing.T) {
	s := newSite(t, closed+"operations: {listen: '127.0.0.1:0'}\n")
	line, group := s.runSmall()
	holders, third := []string{s.tenantKey(line, "a"), s.tenantKey(line, "b")}, s.tenantKey(line, "c")
	const held, size = 400, 1 << 20
	var sent, ended sync.WaitGroup
	var stopped []func()
	for i := range held {
		body, end := io.Pipe()
		stopped = append(stopped, func() { _ = end.Close() })
		request := encrypt(t, line, holders[i%2], body, size)
		if i%4 > 1 {
			request.ContentLength = -1
		}
		sent.Go(func() {
			_, _ = io.WriteString(end, strings.Repeat(" ", size-1)) // fails once the server has answered
		})
		ended.Go(func() {
			if answer, err := s.client().Do(request); err == nil {
				_ = answer.Body.Close()
			}
			_ = body.Close()
		})
	}
	sent.Wait()
	answered := 0
	for range 200 {
		if answered == 8 {
			break
		}
		answer, err := s.client().Do(encrypt(t, line, third, strings.NewReader(large), int64(len(large))))
		must(t, err)
		_ = answer.Body.Close()
		if answer.StatusCode == http.StatusOK {
			answered++
		}
	}
	for _, stop := range stopped {
		stop()
	}
	ended.Wait()
	if answered < 8 {
		t.Errorf("%d calls of a third tenant were answered", answered)
	}
	s.wantSmall(group)
}

// wantSmall fails the test unless the server has found its limit and kept within it.
func (s *site) wantSmall(group *machine.MemoryGroup) {
	t := s.t
	t.Helper()
	_, metrics := s.ask(s.client(), "GET", s.operations()+"/metrics", "", "")
	if !regexp.MustCompile(`(?m)^go_gc_gomemlimit_bytes 2\.14748\d*e\+08$`).MatchString(metrics) { // four fifths
		t.Error("the limit is not found:", regexp.MustCompile(`(?m)^go_gc_gomemlimit_bytes.*`).FindString(metrics))
	}
	if group != nil {
		if peak, kills := group.Peak(), group.Kills(s.t); peak > memoryLimit || kills > 0 {
			s.t.Errorf("it used %d MiB, and %d processes were killed", peak>>20, kills)
		}
	}
}
