package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The paths and bodies are those of Vault's HTTP interface: sys/mounts, Transit, and version 1 of KV.
func TestAPeerIsAskedInItsOwnProtocol(t *testing.T) {
	mounted := make(map[string]string)
	answers := map[string]func(w http.ResponseWriter, body map[string]any){
		"POST /v1/bench-transit/keys/encrypt":    empty,
		"POST /v1/bench-transit/keys/sign":       empty,
		"POST /v1/bench-transit/encrypt/encrypt": base64In(t, "plaintext"),
		"POST /v1/bench-transit/sign/sign":       base64In(t, "input"),
		"POST /v1/bench-kv/*":                    func(w http.ResponseWriter, _ map[string]any) { w.WriteHeader(http.StatusNoContent) },
		"GET /v1/bench-kv/*":                     empty,
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Vault-Token") != "token" {
			t.Errorf("%s has another token", r.URL)
		}
		body := make(map[string]any)
		if r.ContentLength > 0 {
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
				t.Error(err)
			}
		}
		if path, is := strings.CutPrefix(r.URL.Path, "/v1/sys/mounts/"); is {
			if delete(mounted, path); r.Method == http.MethodPost {
				mounted[path], _ = body["type"].(string)
			}
			w.WriteHeader(http.StatusNoContent)
			return
		}
		engine, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v1/"), "/")
		do := answers[r.Method+" "+r.URL.Path]
		if engine == "bench-kv" {
			do = answers[r.Method+" /v1/bench-kv/*"]
		}
		if do == nil || mounted[engine] == "" {
			t.Errorf("it is asked for %s %s", r.Method, r.URL)
			w.WriteHeader(http.StatusNotFound)
			return
		}
		do(w, body)
	}))
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("token\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := newPeer(server.URL, file)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.begin(); err != nil {
		t.Fatal(err)
	}
	if want := map[string]string{"bench-transit": "transit", "bench-kv": "kv"}; !maps.Equal(mounted, want) {
		t.Errorf("the engines are %v", mounted)
	}
	c, err := dial(p.address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	for name, o := range p.operations() {
		if status, answer, err := c.do(o.next()); err != nil || status != o.status {
			t.Errorf("%s: %d %s %v", name, status, answer, err)
		}
	}
	if err := p.end(); err != nil || len(mounted) > 0 {
		t.Error(mounted, err)
	}
	if _, err := newPeer("https://example.org", file); err == nil || !strings.Contains(err.Error(), "-peer is") {
		t.Error(err)
	}
}

func base64In(t *testing.T, field string) func(http.ResponseWriter, map[string]any) {
	return func(w http.ResponseWriter, body map[string]any) {
		text, _ := body[field].(string)
		if b, err := base64.StdEncoding.DecodeString(text); err != nil || string(b) != payload {
			t.Errorf("%s is %q", field, text)
		}
		empty(w, nil)
	}
}

func empty(w http.ResponseWriter, _ map[string]any) { fmt.Fprint(w, "{}") }
