package webhooks_test

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/egress"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/outbox"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/lifetime"
	"github.com/latticekeep/latticekeep/internal/webhooks"
	"github.com/latticekeep/latticekeep/test/servertest"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The test vector is that of the libraries of Standard Webhooks.
func TestASignatureIsThatOfTheSpecification(t *testing.T) {
	secret, err := base64.StdEncoding.DecodeString("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	must(t, err)
	got := webhooks.Sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", []byte(`{"test": 2432232314}`))
	if got != "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=" {
		t.Error(got)
	}
}

// received is a request that a receiver took.
type received struct {
	header http.Header
	body   string
}

// fixture is a service, a receiver on loopback, and who sends to it.
type fixture struct {
	*servertest.Service
	t        *testing.T
	owner    authz.Principal
	receiver *httptest.Server
	url      string
	log      bytes.Buffer
	courier  *outbox.Courier

	mu     sync.Mutex
	status int
	got    []received
}

const canary = "canary-token"

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{Service: servertest.Assemble(t), t: t, status: http.StatusOK}
	f.owner = authz.Principal{Tenant: f.Tenant, Kind: authz.User, ID: "usr_test", Scopes: authz.TenantScopes()}
	f.receiver = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		f.mu.Lock()
		defer f.mu.Unlock()
		f.got = append(f.got, received{r.Header, string(b)})
		w.WriteHeader(f.status)
		_, _ = w.Write([]byte("canary-answer"))
	}))
	f.receiver.Config.ErrorLog = log.New(io.Discard, "", 0)
	f.receiver.StartTLS()
	t.Cleanup(f.receiver.Close)
	f.url = f.receiver.URL + "/" + canary
	roots := x509.NewCertPool()
	roots.AddCert(f.receiver.Certificate())
	client := egress.New(egress.Options{Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, Roots: roots})
	f.courier = f.Webhooks.Courier(client, slog.New(slog.NewTextHandler(&f.log, nil)))
	return f
}

func (f *fixture) create() (id string, secret []byte) {
	f.t.Helper()
	made, text, err := f.Webhooks.Create(f.t.Context(), f.owner, webhooks.Request{URL: f.url, Description: "on call"})
	must(f.t, err)
	encoded, ok := strings.CutPrefix(text, "whsec_")
	secret, err = base64.StdEncoding.DecodeString(encoded)
	if err != nil || !ok || len(secret) != 32 {
		f.t.Fatal("the secret has another form:", err)
	}
	return made.ID, secret
}

// pass makes the attempts that are due, and returns the requests that came of it.
func (f *fixture) pass() []received {
	f.t.Helper()
	_, err := f.courier.Pass(f.t.Context())
	must(f.t, err)
	f.mu.Lock()
	defer f.mu.Unlock()
	got := f.got
	f.got = nil
	return got
}

func (f *fixture) answer(status int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.status = status
}

func (f *fixture) deliveries(id string) []webhooks.Delivery {
	f.t.Helper()
	all, err := f.Webhooks.Deliveries(f.t.Context(), f.owner, id)
	must(f.t, err)
	return all
}

func (f *fixture) test(id string) webhooks.Delivery {
	f.t.Helper()
	d, err := f.Webhooks.Test(f.t.Context(), f.owner, id)
	must(f.t, err)
	return d
}

// verify checks a request as the guide says, with no code of the service.
func verify(t *testing.T, r received, secret []byte, id string, now time.Time) {
	t.Helper()
	timestamp := r.header.Get("webhook-timestamp")
	h := hmac.New(sha256.New, secret)
	_, _ = fmt.Fprintf(h, "%s.%s.%s", r.header.Get("webhook-id"), timestamp, r.body)
	if want := "v1," + base64.StdEncoding.EncodeToString(h.Sum(nil)); r.header.Get("webhook-signature") != want {
		t.Error("the signature is", r.header.Get("webhook-signature"))
	}
	if timestamp != strconv.FormatInt(now.Unix(), 10) || r.header.Get("webhook-id") != id || r.header.Get("Content-Type") != "application/json" {
		t.Error(r.header)
	}
}

