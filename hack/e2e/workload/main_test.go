package main

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// vault is a server that stores what is written to it, as reliably as a test wants.
type vault struct {
	mu                    sync.Mutex
	values                map[string]string // values by id
	names                 map[string]string // names by id
	keys                  map[string]string // ids by Idempotency-Key
	calls                 int
	loses, doubles, mixes bool
	forgets               bool // forgets the calls of an Idempotency-Key
}

const away, back = 59, 80 // the calls between these get 503; the first is a write

func (v *vault) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.calls++
	const first = "cred_0"
	switch { // after the outage the vault is slightly different
	case v.calls == back && v.loses:
		delete(v.values, first)
	case v.calls == back && v.doubles:
		v.names["copy"], v.values["copy"] = v.names[first], v.values[first]
	case v.calls == back && v.mixes:
		v.values[first] = "of another"
	}
	id := strings.TrimPrefix(r.URL.Path, "/api/v2/vault/")
	switch {
	case r.Header.Get("Authorization") != "Bearer the-token":
		w.WriteHeader(http.StatusUnauthorized)
	case v.calls > away && v.calls < back:
		w.WriteHeader(http.StatusServiceUnavailable)
	case id == "seal":
		var in struct {
			Name   string
			Values map[string]string
		}
		_ = json.NewDecoder(r.Body).Decode(&in)
		key := r.Header.Get("Idempotency-Key")
		if v.keys[key] == "" || v.forgets {
			v.keys[key] = fmt.Sprint("cred_", len(v.names))
		}
		v.names[v.keys[key]], v.values[v.keys[key]] = in.Name, in.Values["of"]
		_ = json.NewEncoder(w).Encode(map[string]string{"credential_id": v.keys[key]})
		if v.calls == away { // stored but not acknowledged
			panic(http.ErrAbortHandler)
		}
	case id == "list":
		list := []map[string]string{{"credential_id": "cred_other", "name": "not-ours"}}
		for id, name := range v.names {
			list = append(list, map[string]string{"credential_id": id, "name": name})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"credentials": list})
	case v.values[id] == "":
		w.WriteHeader(http.StatusForbidden)
	default:
		_ = json.NewEncoder(w).Encode(map[string]any{"values": map[string]string{"of": v.values[id]}})
	}
}

func TestLoadNoticesEveryLoss(t *testing.T) {
	for name, tc := range map[string]struct {
		vault *vault
		want  string // text in the error; empty for no error
	}{
		"a vault that is away and back": {vault: &vault{}},
		"a write that is lost":          {vault: &vault{loses: true}, want: "an acknowledged write is lost"},
		"a write that is there twice":   {vault: &vault{doubles: true}, want: "is stored twice"},
		"a write that is repeated":      {vault: &vault{forgets: true}, want: "is stored twice"},
		"a write with other values":     {vault: &vault{mixes: true}, want: "other values than were written"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := tc.vault
			v.values, v.names, v.keys = make(map[string]string), make(map[string]string), make(map[string]string)
			server := httptest.NewTLSServer(v)
			defer server.Close()
			dir := t.TempDir()
			ca, token := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "token")
			certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
			if err := os.WriteFile(ca, certificate, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(token, []byte("the-token\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			c, err := newClient(server.URL, ca, token)
			if err != nil {
				t.Fatal(err)
			}
			switch err := c.load(t.Context()); {
			case tc.want == "" && err != nil:
				t.Errorf("failed: %v", err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("it said %v, want %q", err, tc.want)
			}
		})
	}
}
