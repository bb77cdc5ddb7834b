package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// renewTimeout bounds one exchange of the refresh token, which outlives the
// call that began it.
const renewTimeout = 30 * time.Second

// session holds the tokens of a user, in memory only. A refresh token is good
// for one use, and using it twice ends the session; so one exchange serves all
// calls that wait for it.
type session struct {
	exchange func(ctx context.Context, refresh string) (*v2.TokenAnswer, string, error)

	mu      sync.Mutex
	number  uint64 // session number: changes with each Login and Logout, not with a renewal
	access  string // "" before Login and after Logout
	refresh string // "" also when the session has ended
	renewal *renewal
}

// renewal is an exchange that is under way, or done.
type renewal struct {
	refresh string // the token it uses up
	done    chan struct{}
	answer  *v2.TokenAnswer // valid after done
	err     error           // likewise
}

// tokens returns the present tokens; the credential is the zero value when
// nobody is signed in.
func (s *session) tokens() (access credential, refresh string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.access == "" {
		return credential{}, ""
	}
	return bearer(s.access, s.number), s.refresh
}

// begin replaces the session, if there is one.
func (s *session) begin(access, refresh string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.number++
	s.access, s.refresh = access, refresh
}

// end forgets a session, unless another has taken its place.
func (s *session) end(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.number == number {
		s.number++
		s.access, s.refresh = "", ""
	}
}

// renew returns a credential of the same session in place of the refused one.
// When the session has ended, or another has taken its place, the error is
// ErrUnauthenticated: the call goes on as nobody else. The refused token stays,
// so that no other credential takes its place unasked.
func (s *session) renew(ctx context.Context, refused credential) (credential, error) {
	s.mu.Lock()
	if s.number != refused.session {
		defer s.mu.Unlock()
		return credential{}, fmt.Errorf("the session of this call was replaced: %w", ErrUnauthenticated)
	}
	if s.access != refused.access { // somebody was faster
		defer s.mu.Unlock()
		return bearer(s.access, s.number), nil
	}
	r := s.join(ctx)
	s.mu.Unlock()
	answer, err := r.wait(ctx)
	if err != nil {
		return credential{}, err
	}
	return bearer(answer.AccessToken, refused.session), nil
}

// force exchanges the refresh token although nothing was refused.
func (s *session) force(ctx context.Context) (*v2.TokenAnswer, error) {
	s.mu.Lock()
	r := s.join(ctx)
	s.mu.Unlock()
	return r.wait(ctx)
}

// join returns the exchange of the present refresh token and begins it if
// nobody has. The caller holds mu.
func (s *session) join(ctx context.Context) *renewal {
	if s.refresh == "" {
		return nil
	}
	if s.renewal != nil && s.renewal.refresh == s.refresh {
		return s.renewal
	}
	r := &renewal{refresh: s.refresh, done: make(chan struct{})}
	s.renewal = r
	go s.run(context.WithoutCancel(ctx), r)
	return r
}

func (s *session) run(ctx context.Context, r *renewal) {
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	answer, refresh, err := s.exchange(ctx, r.refresh)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refresh == r.refresh { // nobody has signed in or out meanwhile
		switch {
		case err == nil:
			s.access, s.refresh = answer.AccessToken, refresh
		case errors.Is(err, ErrUnauthenticated):
			s.refresh = ""
		}
	}
	if s.renewal == r {
		s.renewal = nil
	}
	r.answer, r.err = answer, err
	close(r.done)
}

func (r *renewal) wait(ctx context.Context) (*v2.TokenAnswer, error) {
	if r == nil {
		return nil, fmt.Errorf("there is no session to renew, sign in: %w", ErrUnauthenticated)
	}
	select {
	case <-r.done:
		return r.answer, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