func (f *fixture) remind(soon ...lifetime.Soon) {
	f.t.Helper()
	put, err := f.Webhooks.Remind(f.t.Context(), f.Tenant, func(context.Context) ([]lifetime.Soon, error) { return soon, nil })
	must(f.t, err)
	must(f.t, f.Store.Update(f.t.Context(), put))
}

// Promise: each webhook is told once of what expires soon, signed, with ids and times only.
func TestEachWebhookIsToldOfWhatExpiresSoon(t *testing.T) {
	f := newFixture(t)
	secrets := make(map[string][]byte)
	for range 2 {
		id, secret := f.create()
		secrets[id] = secret
	}
	expires := f.Clock.Now().Add(7 * 24 * time.Hour)
	f.remind(lifetime.Soon{ID: "cred_a", ExpiresAt: expires, Days: 7})
	got := f.pass()
	if len(got) != 2 {
		t.Fatal(len(got), "requests")
	}
	for id, secret := range secrets {
		all := f.deliveries(id)
		if len(all) != 1 || all[0].State != webhooks.Delivered || all[0].Attempts != 1 || all[0].Status != 200 || all[0].Event != webhooks.ExpiresSoon {
			t.Fatalf("%+v", all)
		}
		i := slices.IndexFunc(got, func(r received) bool { return r.header.Get("webhook-id") == all[0].ID })
		if i < 0 {
			t.Fatal("it was not sent")
		}
		verify(t, got[i], secret, all[0].ID, f.Clock.Now())
		want := fmt.Sprintf(`{"type":"credential.expires_soon","timestamp":%q,"data":{"tenant_id":%q,"credentials":[{"credential_id":"cred_a","expires_at":%q,"days":7}]}}`,
			f.Clock.Now().UTC().Format(time.RFC3339), f.Tenant, expires.UTC().Format(time.RFC3339))
		if got[i].body != want {
			t.Errorf("%s\nwant %s", got[i].body, want)
		}
	}
	if got := f.pass(); len(got) != 0 {
		t.Error("sent again:", got)
	}
	f.remind() // what was found is renewed
	if got := f.pass(); len(got) != 0 {
		t.Error("told of nothing:", got)
	}
	// The credentials are looked for only if there is a webhook.
	for id := range secrets {
		must(t, f.Webhooks.Delete(t.Context(), f.owner, id))
	}
	_, err := f.Webhooks.Remind(t.Context(), f.Tenant, func(context.Context) ([]lifetime.Soon, error) {
		t.Error("looked for credentials without a webhook")
		return nil, nil
	})
	must(t, err)
}

func TestAnEventNamesABoundedNumberOfCredentials(t *testing.T) {
	f := newFixture(t)
	f.create()
	all := make([]lifetime.Soon, 101)
	for n, more := range map[int]bool{100: false, 101: true} {
		f.remind(all[:n]...)
		got := f.pass()
		if len(got) != 1 || strings.Count(got[0].body, "credential_id") != 100 || strings.Contains(got[0].body, `"more":true`) != more {
			t.Errorf("%d credentials: %v", n, got)
		}
	}
}

