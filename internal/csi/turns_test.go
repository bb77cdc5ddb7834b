package csi

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/secrets-store-csi-driver/provider/v1alpha1"
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
