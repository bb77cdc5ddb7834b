package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/test/machine"
)

// custodian is a production server with key files, in a process of its own, and tenants with one
// credential each.
type custodian struct {
	t       *testing.T
	dir     string
	program string
	cmd     *exec.Cmd
	url     string
	log     *machine.Log
	tenants []*client.V2
	keys    []string // API keys of the tenants
	ids     []string // ids of their credentials
	to      recipient
}

func newCustodian(t *testing.T, tenants int) *custodian {
	t.Helper()
	c := &custodian{t: t, dir: t.TempDir(), to: newRecipient(t)}
	self, err := os.Executable()
	must(t, err)
	c.program = filepath.Join(c.dir, "latticekeep") // under this name the test binary is the program
	must(t, os.Symlink(self, c.program))
	must(t, os.Mkdir(c.path("keys"), 0o700))
	c.configure("a")
	c.start()
	system := c.connect(c.systemKey())
	for i := range tenants {
		made, err := system.CreateTenant(t.Context(), v2.CreateTenantRequest{Name: fmt.Sprint("tenant ", i)})
		must(t, err)
		key, err := system.CreateTenantAPIKey(t.Context(), made.Tenant.TenantId, v2.CreateAPIKeyRequest{Name: "k", Scopes: []v2.Scope{"vault:read", "vault:write"}})
		must(t, err)
		c.keys = append(c.keys, key.ApiKey)
	}
	c.reconnect()
	for i, own := range c.tenants {
		sealed, err := own.SealCredential(t.Context(), v2.SealRequest{Name: "db", CredentialType: "database", Values: map[string]string{"password": fmt.Sprint("s3cret-", i)}}, nil)
		must(t, err)
		c.ids = append(c.ids, sealed.CredentialId)
	}
	return c
}

func (c *custodian) path(name string) string { return filepath.Join(c.dir, name) }

func (c *custodian) keyFile(name string) string { return c.path("keys/" + name + ".key") }

// configure sets the key files. The first is the current one.
func (c *custodian) configure(keys ...string) {
	c.t.Helper()
	var former []string
	for _, name := range keys[1:] {
		former = append(former, fmt.Sprintf("%q", "file://"+c.keyFile(name)))
	}
	machine.WriteFile(c.t, c.path("config.yaml"), fmt.Appendf(nil, `
listen: 127.0.0.1:0
publicURL: http://127.0.0.1:8200
dataDir: %s
kms: {url: "file://%s", former: [%s], cacheTTL: 0s}
systemKeyFile: %s
backup: {recipients: [%s]}
rate: {v1: 1000000, v2: 1000000, address: 1000000}
registration: {closed: true}
`, c.path("data"), c.keyFile(keys[0]), strings.Join(former, ", "), c.path("system.key"), c.to.text))
}

// begin starts the server. It returns nil once the server is ready, or an error with its output.
func (c *custodian) begin() error {
	c.t.Helper()
	c.log = new(machine.Log)
	c.cmd = exec.Command(c.program, "server", "--config", c.path("config.yaml"))
	c.cmd.Env = append(os.Environ(), "KUBERNETES_SERVICE_HOST=")
	c.cmd.Stderr = c.log
	stdout, err := c.cmd.StdoutPipe()
	must(c.t, err)
	must(c.t, c.cmd.Start())
	c.t.Cleanup(c.kill)
	var line app.Ready
	if err := json.NewDecoder(stdout).Decode(&line); err != nil {
		_ = c.cmd.Wait()
		return errors.New(c.log.String())
	}
	c.url = line.BaseURL
	return nil
}

func (c *custodian) start() {
	c.t.Helper()
	if err := c.begin(); err != nil {
		c.t.Fatal(err)
	}
	if c.keys != nil {
		c.reconnect()
	}
}

func (c *custodian) kill() {
	_ = c.cmd.Process.Kill() // it may be dead already
	_ = c.cmd.Wait()
}