// Promise: a receiver that fails gets the same event again, under the same id, until about three days are
// over; then there is an entry and a dead letter, which can be sent again.
func TestADeliveryIsRepeatedUntilItIsDead(t *testing.T) {
	f := newFixture(t)
	id, secret := f.create()
	f.answer(http.StatusInternalServerError)
	f.remind(lifetime.Soon{ID: "cred_a", ExpiresAt: f.Clock.Now(), Days: 1})
	first := f.pass()
	msg := f.deliveries(id)[0].ID
	verify(t, first[0], secret, msg, f.Clock.Now())
	f.pass() // a process that has just started ignores the times once
	for n, wait := range webhooks.Waits {
		d := f.deliveries(id)[0]
		if d.State != webhooks.Waiting || d.Attempts != n+1 || d.Status != 500 || !d.NextAt.Equal(f.Clock.Now().Add(wait)) {
			t.Fatalf("after %d failures: %+v", n+1, d)
		}
		f.Clock.Advance(wait - time.Millisecond)
		if got := f.pass(); len(got) != 0 {
			t.Fatalf("after %d failures: sent before %v", n+1, wait)
		}
		f.Clock.Advance(time.Millisecond)
		got := f.pass()
		if len(got) != 1 || got[0].body != first[0].body {
			t.Fatalf("after %d failures: %v", n+1, got)
		}
		verify(t, got[0], secret, msg, f.Clock.Now())
	}
	dead := f.deliveries(id)[0]
	if dead.State != webhooks.Dead || dead.Attempts != 10 || dead.Status != 500 || !dead.NextAt.IsZero() {
		t.Fatalf("%+v", dead)
	}
	f.Clock.Advance(24 * time.Hour)
	if got := f.pass(); len(got) != 0 {
		t.Error("a dead letter was sent")
	}
	if n := f.entries(audit.WebhookFailed, id, map[string]string{"delivery": msg, "reason": "no_success"}); n != 1 {
		t.Error(n, "entries of a delivery that was given up")
	}
	f.answer(http.StatusNoContent)
	if _, err := f.Webhooks.Resend(t.Context(), f.owner, id, msg); err != nil {
		t.Fatal(err)
	}
	got := f.pass()
	if len(got) != 1 || got[0].body != first[0].body {
		t.Fatal(got)
	}
	verify(t, got[0], secret, msg, f.Clock.Now())
	if d := f.deliveries(id)[0]; d.State != webhooks.Delivered || d.Attempts != 11 || d.Status != 204 {
		t.Errorf("%+v", d)
	}
	if _, err := f.Webhooks.Resend(t.Context(), f.owner, id, msg); !errors.Is(err, fault.Conflict) {
		t.Error("what was delivered is sent again:", err)
	}
	if strings.Contains(f.log.String(), "canary") || strings.Contains(f.log.String(), "127.0.0.1") || !strings.Contains(f.log.String(), msg) {
		t.Error(f.log.String())
	}
}

// entries counts the entries with a type, a resource and attributes, and checks that none shows a URL.
func (f *fixture) entries(want audit.EventType, id string, attributes map[string]string) (n int) {
	f.t.Helper()
	p := authz.Principal{Tenant: f.Tenant, Kind: authz.User, ID: "usr_test", Scopes: authz.TenantScopes()}
	page, _, err := f.Reader.Query(f.t.Context(), p, reader.Query{Limit: 100})
	must(f.t, err)
	for _, e := range page {
		b, err := json.Marshal(e)
		must(f.t, err)
		if strings.Contains(string(b), "canary") || strings.Contains(string(b), "whsec_") {
			f.t.Errorf("%s", b)
		}
		ok := e.EventType == want && e.Resource.ID == id
		for k, v := range attributes {
			ok = ok && e.Attributes[k] == v
		}
		if ok {
			n++
		}
	}
	return n
}

// A delivery that waited too long is not sent: after an outage, or when a backup was restored.
func TestADeliveryOfLongAgoIsNotSent(t *testing.T) {
	f := newFixture(t)
	id, _ := f.create()
	f.test(id)
	f.Clock.Advance(77 * time.Hour)
	if got := f.pass(); len(got) != 0 || f.deliveries(id)[0].State != webhooks.Dead {
		t.Error(got, f.deliveries(id))
	}
}

// Promise: nobody sees the secret again, nor more of the URL than its host, in the store, in a list or in
// an answer.
func TestURLAndSecretAreShownOnce(t *testing.T) {
	f := newFixture(t)
	id, secret := f.create()
	f.answer(http.StatusInternalServerError)
	f.test(id)
	f.pass()
	all, err := f.Webhooks.List(t.Context(), f.owner)
	must(t, err)
	if len(all) != 1 || all[0].ID != id || all[0].Description != "on call" || "https://"+all[0].Host != f.receiver.URL {
		t.Errorf("%+v", all)
	}
	if shown := fmt.Sprintf("%+v %+v", all, f.deliveries(id)); strings.Contains(shown, "canary") {
		t.Error(shown)
	}
	must(t, f.Store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("webhook")), func(key, row []byte) bool {
			for _, s := range []string{canary, "on call", string(secret), base64.StdEncoding.EncodeToString(secret)} {
				if bytes.Contains(row, []byte(s)) {
					t.Errorf("%s shows %q", key, s)
				}
			}
			return true
		})
	}))
	f.entries(audit.WebhookCreated, id, nil)
}

