package kms

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// serviceAccount writes the credentials of a Google service account. A client signs its own tokens
// with them.
func serviceAccount(t *testing.T) string {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string]string{
		"type": "service_account", "project_id": "test", "private_key_id": "k", "client_email": "latticekeep@test.iam.gserviceaccount.com",
		"private_key": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})), "token_uri": "http://127.0.0.1:1/token",
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "credentials.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// An agent rotates the token while the server runs.
func TestTheTokenFileIsReadAgain(t *testing.T) {
	s := serve(t, "hashivault")
	t.Setenv("VAULT_TOKEN", "another")
	file := filepath.Join(t.TempDir(), "token")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(s.Token() + "\n")
	k, err := Open(t.Context(), s.URL(), Options{TokenFile: file})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	b := wrap(t, k, "c")
	s.SetToken("s.second")
	if _, err := k.Unwrap(t.Context(), "c", b); fault.Of(err) != fault.Forbidden {
		t.Error("with a token that ended:", err)
	}
	write("s.second")
	if _, err := k.Unwrap(t.Context(), "c", b); err != nil {
		t.Error(err)
	}
	write("") // the file is empty for a moment when it is rewritten in place
	s.ResetCalls()
	if _, err := k.Unwrap(within(t, firstPause), "c", b); fault.Of(err) != fault.Unavailable || s.Calls() != 0 {
		t.Error(err)
	}
	if strings.Contains(fmt.Sprint(err), "s.second") {
		t.Error("the error tells the token")
	}
}

func TestVaultIsFoundAsItsOwnClientFindsIt(t *testing.T) {
	s := serve(t, "hashivault")
	base := "http://" + s.Address()
	t.Setenv("VAULT_ADDR", base)
	k := open(t, "hashivault://latticekeep")
	t.Setenv("VAULT_ADDR", "https://127.0.0.1:1")
	t.Setenv("VAULT_SERVER_URL", base)
	t.Setenv("VAULT_SERVER_TOKEN", s.Token())
	t.Setenv("VAULT_TOKEN", "another")
	if other := open(t, "hashivault://latticekeep?engine=transit"); other.ID() != k.ID() {
		t.Error(other.ID(), k.ID())
	}
	b := wrap(t, k, "c")
	for _, host := range []string{"a%20b", "%C3%A4", strings.Repeat("a", maxID)} {
		if _, err := Open(t.Context(), "hashivault://latticekeep?host="+host, Options{}); fault.Of(err) != fault.Invalid {
			t.Errorf("an id that no stored form can have: %v", err)
		}
	}

	moved := open(t, "hashivault://latticekeep?host=vault.example.com")
	if moved.ID() != "hashivault:vault.example.com/transit/latticekeep" {
		t.Error(moved.ID())
	}
	if _, err := moved.Unwrap(t.Context(), "c", b); err == nil {
		t.Error("opened under another id")
	}
	s.SetNamespace("team")
	if _, err := k.Unwrap(t.Context(), "c", b); fault.Of(err) != fault.Forbidden {
		t.Error("without a namespace:", err)
	}
	t.Setenv("VAULT_NAMESPACE", "team")
	if inside := open(t, "hashivault://latticekeep"); inside.ID() != "hashivault:"+s.Address()+"/team/transit/latticekeep" {
		t.Error(inside.ID())
	}
	for variable, value := range map[string]string{"VAULT_SKIP_VERIFY": "true", "VAULT_CACERT": "/none", "VAULT_SERVER_TOKEN": ""} {
		t.Run(variable, func(t *testing.T) {
			t.Setenv("VAULT_TOKEN", "")
			t.Setenv(variable, value)
			if _, err := Open(t.Context(), "hashivault://latticekeep", Options{}); fault.Of(err) != fault.Invalid {
				t.Error(err)
			}
		})
	}
}

// A proxy, a wrong port or an error page must not end the server, as the driver's panic would.
func TestWhatIsNotTransitIsAnError(t *testing.T) {
	s := serve(t, "hashivault")
	var answer func(http.ResponseWriter)
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			http.Redirect(w, r, "http://"+s.Address()+r.URL.Path, http.StatusTemporaryRedirect) // as a standby does
			return
		}
		answer(w)
	}))
	defer proxy.Close()
	k := open(t, "hashivault://latticekeep?address="+url.QueryEscape(proxy.URL))
	for name, a := range map[string]func(http.ResponseWriter){
		"no content":   func(w http.ResponseWriter) { w.WriteHeader(http.StatusNoContent) },
		"an empty 404": func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) },
		"no data":      func(w http.ResponseWriter) { fmt.Fprint(w, `{"data":{}}`) },
		"other data":   func(w http.ResponseWriter) { fmt.Fprint(w, `{"data":{"ciphertext":1}}`) },
		"a page":       func(w http.ResponseWriter) { fmt.Fprint(w, "<html>") },
		"an endless one": func(w http.ResponseWriter) {
			_, _ = w.Write(bytes.Repeat([]byte(" "), maxAnswer))
			fmt.Fprint(w, `{"data":{"ciphertext":"vault:v1:AAAA"}}`)
		},
		"a redirect away": func(w http.ResponseWriter) {
			w.Header().Set("Location", "http://vault.example.com/")
			w.WriteHeader(http.StatusTemporaryRedirect)
		},
	} {
		answer = a
		if _, err := k.Wrap(within(t, 100*firstPause/10), "c", secretKey); err == nil {
			t.Errorf("%s is a wrapped key", name)
		}
	}
}

