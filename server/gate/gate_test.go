package gate

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/quota"
)

func TestRoutesAreThoseOfGin(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/keys": "/v1/keys", "/v1/keys/{key_id}/rotate": "/v1/keys/:key_id/rotate", "/{a}/{b}": "/:a/:b", "/": "/",
	} {
		if got := Route(path); got != want {
			t.Errorf("%s: %s", path, got)
		}
	}
}

func TestBearerTokens(t *testing.T) {
	for value, want := range map[string]string{
		"Bearer abc": "abc", "bearer abc": "abc", "BEARER abc": "abc", "Bearer": "", "Bearer ": "", "Basic abc": "", "abc": "", "Bearer  abc": " abc", "": "",
	} {
		if got, ok := bearer([]string{value}); got != want && ok || ok != (want != "") {
			t.Errorf("%q: %q %v", value, got, ok)
		}
	}
	if _, ok := bearer([]string{"Bearer a", "Bearer a"}); ok {
		t.Error("two headers are one token")
	}
	if _, ok := bearer(nil); ok {
		t.Error("no header is a token")
	}
}

func TestRetryAfterIsJitteredInVersionTwoOnly(t *testing.T) {
	seen := make(map[string]bool)
	for range 200 {
		w := httptest.NewRecorder()
		c, _ := gin.CreateTestContext(w)
		(&Version{scheme: KeyOrUser}).retryAfter(c, &tooMany{wait: 1500e6})
		seen[w.Header().Get("Retry-After")] = true
		(&Version{scheme: BearerKey}).retryAfter(c, &tooMany{wait: 1500e6})
		if got := w.Header().Get("Retry-After"); got != "2" {
			t.Fatal("version 1:", got)
		}
	}
	if len(seen) != jitter+1 || !seen["2"] || !seen["7"] {
		t.Error(seen)
	}
	if isTooMany(http.StatusServiceUnavailable) {
		t.Error("a 503 would have Retry-After")
	}
}

// While large bodies take every place, all else goes on.
func TestOnlyLargeBodiesWaitForAPlace(t *testing.T) {
	full := semaphore.NewWeighted(0)
	check := func(body string) error {
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // no time to wait
		c, _ := gin.CreateTestContext(httptest.NewRecorder())
		c.Request = httptest.NewRequestWithContext(ctx, http.MethodPost, "/", strings.NewReader(body))
		c.Request.Header.Set("Content-Type", "application/json")
		call := &Call{gate: &Gate{origins: http.NewCrossOriginProtection(), parsing: full}, operation: &operation{}, body: []byte(body)}
		return call.check(c)
	}
	for _, size := range []int{0, 2, smallBody} {
		if err := check(strings.Repeat(" ", max(0, size-2)) + "{}"[:min(2, size)]); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	if err := check(strings.Repeat(" ", smallBody) + "{}"); !errors.Is(err, fault.Unavailable) {
		t.Errorf("a large body: %v", err)
	}
}

func newAccountCall(g *Gate, id string) *Call {
	return &Call{gate: g, operation: &operation{Operation: Operation{Action: authz.ListCredentials}}, Caller: identity.Caller{
		Principal: authz.Principal{Kind: authz.ServiceAccount, ID: id}, ServiceAccount: &identity.ServiceAccount{Namespace: "shop", Name: id},
	}}
}

func counted(call *Call) quota.Usage {
	c, _ := gin.CreateTestContext(httptest.NewRecorder())
	c.Request = httptest.NewRequest(http.MethodGet, "/", nil)
	u, err := call.count(c)
	if err != nil { // nothing is borrowed here
		panic(err)
	}
	return u
}

// Strangers of so many addresses that they share one bucket take nothing of a ServiceAccount's.
func TestAFloodOfAddressesRefusesNoServiceAccount(t *testing.T) {
	now := time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)
	g, err := New(Config{Now: func() time.Time { return now }, Limits: Limits{Address: 1}})
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; g.addresses.Peek("unknown", 1).Remaining > 0; i++ {
		if i > 1_000_000 {
			t.Fatal("the addresses never share a bucket")
		}
		g.addresses.Take(strconv.Itoa(i), 1)
	}
	if u := counted(newAccountCall(g, "a")); u.Exceeded || u.Remaining != 1 {
		t.Errorf("%+v", u)
	}
	newAccountCall(g, "a").countRefused()
	if u := counted(newAccountCall(g, "a")); !u.Exceeded {
		t.Errorf("its own refusals are not counted: %+v", u)
	}
	if u := counted(newAccountCall(g, "b")); u.Exceeded {
		t.Errorf("another pays for it: %+v", u)
	}
}

// away is a cluster that cannot be asked.
type away struct{ identity.Cluster }

func (away) Allowed(context.Context, identity.ServiceAccount, string, string, string) (bool, error) {
	return false, fault.Wrap(fault.Unavailable, "try again", errors.New("down"))
}

// That the cluster does not answer is not the ServiceAccount's fault; that it does not wait for the answer is.
func TestAnOutageOfTheClusterIsNotCountedAgainstAServiceAccount(t *testing.T) {
	now := time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)
	service := new(identity.Service)
	service.UseCluster(away{}, nil)
	g, err := New(Config{Identity: service, Now: func() time.Time { return now }, Limits: Limits{Address: 1}})
	if err != nil {
		t.Fatal(err)
	}
	hungUp, hangUp := context.WithCancel(t.Context())
	hangUp()
	late, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	for _, c := range []struct {
		name    string
		ctx     context.Context
		counted bool
	}{{"an outage", t.Context(), false}, {"no answer in time", late, false}, {"hung up", hungUp, true}} {
		call := newAccountCall(g, c.name)
		if err := call.Review(c.ctx, "", ""); !errors.Is(err, fault.Unavailable) {
			t.Errorf("%s: %v", c.name, err)
		}
		call.countRefused()
		if u := counted(call); u.Exceeded != c.counted {
			t.Errorf("%s: %+v", c.name, u)
		}
	}
}
