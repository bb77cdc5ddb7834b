package cli

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"sigs.k8s.io/yaml"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/app"
)

// The life of sealing keys on the command line of a real server: manifests are sealed, a new key is
// made, the manifests move to it without any other change, and the previous key is retired and
// restored.
func TestManifestsMoveToTheNewestSealingKey(t *testing.T) {
	stderr := make(said, 10_000) // more than a test makes
	server := startWith(t, app.DevConfig{DataDir: t.TempDir(), Stderr: stderr})
	t.Cleanup(server.end) // after the script, which testscript runs beside this function
	steps := stderr.await(t, "SYSTEM_KEY=")
	system := regexp.MustCompile(`SYSTEM_KEY=(lk_live_\w+)\n`).FindStringSubmatch(steps)
	identity := regexp.MustCompile(`identity: ([0-9a-f]{64})\n`).FindStringSubmatch(steps)
	if system == nil || identity == nil {
		t.Fatal("the server does not say its system key and identity")
	}
	script := strings.NewReplacer("$BASE", server.BaseURL, "$SYSTEM_KEY", system[1], "$KEY", server.APIKey, "$IDENTITY", identity[1]).Replace(`
env LATTICEKEEP_URL=$BASE
env LATTICEKEEP_API_KEY=$KEY
env LATTICEKEEP_IDENTITY=$IDENTITY
latticekeep seal --url $BASE --name db --namespace shop --type database --from-literal password=tr0ub4dor --from-literal user=app
cp stdout one.yaml
latticekeep seal --url $BASE --name cache --namespace shop --scope Namespace --type database --from-literal password=tr0ub4dor
cp stdout two.yaml
# A file of the version before stays one.
exec sed s/v1beta1/v1alpha1/ two.yaml
cp stdout two.yaml
grep v1alpha1 two.yaml
decorate all.yaml one.yaml two.yaml
cp all.yaml before.yaml
accepted all.yaml

# There is nothing to do before there is a new key.
latticekeep reseal all.yaml
stdout 'unchanged: shop/db in all.yaml'
cmp all.yaml before.yaml
latticekeep sealing-key list --api-key $SYSTEM_KEY --json
keys stdout FIRST
latticekeep sealing-key rotate --api-key $SYSTEM_KEY
stdout '[0-9a-f]+ +current +\d+-\d+-\d+ +- +0'
latticekeep sealing-key list --api-key $SYSTEM_KEY
stdout 'KEY_ID +STATE'
stdout $FIRST' +earlier'
accepted all.yaml

# A value cannot be merged into what is sealed for the former key.
! latticekeep seal --merge-into one.yaml --url $BASE --from-literal token=x
stderr 'latticekeep reseal'
latticekeep reseal all.yaml one.yaml
stdout 'resealed: shop/db in all.yaml, values 2, key'
stdout 'resealed: shop/cache in all.yaml, values 1'
stdout 'resealed: shop/db in one.yaml'
! stdout tr0ub4dor
! stderr .
same-but-sealed before.yaml all.yaml
accepted all.yaml
accepted one.yaml
latticekeep seal --merge-into one.yaml --url $BASE --from-literal token=x
accepted one.yaml

# What is sealed for a retired key is refused, until the key is restored.
! latticekeep sealing-key retire $FIRST
stderr 403
latticekeep sealing-key retire $FIRST --api-key $SYSTEM_KEY
stdout $FIRST' +retired'
accepted all.yaml
refused before.yaml retired_key
cp two.yaml kept.yaml
! latticekeep reseal two.yaml
stderr 'two.yaml: shop/cache: .*do not open here'
cmp two.yaml kept.yaml
latticekeep sealing-key restore $FIRST --api-key $SYSTEM_KEY
stdout $FIRST' +earlier'
accepted before.yaml
! latticekeep sealing-key retire 00 --api-key $SYSTEM_KEY
stderr 404

# One bad document keeps the whole file as it is, and other files move all the same.
moved before.yaml bad.yaml
cp bad.yaml kept.yaml
! latticekeep reseal bad.yaml two.yaml
stderr 'bad.yaml: shop/moved: .*do not open here'
stdout 'resealed: shop/cache in two.yaml'
cmp bad.yaml kept.yaml
accepted two.yaml

# What is not there, not ours or not the pinned identity's.
! latticekeep reseal nothing.yaml
stderr 'no such file'
latticekeep reseal other.yaml
stderr 'skipped: other.yaml has no sealed values'
! latticekeep reseal before.yaml --identity 0000000000000000000000000000000000000000000000000000000000000000
stderr 'not the pinned one'
! latticekeep reseal before.yaml --api-key lk_live_x
stderr 401

-- other.yaml --
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData: {password: tr0ub4dor}
`)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "reseal.txt"), []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	data := regexp.MustCompile(`(?m)(data|keyID): .*$`)
	verdict := func(ts *testscript.TestScript, file string, want func(*v2.CheckAnswer) bool) {
		seen := 0
		for text := range strings.SplitSeq(ts.ReadFile(file), "---\n") {
			var obj v1beta1.SealedCredential
			ts.Check(yaml.Unmarshal([]byte(text), &obj))
			if obj.Spec.Sealed == nil {
				continue
			}
			seen++
			body, err := json.Marshal(checkRequest(&obj))
			ts.Check(err)
			_, answer, err := call(server.DevReady, http.MethodPost, "/api/v2/sealing-key/check", string(body))
			ts.Check(err)
			b, err := json.Marshal(answer)
			ts.Check(err)
			var v v2.CheckAnswer
			ts.Check(json.Unmarshal(b, &v))
			if !want(&v) {
				ts.Fatalf("%s: %s", obj.Name, b)
			}
		}
		if seen == 0 {
			ts.Fatalf("%s has no sealed values", file)
		}
	}
	testscript.Run(t, testscript.Params{Dir: dir, Cmds: map[string]func(*testscript.TestScript, bool, []string){
		"decorate": func(ts *testscript.TestScript, _ bool, args []string) {
			text := "# all of it\n"
			for _, file := range args[1:] {
				text += strings.Replace(ts.ReadFile(file), "spec:\n", "# what it is\nspec:\n\n", 1) + "---\n"
			}
			ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(text+ts.ReadFile("other.yaml")), 0o600))
		},
		"keys": func(ts *testscript.TestScript, _ bool, args []string) {
			var list v2.SealingKeyList
			ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &list))
			ts.Setenv(args[1], list.SealingKeys[0].KeyId)
		},
		"accepted": func(ts *testscript.TestScript, _ bool, args []string) {
			verdict(ts, args[0], func(v *v2.CheckAnswer) bool { return v.Accepted })
		},
		"refused": func(ts *testscript.TestScript, _ bool, args []string) {
			verdict(ts, args[0], func(v *v2.CheckAnswer) bool { return !v.Accepted && string(*v.Code) == args[1] })
		},
		"moved": func(ts *testscript.TestScript, _ bool, args []string) {
			text := strings.Replace(ts.ReadFile(args[0]), "name: cache", "name: moved", 1)
			ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(strings.Replace(text, "scope: Namespace", "scope: Strict", 1)), 0o600))
		},
		"same-but-sealed": func(ts *testscript.TestScript, _ bool, args []string) {
			a, b := ts.ReadFile(args[0]), ts.ReadFile(args[1])
			if a == b || data.ReplaceAllString(a, "$1") != data.ReplaceAllString(b, "$1") {
				ts.Fatalf("they differ in more than data and keyID, or not at all:\n%s\n%s", a, b)
			}
		},
	}})
}

// checkRequest returns a request to check the sealed values of a manifest.
func checkRequest(obj *v1beta1.SealedCredential) v2.CheckRequest {
	sealed := obj.Spec.Sealed
	scope := v2.SealedValuesScope(sealed.Scope)
	values := v2.SealedValues{
		Version: v2.SealedValuesVersion(sealed.Version), Suite: string(sealed.Suite), KeyId: sealed.KeyID, Scope: &scope, Values: map[string]v2.SealedValue{},
	}
	for key, v := range sealed.Values {
		values.Values[key] = v2.SealedValue{SealedAt: v.SealedAt.UTC(), Data: v.Data}
	}
	return v2.CheckRequest{Namespace: obj.Namespace, Name: obj.Name, CredentialType: obj.Spec.CredentialType, Sealed: &values}
}
