package gate

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/fault"
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
	full := make(chan struct{}, 1)
	full <- struct{}{}
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
