package app

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// The administrative commands against a running server: a tenant from nothing
// to a member, with the first system key.
func TestTheCommandLineAdministersAServer(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	out, in := io.Pipe()
	var log buffer
	served := make(chan error, 1)
	go func() {
		err := Run(ctx, Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Stdout: in, Stderr: &log})
		in.CloseWithError(io.ErrUnexpectedEOF)
		served <- err
	}()
	t.Cleanup(func() { // after the script, which testscript runs beside this function
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	var line ready
	if err := json.NewDecoder(out).Decode(&line); err != nil {
		t.Fatal(err)
	}
	var key []string
	for key == nil { // it is printed after the line
		key = regexp.MustCompile(`SYSTEM_KEY=(lk_live_\w+)\n`).FindStringSubmatch(log.String())
		if ctx.Err() != nil {
			t.Fatal(ctx.Err())
		}
	}
	script := strings.NewReplacer("$BASE", line.BaseURL, "$SYSTEM_KEY", key[1]).Replace(`
env LATTICEKEEP_URL=$BASE
latticekeep tenant create payments --api-key $SYSTEM_KEY
stdout 'ten_\w+ +active .*payments'
latticekeep tenant list --api-key $SYSTEM_KEY
stdout '^TENANT_ID +STATUS'
stdout payments
latticekeep tenant list --api-key $SYSTEM_KEY --json
cp stdout tenants.json
tenant tenants.json payments
latticekeep tenant limit $TENANT --v2 7 --api-key $SYSTEM_KEY --json
stdout '"v2": 7'
latticekeep tenant activate $TENANT --api-key $SYSTEM_KEY
latticekeep apikey create admin --tenant $TENANT --scope account:admin,vault:read,crypto:verify,keys:read,audit:read,compliance:read --days 9 --api-key $SYSTEM_KEY
stdout '^lk_live_\w+$'
stderr 'key_\w+, until .*not shown again'
cp stdout key
latticekeep apikey create reader --scope vault:read --api-key-file key
latticekeep apikey list --api-key-file key
stdout 'active .*vault:read +reader'
! latticekeep apikey create writer --scope vault:write --api-key-file key
stderr 403
latticekeep user invite ada@example.org --role auditor --api-key-file key
stdout 'inv_\w+ sent'
latticekeep user list --api-key-file key
stdout 'inv_\w+ +auditor +invited +ada@example.org'
! latticekeep tenant list --api-key-file key
stderr 403
! latticekeep apikey revoke key_aaaaaaaaaaaaaaaaaaaaaaaaaa --api-key-file key
stderr 404
`)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "admin.txt"), []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{Dir: dir, Cmds: map[string]func(*testscript.TestScript, bool, []string){
		"tenant": func(ts *testscript.TestScript, _ bool, args []string) {
			var tenants []v2.Tenant
			ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &tenants))
			for _, tenant := range tenants {
				if tenant.Name == args[1] {
					ts.Setenv("TENANT", tenant.TenantId)
				}
			}
		},
	}})
}