// The driver's Decrypt names no key, and AWS would then decrypt with any key that the credentials
// may use.
func TestAWSOpensWithTheKeyThatIsMeant(t *testing.T) {
	s := serve(t, "awskms")
	s.AddKey("other", "")
	k, other := open(t, s.URL()), open(t, s.KeyURL("other"))
	w, err := parseWrapped(wrap(t, other, "c"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.Unwrap(t.Context(), "c", wrapped{k.ID(), w.ciphertext}.marshal()); err == nil {
		t.Error("opened by another key than its own")
	}
	if byARN := open(t, "awskms:///"+s.ARN("other")+"?endpoint="+url.QueryEscape("http://"+s.Address())); byARN.ID() != other.ID() {
		t.Error("one key has two ids:", byARN.ID(), other.ID())
	}
}

// TestARealTransit runs against a Vault or OpenBao at LATTICEKEEP_TEST_VAULT_ADDR with an engine
// mounted at transit. LATTICEKEEP_TEST_VAULT_TOKEN must have all permissions. Without these
// variables it runs against kmstest, which shows that kmstest behaves alike.
func TestARealTransit(t *testing.T) {
	address, token := os.Getenv("LATTICEKEEP_TEST_VAULT_ADDR"), os.Getenv("LATTICEKEEP_TEST_VAULT_TOKEN")
	if address == "" {
		s := serve(t, "hashivault")
		address, token = "http://"+s.Address(), s.Token()
	}
	t.Setenv("VAULT_ADDR", address)
	t.Setenv("VAULT_TOKEN", token)
	name := "test-" + strings.ToLower(rand.Text())
	write := func(path, body string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, address+"/v1/transit/keys/"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-Vault-Token", token)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode >= 300 {
			t.Fatal(path, resp.Status)
		}
	}
	if _, err := Open(t.Context(), "hashivault://"+name, Options{}); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), "vault write -f") {
		t.Error("a key that is not there:", err)
	}
	for _, kind := range []string{"rsa-2048", "ecdsa-p256", "ed25519", "aes128-gcm96"} {
		write(name+"-"+kind, `{"type":"`+kind+`"}`)
		if _, err := Open(t.Context(), "hashivault://"+name+"-"+kind, Options{}); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), kind) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	write(name+"-derived", `{"derived":true}`)
	if _, err := Open(t.Context(), "hashivault://"+name+"-derived", Options{}); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), "derived") {
		t.Error(err)
	}
	for _, kind := range []string{"aes256-gcm96", "chacha20-poly1305"} {
		name := name + "-" + kind
		write(name, `{"type":"`+kind+`"}`)
		k := open(t, "hashivault://"+name)
		b := wrap(t, k, "c")
		write(name+"/rotate", "")
		for _, b := range [][]byte{b, wrap(t, k, "c")} {
			if got, err := k.Unwrap(t.Context(), "c", b); err != nil || !bytes.Equal(got, secretKey) {
				t.Error(err)
			}
		}
		bad := bytes.Clone(b)
		bad[len(bad)-6] ^= 1
		if _, err := k.Unwrap(t.Context(), "c", bad); err == nil || fault.Of(err) != fault.Internal {
			t.Error("a damaged one:", err)
		}
		write(name+"/config", `{"min_decryption_version":2}`)
		if _, err := k.Unwrap(t.Context(), "c", b); fault.Of(err) != fault.Forbidden {
			t.Error("opened with a version that is given up:", err)
		}
		if _, err := k.Destroy(t.Context()); fault.Of(err) != fault.Forbidden || !strings.Contains(err.Error(), "deletion_allowed=true") {
			t.Error(err)
		}
		write(name+"/config", `{"deletion_allowed":true}`)
		if _, err := k.Destroy(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := k.Unwrap(t.Context(), "c", b); fault.Of(err) != fault.Forbidden {
			t.Error("opened by a key that was destroyed:", err)
		}
		t.Setenv("VAULT_TOKEN", "s.wrong")
		if _, err := Open(t.Context(), "hashivault://"+name, Options{}); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), "read on transit/keys/"+name) {
			t.Error(err)
		}
		t.Setenv("VAULT_TOKEN", token)
	}
}
