package importer

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// kv answers as the KV engines of Vault do: secret has version 2, and old/kv version 1. Its answers
// have the form of those of vault-plugin-secrets-kv 0.25.0, which were compared with them.
type kv struct {
	*httptest.Server
	token   string
	secrets map[string]any    // data by whole path; nil: the newest version is deleted
	denied  map[string]string // methods that are refused by path: read, list
}

func newKV(t *testing.T) *kv {
	t.Helper()
	k := &kv{token: "hvs.token", secrets: make(map[string]any), denied: make(map[string]string)}
	k.Server = httptest.NewServer(k)
	t.Cleanup(k.Close)
	return k
}

// ServeHTTP implements http.Handler.
func (k *kv) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/v1/")
	answer := func(status int, body any) {
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(body)
	}
	fail := func(status int, errors ...string) {
		answer(status, map[string]any{"errors": slices.Concat([]string{}, errors)})
	}
	isList := r.URL.Query().Get("list") == "true" || r.Method == "LIST"
	mount, version := "secret", "2"
	if looked, ok := strings.CutPrefix(path, "sys/internal/ui/mounts/"); ok {
		if strings.HasPrefix(looked+"/", "old/kv/") {
			mount, version = "old/kv", "1"
		}
		switch {
		case r.Header.Get("X-Vault-Token") != k.token, !strings.HasPrefix(looked+"/", mount+"/") && !strings.HasPrefix(looked, "pki"):
			fail(403, "preflight capability check returned 403, please ensure client's policies grant access to path \""+looked+"/\"")
		case strings.HasPrefix(looked, "pki"):
			answer(200, map[string]any{"data": map[string]any{"path": "pki/", "type": "pki", "options": nil}})
		default:
			answer(200, map[string]any{"data": map[string]any{"path": mount + "/", "type": "kv", "options": map[string]string{"version": version}}})
		}
		return
	}
	kind, at := "data", strings.TrimPrefix(path, "secret/")
	switch {
	case strings.HasPrefix(path, "old/kv"):
		version, at = "1", path
	case isList:
		kind = "metadata"
		fallthrough
	default:
		rest, ok := strings.CutPrefix(at+"/", kind+"/")
		if !ok {
			fail(404)
			return
		}
		at = strings.TrimSuffix("secret/"+rest, "/")
	}
	switch {
	case r.Header.Get("X-Vault-Token") != k.token, isList && k.denied[at] == "list", !isList && k.denied[at] == "read":
		fail(403, "1 error occurred:\n\t* permission denied\n\n")
	case isList:
		keys := make(map[string]bool)
		for name := range k.secrets {
			if rest, ok := strings.CutPrefix(name, at+"/"); ok {
				first, _, isFolder := strings.Cut(rest, "/")
				if isFolder {
					first += "/"
				}
				keys[first] = true
			}
		}
		if len(keys) == 0 {
			fail(404)
			return
		}
		answer(200, map[string]any{"data": map[string]any{"keys": slices.Sorted(maps.Keys(keys))}})
	default:
		data, ok := k.secrets[at]
		metadata := map[string]any{"created_time": "2026-01-02T03:04:05Z", "custom_metadata": nil, "deletion_time": "", "destroyed": false, "version": 1}
		switch {
		case !ok:
			fail(404)
		case version == "1":
			answer(200, map[string]any{"data": data})
		case data == nil:
			metadata["deletion_time"] = "2026-01-02T03:04:06Z"
			answer(404, map[string]any{"data": map[string]any{"data": nil, "metadata": metadata}})
		default:
			answer(200, map[string]any{"data": map[string]any{"data": data, "metadata": metadata}})
		}
	}
}

