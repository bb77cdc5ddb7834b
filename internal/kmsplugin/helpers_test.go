package kmsplugin

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	kmsapi "k8s.io/kms/apis/v2"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/kms"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refused fails unless err says words.
func refused(t testing.TB, what string, err error, words string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("%s: %v; want an error with %q", what, err, words)
	}
}

// newKMS returns the URL of a new KMS key.
func newKMS(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kms.key")
	must(t, kms.CreateLocal(path))
	return "file://" + path
}

func newCustody(t testing.TB) *Custody {
	t.Helper()
	c := new(Custody)
	t.Cleanup(c.Close)
	return c
}

// initialized returns the directory of node cp-1 with a new key set.
func initialized(t testing.TB, c *Custody, url string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "cp-1")
	_, err := Init(t.Context(), c, dir, "cp-1", url, envelope.MLKEM768)
	must(t, err)
	return dir
}

// forge signs a key set that may be inconsistent.
func forge(t testing.TB, c *Custody, s *KeySet) []byte {
	t.Helper()
	key, err := c.openSigningKey(t.Context(), s.Signer.KMS, signerContext, s.Signer.PublicKey, s.Signer.Wrapped)
	must(t, err)
	b, err := canonical.Encode(s)
	must(t, err)
	b = b[:len(b)-1]
	signature, err := key.Sign(labelKeySet, frame.Join(labelKeySet, b))
	must(t, err)
	b, err = canonical.Encode(signedKeySet{b, signature})
	must(t, err)
	return b
}

func copyKeySet(t testing.TB, from, to string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(from, keySetFile))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(to, keySetFile), b, 0o600))
}

// logged receives the lines of a log.
type logged chan string

func (l logged) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}

func (l logged) await(t testing.TB, words string) {
	t.Helper()
	patience := time.After(time.Minute)
	for {
		select {
		case line := <-l:
			if strings.Contains(line, words) {
				return
			}
		case <-patience:
			t.Fatalf("waited in vain for %q", words)
		}
	}
}

// running is a plugin that serves.
type running struct {
	kmsapi.KeyManagementServiceClient
	socket string
	log    logged
	stop   func() error
}

func start(t testing.TB, dir string) *running {
	t.Helper()
	return startWith(t, Config{Dir: dir})
}

func startWith(t testing.TB, c Config) *running {
	t.Helper()
	r := &running{socket: filepath.Join(t.TempDir(), "s"), log: make(logged, 100)}
	c.Socket, c.Logger, c.Poll = r.socket, slog.New(slog.NewTextHandler(r.log, nil)), time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, c) }()
	r.stop = func() error {
		cancel()
		err := <-ended
		ended <- err
		return err
	}
	t.Cleanup(func() { must(t, r.stop()) })
	r.log.await(t, "msg=serving")
	connection, err := grpc.NewClient("unix:"+r.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { _ = connection.Close() })
	r.KeyManagementServiceClient = kmsapi.NewKeyManagementServiceClient(connection)
	return r
}

// status fails unless the plugin is healthy.
func (r *running) status(t testing.TB) (keyID string) {
	t.Helper()
	s, err := r.Status(t.Context(), &kmsapi.StatusRequest{})
	must(t, err)
	if s.GetVersion() != "v2" || s.GetHealthz() != "ok" {
		t.Fatalf("status: %v", s)
	}
	return s.GetKeyId()
}

func (r *running) encrypt(t testing.TB, seed string) *kmsapi.DecryptRequest {
	t.Helper()
	e, err := r.Encrypt(t.Context(), &kmsapi.EncryptRequest{Plaintext: []byte(seed), Uid: "1"})
	must(t, err)
	return &kmsapi.DecryptRequest{Ciphertext: e.GetCiphertext(), KeyId: e.GetKeyId(), Annotations: e.GetAnnotations(), Uid: "2"}
}

func (r *running) decrypts(t testing.TB, request *kmsapi.DecryptRequest, seed string) {
	t.Helper()
	if d, err := r.Decrypt(t.Context(), request); err != nil || string(d.GetPlaintext()) != seed {
		t.Errorf("decrypting: %q, %v", d.GetPlaintext(), err)
	}
}

// read returns the key set of a directory.
func read(t testing.TB, dir string) *KeySet {
	t.Helper()
	s, err := Read(dir)
	must(t, err)
	return s
}

func number(id string) string { return fmt.Sprint(strings.SplitN(id, "-", 2)[0]) }
