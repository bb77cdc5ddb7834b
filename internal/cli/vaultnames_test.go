package cli

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
)

// What is in the trash does not hold its name, however often it has been put there.
func TestANameThatIsInTheTrashSeveralTimes(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	server.script(`
env LATTICEKEEP_URL=$BASE
stdin api-key
latticekeep login
exec sh thrice.sh
stdin line
latticekeep put db a=-
stdout 'db +kind +1 +active'
latticekeep rm db
stdin line
latticekeep put db --keep a=-
stdout 'db +kind +1 +active'
latticekeep rm db
latticekeep generate db token
stdout 'db +kind +1 +active'
latticekeep rm db
stdin env
latticekeep env push db
stdout 'db +kind +1 +active'
latticekeep rm db

# the one that was put there last comes back
latticekeep renew db
latticekeep get db -o env
cmp stdout env
latticekeep rm db

# which one is deleted somebody has to say, and learns how
exec sh status.sh
stderr '7 credentials have the name db: give the id of one of them, cred_\w+ \(in the trash since 20\d\d-\S+ \S+\)'
`, map[string]string{
		"line": "v\n", "env": "LAST=1\n", "status.sh": `latticekeep rm db --purge --yes; test $? = 4`,
		"thrice.sh": `set -e; for n in 1 2 3; do printf $n | latticekeep put db a=- --type kind; latticekeep rm db; done`,
	}, nil)
}

// A table shows values as they are, or not at all. Names in other scripts stay, and what cannot be seen in
// one is escaped.
func TestWhatATerminalCannotShow(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	server.script(`
env LATTICEKEEP_URL=$BASE
stdin api-key
latticekeep login
stdin values.json
latticekeep put Größe
stdout '^Größe +generic'
latticekeep get Größe
cmp stdout table
latticekeep __complete get Gr
stdout '^Größe$'
stdin line
latticekeep put 'q"' a=-
stdout '^q\\" +generic'
exec curl -sf $BASE/api/v2/vault/seal -H 'X-API-Key: '$API_KEY -H 'Content-Type: application/json' -d @hidden.json
latticekeep ls hid
stdout '^hid\\u200bden '
ttyin -stdin shown
latticekeep rm 'q"' --purge
stderr 'Type q\\" to delete it'
stdout '^q\\" \(cred_\w+\) deleted'
`, map[string]string{
		"line": "v\n", "shown": "q\\\"\n",
		"values.json": `{"back": "a\\b", "bell": "a\u0007b", "bidi": "a\u202eb", "lines": "a\nb", "plain": "\"größe\" '$ñ", "zero": "a\u200bb"}`,
		"hidden.json": `{"name":"hid\u200bden","credential_type":"x","values":{"a":"b"}}`,
		"table": `KEY    VALUE
back   a\b
bell   (3 bytes; latticekeep get Größe bell)
bidi   (5 bytes; latticekeep get Größe bidi)
lines  (3 bytes; latticekeep get Größe lines)
plain  "größe" '$ñ
zero   (5 bytes; latticekeep get Größe zero)
`,
	}, nil)
}

// What somebody stores after a credential was looked up is not removed with it.
func TestRemovalsLeaveWhatIsNew(t *testing.T) {
	server := start(t, t.TempDir())
	defer server.end()
	status, sealed := server.call("POST", "/api/v2/vault/seal", `{"name":"db","credential_type":"x","values":{"k":"v"}}`)
	if status != http.StatusCreated {
		t.Fatal(status, sealed)
	}
	id := sealed["credential_id"].(string)
	to, err := url.Parse(server.BaseURL)
	must(t, err)
	proxy := httputil.NewSingleHostReverseProxy(to)
	var removals atomic.Int64
	meanwhile := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodDelete || strings.HasSuffix(r.URL.Path, "/trash") {
			removals.Add(1)
			if status, answer, err := call(server.DevReady, "PATCH", "/api/v2/vault/"+id, `{"values":{"k":"new"}}`); err != nil || status != http.StatusOK {
				t.Error(status, answer, err)
			}
		}
		proxy.ServeHTTP(w, r)
	}))
	defer meanwhile.Close()
	for _, args := range [][]string{{"rm", "db"}, {"rm", "db", "--purge", "--yes"}, {"rm", id}} {
		out, err := run(t, append(args, "--url", meanwhile.URL, "--api-key", server.APIKey)...)
		if err == nil || !strings.Contains(err.Error(), "somebody else has changed it meanwhile, so it stays") || ExitStatus(err) != 4 {
			t.Errorf("%q: %v %s", args, err, out)
		}
	}
	if status, now := server.call("GET", "/api/v2/vault/"+id, ""); status != http.StatusOK || now["values"].(map[string]any)["k"] != "new" || removals.Load() != 3 {
		t.Errorf("after %d removals: %d %v", removals.Load(), status, now)
	}
}
