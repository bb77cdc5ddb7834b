package csi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/secrets-store-csi-driver/provider/v1alpha1"

	"github.com/latticekeep/latticekeep/internal/csi"
	"github.com/latticekeep/latticekeep/internal/delivery"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// driver calls a provider as the driver does.
type driver struct {
	*servertest.Service
	pods     *servertest.Pods
	provider v1alpha1.CSIDriverProviderClient
	logged   *bytes.Buffer
	end      func()
}

// start starts a provider that reads from a server at a URL; "" is that of a new one.
func start(t *testing.T, url string) *driver {
	d := &driver{Service: servertest.Start(t), logged: new(bytes.Buffer)}
	d.pods = d.UsePods(d.Tenant)
	d.pods.Allow(servertest.AllowOnly("unseal"))
	if url == "" {
		url = d.URL
	}
	server, err := delivery.NewServer(url, "")
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	socket := filepath.Join(folder, "s")
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- csi.Serve(ctx, csi.Config{Server: server, Socket: socket, Version: "1.2.3", Logger: slog.New(slog.NewTextHandler(d.logged, nil))})
	}()
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	d.end = func() {
		_ = connection.Close()
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		ended <- nil
	}
	t.Cleanup(d.end)
	d.provider = v1alpha1.NewCSIDriverProviderClient(connection)
	return d
}

const files = "- {path: key, credential: n, key: key}\n"

// request returns a request for the files of a plan, by a pod with a token.
func request(t *testing.T, plan, token string, had []*v1alpha1.ObjectVersion) *v1alpha1.MountRequest {
	given := map[string]string{
		"files": plan, "secretProviderClass": "orders", "csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.name": "orders-1", "csi.storage.k8s.io/ephemeral": "true",
		"csi.storage.k8s.io/serviceAccount.tokens": fmt.Sprintf(`{"latticekeep":{"token":%q,"expirationTimestamp":"2026-11-21T11:00:00Z"}}`, token),
	}
	encoded, err := json.Marshal(given)
	if err != nil {
		t.Fatal(err)
	}
	return &v1alpha1.MountRequest{Attributes: string(encoded), CurrentObjectVersion: had}
}

