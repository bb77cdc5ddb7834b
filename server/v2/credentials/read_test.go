package credentials

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/server/gate"
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

// Clients read without a wait after 429, and not after 503.
func TestAServerWithoutAPlaceIsNotDown(t *testing.T) {
	for name, places := range map[string]*gate.Places{"all": gate.NewPlaces(1, 1, 0), "tenant": gate.NewPlaces(1, 0, 1), "caller": gate.NewPlaces(0, 1, 1)} {
		r := reads{waits: places}
		if _, err := r.takePlace(t.Context(), authz.Principal{Tenant: "t"}, func() {}); !errors.Is(err, fault.Exhausted) {
			t.Errorf("without a place of %s: %v", name, err)
		}
	}
}
