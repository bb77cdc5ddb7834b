package kubetest

import "testing"

// ForTest is a control plane for the length of a test. Without the binaries the test fails, saying what to run: a machine that
// cannot run these tests has not passed them. flags are more flags for the API server.
func ForTest(t testing.TB, flags ...string) *ControlPlane {
	t.Helper()
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