func (d *driver) mount(t *testing.T, plan string, had []*v1alpha1.ObjectVersion) *v1alpha1.MountResponse {
	t.Helper()
	answer, err := d.provider.Mount(t.Context(), request(t, plan, servertest.OrdersToken, had))
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

func (d *driver) unsealed() int { return len(d.Entries("event_type=CREDENTIAL_UNSEALED")) }

func written(m *v1alpha1.MountResponse) (all []string) {
	for _, f := range m.GetFiles() {
		all = append(all, fmt.Sprintf("%s %04o %s", f.GetPath(), f.GetMode(), f.GetContents()))
	}
	return all
}

// The driver mounts, polls, and learns of a new version.
func TestAPodGetsItsFilesAndTheirNextVersion(t *testing.T) {
	d := start(t, "")
	id := d.Seal("first")
	first := d.mount(t, files, nil)
	if got := written(first); !slices.Equal(got, []string{"key 0444 first"}) {
		t.Error(got)
	}
	if v := first.GetObjectVersion(); len(v) != 2 || v[0].GetId() != "credential/n" || !strings.HasPrefix(v[0].GetVersion(), "1 ") {
		t.Error(v)
	}
	again := d.mount(t, files, first.GetObjectVersion())
	if len(again.GetFiles()) > 0 || fmt.Sprint(again.GetObjectVersion()) != fmt.Sprint(first.GetObjectVersion()) || d.unsealed() != 1 {
		t.Error("a poll without a change reads the values: ", again, d.unsealed())
	}
	d.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/" + id, Key: d.Key, Body: `{"values":{"key":"second"}}`}).Want(t, http.StatusOK)
	second := d.mount(t, files, first.GetObjectVersion())
	if got := written(second); !slices.Equal(got, []string{"key 0444 second"}) || !strings.HasPrefix(second.GetObjectVersion()[0].GetVersion(), "2 ") {
		t.Error(second)
	}
	// Another plan of the same version has other files.
	other := d.mount(t, "- {path: all, credential: n, format: env, mode: \"0400\"}", second.GetObjectVersion())
	if got := written(other); !slices.Equal(got, []string{"all 0400 key=second\n"}) {
		t.Error(got)
	}
	// Another credential under the same name is another version, though its number is the same.
	d.Delete("/api/v2/vault/"+id).Want(t, http.StatusOK)
	d.Seal("third")
	if got := written(d.mount(t, files, first.GetObjectVersion())); !slices.Equal(got, []string{"key 0444 third"}) {
		t.Error(got)
	}
	if v, err := d.provider.Version(t.Context(), &v1alpha1.VersionRequest{}); err != nil || v.GetRuntimeVersion() != "1.2.3" || v.GetVersion() != "v1alpha1" {
		t.Error(v, err)
	}
}

// All files come together: one that is new brings those that are not.
func TestAnAnswerHasAllFilesOrNone(t *testing.T) {
	d := start(t, "")
	id := d.Seal("first")
	d.Post("/api/v2/vault/seal", `{"name":"other","credential_type":"t","values":{"key":"same"}}`).Want(t, http.StatusCreated)
	plan := files + "- {path: other, credential: other, key: key}\n"
	first := d.mount(t, plan, nil)
	d.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/" + id, Key: d.Key, Body: `{"values":{"key":"second"}}`}).Want(t, http.StatusOK)
	if got := written(d.mount(t, plan, first.GetObjectVersion())); !slices.Equal(got, []string{"key 0444 second", "other 0444 same"}) {
		t.Error(got)
	}
}

// A missing credential and a forbidden one have the same text, which says what to do.
func TestADenialIsOneText(t *testing.T) {
	d := start(t, "")
	missing, err := d.provider.Mount(t.Context(), request(t, files, servertest.OrdersToken, nil))
	if missing != nil || status.Code(err) != codes.PermissionDenied {
		t.Fatal(missing, err)
	}
	d.Seal("s3cret")
	d.pods.Allow(servertest.AllowNothing)
	_, denied := d.provider.Mount(t.Context(), request(t, files, servertest.OrdersToken, nil))
	if denied == nil || denied.Error() != err.Error() || !strings.Contains(err.Error(), "ServiceAccount shop/orders lacks unseal on it: kubectl create role unseal-n-orders --namespace shop ") {
		t.Errorf("%v\n%v", err, denied)
	}
	_, unknown := d.provider.Mount(t.Context(), request(t, files, servertest.PodToken("unknown"), nil))
	if status.Code(unknown) != codes.Unauthenticated || !strings.Contains(unknown.Error(), "audience latticekeep") {
		t.Error(unknown)
	}
	d.end()
	if text := d.logged.String(); strings.Contains(text, "s3cret") || strings.Contains(text, servertest.OrdersToken) || !strings.Contains(text, "namespace=shop pod=orders-1") {
		t.Error(text)
	}
}

func TestARequestSaysWhatIsWrongWithIt(t *testing.T) {
	d := start(t, "")
	d.Seal("s3cret")
	more := request(t, files, servertest.OrdersToken, nil)
	more.Attributes = strings.Replace(more.Attributes, `"files"`, `"objects":"","files"`, 1)
	for name, c := range map[string]struct {
		request *v1alpha1.MountRequest
		named   string
	}{
		"no token":          {request(t, files, "", nil), "tokenRequests[0].audience=latticekeep"},
		"another parameter": {more, "spec.parameters.objects"},
		"no files":          {request(t, "", servertest.OrdersToken, nil), "list of files is empty"},
		"a path":            {request(t, "- {path: ../a, credential: n}", servertest.OrdersToken, nil), "files[0].path"},
		"another key":       {request(t, "- {path: a, credential: n, key: other}", servertest.OrdersToken, nil), "has no value other; it has key"},
		"no JSON":           {&v1alpha1.MountRequest{Attributes: "a"}, "JSON"},
	} {
		_, err := d.provider.Mount(t.Context(), c.request)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.named) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: %v, want %s", name, err, c.named)
		}
	}
}

// The credentials of a volume have a bound, whatever little of them is in its files.
func TestAVolumeReadsNoMoreThanItsBound(t *testing.T) {
	d := start(t, "")
	var plan strings.Builder
	value := strings.Repeat("x", 250<<10)
	for i := range 17 {
		d.Post("/api/v2/vault/seal", fmt.Sprintf(`{"name":"c%d","credential_type":"t","values":{"large":%q,"small":"x"}}`, i, value)).Want(t, http.StatusCreated)
		fmt.Fprintf(&plan, "- {path: f%d, credential: c%d, key: small}\n", i, i)
	}
	_, err := d.provider.Mount(t.Context(), request(t, plan.String(), servertest.OrdersToken, nil))
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "divide them among several volumes") {
		t.Error(err)
	}
}

// A server that is down is named, and the kubelet tries again.
func TestAServerThatIsDownIsNamed(t *testing.T) {
	d := start(t, "http://127.0.0.1:1")
	_, err := d.provider.Mount(t.Context(), request(t, files, servertest.OrdersToken, nil))
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "http://127.0.0.1:1 does not answer: ") {
		t.Error(err)
	}
}
