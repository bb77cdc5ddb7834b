package gate

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/gin-gonic/gin"
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
