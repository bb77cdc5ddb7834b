package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// renewTimeout bounds one exchange of the refresh token, which may outlive the call that began it.
const renewTimeout = 30 * time.Second

// session holds the tokens of a user, in memory only. A refresh token can be used once, and using
// it twice ends the session. So one exchange serves all calls that wait for it.
type session struct {
	exchange func(ctx context.Context, refresh string) (*v2.TokenAnswer, string, error)

	mu      sync.Mutex
	number  uint64 // changes with each Login and Logout, not with a renewal
	access  string // "" before Login and after Logout
	refresh string // "" also after the session has ended
	renewal *renewal
}

// renewal is an exchange in progress, or a finished one.
type renewal struct {
	refresh string // refresh token that the exchange uses up
	done    chan struct{}
	answer  *v2.TokenAnswer // valid after done
	err     error           // valid after done
}

// tokens returns the current tokens. The credential is zero when nobody is signed in.
func (s *session) tokens() (access credential, refresh string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.access == "" {
		return credential{}, ""
	}
	return bearer(s.access, s.number), s.refresh
}

// begin starts a session and replaces the previous one.
func (s *session) begin(access, refresh string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.number++
	s.access, s.refresh = access, refresh
}

// end clears the session with this number, unless another has replaced it.
func (s *session) end(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.number == number {
		s.number++
		s.access, s.refresh = "", ""
	}
}

// renew returns a new credential of the same session for the rejected one. When the session has
// ended, or another has replaced it, renew returns ErrUnauthenticated: the call must not continue
// as another principal. The rejected token stays set, so that no other credential replaces it
// unasked.
func (s *session) renew(ctx context.Context, refused credential) (credential, error) {
	s.mu.Lock()
	if s.number != refused.session {
		defer s.mu.Unlock()
		return credential{}, fmt.Errorf("the session of this call was replaced: %w", ErrUnauthenticated)
	}
	if s.access != refused.access { // another call was faster
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

// force exchanges the refresh token although no token was rejected.
func (s *session) force(ctx context.Context) (*v2.TokenAnswer, error) {
	s.mu.Lock()
	r := s.join(ctx)
	s.mu.Unlock()
	return r.wait(ctx)
}

// join returns the exchange of the current refresh token and begins it if none is in progress. The
// caller holds mu.
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
