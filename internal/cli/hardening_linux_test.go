package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/latticekeep/latticekeep/internal/app"
)

// The memory of a server is in no core dump, and a process of the same user cannot read it.
func TestTheMemoryOfAServerIsItsOwn(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to be two processes of another user")
	}
	const nobody = 65534
	asNobody := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, Pdeathsig: syscall.SIGKILL}
	dir, err := os.MkdirTemp("", "latticekeep-memory-") // all of its parents may be entered by nobody
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Chown(dir, nobody, nobody))
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "server", "--dev", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, "data"))
	cmd.Args[0] = "latticekeep" // under this name the test binary is the program
	cmd.SysProcAttr, cmd.Dir = asNobody, dir
	stderr := make(said, 10_000) // more lines than the server logs
	cmd.Stderr = stderr
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	var ready app.DevReady
	if err := json.NewDecoder(stdout).Decode(&ready); err != nil {
		t.Fatal("the server is not ready:", err)
	}
	in := fmt.Sprintf("/proc/%d/", cmd.Process.Pid)
	if limits := readText(t, in+"limits"); !regexp.MustCompile(`(?m)^Max core file size +0 +0 `).MatchString(limits) {
		t.Errorf("core dumps are allowed:\n%s", limits)
	}
	info, err := os.Stat(in + "mem")
	must(t, err)
	if owner := info.Sys().(*syscall.Stat_t).Uid; owner != 0 {
		t.Errorf("the memory belongs to user %d, so the process is dumpable", owner)
	}
	for _, file := range []string{"mem", "environ", "maps"} {
		look := exec.CommandContext(t.Context(), "/bin/sh", "-c", `exec 3<"$1" && head -c 1 <&3`, "look", in+file)
		look.SysProcAttr = asNobody
		if out, err := look.CombinedOutput(); err == nil {
			t.Errorf("another process of the same user reads %s: %q", file, out)
		}
	}
	// The server still sees its own files in /proc, which metrics are made of.
	system := regexp.MustCompile(`SYSTEM_KEY=(lk_live_\w+)`).FindStringSubmatch(stderr.await(t, "SYSTEM_KEY="))[1]
	made := strings.Fields(mustRun(t, "apikey", "create", "prometheus", "--scope", "metrics:read", "--url", ready.BaseURL, "--api-key", system))
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, ready.BaseURL+"/metrics", nil)
	must(t, err)
	request.Header.Set("X-API-Key", made[len(made)-1])
	answer, err := http.DefaultClient.Do(request)
	must(t, err)
	defer answer.Body.Close()
	metrics, err := io.ReadAll(answer.Body)
	must(t, err)
	for _, metric := range []string{"process_open_fds", "process_resident_memory_bytes"} {
		if !regexp.MustCompile(`(?m)^` + metric + ` [1-9]`).Match(metrics) {
			t.Errorf("there is no metric %s", metric)
		}
	}
}
