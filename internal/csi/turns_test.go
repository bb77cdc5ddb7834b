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
	if !p.mounts.TryAcquire(4) {
		t.Fatal("there are fewer than four turns")
	}
	over, end := context.WithCancel(t.Context())
	end()
	for range 2 {
		if _, err := p.Mount(over, request); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "too many volumes") {
			t.Error(err)
		}
	}
	p.mounts.Release(4)
	if !p.mounts.TryAcquire(4) {
		t.Error("a refused mount kept its turn")
	}
	if p.mounts.TryAcquire(1) {
		t.Error("there are more than four turns")
	}
}
