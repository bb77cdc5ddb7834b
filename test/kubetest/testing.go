package kubetest

import "testing"

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
