package csi

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/secrets-store-csi-driver/provider/v1alpha1"

	"github.com/latticekeep/latticekeep/internal/fair"
)

// A volume that finds no turn in the time of its request is told why. What was refused takes no turn with it.
func TestFewVolumesAreMountedAtOnce(t *testing.T) {
	p := newProvider(Config{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	request := &v1alpha1.MountRequest{Attributes: `{"files": "- {path: a, credential: n, key: k}", "csi.storage.k8s.io/serviceAccount.tokens": "{\"latticekeep\": {\"token\": \"t\"}}"}`}
	others, err := p.turns.Acquire(t.Context(), "others", 4, func() {})
	if err != nil {
		t.Fatal(err)
	}
	over, end := context.WithCancel(t.Context())
	end()
	for range 2 {
		if _, err := p.Mount(over, request); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "too many volumes") {
			t.Error(err)
		}
	}
	others.Release()
	if others, err = p.turns.Acquire(t.Context(), "others", 4, func() {}); err != nil { // a refused mount keeps no turn
		t.Fatal(err)
	}
	defer others.Release()
	if _, err := p.turns.Acquire(over, "more", 1, func() {}); err == nil {
		t.Error("there are more than four turns")
	}
}

// A namespace that has all turns, and more volumes that wait, does not keep another one waiting behind these.
func TestTheNamespaceWithTheFewestMountsComesNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(Config{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
		var held []*fair.Loan[string]
		for range 4 {
			turn, err := p.turns.Acquire(t.Context(), "shop", 1, func() {})
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, turn)
		}
		ended := make(chan string, 3)
		for _, namespace := range []string{"shop", "shop", "bank"} {
			go func() {
				// The list is empty, which is found out in its turn.
				_, _ = p.Mount(t.Context(), &v1alpha1.MountRequest{Attributes: `{"csi.storage.k8s.io/pod.namespace": "` + namespace + `", "csi.storage.k8s.io/serviceAccount.tokens": "{\"latticekeep\": {\"token\": \"t\"}}"}`})
				ended <- namespace
			}()
			synctest.Wait()
		}
		held[0].Release()
		if next := <-ended; next != "bank" {
			t.Errorf("%s comes next", next)
		}
		for _, turn := range held[1:] {
			turn.Release()
		}
	})
}
