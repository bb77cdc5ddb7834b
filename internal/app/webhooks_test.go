package app

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/webhooks"
)

// moved is a clock that a test moves.
type moved struct {
	mu  sync.Mutex
	now time.Time
}

func (m *moved) Now() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now
}

func (m *moved) advance(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now = m.now.Add(d)
}

// told is a request that a receiver took.
type told struct {
	id, body string
	verified bool
}

// Promise: a server without a mail server tells the webhooks of a tenant, signed, that a credential expires
// within 7 days. It repeats that under the same id, makes a dead letter of it after about three days, and
// sends it again when somebody asks for it.
func TestAWebhookIsToldOfWhatExpires(t *testing.T) {
	var secret []byte
	requests, answers := make(chan told), make(chan int)
	receiver := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		h := hmac.New(sha256.New, secret)
		h.Write([]byte(r.Header.Get("webhook-id") + "." + r.Header.Get("webhook-timestamp") + "." + string(b)))
		want := "v1," + base64.StdEncoding.EncodeToString(h.Sum(nil))
		requests <- told{r.Header.Get("webhook-id"), string(b), r.Header.Get("webhook-signature") == want}
		w.WriteHeader(<-answers)
	}))
	receiver.Config.ErrorLog = log.New(io.Discard, "", 0)
	receiver.StartTLS()
	t.Cleanup(receiver.Close)

	clock := &moved{now: time.Now()}
	p, base := startAt(t, clock, receiver)
	tenant, err := p.identity.CreateTenant(t.Context(), authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "test", Scopes: authz.Scopes()}, "shop")
	must(t, err)
	_, key, err := p.identity.CreateAPIKey(t.Context(), authz.SystemPrincipal(tenant.ID), identity.APIKeyRequest{Name: "test", Scopes: authz.TenantScopes()})
	must(t, err)
	call := func(method, path string, body any) (answer map[string]any) {
		t.Helper()
		b, err := json.Marshal(body)
		must(t, err)
		r, err := http.NewRequestWithContext(t.Context(), method, base+"/api/v2"+path, bytes.NewReader(b))
		must(t, err)
		r.Header.Set("X-API-Key", key)
		if body != nil {
			r.Header.Set("Content-Type", "application/json")
		} else {
			r.Body, r.ContentLength = http.NoBody, 0
		}
		got, err := http.DefaultClient.Do(r)
		must(t, err)
		defer func() { _ = got.Body.Close() }()
		if must(t, json.NewDecoder(got.Body).Decode(&answer)); got.StatusCode >= 300 {
			t.Fatal(method, path, answer)
		}
		return answer
	}
	hook := call("POST", "/webhooks", map[string]any{"url": receiver.URL + "/canary-token"})
	id := hook["webhook"].(map[string]any)["webhook_id"].(string)
	secret, err = base64.StdEncoding.DecodeString(strings.TrimPrefix(hook["secret"].(string), "whsec_"))
	must(t, err)
	credential := call("POST", "/vault/seal", map[string]any{"name": "canary-name", "credential_type": "t", "values": map[string]string{"k": "canary-value"}, "ttl_days": 30})["credential_id"].(string)
	// state waits until the only delivery is in a state, after so many attempts.
	admin := authz.Principal{Tenant: tenant.ID, Kind: authz.User, ID: "usr_test", Scopes: authz.TenantScopes()}
	state := func(want webhooks.State, attempts int) {
		t.Helper()
		for {
			all, err := p.webhooks.Deliveries(t.Context(), admin, id)
			if err != nil || len(all) != 1 {
				t.Fatal(all, err)
			}
			if all[0].State == want && all[0].Attempts == attempts {
				return
			}
		}
	}
	var first told
	take := func(answer int) {
		t.Helper()
		p.webhooks.Notify()
		got := <-requests
		answers <- answer
		if first.id == "" {
			first = got
		}
		if got != first || !got.verified || !strings.HasPrefix(got.id, "msg_") {
			t.Errorf("%+v, first %+v", got, first)
		}
	}

	p.maintainOnce(t.Context()) // nothing expires soon
	clock.advance(23*24*time.Hour + time.Minute)
	p.maintainOnce(t.Context())
	take(http.StatusInternalServerError)
	if !strings.Contains(first.body, `"credential_id":"`+credential+`"`) || !strings.Contains(first.body, `"days":7`) || strings.Contains(first.body, "canary") {
		t.Error(first.body)
	}
	state("waiting", 1)
	p.maintainOnce(t.Context()) // the tenant was reminded
	clock.advance(5 * time.Second)
	take(http.StatusInternalServerError)
	state("waiting", 2)
	clock.advance(77 * time.Hour)
	p.webhooks.Notify()
	state("dead", 2)
	call("POST", "/webhooks/"+id+"/deliveries/"+first.id+"/resend", nil)
	take(http.StatusOK)
	state("delivered", 3)
}

// startAt starts a production server with a clock, which trusts the certificate of a receiver on loopback.
// It has no mail server.
func startAt(t *testing.T, clock *moved, receiver *httptest.Server) (*production, string) {
	t.Helper()
	dir := t.TempDir()
	c := config.Default()
	c.Listen, c.PublicURL, c.DataDir = "127.0.0.1:0", "http://127.0.0.1", filepath.Join(dir, "data")
	c.KMS.URL, c.SystemKeyFile, c.Registration.Closed = "file://"+filepath.Join(dir, "kms", "kms.key"), filepath.Join(dir, "system.key"), true
	c.Audit.Verification = 0
	c.Egress.Allow, c.Egress.CAFile = []string{"127.0.0.0/8"}, filepath.Join(dir, "receiver.pem")
	must(t, os.Mkdir(filepath.Join(dir, "kms"), 0o700))
	must(t, os.WriteFile(c.Egress.CAFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: receiver.Certificate().Raw}), 0o600))
	ctx, stop := context.WithCancel(t.Context())
	p := &production{config: c, handshakes: newHandshakeCounter()}
	must(t, p.configure(ctx, slog.New(slog.DiscardHandler)))
	p.now = clock.Now
	l, err := p.listen(ctx)
	must(t, err)
	must(t, p.openMeanwhile(ctx, l))
	ready, written := io.Pipe()
	served := make(chan error, 1)
	go func() { served <- p.serve(ctx, l, written) }()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		must(t, p.end())
	})
	var line Ready
	must(t, json.NewDecoder(ready).Decode(&line))
	return p, line.BaseURL
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
