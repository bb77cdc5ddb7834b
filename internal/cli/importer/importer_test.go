package importer

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// canary is in every value of the tests, and never in what the program prints.
const canary = "tr0ub4dor"

// site is a server, and a folder with files to import.
type site struct {
	*testing.T
	server *servertest.Service
	dir    string
	url    string
	key    string
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := servertest.Start(t)
	return &site{t, s, t.TempDir(), s.URL, s.GrantKey(authz.VaultRead, authz.VaultWrite)}
}

func (s *site) file(name, text string) string {
	s.Helper()
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		s.Fatal(err)
	}
	return path
}

// try runs an import, and returns standard output and standard error.
func (s *site) try(args ...string) (stdout, stderr string, err error) {
	s.Helper()
	var out, note bytes.Buffer
	cmd := NewCommand()
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	command.Strict(cmd)
	cmd.SetArgs(append(args, "--url", s.url, "--api-key", s.key))
	cmd.SetOut(&out)
	cmd.SetErr(&note)
	err = cmd.ExecuteContext(s.Context())
	if strings.Contains(fmt.Sprint(out.String(), note.String(), err), canary) {
		s.Errorf("%q shows a value:\n%s%s%v", args, &out, &note, err)
	}
	return out.String(), note.String(), err
}

// want runs an import that must succeed and say this.
func (s *site) want(said string, args ...string) {
	s.Helper()
	out, note, err := s.try(args...)
	if err != nil || !strings.Contains(out, said) {
		s.Fatalf("%q: %v, %s%swant %q", args, err, out, note, said)
	}
}

// refuses runs an import that refuses some secrets, and says so with these words.
func (s *site) refuses(args []string, says ...string) {
	s.Helper()
	out, note, err := s.try(args...)
	if command.Status(err) != 1 {
		s.Errorf("%q: status %d, %v", args, command.Status(err), err)
	}
	for _, text := range says {
		if !strings.Contains(out+note, text) {
			s.Errorf("%q does not say %q:\n%s%s", args, text, out, note)
		}
	}
}

// has compares a credential of the vault, which is read by its name.
func (s *site) has(name string, values map[string]string) *v2.UnsealedCredential {
	s.Helper()
	c, err := client.New(s.server.URL, client.WithAPIKey(s.key))
	if err != nil {
		s.Fatal(err)
	}
	found, err := c.V2.UnsealCredentialByName(s.Context(), name)
	if err != nil || !maps.Equal(found.Values, values) {
		s.Errorf("%s: %v, %+v", name, err, found)
	}
	return found
}

// count returns how many credentials the vault has.
func (s *site) count() int {
	s.Helper()
	return len(s.server.Get("/api/v2/vault/list").Want(s, http.StatusOK)["credentials"].([]any))
}

func TestAnEnvFileBecomesOneCredential(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	file := s.file(".env", "USER=a\nexport PASSWORD='$"+canary+"#1' # comment\nPEM=\"x\\ny\"\n")
	values := map[string]string{"USER": "a", "PASSWORD": "$" + canary + "#1", "PEM": "x\ny"}

	s.want("created    shop/prod/env\ndry run: created 1,", "env", file, "--name", "env", "--prefix", "shop/prod", "--dry-run")
	if n := s.count(); n != 0 {
		t.Fatalf("a dry run made %d credentials", n)
	}
	s.want("created 1, replaced 0, unchanged 0, skipped 0, refused 0", "env", file, "--name", "env", "--prefix", "shop/prod/", "--type", "env", "--ttl-days", "7")
	if found := s.has("shop/prod/env", values); found.CredentialType != "env" || found.ExpiresAt.Sub(found.CreatedAt).Hours() != 7*24 {
		t.Errorf("%s expires at %v", found.CredentialType, found.ExpiresAt)
	}

	s.file(".env", "USER=b\nPASSWORD="+canary+"2\n")
	s.refuses([]string{"env", file, "--name", "shop/prod/env"}, "refused: "+file, "has other values: store these with --replace", "refused 1")
	s.has("shop/prod/env", values)
	s.want("replaced   shop/prod/env", "env", file, "--name", "shop/prod/env", "--replace", "--dry-run")
	s.has("shop/prod/env", values)
	s.want("replaced 1", "env", file, "--name", "shop/prod/env", "--replace")
	s.has("shop/prod/env", map[string]string{"USER": "b", "PASSWORD": canary + "2"})
	if n := s.count(); n != 1 {
		t.Errorf("there are %d credentials", n)
	}

	s.file(".env", "OK=1\nPASSWORD "+canary+"\nX='"+canary)
	if _, _, err := s.try("env", file, "--name", "new"); err == nil || !strings.Contains(err.Error(), "line 2: it has no =") || !strings.Contains(err.Error(), "line 3: the quote") {
		t.Errorf("lines that cannot be read: %v", err)
	}
}

