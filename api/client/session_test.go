package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// sessions simulates a server with one user. An access token is valid until it is replaced, a
// refresh token for one use.
type sessions struct {
	mu       sync.Mutex
	number   int    // number of the valid access token
	refresh  string // valid refresh token
	ended    bool
	renewals int
	slow     time.Duration // delay of the answer to a renewal
	fails    int           // status with which a renewal is rejected; 0: none
}

func (s *sessions) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.number++
}

func (s *sessions) answer(w http.ResponseWriter, r *http.Request, _ int) {
	switch r.URL.Path {
	case "/api/v2/auth/login":
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ended = false
		s.give(w)
	case "/api/v2/auth/refresh":
		defer time.Sleep(s.slow) // in a bubble; the work is done before the delay
		s.mu.Lock()
		defer s.mu.Unlock()
		s.renewals++
		cookie, err := r.Cookie("refreshToken")
		switch {
		case s.fails != 0:
			refusal(w, s.fails)
		case err != nil || s.ended || cookie.Value != s.refresh:
			s.ended = true
			refusal(w, http.StatusUnauthorized)
		default:
			s.give(w)
		}
	case "/api/v2/auth/logout":
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.ended {
			refusal(w, http.StatusUnauthorized)
			return
		}
		s.ended = true
		success(w, nil)
	default:
		if strings.HasSuffix(r.URL.Path, "/slow") {
			defer time.Sleep(5 * time.Second) // in a bubble; the work is done before the delay
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.ended || r.Header.Get("Authorization") != fmt.Sprint("Bearer access-", s.number) {
			refusal(w, http.StatusUnauthorized)
			return
		}
		success(w, nil)
	}
}

func (s *sessions) give(w http.ResponseWriter) {
	s.number++
	s.refresh = fmt.Sprint("refresh-", s.number)
	http.SetCookie(w, &http.Cookie{Name: "accessToken", Value: fmt.Sprint("access-", s.number), Path: "/", HttpOnly: true})
	http.SetCookie(w, &http.Cookie{Name: "refreshToken", Value: s.refresh, Path: "/api/v2/auth", HttpOnly: true})
	success(w, map[string]any{"access_token": fmt.Sprint("access-", s.number), "token_type": "Bearer", "expires_in": 1800})
}

// signedIn returns a client of the server with a session.
func signedIn(t *testing.T, s *sessions) (*Client, *wire) {
	t.Helper()
	n := &wire{answer: s.answer}
	c := n.client(t)
	login(t, c)
	return c, n
}

func login(t *testing.T, c *Client) {
	t.Helper()
	got, err := c.V2.Login(t.Context(), v2.LoginRequest{Email: "user@example.org", Password: "correct horse battery"})
	if err != nil || got.AccessToken == "" {
		t.Fatal(got, err)
	}
}

func TestManyRefusedCallsRenewTheSessionOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sessions{slow: time.Second}
		c, n := signedIn(t, s)
		s.expire()
		var calls sync.WaitGroup
		for range 50 {
			calls.Go(func() {
				if _, err := c.V2.ReplaceCredential(t.Context(), "cred_x", v2.ReplaceRequest{Values: map[string]string{"k": "v"}}); err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
		if s.renewals != 1 {
			t.Errorf("%d renewals", s.renewals)
		}
		for _, sent := range n.all() {
			if strings.HasPrefix(sent.path, "/api/v2/vault/") && !strings.Contains(sent.body, `"v"`) {
				t.Fatalf("without its body: %+v", sent)
			}
		}
		// The next token works as long as it is valid, and the next renewal uses the next refresh
		// token.
		if _, err := c.V2.ListCredentials(t.Context(), nil); err != nil || s.renewals != 1 {
			t.Error(err, s.renewals)
		}
		s.expire()
		if _, err := c.V2.ListCredentials(t.Context(), nil); err != nil || s.renewals != 2 {
			t.Error(err, s.renewals)
		}
		var cookies []string
		for _, sent := range n.all() {
			if sent.path == "/api/v2/auth/refresh" {
				cookies = append(cookies, sent.header.Get("Cookie"))
				if sent.header.Get("Authorization") != "" || sent.header.Get("X-API-Key") != "" {
					t.Error("a renewal carries another credential")
				}
			} else if sent.header.Get("Cookie") != "" {
				t.Error("a cookie is sent to", sent.path)
			}
		}
		if len(cookies) != 2 || cookies[0] == cookies[1] {
			t.Error("the same refresh token twice")
		}
	})
}

func TestACallThatIsRefusedLateUsesTheTokenThatIsThereByThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sessions{}
		c, _ := signedIn(t, s)
		s.expire()
		var calls sync.WaitGroup
		for _, id := range []string{"slow", "fast"} {
			calls.Go(func() {
				if _, err := c.V2.UnsealCredential(t.Context(), id); err != nil {
					t.Error(id, err)
				}
			})
			synctest.Wait() // the slow call waits for its answer
		}
		calls.Wait()
		if s.renewals != 1 {
			t.Errorf("%d renewals", s.renewals)
		}
	})
}

func TestACallThatIsCancelledDoesNotSpoilTheRenewalForTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sessions{slow: 2 * time.Second}
		c, _ := signedIn(t, s)
		s.expire()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var calls sync.WaitGroup
		calls.Go(func() { // begins the renewal and ends before it
			if _, err := c.V2.ListCredentials(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
				t.Error("the first:", err)
			}
		})
		calls.Go(func() {
			time.Sleep(100 * time.Millisecond) // on the bubble's clock: after the other call
			if _, err := c.V2.ListCredentials(t.Context(), nil); err != nil {
				t.Error("the second:", err)
			}
		})
		calls.Wait()
		if s.renewals != 1 {
			t.Errorf("%d renewals", s.renewals)
		}
	})
}

