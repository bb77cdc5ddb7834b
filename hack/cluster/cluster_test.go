package main

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/test/kubetest"
)

// The test runs the same steps as `make cluster`, up to the wait for an interrupt.
func TestClusterProvesTheMainJob(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: builds the program and needs a Kubernetes control plane")
	}
	t.Chdir(filepath.Join("..", ".."))
	binary := filepath.Join(t.TempDir(), "latticekeep")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("building latticekeep: %v\n%s", err, out)
	}
	var out bytes.Buffer
	c, err := start(t.Context(), binary, &out)
	if err == nil {
		err = c.prove(t.Context())
	}
	if err != nil {
		t.Errorf("%v\n%s", err, &out)
	}
	if strings.Contains(out.String(), "correct-horse") {
		t.Errorf("a secret value was printed:\n%s", &out)
	}
	server := c.server
	if err := c.stop(); err != nil {
		t.Errorf("stopping: %v", err)
	}
	if server == nil {
		return
	}
	select {
	case <-server.Done():
	default:
		t.Error("latticekeep is still running")
	}
}

// A committed example must at least be accepted by the API server.
func TestSampleIsAValidObject(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	plane := kubetest.ForTest(t)
	if out, err := plane.Kubectl(t.Context(), "apply", "--dry-run=server", "-f", "config/samples/sealedcredential.yaml").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