func TestAJSONFileBecomesCredentialsInFolders(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	file := s.file("all.json", `{
		"shop": {
			"db": {"user": "a", "port": 5432, "tls": true, "password": "`+canary+`"},
			"bad": {"list": ["`+canary+`"]},
			"mixed": {"user": "a", "inner": {"x": "`+canary+`"}},
			"empty": {},
			"keys": {"a b": "`+canary+`"},
			"..": {"x": "`+canary+`"},
			"loose": "`+canary+`"
		},
		"mail": {"password": "`+canary+`"}
	}`)
	says := []string{
		`shop/bad: its member "list" is an array`, `shop/mixed: its member "inner" is an object beside values`, "shop/empty: it has no values",
		`shop/keys: the key "a b" is none`, `shop/..: the name "shop/.." has an empty segment, or . or ..`, "shop/loose: it stands beside objects",
		"created 2, replaced 0, unchanged 0, skipped 0, refused 6",
	}
	s.refuses([]string{"json", file, "--dry-run"}, append(says, "created    shop/db", "created    mail")...)
	if n := s.count(); n != 0 {
		t.Fatalf("a dry run made %d credentials", n)
	}
	s.refuses([]string{"json", file}, says...)
	s.has("shop/db", map[string]string{"user": "a", "port": "5432", "tls": "true", "password": canary})
	s.has("mail", map[string]string{"password": canary})

	flat := s.file("flat.json", `{"password": "`+canary+`"}`)
	if _, _, err := s.try("json", flat); command.Status(err) != command.StatusUsage || !strings.Contains(err.Error(), "--name") {
		t.Errorf("a flat object without a name: %v", err)
	}
	s.want("created 1", "json", flat, "--name", "flat")
	s.has("flat", map[string]string{"password": canary})

	for text, says := range map[string]string{
		"{\n\"a\": {\n\"x\": " + canary + "}}":              "line 3: it is no JSON",
		`{"a": {"x": "` + canary + `"`:                      "line 1: it is no JSON",
		`["` + canary + `"]`:                                "it is no JSON object",
		`{"a": {"x": "` + canary + `", "x": "1"}}`:          `an object has the name "x" twice`,
		`{"a": {"x": "` + canary + `"}} {}`:                 "something follows the JSON value",
		"{\n\"a\": {\"x\": \"" + canary + "\xff\\uZZZZ\"}}": "line 2: it is no JSON",
		"":                                    "line 1: it is no JSON",
		strings.Repeat(`{"a":`, 20_000) + "1": "it is no JSON",
	} {
		if _, _, err := s.try("json", s.file("bad.json", text)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%.80q: %.200v, want %q", text, err, says)
		}
	}
}

func TestSecretsOfAWSAreImported(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	file := s.file("aws.json", `{
  "SecretValues": [
    {"ARN": "arn:aws:secretsmanager:eu-west-1:1:secret:/shop/db-AbCdEf", "Name": "/shop/db", "VersionId": "v", "VersionStages": ["AWSCURRENT"],
     "SecretString": "{\"username\":\"a\",\"password\":\"`+canary+`\",\"port\":5432}", "CreatedDate": 1700000000.1},
    {"ARN": "arn:2", "Name": "shop/token", "SecretString": "`+canary+`"},
    {"ARN": "arn:3", "Name": "shop/nested", "SecretString": "{\"a\":{\"b\":\"`+canary+`\"}}"},
    {"ARN": "arn:4", "Name": "shop/binary", "SecretBinary": "dHIwdWI0ZG9y"},
    {"ARN": "arn:5", "Name": "shop/nothing"},
    {"ARN": "arn:6", "Name": "shop/token", "SecretString": "`+canary+`2"}
  ],
  "Errors": [{"SecretId": "shop/hidden", "ErrorCode": "AccessDeniedException", "Message": "no"}],
  "NextToken": "x"
}`)
	s.refuses([]string{"aws", file}, "created 4, replaced 0, unchanged 0, skipped 1, refused 3", "shop/hidden: AWS did not give it: AccessDeniedException",
		"shop/nothing: it has no SecretString", "shop/token: shop/token has the same name", "skipped: "+file+": it is one page of several")
	s.has("shop/db", map[string]string{"username": "a", "password": canary, "port": "5432"})
	s.has("shop/token", map[string]string{"value": canary})
	s.has("shop/nested", map[string]string{"value": `{"a":{"b":"` + canary + `"}}`})
	s.has("shop/binary", map[string]string{"value.base64": "dHIwdWI0ZG9y"})
	if _, _, err := s.try("aws", s.file("other.json", `{"a": {"x": "`+canary+`"}}`)); err == nil || !strings.Contains(err.Error(), "batch-get-secret-value") {
		t.Errorf("another JSON file: %v", err)
	}
}

