package google

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/oauth2"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// useFile makes a credentials file the default one.
func useFile(t *testing.T, content map[string]any) {
	t.Helper()
	text, err := json.Marshal(content)
	if err != nil {
		t.Fatalf("encoding credentials: %v", err)
	}
	path := filepath.Join(t.TempDir(), "credentials.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatalf("writing credentials: %v", err)
	}
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
}

// headers returns the headers of a request by a client with the default credentials.
func headers(t *testing.T) (http.Header, *Credentials) {
	t.Helper()
	var got http.Header
	service := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header }))
	defer service.Close()
	c, err := Find(t.Context(), Universe)
	if err != nil {
		t.Fatalf("finding credentials: %v", err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, service.URL, nil)
	if err != nil {
		t.Fatalf("making a request: %v", err)
	}
	resp, err := c.Client(http.DefaultTransport).Do(r)
	if err != nil {
		t.Fatalf("sending a request: %v", err)
	}
	_ = resp.Body.Close()
	return got, c
}

func TestTheWorkloadIdentityOfAPodComesFromTheMetadataServer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Metadata-Flavor", "Google")
		switch {
		case strings.HasSuffix(r.URL.Path, "/service-accounts/default/token"):
			fmt.Fprint(w, `{"access_token":"of-the-pod","token_type":"Bearer","expires_in":3600}`)
		case strings.HasSuffix(r.URL.Path, "/service-accounts/default/email"):
			fmt.Fprint(w, "pod@test.iam.gserviceaccount.com")
		}
	}))
	defer server.Close()
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
	t.Setenv("HOME", t.TempDir()) // contains no credentials of gcloud
	t.Setenv("GCE_METADATA_HOST", strings.TrimPrefix(server.URL, "http://"))
	got, c := headers(t)
	if got.Get("Authorization") != "Bearer of-the-pod" {
		t.Errorf("the token is %q", got.Get("Authorization"))
	}
	if email, err := c.Email(t.Context()); err != nil || email != "pod@test.iam.gserviceaccount.com" {
		t.Errorf("the email is %q: %v", email, err)
	}
	if c.PrivateKey() != nil {
		t.Error("there is a private key")
	}
}

func TestAFederatedWorkloadIdentityIsExchangedForAToken(t *testing.T) {
	exchange := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil || r.Form.Get("subject_token") != "of-the-cluster" {
			t.Errorf("the subject's token is %q: %v", r.Form.Get("subject_token"), err)
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"access_token":"exchanged","issued_token_type":"urn:ietf:params:oauth:token-type:access_token","token_type":"Bearer","expires_in":3600}`)
	}))
	defer exchange.Close()
	subject := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(subject, []byte("of-the-cluster"), 0o600); err != nil {
		t.Fatalf("writing the subject's token: %v", err)
	}
	useFile(t, map[string]any{
		"type": "external_account", "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/k",
		"subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "token_url": exchange.URL,
		"credential_source": map[string]any{"file": subject}, "quota_project_id": "payer",
	})
	got, _ := headers(t)
	if got.Get("Authorization") != "Bearer exchanged" || got.Get("X-Goog-User-Project") != "payer" {
		t.Errorf("the headers are %v", got)
	}
}

func TestAServiceAccountSignsItsTokensItself(t *testing.T) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatalf("making a key: %v", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatalf("encoding the key: %v", err)
	}
	useFile(t, map[string]any{
		"type": "service_account", "client_email": "a@test.iam.gserviceaccount.com", "private_key_id": "k", "token_uri": "http://127.0.0.1:1",
		"private_key": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})),
	})
	got, c := headers(t)
	if token, ok := strings.CutPrefix(got.Get("Authorization"), "Bearer "); !ok || strings.Count(token, ".") != 2 {
		t.Errorf("the token is %q, want a JWT", token)
	}
	if email, err := c.Email(t.Context()); err != nil || email != "a@test.iam.gserviceaccount.com" || c.PrivateKey() == nil {
		t.Errorf("the email is %q: %v", email, err)
	}
}

func TestCredentialsOfAnotherUniverseAreRefused(t *testing.T) {
	for own, universes := range map[string]map[string]bool{
		"":           {Universe: true, "other.test": true},
		Universe:     {Universe: true, "other.test": false},
		"other.test": {Universe: false, "other.test": true},
	} {
		content := map[string]any{"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
		if own != "" {
			content["universe_domain"] = own
		}
		useFile(t, content)
		for universe, fits := range universes {
			_, err := Find(t.Context(), universe)
			if fits != (err == nil) || !fits && (fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), "universe_domain")) {
				t.Errorf("credentials of %q in %s: %v", own, universe, err)
			}
		}
	}
}

func TestATokenThatIsRefusedIsNotWaitedFor(t *testing.T) {
	var answer atomic.Int64 // the status of every answer
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(int(answer.Load())) }))
	defer server.Close()
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
	t.Setenv("HOME", t.TempDir()) // which has no credentials of gcloud
	t.Setenv("GCE_METADATA_HOST", strings.TrimPrefix(server.URL, "http://"))
	for code, kind := range map[int]fault.Kind{
		http.StatusForbidden: fault.Forbidden, http.StatusNotFound: fault.Forbidden,
		http.StatusTooManyRequests: fault.Unavailable, http.StatusServiceUnavailable: fault.Unavailable,
	} {
		answer.Store(int64(code))
		c, err := Find(t.Context(), Universe)
		if err != nil {
			t.Fatalf("finding credentials: %v", err)
		}
		patience := time.Minute // ends only the test of a refusal that is waited for
		if kind == fault.Unavailable {
			patience = 500 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, nil)
		if err != nil {
			t.Fatalf("making a request: %v", err)
		}
		_, err = c.Client(http.DefaultTransport).Do(r)
		cancel()
		if fault.Of(err) != kind {
			t.Errorf("%d: %v: %v", code, fault.Of(err), err)
		}
	}
	refused := &oauth2.RetrieveError{Response: &http.Response{StatusCode: http.StatusBadRequest}}
	if !isRefusal(fmt.Errorf("refreshing: %w", refused)) {
		t.Error("a refusal of the token endpoint is none")
	}
}

func TestARedirectIsNotFollowedWithTheToken(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the redirect is followed") }))
	defer elsewhere.Close()
	service := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	defer service.Close()
	c := &Credentials{tokens: nil}
	client := c.Client(http.DefaultTransport)
	client.Transport = http.DefaultTransport
	resp, err := client.Get(service.URL)
	if err != nil {
		t.Fatalf("sending a request: %v", err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusTemporaryRedirect {
		t.Errorf("the status is %d", resp.StatusCode)
	}
}
