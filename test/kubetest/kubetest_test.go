package kubetest

import (
	"bufio"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func kubectl(t *testing.T, c *ControlPlane, stdin string, args ...string) string {
	t.Helper()
	cmd := c.Kubectl(t.Context(), args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestControlPlaneServesAndLeavesNothingBehind(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: needs a Kubernetes control plane")
	}
	c, err := Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	defer func() {
		if !stopped {
			_ = c.Stop()
		}
	}()

	kubectl(t, c, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"sample"},"data":{"key":"value"}}`, "apply", "-f", "-")
	if got := kubectl(t, c, "", "get", "configmap", "sample", "-o", "jsonpath={.data.key}"); got != "value" {
		t.Errorf("the ConfigMap reads back as %q", got)
	}
	if got := kubectl(t, c, "", "get", "sealedcredentials", "--all-namespaces", "--no-headers"); !strings.HasPrefix(got, "No resources found") {
		t.Errorf("listing SealedCredentials printed %q", got)
	}
	if got := kubectl(t, c, "", "version"); strings.Contains(got, "Server Version: v0") {
		t.Errorf("the API server does not know its version: %s", got)
	}

	t.Run("RBAC holds for other users", func(t *testing.T) {
		nobody, err := c.KubeconfigFor("nobody")
		if err != nil {
			t.Fatal(err)
		}
		out, err := c.Kubectl(t.Context(), "--kubeconfig", nobody, "get", "configmaps").CombinedOutput()
		if err == nil || !strings.Contains(string(out), `User "nobody" cannot list resource "configmaps"`) {
			t.Errorf("a user without rights got %v: %s", err, out)
		}
	})

	pids := []int{c.api.Pid(), c.etcd.Pid()}
	stopped = true
	if err := c.Stop(); err != nil {
		t.Errorf("stopping: %v", err)
	}
	for _, pid := range pids {
		if exists(pid) {
			t.Errorf("process %d is still there", pid)
		}
	}
	if _, err := os.Stat(c.dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the temporary directory is still there: %v", err)
	}
}

func TestMissingBinariesNameTheRemedy(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "hack", "k8s"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, versionFile), []byte("require (\n\tk8s.io/kubernetes v1.2.3 // indirect\n)\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBEBUILDER_ASSETS", "")
	if _, err := binaries(root); err == nil || !strings.Contains(err.Error(), "run `make control-plane`") || !strings.Contains(err.Error(), "v1.2.3") {
		t.Errorf("without binaries: %v", err)
	}
	t.Setenv("KUBEBUILDER_ASSETS", "assets")
	if _, err := binaries(root); err == nil || !strings.Contains(err.Error(), "correct KUBEBUILDER_ASSETS") {
		t.Errorf("with KUBEBUILDER_ASSETS pointing nowhere: %v", err)
	}
	assets := filepath.Join(root, "assets")
	if err := os.Mkdir(assets, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kube-apiserver", "etcd"} {
		if err := os.WriteFile(filepath.Join(assets, name), []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := binaries(root); err != nil || got != assets {
		t.Errorf("a relative KUBEBUILDER_ASSETS gave %q, %v; want it under the root, %q", got, err, assets)
	}
}

func TestStopInterruptsThenKills(t *testing.T) {
	for name, script := range map[string]string{
		"ends when asked":       `trap 'exit 0' INT; echo ready; while :; do sleep 0.02; done`,
		"ignores the interrupt": `trap '' INT; echo ready; while :; do sleep 0.02; done`,
	} {
		t.Run(name, func(t *testing.T) {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			cmd := exec.Command("sh", "-c", script)
			cmd.Stdout = w
			p, err := StartProcess(cmd)
			w.Close()
			if err != nil {
				t.Fatal(err)
			}
			readLine(t, r)
			grace := time.Minute
			if strings.Contains(name, "ignores") {
				grace = 100 * time.Millisecond
			}
			err = p.Stop(grace)
			if killed := err != nil; killed != strings.Contains(name, "ignores") {
				t.Errorf("Stop returned %v", err)
			}
			if exists(p.Pid()) {
				t.Errorf("process %d is still there", p.Pid())
			}
		})
	}
}

// The test runs itself as a parent that is killed, like a test that reaches its timeout.
func TestChildrenDieWithTheirParent(t *testing.T) {
	if os.Getenv("KUBETEST_PARENT") == "1" {
		p, err := StartProcess(exec.Command("sleep", "600"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = os.Stdout.WriteString(strconv.Itoa(p.Pid()) + "\n")
		<-p.Done()
		return
	}
	if runtime.GOOS != "linux" {
		t.Skip("only Linux can tie a child's life to its parent's")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	parent := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	parent.Env = append(os.Environ(), "KUBETEST_PARENT=1")
	parent.Stdout = w
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	child, err := strconv.Atoi(readLine(t, r))
	if err != nil {
		t.Fatal(err)
	}
	if !exists(child) {
		t.Fatalf("the child %d never ran", child)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // an error is expected: it was killed
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for exists(child) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			_ = syscall.Kill(child, syscall.SIGKILL)
			t.Fatalf("the child %d outlived its parent", child)
		}
	}
}

func readLine(t *testing.T, f *os.File) string {
	t.Helper()
	line, err := bufio.NewReader(f).ReadString('\n')
	if err != nil {
		t.Fatalf("waiting for the process to say that it runs: %v", err)
	}
	return strings.TrimSpace(line)
}

// exists reports whether a process runs. A zombie does not count.
func exists(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || !strings.Contains(string(stat), ") Z ")
}
