package seal

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// TestSealAndValidate runs the scripts of the two commands. Each script has sealing-key.json, the
// golden document of package sealing; $IDENTITY, the fingerprint of its signer; $SERVER, which
// serves it; and a kubeconfig for a cluster that has it in a ConfigMap. The command "opens" opens a
// manifest as the vault does.
func TestSealAndValidate(t *testing.T) {
	var scripts []string
	for _, pattern := range []string{"seal*.txt", "validate*.txt"} {
		found, err := filepath.Glob(filepath.Join("testdata", "script", pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("no scripts %s: %v", pattern, err)
		}
		scripts = append(scripts, found...)
	}
	document, err := os.ReadFile(filepath.Join("..", "..", "sealing", "testdata", "document.json"))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := sealing.ParseDocument(document)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(keyServer(t, document))
	t.Cleanup(server.Close)

	testscript.Run(t, testscript.Params{
		Files: scripts,
		Setup: func(env *testscript.Env) error {
			env.Setenv("SERVER", server.URL)
			env.Setenv("IDENTITY", parsed.Identity())
			kubeconfig := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c",`+
				`"clusters":[{"name":"c","cluster":{"server":%q}}],"contexts":[{"name":"c","context":{"cluster":"c"}}]}`, server.URL)
			if err := os.WriteFile(filepath.Join(env.WorkDir, "kubeconfig"), []byte(kubeconfig), 0o600); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(env.WorkDir, "sealing-key.json"), document, 0o600)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"opens": opens, "make-manifest": makeManifest, "only-sealed-differs": onlySealedDiffers, "to-json": toJSON, "other-key": otherKey, "folded": folded,
		},
	})
}

// keyServer serves the document as the REST API and as the Kubernetes API.
func keyServer(t *testing.T, document []byte) http.Handler {
	t.Helper()
	const configMap = "/api/v1/namespaces/%s/configmaps/latticekeep-sealing-key"
	answer := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(body))
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v2/sealing-key", answer(string(document)))
	mux.HandleFunc("GET /changed/api/v2/sealing-key", answer(strings.Replace(string(document), "10:30:00", "10:30:01", 1)))
	mux.HandleFunc("GET /endless/api/v2/sealing-key", func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := w.Write(document); err != nil {
				return
			}
		}
	})
	mux.HandleFunc("GET "+fmt.Sprintf(configMap, "latticekeep-system"),
		answer(fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"latticekeep-sealing-key"},"data":{"sealing-key.json":%q}}`, document)))
	mux.HandleFunc("GET "+fmt.Sprintf(configMap, "empty"),
		answer(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"latticekeep-sealing-key"}}`))
	return mux
}

// opens MANIFEST KEY=VALUE… succeeds if the golden sealing key, whose seed is the bytes 0 to 31,
// opens the manifest to exactly these values. A value @FILE stands for the content of a file.
func opens(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: opens MANIFEST KEY=VALUE…")
	}
	seed := make([]byte, 32)
	for i := range seed {
		seed[i] = byte(i)
	}
	key, err := envelope.ParseSealingKey(envelope.SuiteMLKEM768X25519, seed)
	ts.Check(err)
	obj, err := decodeSealedCredential([]byte(ts.ReadFile(args[0])))
	ts.Check(err)
	values, err := sealing.Open(obj, func(id string) (*envelope.SealingKey, error) {
		if id != key.Public().ID() {
			return nil, fault.NotFound
		}
		return key, nil
	})
	ts.Check(err)
	if len(values) != len(args)-1 {
		ts.Fatalf("%d values, not %d", len(values), len(args)-1)
	}
	for _, arg := range args[1:] {
		k, want, _ := strings.Cut(arg, "=")
		if path, ok := strings.CutPrefix(want, "@"); ok {
			want = ts.ReadFile(path)
		}
		if string(values[k]) != want {
			ts.Fatalf("value of %s is %q, not %q", k, string(values[k]), want)
		}
	}
}
