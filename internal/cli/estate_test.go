package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/machine"
)

// estate is a production deployment that moves between stores and always keeps its KMS key.
type estate struct {
	t      *testing.T
	dir    string
	kms    string    // kms.url; empty: a key file
	more   string    // more lines of the configuration
	log    io.Writer // standard error of the servers; nil: nowhere
	tenant string    // tenant's API key
	ids    []string
	ready  app.Ready // of the newest server
}

// newEstate creates a deployment with credentials in a data directory, and returns the URL of its
// store.
func newEstate(t *testing.T, more string) (*estate, string) {
	t.Helper()
	return newEstateUnder(t, "", more)
}

// newEstateUnder is newEstate with the URL of a KMS key.
func newEstateUnder(t *testing.T, kms, more string) (*estate, string) {
	t.Helper()
	e := &estate{t: t, dir: t.TempDir(), kms: kms, more: more}
	must(t, os.Mkdir(e.path("keys"), 0o700))
	at := offline.BoltScheme + e.path("data")
	url, end := e.serve(at)
	system := e.connect(url, e.systemKey())
	made, err := system.CreateTenant(t.Context(), v2.CreateTenantRequest{Name: "one"})
	must(t, err)
	key, err := system.CreateTenantAPIKey(t.Context(), made.Tenant.TenantId, v2.CreateAPIKeyRequest{Name: "k", Scopes: []v2.Scope{"vault:read", "vault:write", "audit:read"}})
	must(t, err)
	e.tenant = key.ApiKey
	e.seal(url, 20)
	end()
	return e, at
}

func (e *estate) path(name string) string { return filepath.Join(e.dir, name) }

func (e *estate) keyFile() string { return e.path("keys/kms.key") }

func (e *estate) systemKey() string {
	e.t.Helper()
	b, err := os.ReadFile(e.path("system.key"))
	must(e.t, err)
	return strings.TrimSpace(string(b))
}

func (e *estate) connect(url, key string) *client.V2 {
	e.t.Helper()
	c, err := client.New(url, client.WithAPIKey(key))
	must(e.t, err)
	return c.V2
}

// begin runs a server on a store until ctx ends. It returns the server's URL, or the error with
// which the start failed.
func (e *estate) begin(ctx context.Context, at string) (url string, done chan error, err error) {
	e.t.Helper()
	settings := fmt.Sprintf("store: {url: %q}\ncompliance: {reports: %q}\n", at, "file://"+e.path("reports"))
	if dir, ok := strings.CutPrefix(at, offline.BoltScheme); ok {
		settings = "dataDir: " + dir + "\n"
	}
	file := filepath.Join(e.t.TempDir(), "config.yaml")
	machine.WriteFile(e.t, file, fmt.Appendf(nil, `
listen: 127.0.0.1:0
publicURL: http://127.0.0.1:8200
kms: {url: %q}
systemKeyFile: %s
registration: {closed: true}
%s%s`, cmp.Or(e.kms, "file://"+e.keyFile()), e.path("system.key"), settings, e.more))
	stdout, line := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		cmd := Command()
		cmd.SetArgs([]string{"server", "--config", file})
		cmd.SetOut(line)
		cmd.SetErr(io.Discard)
		if e.log != nil {
			cmd.SetErr(e.log)
		}
		err := cmd.ExecuteContext(ctx)
		line.CloseWithError(errors.Join(err, io.EOF))
		ended <- err
	}()
	var r app.Ready
	if err := json.NewDecoder(stdout).Decode(&r); err != nil {
		return "", ended, err
	}
	e.ready = r
	return r.BaseURL, ended, nil
}

// serve is begin for a server that must start.
func (e *estate) serve(at string) (url string, end func()) {
	e.t.Helper()
	ctx, stop := context.WithCancel(e.t.Context())
	e.t.Cleanup(stop)
	url, done, err := e.begin(ctx, at)
	if err != nil {
		e.t.Fatal(err)
	}
	return url, func() {
		e.t.Helper()
		stop()
		if err := <-done; err != nil {
			e.t.Fatal(err)
		}
	}
}

// refused fails unless a server refuses the store and says why.
func (e *estate) refused(at, why string) {
	e.t.Helper()
	ctx, stop := context.WithCancel(e.t.Context())
	defer stop()
	if url, _, err := e.begin(ctx, at); err == nil || !strings.Contains(err.Error(), why) {
		e.t.Errorf("served at %q, %v; want %q", url, err, why)
	}
}

// seal seals n more credentials.
func (e *estate) seal(url string, n int) {
	e.t.Helper()
	c := e.connect(url, e.tenant)
	for range n {
		sealed, err := c.SealCredential(e.t.Context(), v2.SealRequest{Name: "db", CredentialType: "t", Values: map[string]string{"v": fmt.Sprint("s3cret-", len(e.ids))}}, nil)
		must(e.t, err)
		e.ids = append(e.ids, sealed.CredentialId)
	}
}

// whole fails unless a server on a store serves every credential and seals more.
func (e *estate) whole(at string) {
	e.t.Helper()
	url, end := e.serve(at)
	c := e.connect(url, e.tenant)
	for i, id := range e.ids {
		got, err := c.UnsealCredential(e.t.Context(), id)
		if err != nil || got.Values["v"] != fmt.Sprint("s3cret-", i) {
			e.t.Fatalf("credential %d: %v", i, err)
		}
	}
	e.seal(url, 1)
	end()
	mustRun(e.t, "audit", "verify", "--store", at)
}

// with opens a store for the test itself.
func (e *estate) with(at string, do func(store.Database)) {
	e.t.Helper()
	s, err := offline.Open(e.t.Context(), offline.Location{URL: at})
	must(e.t, err)
	do(s)
	must(e.t, s.Close())
}

// rows returns all rows of a store.
func (e *estate) rows(at string) map[string]string {
	e.t.Helper()
	all := map[string]string{}
	e.with(at, func(s store.Database) {
		must(e.t, audit.ScanAll(e.t.Context(), s, store.Range{}, func(key, value []byte) error {
			all[string(key)] = string(value)
			return nil
		}))
	})
	return all
}

// fill writes enough rows into a store that copying them takes several pages.
func (e *estate) fill(at string, n int) {
	e.t.Helper()
	e.with(at, func(s store.Database) {
		for from := 0; from < n; from += offline.BatchRows {
			must(e.t, s.Update(e.t.Context(), func(tx store.Tx) error {
				for i := from; i < min(n, from+offline.BatchRows); i++ {
					key := fmt.Appendf(nil, "test/%08d", i/3)
					key = append(key, make([]byte, i%3)...) // the next key is this one with one more byte, wherever a page ends
					if err := tx.Put(key, make([]byte, 100)); err != nil {
						return err
					}
				}
				return nil
			}))
		}
	})
}
