package server_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/secrets-store-csi-driver/provider/v1alpha1"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/csi"
	"github.com/latticekeep/latticekeep/internal/delivery"
)

// csiProvider serves the CSI provider beside the cluster's service, and returns a client like the one of the driver.
func (c *cluster) csiProvider() v1alpha1.CSIDriverProviderClient {
	c.T.Helper()
	from, err := delivery.NewServer(c.URL, "", client.WithRetries(0))
	if err != nil {
		c.T.Fatal(err)
	}
	socket := filepath.Join(c.T.TempDir(), "s")
	ctx, stop := context.WithCancel(context.WithoutCancel(c.T.Context()))
	ended := make(chan error, 1)
	go func() {
		ended <- csi.Serve(ctx, csi.Config{Server: from, Socket: socket, Version: "test", Logger: slog.New(slog.DiscardHandler)})
	}()
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		c.T.Fatal(err)
	}
	c.T.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			c.T.Error(err)
		}
		if err := connection.Close(); err != nil {
			c.T.Error(err)
		}
	})
	return v1alpha1.NewCSIDriverProviderClient(connection)
}

// mountRequest is one for the password of db, as the driver makes it with the token that the kubelet has asked for.
func mountRequest(t *testing.T, token string) *v1alpha1.MountRequest {
	t.Helper()
	tokens, err := json.Marshal(map[string]any{"latticekeep": map[string]string{"token": token, "expirationTimestamp": "2026-11-21T11:00:00Z"}})
	if err != nil {
		t.Fatal(err)
	}
	attributes, err := json.Marshal(map[string]string{
		"secretProviderClass": "db", "files": "- {path: password, credential: db, key: password}", "csi.storage.k8s.io/pod.namespace": "shop",
		"csi.storage.k8s.io/pod.name": "app", "csi.storage.k8s.io/serviceAccount.name": "app", "csi.storage.k8s.io/serviceAccount.tokens": string(tokens),
	})
	if err != nil {
		t.Fatal(err)
	}
	return &v1alpha1.MountRequest{Attributes: string(attributes)}
}

// A denial says which commands grant the right. They are run as they are written, and then the pod has its files.
func TestTheCSIProviderReadsWithTheRightsOfAPodOfARealCluster(t *testing.T) {
	c := newCluster(t)
	provider := c.csiProvider()
	token, _ := c.workload("shop")
	c.soon(http.StatusCreated, token, "POST", sealPath, sealBody("db", "of shop"))
	c.kubectl("", "delete", "role,rolebinding", "app", "-n", "shop")
	mount := func(token string) (*v1alpha1.MountResponse, error) {
		return provider.Mount(t.Context(), mountRequest(t, token))
	}
	// until repeats a mount until its answer has a code: the API server takes its time to notice what it was told.
	until := func(code codes.Code, token string) (*v1alpha1.MountResponse, error) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; {
			answer, err := mount(token)
			if status.Code(err) == code {
				return answer, err
			}
			if time.Now().After(end) {
				t.Fatalf("%v, want %s", err, code)
			}
			c.at.Advance(10 * time.Second) // so long a right is remembered
		}
	}

	_, denied := until(codes.PermissionDenied, token)
	_, commands, found := strings.Cut(status.Convert(denied).Message(), "ServiceAccount shop/app lacks unseal on it: ")
	if !found {
		t.Fatal(denied)
	}
	paste := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", commands)
	paste.Env = append(os.Environ(), "KUBECONFIG="+c.plane.Kubeconfig)
	if out, err := paste.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", commands, err, out)
	}
	answer, _ := until(codes.OK, token)
	if files := answer.GetFiles(); len(files) != 1 || files[0].GetPath() != "password" || string(files[0].GetContents()) != "of shop" {
		t.Error(files)
	}

	for name, other := range map[string]string{
		"for the API server":   c.token("shop"),
		"for another audience": c.token("shop", "--audience", "vault"),
		"changed":              token[:len(token)-8] + "AAAAAAAA",
	} {
		if _, err := mount(other); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "audience latticekeep") {
			t.Errorf("a token %s: %v", name, err)
		}
	}

	c.at.Advance(10 * time.Second)
	c.wire.set(true)
	if _, err := mount(token); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "credential db cannot be read now: ") {
		t.Error("without the API server: ", err)
	}
	c.wire.set(false)
	_, _ = until(codes.OK, token)
	if strings.Contains(c.Logged.String(), strings.Split(token, ".")[2]) {
		t.Error("a token is in the log")
	}
}
