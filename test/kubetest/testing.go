package kubetest

import (
	"fmt"
	"os"
	"testing"
)

// ForTest starts a control plane for the duration of a test. It skips the test under -short and
// under the race detector. Without the binaries it fails the test and says what to run, because a
// machine that cannot run these tests has not passed them. The flags are passed to the API server.
func ForTest(t testing.TB, flags ...string) *ControlPlane {
	t.Helper()
	if testing.Short() || underRace {
		t.Skip("-short or -race: needs a Kubernetes control plane")
	}
	c, err := Start(t.Context(), flags...)
	if err != nil {
		t.Fatalf("starting a Kubernetes control plane: %v", err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Errorf("stopping the Kubernetes control plane: %v", err)
		}
	})
	return c
}

// Another starts a further API server on the same etcd, for the duration of a test. The flags are its own.
func (c *ControlPlane) Another(t testing.TB, flags ...string) *ControlPlane {
	t.Helper()
	another := &ControlPlane{bin: c.bin, more: flags, ca: c.ca, etcd: c.etcd}
	err := another.startBeside(c, t)
	if err != nil {
		t.Fatalf("starting another API server: %v", err)
	}
	return another
}

func (c *ControlPlane) startBeside(first *ControlPlane, t testing.TB) (err error) {
	if c.dir, err = os.MkdirTemp("", "latticekeep-kube-"); err != nil {
		return fmt.Errorf("making its directory: %w", err)
	}
	t.Cleanup(func() {
		if c.api != nil {
			_ = c.api.Stop(0) // nil: it was killed
		}
		if err := os.RemoveAll(c.dir); err != nil {
			t.Error(err)
		}
	})
	for _, name := range []string{"etcd.sock", "api.crt", "api.key", "ca.crt", "tokens.key"} {
		if err := os.Symlink(first.path(name), c.path(name)); err != nil {
			return err
		}
	}
	if err := c.startAPIServer(t.Context()); err != nil {
		return err
	}
	c.Kubeconfig, err = c.KubeconfigFor("admin", "system:masters")
	return err
}