func (c *custodian) systemKey() string {
	c.t.Helper()
	b, err := os.ReadFile(c.path("system.key"))
	must(c.t, err)
	return strings.TrimSpace(string(b))
}

func (c *custodian) connect(key string) *client.V2 {
	c.t.Helper()
	made, err := client.New(c.url, client.WithAPIKey(key))
	must(c.t, err)
	return made.V2
}

func (c *custodian) reconnect() {
	c.t.Helper()
	c.tenants = nil
	for _, key := range c.keys {
		c.tenants = append(c.tenants, c.connect(key))
	}
}

// unsealAll fails the test unless every tenant reads the value that it sealed.
func (c *custodian) unsealAll() {
	c.t.Helper()
	for i, own := range c.tenants {
		got, err := own.UnsealCredential(c.t.Context(), c.ids[i])
		if err != nil || got.Values["password"] != fmt.Sprint("s3cret-", i) {
			c.t.Errorf("tenant %d: %v", i, err)
		}
	}
}

// load seals and unseals without a pause until end is called. end returns the number of calls. No
// call may fail.
func (c *custodian) load() (end func() int64) {
	ctx, stop := context.WithCancel(c.t.Context())
	var done atomic.Int64
	var workers sync.WaitGroup
	for w := range 4 {
		workers.Go(func() {
			for i := w; ctx.Err() == nil; i++ {
				own := c.tenants[i%len(c.tenants)]
				_, err := own.UnsealCredential(c.t.Context(), c.ids[i%len(c.ids)])
				if err == nil {
					_, err = own.SealCredential(c.t.Context(), v2.SealRequest{Name: "more", CredentialType: "t", Values: map[string]string{"k": "v"}}, nil)
				}
				if err != nil {
					c.t.Error("under load:", err)
					return
				}
				done.Add(1)
			}
		})
	}
	return func() int64 { stop(); workers.Wait(); return done.Load() }
}

// command runs latticekeep kms with typed on its standard input.
func (c *custodian) command(typed string, args ...string) (string, error) {
	c.t.Helper()
	var out machine.Log
	cmd := Command()
	cmd.SetArgs(append([]string{"kms"}, append(args, "--url", c.url, "--api-key-file", c.path("system.key"))...))
	cmd.SetIn(strings.NewReader(typed))
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	err := cmd.ExecuteContext(c.t.Context())
	return out.String(), err
}

func (c *custodian) idOf(name string) string {
	c.t.Helper()
	k, err := kms.OpenLocal(c.keyFile(name))
	must(c.t, err)
	return k.ID()
}