// A webhook that is deleted is told nothing more, and leaves no row.
func TestADeletedWebhookLeavesNothing(t *testing.T) {
	f := newFixture(t)
	id, _ := f.create()
	f.answer(http.StatusInternalServerError)
	f.test(id)
	f.pass()
	f.test(id)
	must(t, f.Webhooks.Delete(t.Context(), f.owner, id))
	f.Clock.Advance(time.Hour)
	if got := f.pass(); len(got) != 0 {
		t.Error(got)
	}
	must(t, f.Store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("webhook")), func(key, _ []byte) bool {
			t.Errorf("%s is left", key)
			return true
		})
	}))
	if err := f.Webhooks.Delete(t.Context(), f.owner, id); !errors.Is(err, fault.NotFound) {
		t.Error(err)
	}
}

// A webhook that is deleted while it is called does not come back with the outcome.
func TestAWebhookThatIsDeletedWhileItIsCalled(t *testing.T) {
	f := newFixture(t)
	id, _ := f.create()
	f.receiver.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		must(t, f.Webhooks.Delete(context.Background(), f.owner, id))
		w.WriteHeader(http.StatusInternalServerError)
	})
	f.test(id)
	f.pass()
	f.pass()
	must(t, f.Store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("webhook")), func(key, _ []byte) bool {
			t.Errorf("%s is left", key)
			return true
		})
	}))
}

func TestBounds(t *testing.T) {
	f := newFixture(t)
	id, _ := f.create()
	for range 9 {
		f.create()
	}
	if _, _, err := f.Webhooks.Create(t.Context(), f.owner, webhooks.Request{URL: f.url}); !errors.Is(err, fault.Conflict) {
		t.Error("the eleventh:", err)
	}
	for _, r := range []webhooks.Request{{URL: "http://example.org"}, {URL: ""}, {URL: f.url, Description: strings.Repeat("x", 256)}} {
		if _, _, err := f.Webhooks.Create(t.Context(), f.owner, r); !errors.Is(err, fault.Invalid) {
			t.Error(err)
		}
	}
	for range 10 {
		f.test(id)
	}
	if _, err := f.Webhooks.Test(t.Context(), f.owner, id); !errors.Is(err, fault.Conflict) {
		t.Error("the eleventh that waits:", err)
	}
	f.pass()
	for range 12 { // of the deliveries that are over the newest 100 are kept
		f.Clock.Advance(time.Minute)
		for range 10 {
			f.test(id)
		}
		f.pass()
	}
	if n := len(f.deliveries(id)); n != 100 {
		t.Error(n, "deliveries")
	}
	f.Clock.Advance(31 * 24 * time.Hour)
	if n := len(f.deliveries(id)); n != 0 {
		t.Error(n, "deliveries after a month")
	}
	f.test(id)
	rows := 0
	must(t, f.Store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte(webhooks.DeliveryFamily)), func(_, _ []byte) bool { rows++; return true })
	}))
	if rows != 1 {
		t.Error(rows, "rows")
	}
}

