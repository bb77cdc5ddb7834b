package kms

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

const googleTestKey = "projects/p/locations/l/keyRings/r/cryptoKeys/k"

// answerAsGoogle opens a key on a server that describes the key, wraps with it, and passes all other
// requests to others.
func answerAsGoogle(t *testing.T, others http.HandlerFunc) *Key {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, googleTestKey):
			fmt.Fprintf(w, `{"name":%q,"purpose":"ENCRYPT_DECRYPT","primary":{"name":"x","state":"ENABLED","algorithm":"GOOGLE_SYMMETRIC_ENCRYPTION"}}`, googleTestKey)
		case strings.HasSuffix(r.URL.Path, ":encrypt"):
			fmt.Fprint(w, `{"ciphertext":"AAAA"}`)
		default:
			others(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return open(t, "gcpkms://"+googleTestKey+"?endpoint="+s.URL)
}

func TestAnAnswerThatIsNotGooglesIsNoDestructionAndNoForeignKey(t *testing.T) {
	k := answerAsGoogle(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	if d, err := k.Destroy(within(t, 100*time.Millisecond)); fault.Of(err) != fault.Unavailable {
		t.Errorf("destroyed: %+v, %v", d, err)
	}
	if _, err := k.Unwrap(within(t, 100*time.Millisecond), "c", wrap(t, k, "c")); fault.Of(err) != fault.Unavailable || errors.Is(err, ErrForeign) {
		t.Errorf("unwrapped: %v", err)
	}
}

func TestOnlyAVersionOfTheKeyThatGoogleEndsIsDestroyed(t *testing.T) {
	const version = googleTestKey + "/cryptoKeyVersions/1"
	at := time.Now().UTC().Add(24 * time.Hour).Truncate(time.Second)
	for name, c := range map[string]struct {
		version, after string
		destroyed      bool
	}{
		"scheduled":       {version, "DESTROY_SCHEDULED", true},
		"at once":         {version, "DESTROYED", true},
		"still enabled":   {version, "ENABLED", false},
		"without a state": {version, "", false},
		"of another key":  {googleTestKey + "2/cryptoKeyVersions/1", "DESTROY_SCHEDULED", false},
		"without a name":  {"", "DESTROY_SCHEDULED", false},
	} {
		t.Run(name, func(t *testing.T) {
			k := answerAsGoogle(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet {
					_ = json.NewEncoder(w).Encode(map[string]any{"cryptoKeyVersions": []any{map[string]any{"name": c.version, "state": "ENABLED"}}})
					return
				}
				_ = json.NewEncoder(w).Encode(map[string]any{"name": version, "state": c.after, "destroyTime": at})
			})
			d, err := k.Destroy(within(t, 100*time.Millisecond))
			if c.destroyed && (err != nil || !d.When.Equal(at)) || !c.destroyed && fault.Of(err) != fault.Unavailable {
				t.Errorf("%+v, %v", d, err)
			}
		})
	}
}

func TestARedirectOfAServiceOnThisMachineIsNotFollowed(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		t.Error("the redirect is followed")
		fmt.Fprint(w, `{"plaintext":"AAAA"}`)
	}))
	defer elsewhere.Close()
	for _, code := range []int{http.StatusFound, http.StatusTemporaryRedirect} {
		k := answerAsGoogle(t, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, elsewhere.URL+r.URL.Path, code) })
		if _, err := k.Unwrap(within(t, 100*time.Millisecond), "c", wrap(t, k, "c")); fault.Of(err) != fault.Unavailable {
			t.Errorf("%d: %v", code, err)
		}
	}
}