func TestADeploymentMovesToAnotherKMSKeyWhileItServes(t *testing.T) {
	t.Parallel()
	const tenants = 12
	c := newCustodian(t, tenants)
	a := c.idOf("a")
	c.kill()
	must(t, os.CopyFS(c.path("snapshot"), os.DirFS(c.path("data")))) // a snapshot of the volume before the move
	must(t, kms.CreateLocal(c.keyFile("b")))
	b := c.idOf("b")
	c.configure("b", "a")
	c.start()

	if out, err := run(t, "kms", "rewrap", "--destroy-old", "--yes", "--url", c.url, "--api-key", c.keys[0]); err == nil || !strings.Contains(err.Error(), "403") {
		t.Error("with a tenant's key:", out, err)
	}
	end := c.load()
	out, err := c.command("", "rewrap")
	if n := end(); n == 0 {
		t.Error("the load did nothing")
	}
	for _, want := range []string{fmt.Sprintf("moved %d sets of keys, 0 remain", tenants+1), b + "  current  ", "remove it from kms.former"} {
		if err != nil || !strings.Contains(out, want) {
			t.Fatalf("no %q in %s %v", want, out, err)
		}
	}
	out, err = c.command("", "status")
	if err != nil || !strings.Contains(out, fmt.Sprintf("%s  current  %d\n", b, tenants+1)) || !strings.Contains(out, a+"  former   0\n") {
		t.Error(out, err)
	}
	c.unsealAll()

	for _, typed := range []string{"", "\n", "yes\n", b + "\n", a[:10] + "\n"} {
		if out, err := c.command(typed, "rewrap", "--destroy-old"); err == nil || !strings.Contains(err.Error(), "not destroyed") ||
			!strings.Contains(out, "every backup that was taken before") || !strings.Contains(out, "write-ahead log") {
			t.Errorf("typed %q: %s %v", typed, out, err)
		}
	}
	if _, err := os.Stat(c.keyFile("a")); err != nil {
		t.Fatal("it was destroyed all the same:", err)
	}
	must(t, copyFile(c.keyFile("a"), c.keyFile("kept"))) // an administrator ignores the advice to keep no copy
	if out, err := c.command(a+"\n", "rewrap", "--destroy-old"); err != nil || !strings.Contains(out, a+" destroyed") {
		t.Fatal(out, err)
	}
	if _, err := os.Stat(c.keyFile("a")); !errors.Is(err, os.ErrNotExist) {
		t.Error("the key file is still there:", err)
	}
	c.unsealAll()

	// The configuration still names the destroyed key. Backups and a restart work without it.
	for _, when := range []string{"after the destruction", "after a restart"} {
		file := c.path(when + ".backup")
		mustRun(t, "backup", "--url", c.url, "--api-key-file", c.path("system.key"), "--recipient", c.to.text, "--output", file)
		content, err := os.ReadFile(file)
		must(t, err)
		in, err := backup.Open(bytes.NewReader(content), c.to.identities(t))
		must(t, err)
		if _, err := in.Rows(func(_, _ []byte) error { return nil }); err != nil || len(in.KMSKeys) != 1 {
			t.Errorf("%s: a backup with %d key files: %v", when, len(in.KMSKeys), err)
		}
		c.kill()
		c.start()
		c.unsealAll()
	}
	c.kill()

	// Only the new key is configured. A snapshot from before the move is refused, and the message
	// names the key that it needs. The destroyed key is not used again.
	c.configure("b")
	c.start()
	c.unsealAll()
	c.kill()
	c.configure("kept", "b")
	if err := c.begin(); err == nil || !strings.Contains(err.Error(), "given up") {
		t.Error("a key that was given up is the current one again:", err)
	}
	must(t, os.RemoveAll(c.path("data")))
	must(t, os.Rename(c.path("snapshot"), c.path("data")))
	c.configure("b")
	if err := c.begin(); err == nil || !strings.Contains(err.Error(), a) || !strings.Contains(err.Error(), "kms.former") || !strings.Contains(err.Error(), "from before") {
		t.Error("a snapshot from before the move:", err)
	}
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o600)
}

func TestAMoveThatIsKilledGoesOn(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: kills the program many times")
	}
	t.Parallel()
	c := newCustodian(t, 30)
	must(t, kms.CreateLocal(c.keyFile("b")))
	const kills = 8
	for i := range kills {
		c.kill()
		keys := []string{"b", "a"}
		if i%2 == 1 { // there and back
			keys = []string{"a", "b"}
		}
		c.configure(keys...)
		c.start()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = c.connect(c.systemKey()).RewrapKeys(context.Background(), v2.RewrapKeysRequest{}) // the result does not matter
		}()
		select {
		case <-time.After(time.Duration(rand.Int64N(int64(25 * time.Millisecond)))):
		case <-ended:
		}
		c.kill()
		c.start()
		c.unsealAll()
	}
	if out, err := c.command("", "rewrap"); err != nil || !strings.Contains(out, " 0 remain") {
		t.Fatal(out, err)
	}
	c.kill()
	c.configure("a")
	c.start()
	c.unsealAll()
	c.kill()
	if out, err := run(t, "audit", "verify", "--data-dir", c.path("data")); err != nil {
		t.Error(out, err)
	}
}
