package app

import (
	"os"
	"testing"
)

// TestMain ensures that no test becomes the operator of the cluster in which it may run.
func TestMain(m *testing.M) {
	if err := os.Unsetenv(serviceHost); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}
