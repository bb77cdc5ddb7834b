package app

import (
	"os"
	"testing"
)

// TestMain keeps every test from being the operator of the cluster that it may run in.
func TestMain(m *testing.M) {
	if err := os.Unsetenv(serviceHost); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}