// Webhooks are those of one tenant, and of people whom no policy limits.
func TestNobodyElseReachesAWebhook(t *testing.T) {
	f := newFixture(t)
	id, _ := f.create()
	d := f.test(id)
	other := f.owner
	tenant, err := f.Identity.CreateTenant(t.Context(), authz.SystemPrincipal(authz.SystemTenant), "other")
	if err != nil {
		operator := authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "test", Scopes: authz.Scopes()}
		tenant, err = f.Identity.CreateTenant(t.Context(), operator, "other")
	}
	must(t, err)
	other.Tenant = tenant.ID
	limited := f.owner
	limited.Access = authz.Nothing()
	member := f.owner
	member.Scopes = authz.Member.Scopes()
	ctx := t.Context()
	for name, c := range map[string]struct {
		p    authz.Principal
		want error
	}{"another tenant": {other, fault.NotFound}, "limited by a policy": {limited, fault.Forbidden}, "without the scope": {member, fault.Forbidden}} {
		_, err1 := f.Webhooks.Deliveries(ctx, c.p, id)
		_, err2 := f.Webhooks.Test(ctx, c.p, id)
		_, err3 := f.Webhooks.Resend(ctx, c.p, id, d.ID)
		for i, err := range []error{err1, err2, err3, f.Webhooks.Delete(ctx, c.p, id)} {
			if !errors.Is(err, c.want) {
				t.Errorf("%s: call %d: %v", name, i, err)
			}
		}
		all, err := f.Webhooks.List(ctx, c.p)
		if len(all) != 0 || (err == nil) != (c.want == fault.NotFound) {
			t.Errorf("%s: %v, %v", name, all, err)
		}
	}
	if _, err := f.Webhooks.Resend(ctx, f.owner, id, "msg_aaaaaaaaaaaaaaaaaaaaaaaaaa"); !errors.Is(err, fault.NotFound) {
		t.Error(err)
	}
	if len(f.deliveries(id)) != 1 {
		t.Error("somebody else changed it")
	}
}

// Whoever writes the database cannot have a body of theirs signed, nor one of another webhook sent.
func TestRowsOfSomebodyElseAreNotSent(t *testing.T) {
	f := newFixture(t)
	id, _ := f.create()
	other, _ := f.create()
	d := f.test(id)
	at := func(hook, msg string) []byte {
		return []byte("webhook-delivery/" + string(f.Tenant) + "/" + hook + "/" + msg)
	}
	must(t, f.Store.Update(t.Context(), func(tx store.Tx) error {
		row, err := tx.Get(at(id, d.ID))
		forged := bytes.Replace(row, []byte("webhook.test"), []byte("webhook.tEst"), 1)
		return errors.Join(err, tx.Put(at(other, d.ID), slices.Clone(row)), tx.Put(at(id, d.ID), forged),
			tx.Put([]byte("webhook-outbox/msg_x"), []byte(string(f.Tenant)+"/"+other)), tx.Put(at(other, "msg_x"), slices.Clone(row)),
			tx.Put([]byte("webhook-outbox/msg_y"), []byte("nonsense")))
	}))
	if got := f.pass(); len(got) != 0 {
		t.Error(got)
	}
	waiting, err := outbox.Queued(t.Context(), f.Store, webhooks.OutboxFamily)
	if err != nil || waiting != 0 {
		t.Error(waiting, err)
	}
}

// A webhook whose row is damaged is listed, so that it can be deleted.
func TestADamagedWebhookIsListed(t *testing.T) {
	f := newFixture(t)
	for i := range 6 {
		id, _ := f.create()
		key := []byte(webhooks.Family + string(f.Tenant) + "/" + id)
		must(t, f.Store.Update(t.Context(), func(tx store.Tx) error {
			row, err := tx.Get(key)
			row = slices.Clone(row)
			row[i] ^= 0x41 // of the version of the key, and of what is sealed
			return errors.Join(err, tx.Put(key, row))
		}))
		all, err := f.Webhooks.List(t.Context(), f.owner)
		if err != nil || len(all) != 1 || all[0].ID != id || all[0].Host != "" {
			t.Errorf("changed at %d: %+v, %v", i, all, err)
		}
		must(t, f.Webhooks.Delete(t.Context(), f.owner, id))
	}
}

// What cannot be reached has a reason, and no status.
func TestADeliveryThatReachesNobodyHasAReason(t *testing.T) {
	f := newFixture(t)
	for url, reason := range map[string]egress.Reason{"https://10.0.0.1/": egress.Unreachable, f.receiver.URL: ""} {
		made, _, err := f.Webhooks.Create(t.Context(), f.owner, webhooks.Request{URL: url})
		must(t, err)
		f.test(made.ID)
		f.pass()
		if d := f.deliveries(made.ID)[0]; d.Reason != string(reason) || (d.Status == 0) != (reason != "") {
			t.Errorf("%s: %+v", url, d)
		}
	}
}