func TestSecretsOfVaultAreImported(t *testing.T) {
	for _, name := range []string{"VAULT_NAMESPACE", "VAULT_SKIP_VERIFY", "VAULT_CACERT"} {
		t.Setenv(name, "")
	}
	s, k := newSite(t), newKV(t)
	t.Setenv("VAULT_ADDR", k.URL)
	t.Setenv("VAULT_TOKEN", k.token)
	k.secrets = map[string]any{
		"secret/shop":            map[string]any{"at": "the folder " + canary},
		"secret/shop/db":         map[string]any{"user": "a", "password": canary, "port": 5432, "big": json.Number("12345678901234567890"), "tls": true, "more": map[string]any{"b": 1, "a": "<&>"}},
		"secret/shop/prod/mail":  map[string]any{"password": canary},
		"secret/shop/a b%2F?#ü":  map[string]any{"x": canary},
		"secret/shop/null":       map[string]any{"x": nil},
		"secret/shop/empty":      map[string]any{},
		"secret/shop/gone":       nil,
		"secret/shop/closed":     map[string]any{"x": canary},
		"secret/shop/hidden/one": map[string]any{"x": canary},
		"secret/shop/../up":      map[string]any{"x": canary},
		"secret/other":           map[string]any{"x": canary},
		"old/kv/app/db":          map[string]any{"password": canary},
	}
	k.denied = map[string]string{"secret/shop/closed": "read", "secret/shop/hidden": "list"}
	says := []string{
		`refused: secret/shop/null: its value "x" is null`, "refused: secret/shop/empty: it has no values", "skipped: secret/shop/gone: its newest version is deleted in Vault",
		"refused: secret/shop/closed: Vault answered 403: 1 error occurred: * permission denied", "refused: secret/shop/hidden/: listing: Vault answered 403",
		`refused: secret/shop/..: the name "shop/.." has an empty segment`,
	}
	s.refuses([]string{"vault", "secret/shop", "--dry-run"}, append(says, "created    shop/db", "created    shop/prod/mail", "dry run: created 4, replaced 0, unchanged 0, skipped 1, refused 5")...)
	if n := s.count(); n != 0 {
		t.Fatalf("a dry run made %d credentials", n)
	}
	s.refuses([]string{"vault", "/secret/shop/"}, append(says, "created 4, replaced 0, unchanged 0, skipped 1, refused 5")...)
	s.has("shop", map[string]string{"at": "the folder " + canary})
	s.has("shop/db", map[string]string{"user": "a", "password": canary, "port": "5432", "big": "12345678901234567890", "tls": "true", "more": `{"a":"<&>","b":1}`})
	s.has("shop/prod/mail", map[string]string{"password": canary})
	if n := s.count(); n != 4 {
		t.Errorf("there are %d credentials", n)
	}
	s.want("created 1, replaced 0, unchanged 0, skipped 0, refused 0", "vault", "secret/other", "--prefix", "from/vault")
	s.has("from/vault/other", map[string]string{"x": canary})
	s.refuses([]string{"vault", "secret"}, "created 1, replaced 0, unchanged 4, skipped 1, refused 5")
	s.want("created 1,", "vault", "old/kv")
	s.has("app/db", map[string]string{"password": canary})

	// A token that may read only what is in a folder.
	k.denied["secret/shop/prod"] = "read"
	s.want("created 0, replaced 0, unchanged 1, skipped 0, refused 0", "vault", "secret/shop/prod")

	token := s.file("token", k.token+"\n")
	t.Setenv("VAULT_TOKEN", "")
	t.Setenv("VAULT_ADDR", "")
	s.want("unchanged 1,", "vault", "old/kv/app", "--vault-addr", k.URL, "--vault-token-file", token)
	for _, c := range []struct {
		status int
		says   string
		args   []string
	}{
		{command.StatusUsage, "no address of Vault", []string{"vault", "secret"}},
		{command.StatusUsage, "no token of Vault", []string{"vault", "secret", "--vault-addr", k.URL}},
		{command.StatusUnreachable, "reading the token of Vault", []string{"vault", "secret", "--vault-addr", k.URL, "--vault-token-file", token + "x"}},
		{command.StatusUsage, "only KV engines", []string{"vault", "pki", "--vault-addr", k.URL, "--vault-token-file", token}},
		{command.StatusRefused, "looking for the KV engine of none", []string{"vault", "none", "--vault-addr", k.URL, "--vault-token-file", token}},
		{command.StatusRefused, "there are no secrets at secret/none in Vault", []string{"vault", "secret/none", "--vault-addr", k.URL, "--vault-token-file", token}},
	} {
		if _, _, err := s.try(c.args...); command.Status(err) != c.status || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: status %d, %v", c.args, command.Status(err), err)
		}
	}
	k.Close()
	t.Setenv("VAULT_MAX_RETRIES", "0")
	if _, _, err := s.try("vault", "secret", "--vault-addr", k.URL, "--vault-token-file", token); command.Status(err) != command.StatusUnreachable {
		t.Errorf("Vault is down: status %d, %v", command.Status(err), err)
	}
}

// The token of Vault goes to the named server alone.
func TestTheTokenGoesToTheNamedServerOnly(t *testing.T) {
	var heard []string
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		heard = append(heard, r.Header.Get("X-Vault-Token"))
	}))
	defer other.Close()
	named := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer named.Close()
	t.Setenv("VAULT_TOKEN", "hvs.token")
	t.Setenv("VAULT_AGENT_ADDR", other.URL)
	c, err := openVault(named.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openEngine(t.Context(), c, "secret/shop"); err == nil || len(heard) > 0 {
		t.Errorf("another server heard %q; the import says %v", heard, err)
	}
	if _, err := openVault("http://vault.example.org", ""); err == nil || command.Status(err) != command.StatusUsage {
		t.Error("plain HTTP to another machine:", err)
	}
}
