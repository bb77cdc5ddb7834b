package client

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// users simulates a server on which every login is another user's. It processes a request when it
// arrives. An answer takes a second, except that the answer to a login takes no time and the answer
// to a logout takes a quarter of a second. Only the last access token of each user is valid.
type users struct {
	mu      sync.Mutex
	tokens  []int // number of the valid token, by user
	limited bool  // the next success is a 429 instead
}

// expire invalidates the access token of a user.
func (u *users) expire(user int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.tokens[user]++
}

func (u *users) answer(w http.ResponseWriter, r *http.Request, _ int) {
	if r.URL.Path != "/api/v2/auth/login" {
		pause := time.Second
		if r.URL.Path == "/api/v2/auth/logout" {
			pause /= 4
		}
		defer time.Sleep(pause) // on the clock of the test's bubble
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	switch r.URL.Path {
	case "/api/v2/auth/login":
		u.tokens = append(u.tokens, 0)
		u.give(w, len(u.tokens)-1)
	case "/api/v2/auth/refresh":
		var user int
		if cookie, err := r.Cookie(refreshCookie); err == nil {
			_, _ = fmt.Sscanf(cookie.Value, "refresh-%d", &user)
		}
		u.tokens[user]++
		u.give(w, user)
	default:
		good := slices.ContainsFunc(u.all(), func(token string) bool { return r.Header.Get("Authorization") == "Bearer "+token })
		switch {
		case !good && r.URL.Path != "/api/v2/auth/logout":
			refusal(w, http.StatusUnauthorized)
		case u.limited:
			u.limited = false
			refusal(w, http.StatusTooManyRequests)
		default:
			success(w, nil)
		}
	}
}

// all returns the valid access tokens.
func (u *users) all() (tokens []string) {
	for user, number := range u.tokens {
		tokens = append(tokens, fmt.Sprintf("access-%d-%d", user, number))
	}
	return tokens
}

func (u *users) give(w http.ResponseWriter, user int) {
	http.SetCookie(w, &http.Cookie{Name: refreshCookie, Value: fmt.Sprintf("refresh-%d-%d", user, u.tokens[user])})
	success(w, map[string]any{"access_token": u.all()[user], "token_type": "Bearer", "expires_in": 1800})
}

// deletions returns the credentials that the deletions carried.
func deletions(n *wire) (credentials []string) {
	for _, s := range n.all() {
		if s.method == http.MethodDelete {
			credentials = append(credentials, s.header.Get("X-API-Key")+strings.TrimPrefix(s.header.Get("Authorization"), "Bearer "))
		}
	}
	return credentials
}

// TestACallIsNeverSentAsSomebodyElse rejects the first user's deletion while or after something
// else happens to the session.
func TestACallIsNeverSentAsSomebodyElse(t *testing.T) {
	logout := func(t *testing.T, c *Client) {
		t.Helper()
		if err := c.V2.Logout(t.Context()); err != nil {
			t.Error(err)
		}
	}
	for name, test := range map[string]struct {
		after   time.Duration // its refusal comes after 1 s, the renewal's end after 2, the next answer after 3
		limited bool
		happens func(*testing.T, *Client)
		want    []string // tokens that the deletion carries, in order
		fails   bool
	}{
		"nothing":                {0, false, func(*testing.T, *Client) {}, []string{"access-0-0", "access-0-2"}, false},
		"another user signs in":  {500 * time.Millisecond, false, login, []string{"access-0-0"}, true},
		"the user signs out":     {0, false, logout, []string{"access-0-0"}, true},
		"both":                   {0, false, func(t *testing.T, c *Client) { login(t, c); logout(t, c); login(t, c) }, []string{"access-0-0"}, true},
		"in the renewal":         {1500 * time.Millisecond, false, login, []string{"access-0-0", "access-0-2"}, false},
		"in the wait afterwards": {3050 * time.Millisecond, true, login, []string{"access-0-0", "access-0-2", "access-0-2"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u := &users{limited: test.limited}
				n := &wire{answer: u.answer}
				c := n.client(t)
				login(t, c)
				u.expire(0)
				var calls sync.WaitGroup
				calls.Go(func() {
					err := c.V2.DeleteCredential(t.Context(), "cred_x")
					if test.fails != (err != nil) || test.fails && !errors.Is(err, ErrUnauthenticated) {
						t.Error(err)
					}
				})
				synctest.Wait()
				time.Sleep(test.after) // on the bubble's clock, which decides the order
				test.happens(t, c)
				calls.Wait()
				if got := deletions(n); !slices.Equal(got, test.want) {
					t.Errorf("deleted as %q, want %q", got, test.want)
				}
			})
		})
	}
}

func TestALogoutEndsOnlyTheSessionThatItBeganWith(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &users{}
		n := &wire{answer: u.answer}
		c := n.client(t)
		login(t, c)
		var calls sync.WaitGroup
		calls.Go(func() {
			if err := c.V2.Logout(t.Context()); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait() // the call waits for its answer
		login(t, c)
		calls.Wait()
		if access, refresh := c.V2.session.tokens(); access.access != "access-1-0" || refresh != "refresh-1-0" {
			t.Error("the second user was signed out")
		}
	})
}

func TestALogoutCarriesBothTokensOfOneSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &wire{answer: (&users{}).answer}
		c := n.client(t)
		login(t, c)
		access, refresh := c.V2.session.tokens()
		login(t, c) // between reading the tokens and sending
		if err := c.V2.transport.run(t.Context(), logout(access, refresh)); err != nil {
			t.Fatal(err)
		}
		last := n.all()[len(n.all())-1].header
		if last.Get("Authorization") != "Bearer access-0-0" || last.Get("Cookie") != "refreshToken=refresh-0-0" {
			t.Error(last)
		}
	})
}
