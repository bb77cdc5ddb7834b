package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/app"
)

// The administrative commands work against a running server, from the first system key to a tenant
// with a member.
func TestTheCommandLineAdministersAServer(t *testing.T) {
	stderr := make(said, 10_000) // more lines than a test logs
	server := startWith(t, app.DevConfig{DataDir: t.TempDir(), Stderr: stderr})
	t.Cleanup(server.end) // runs after the script, which testscript runs beside this function
	key := regexp.MustCompile(`SYSTEM_KEY=(lk_live_\w+)\n`).FindStringSubmatch(stderr.await(t, "SYSTEM_KEY="))
	if key == nil {
		t.Fatal("the system key is not printed as a line to paste")
	}
	script := strings.NewReplacer("$BASE", server.BaseURL, "$SYSTEM_KEY", key[1]).Replace(`
env LATTICEKEEP_URL=$BASE
latticekeep tenant create payments --api-key $SYSTEM_KEY
stdout 'ten_\w+ +active .*payments'
latticekeep tenant list --api-key $SYSTEM_KEY
stdout '^TENANT_ID +STATUS'
stdout payments
latticekeep tenant list --api-key $SYSTEM_KEY --json
cp stdout tenants.json
tenant tenants.json payments
latticekeep tenant limit $TENANT --v2 700 --api-key $SYSTEM_KEY --json
stdout '"v2": 700'
latticekeep tenant activate $TENANT --api-key $SYSTEM_KEY
latticekeep apikey create admin --tenant $TENANT --scope account:admin,vault:read,crypto:verify,keys:read,audit:read,audit:names,compliance:read --days 9 --api-key $SYSTEM_KEY
stdout '^lk_live_\w+$'
stderr 'key_\w+, expires .*not shown again'
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
latticekeep access put shop --allow 'shop/**=list,read' --api-key-file key
stdout '^pol_\w+ shop shop/\*\*=list,read$'
latticekeep access put shop --allow 'shop/prod/**=list,read' --allow 'shop/a=b=write' --api-key-file key
stdout 'shop/prod/\*\*=list,read shop/a=b=write'
! latticekeep access put shop --allow 'shop/**' --api-key-file key
stderr '--allow is "shop/\*\*": write GLOB=VERB'
! latticekeep access put shop --allow 'shop/**=own' --api-key-file key
stderr 'its verbs are of list, read, write and delete'
latticekeep access bind system:serviceaccount:shop:app shop --api-key-file key
stdout 'system:serviceaccount:shop:app has 1 of the policies'
latticekeep access list --api-key-file key
stdout '(?s)POLICY +ID +ALLOWS\nshop +pol_\w+ .*SUBJECT +SINCE +POLICIES\nsystem:serviceaccount:shop:app +\S+ +shop'
latticekeep access check shop/prod/db read --subject system:serviceaccount:shop:app --api-key-file key
stdout '^yes$'
! latticekeep access check shop/prod/db write --subject system:serviceaccount:shop:app --api-key-file key
stderr 'no: outside_policy'
! latticekeep access delete shop --api-key-file key
stderr 'the policy is bound'
latticekeep access put shop --allow 'shop/**=list' --dry-run --api-key-file key
stdout '^nobody would lose anything'
latticekeep access put new --allow 'shop/**=list' --dry-run --api-key-file key
stdout '^nobody would lose anything'
! latticekeep access unbind key_aaaaaaaaaaaaaaaaaaaaaaaaaa --dry-run --api-key-file key
stderr 'trying the change.* 404'
latticekeep access unbind system:serviceaccount:shop:app --dry-run --api-key-file key
latticekeep apikey create writer --tenant $TENANT --scope vault:read,vault:write --api-key $SYSTEM_KEY
cp stdout writer
exec sh use.sh
stdout '(?s)^WHO +VERB +CREDENTIAL +USES +LAST\n.*writer +read +shop/db +1 +20.*writer +write +shop/db +1 '
latticekeep access unbind system:serviceaccount:shop:app --api-key-file key
stdout 'has all paths'
latticekeep group create 'shop developers' --api-key-file key
stdout '^grp_\w+ shop developers has 0 members$'
latticekeep group add 'shop developers' system:serviceaccount:shop:app --api-key-file key
stdout 'has 1 member$'
latticekeep group rename 'shop developers' developers --api-key-file key
latticekeep access bind developers shop --api-key-file key
stdout '^grp_\w+ has 1 of the policies$'
latticekeep group list --api-key-file key
stdout '(?s)^GROUP +ID +MEMBERS +POLICIES\ndevelopers +grp_\w+ +1 +pol_\w+\n$'
latticekeep group members developers --api-key-file key
stdout '(?s)^MEMBER +EMAIL\nsystem:serviceaccount:shop:app +\n$'
latticekeep group members developers --api-key-file key --json
stdout '"id": "system:serviceaccount:shop:app"'
! latticekeep group add developers bob@example.org --api-key-file key
stderr 'no member has the address bob@example.org'
! latticekeep access bind nobody shop --api-key-file key
stderr 'there is no group nobody: latticekeep group list lists them'
latticekeep group remove developers system:serviceaccount:shop:app --dry-run --api-key-file key
stdout '^nobody would lose anything'
latticekeep group remove developers system:serviceaccount:shop:app --api-key-file key
stdout 'has 0 members$'
! latticekeep group remove developers system:serviceaccount:shop:app --api-key-file key
stderr 404
latticekeep group delete developers --dry-run --api-key-file key
stdout '^nobody would lose anything'
latticekeep group delete developers --api-key-file key
stdout '^grp_\w+ deleted$'
latticekeep access delete shop --api-key-file key
stdout '^pol_\w+ deleted$'
! latticekeep access bind bob@example.org shop --api-key-file key
stderr 'no member has the address bob@example.org'
! latticekeep access bind key_aaaaaaaaaaaaaaaaaaaaaaaaaa none --api-key-file key
stderr 'there is no policy none'
latticekeep access check any/path read --api-key-file key
stdout '^yes$'
! latticekeep tenant list --api-key-file key
stderr 403
! latticekeep apikey revoke key_aaaaaaaaaaaaaaaaaaaaaaaaaa --api-key-file key
stderr 404
-- use.sh --
set -e
echo v | latticekeep put shop/db n=- --api-key-file writer >/dev/null
latticekeep get shop/db n --api-key-file writer >/dev/null
id=$(latticekeep apikey list --api-key-file key | grep writer | grep -o 'key_[a-z2-7]*')
latticekeep access bind $id --dry-run --api-key-file key
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
