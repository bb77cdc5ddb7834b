package kubetest

import "testing"

// ForTest starts a control plane for the length of a test. Under -short and under the race detector it skips the
// test. Without the binaries it fails the test and says what to run, since a machine that cannot run these
// tests has not passed them. The flags are passed to the API server.
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