func TestAnEndedSessionIsNotReplacedByTheAPIKey(t *testing.T) {
	s := &sessions{}
	c, n := signedIn(t, s)
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	for range 2 {
		if _, err := c.V2.ListCredentials(t.Context(), nil); !errors.Is(err, ErrUnauthenticated) {
			t.Error(err)
		}
	}
	if _, err := c.V2.RefreshSession(t.Context()); !errors.Is(err, ErrUnauthenticated) {
		t.Error(err)
	}
	if s.renewals != 1 {
		t.Errorf("%d renewals of an ended session", s.renewals)
	}
	for _, sent := range n.all() {
		if sent.header.Get("X-API-Key") != "" {
			t.Error("the API key was sent to", sent.path)
		}
	}
	login(t, c)
	if _, err := c.V2.ListCredentials(t.Context(), nil); err != nil {
		t.Error("after signing in again:", err)
	}
}

func TestARenewalThatFailsOtherwiseIsTheErrorOfTheCall(t *testing.T) {
	s := &sessions{fails: http.StatusServiceUnavailable}
	c, _ := signedIn(t, s)
	s.expire()
	if _, err := c.V2.ListCredentials(t.Context(), nil); !errors.Is(err, ErrUnavailable) {
		t.Error(err)
	}
	if s.renewals != 1 {
		t.Errorf("a refresh token was sent %d times, though it may have been used up", s.renewals)
	}
	s.fails = 0
	if _, err := c.V2.ListCredentials(t.Context(), nil); err != nil {
		t.Error("when the server is back:", err)
	}
}

func TestARefusalThatANewTokenDoesNotCureIsFinal(t *testing.T) {
	s := &sessions{}
	n := &wire{answer: func(w http.ResponseWriter, r *http.Request, i int) {
		if r.URL.Path == "/api/v2/vault/list" {
			refusal(w, http.StatusUnauthorized)
			return
		}
		s.answer(w, r, i)
	}}
	c := n.client(t)
	login(t, c)
	if _, err := c.V2.ListCredentials(t.Context(), nil); !errors.Is(err, ErrUnauthenticated) || s.renewals != 1 {
		t.Error(err, s.renewals)
	}
	if len(n.all()) != 4 { // sign in, list, renew, list
		t.Errorf("%d requests", len(n.all()))
	}
}

func TestLogoutEndsTheSessionAndForgetsIt(t *testing.T) {
	s := &sessions{}
	c, n := signedIn(t, s)
	s.expire() // must not cause a renewal
	if err := c.V2.Logout(t.Context()); err != nil {
		t.Fatal(err)
	}
	last := n.all()[len(n.all())-1]
	if last.path != "/api/v2/auth/logout" || last.header.Get("Cookie") != "refreshToken=refresh-1" ||
		last.header.Get("Authorization") != "Bearer access-1" || s.renewals != 0 {
		t.Errorf("%+v, %d renewals", last, s.renewals)
	}
	_, _ = c.V2.ListCredentials(t.Context(), nil)
	last = n.all()[len(n.all())-1]
	if last.header.Get("X-API-Key") != testKey || last.header.Get("Authorization") != "" {
		t.Errorf("after it: %v", last.header)
	}
	sent := len(n.all())
	if err := c.V2.Logout(t.Context()); err != nil || len(n.all()) != sent {
		t.Error("a second time:", err)
	}
}

func TestLogoutOfASessionThatHasEndedForgetsItWithoutRenewing(t *testing.T) {
	s := &sessions{}
	n := &wire{answer: s.answer}
	c := n.client(t)
	login(t, c)
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	if err := c.V2.Logout(t.Context()); err != nil || s.renewals != 0 {
		t.Error(err, s.renewals)
	}
	if access, refresh := c.V2.session.tokens(); access != (credential{}) || refresh != "" {
		t.Error("it is still there")
	}
}

func TestARenewalDoesNotBringBackASessionThatWasSignedOutMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sessions{slow: 2 * time.Second}
		c, n := signedIn(t, s)
		s.expire()
		var calls sync.WaitGroup
		calls.Go(func() {
			if _, err := c.V2.ListCredentials(t.Context(), nil); !errors.Is(err, ErrUnauthenticated) {
				t.Error("the call that waited for it:", err)
			}
		})
		time.Sleep(time.Second) // on the bubble's clock: in the middle of the renewal
		if err := c.V2.Logout(t.Context()); err != nil {
			t.Fatal(err)
		}
		calls.Wait()
		for _, sent := range n.all() {
			if sent.header.Get("X-API-Key") != "" {
				t.Error("a call of the user went on with the API key")
			}
		}
		if access, refresh := c.V2.session.tokens(); access != (credential{}) || refresh != "" {
			t.Error("it is back")
		}
	})
}

func TestRefreshSessionAnswersTheNewToken(t *testing.T) {
	s := &sessions{}
	c, _ := signedIn(t, s)
	got, err := c.V2.RefreshSession(t.Context())
	if err != nil || got.AccessToken != "access-2" || got.ExpiresIn != 1800 {
		t.Fatal(got, err)
	}
	if _, err := c.V2.ListCredentials(t.Context(), nil); err != nil || s.renewals != 1 {
		t.Error(err, s.renewals)
	}
}