// An import that was interrupted anywhere goes on when it is run again: each secret is there once.
func TestAnInterruptedImportGoesOn(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var text []string
	for i := range 6 {
		text = append(text, fmt.Sprintf(`"c%d": {"x": "%s%d"}`, i, canary, i))
	}
	file := s.file("all.json", "{"+strings.Join(text, ",")+"}")
	var left atomic.Int32
	base, err := url.Parse(s.server.URL)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(base)
	failing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut && left.Add(-1) < 0 {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(failing.Close)
	s.url = failing.URL
	for done := 0; done < 6; done += 2 {
		left.Store(2)
		out, _, err := s.try("json", file)
		if done < 4 && (command.Status(err) != command.StatusUnreachable || !strings.Contains(fmt.Sprint(err), fmt.Sprintf("stopped at secret %d of 6; run the same command again", done+3))) {
			t.Fatalf("after %d: status %d, %v\n%s", done, command.Status(err), err, out)
		}
		if want := fmt.Sprintf("created 2, replaced 0, unchanged %d,", done); !strings.Contains(out, want) {
			t.Fatalf("%s, want %s", out, want)
		}
	}
	left.Store(0)
	s.want("created 0, replaced 0, unchanged 6, skipped 0, refused 0", "json", file, "--replace")
	if n := s.count(); n != 6 {
		t.Errorf("there are %d credentials", n)
	}
}

// A missing right of the API key is told before anything is stored.
// Two imports of one list at the same time make no name twice, whichever stores it first.
func TestImportsAtTheSameTimeMakeNoNameTwice(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	file := s.file("all.json", `{"a": {"x": "`+canary+`"}, "b": {"x": "`+canary+`"}}`)
	others := s.file("others.json", `{"a": {"x": "`+canary+`"}, "b": {"x": "`+canary+`-other"}}`)
	base, err := url.Parse(s.server.URL)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(base)
	var first atomic.Bool
	first.Store(true)
	meanwhile := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && first.Swap(false) {
			other := *s
			other.url = s.server.URL
			other.want("created 2, replaced 0, unchanged 0, skipped 0, refused 0", "json", others)
		}
		proxy.ServeHTTP(w, r)
	}))
	defer meanwhile.Close()
	s.url = meanwhile.URL
	out, note, err := s.try("json", file)
	if err == nil || !strings.Contains(out, "created 0, replaced 0, unchanged 1, skipped 0, refused 1") || !strings.Contains(note, "has other values: store these with --replace") {
		t.Errorf("%v %s%s", err, out, note)
	}
	c, err := client.New(s.server.URL, client.WithAPIKey(s.key))
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]int)
	page, err := c.V2.ListCredentials(t.Context(), &v2.ListCredentialsParams{Limit: new(100)})
	if err != nil {
		t.Fatal(err)
	}
	for _, credential := range page.Credentials {
		seen[credential.Name]++
	}
	if !maps.Equal(seen, map[string]int{"a": 1, "b": 1}) {
		t.Errorf("the vault has %v", seen)
	}
}

func TestAnImportNeedsBothScopes(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	file := s.file(".env", "A="+canary)
	s.key = s.server.GrantKey(authz.VaultWrite)
	if _, _, err := s.try("env", file, "--name", "x"); command.Status(err) != command.StatusRefused || !strings.Contains(err.Error(), "vault:read and vault:write") {
		t.Errorf("without vault:read: %v", err)
	}
	s.key = s.server.GrantKey(authz.VaultRead)
	s.refuses([]string{"env", file, "--name", "x"}, "refused: "+file+": sealing: latticekeep answered 403")
	if n := s.count(); n != 0 {
		t.Errorf("there are %d credentials", n)
	}
	for flags, says := range map[string]string{
		"--type=a/b": "--type takes", "--ttl-days=0": "from 1 to 3650", "--ttl-days=3651": "from 1 to 3650", "--prefix=a//b": "has an empty segment",
	} {
		out, note, err := s.try("env", file, "--name", "x", flags)
		if err == nil || !strings.Contains(fmt.Sprint(note, err), says) {
			t.Errorf("%s: %v\n%s%s", flags, err, out, note)
		}
	}
}
