package externalsecrets

import (
	"cmp"
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"text/template"

	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/test/servertest"
)

// webhook is what a store says about its provider.
type webhook struct {
	Method, URL, Body string
	Headers           map[string]string
	Result            struct{ JSONPath string }
}

// The requests of the stores are those that the server takes, and their results are in its answers. The operator renders
// the templates likewise; with its own code they are rendered by `make external-secrets`.
func TestTheStoresOfTheGuideFitTheServer(t *testing.T) {
	s := servertest.Start(t)
	const name, key = "shop/two words+%?#é", "a-b.c_d"
	push := store(t, "SecretStore", "latticekeep-push")
	call(t, s, push, map[string]string{"remoteKey": name, name: `{"a-b.c_d":"value"}`}).Want(t, http.StatusCreated)
	s.Get("/api/v2/vault/by-name/"+url.PathEscape(name)).Want(t, http.StatusOK) // it has this very name

	for kind, remote := range map[string]string{"SecretStore": name, "ClusterSecretStore": strings.TrimPrefix(name, "shop/")} {
		w := store(t, kind, "latticekeep")
		answer := call(t, s, w, map[string]string{"namespace": "shop", "key": remote}).Want(t, http.StatusOK)
		values, ok := answer["values"].(map[string]any)
		if !ok || values[key] != "value" {
			t.Fatalf("%s: the answer is %v", kind, answer)
		}
		if all := render(t, w.Result.JSONPath, map[string]string{}, raw); all != "$.values" {
			t.Errorf("%s: all values are at %s", kind, all)
		}
		if one := render(t, w.Result.JSONPath, map[string]string{"property": key}, raw); one != `$.values["a-b.c_d"]` {
			t.Errorf("%s: a value is at %s", kind, one)
		}
	}
}

func TestTheGuideNamesTheReleaseThatIsRun(t *testing.T) {
	text, err := os.ReadFile(guide)
	if err != nil {
		t.Fatal(err)
	}
	if version := release(t); !strings.Contains(string(text), "release "+version+"\n") {
		t.Errorf("the guide does not name the release %s", version)
	}
}

// store returns the provider of a store of the guide.
func store(t *testing.T, kind, name string) webhook {
	t.Helper()
	var object struct {
		Spec struct{ Provider struct{ Webhook webhook } }
	}
	if err := yaml.Unmarshal([]byte(manifest(t, kind, name)), &object); err != nil {
		t.Fatal(err)
	}
	return object.Spec.Provider.Webhook
}

// call sends the request of a store.
func call(t *testing.T, s *servertest.Service, w webhook, remote map[string]string) servertest.Reply {
	t.Helper()
	address, ok := strings.CutPrefix(render(t, w.URL, remote, url.QueryEscape), inCluster)
	if !ok {
		t.Fatalf("the store asks %s", w.URL)
	}
	header := make(http.Header)
	for name, value := range w.Headers {
		header.Set(name, strings.ReplaceAll(render(t, value, remote, raw), "the key", s.Key))
	}
	r := servertest.Request{Method: cmp.Or(w.Method, http.MethodGet), Path: address, Header: header, Body: render(t, w.Body, remote, raw)}
	if r.Body != "" {
		r.ContentType = cmp.Or(header.Get("Content-Type"), "text/plain") // the client here has a default, the operator none
	}
	return s.Call(r)
}

func raw(s string) string { return s }

// render executes a template as the operator does: in a URL, what is remote is escaped.
func render(t *testing.T, text string, remote map[string]string, escape func(string) string) string {
	t.Helper()
	parsed, err := template.New("").Funcs(template.FuncMap{
		"replace": func(what, with, in string) string { return strings.ReplaceAll(in, what, with) },
		"trim":    strings.TrimSpace,
		"toJson": func(v any) (string, error) {
			b, err := json.Marshal(v)
			return string(b), err
		},
	}).Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	escaped := make(map[string]string)
	for k, v := range remote {
		escaped[k] = escape(v)
	}
	var b strings.Builder
	if err := parsed.Execute(&b, map[string]map[string]string{"remoteRef": escaped, "latticekeep": {"key": "the key\n"}}); err != nil {
		t.Fatal(err)
	}
	return b.String()
}
