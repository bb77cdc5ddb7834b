package credentials

import (
	"testing"

	"github.com/latticekeep/latticekeep/internal/vault"
)

// A wait that finds sixteen others at the vault leaves it alone: one that looked would panic here, without a vault.
func TestFewWaitsLookAtOnce(t *testing.T) {
	w := waiting{reads: newReads(nil, nil)}
	if !w.looks.TryAcquire(16) {
		t.Fatal("fewer than 16 may look")
	}
	if w.isOther(t.Context(), vault.ByID("cred_a")) {
		t.Error("a wait that did not look knows of another version")
	}
}
