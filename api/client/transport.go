package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"time"
)

// manner is how a request is to be sent. The methods put it on their context,
// the one way from them through the generated code to the doer.
type manner struct {
	// repeatable: carrying it out twice does no more than once, so that it may
	// be sent again although its outcome is unknown.
	repeatable bool
	anonymous  bool       // it carries no credential
	once       bool       // it is not sent again, whatever the answer
	lasting    bool       // its answer may take as long as ctx allows
	access     credential // if not zero, it carries this one, and its 401 does not renew the session
	refresh    string     // it carries this refresh token
}

type mannerKey struct{}

func with(ctx context.Context, m manner) context.Context {
	return context.WithValue(ctx, mannerKey{}, m)
}

// repeatable marks requests other than GET that change nothing, or that set a
// state which they state in full.
func repeatable(ctx context.Context) context.Context { return with(ctx, manner{repeatable: true}) }

// anonymous marks operations that need no credential: it goes only where it is
// needed.
func anonymous(ctx context.Context) context.Context { return with(ctx, manner{anonymous: true}) }

// probe marks questions about the present moment.
func probe(ctx context.Context) context.Context {
	return with(ctx, manner{anonymous: true, once: true})
}

func mannerOf(r *http.Request) manner {
	m, _ := r.Context().Value(mannerKey{}).(manner)
	// The rule of net/http's Transport, which repeats such requests too.
	if r.Method == http.MethodGet || r.Method == http.MethodHead || r.Header.Get(idempotencyKey) != "" {
		m.repeatable = true
	}
	return m
}

// credential is the header that says who calls; the zero value says nobody.
type credential struct {
	header, value string
	access        string // the access token, if it is one
	session       uint64 // the number of its session
}

func bearer(access string, session uint64) credential {
	return credential{"Authorization", "Bearer " + access, access, session}
}

// doer sends the requests of the generated code: it puts the credential on
// them, renews the session and sends again what may be sent again. A call keeps
// its principal to the end, whoever signs in or out meanwhile.
type doer struct {
	http       *http.Client
	retries    int
	credential func() credential
	// renew returns a credential of the same principal in place of one that was
	// refused.
	renew func(ctx context.Context, refused credential) (credential, error)
}

// Do sends one request and returns the last answer to it.
func (d *doer) Do(request *http.Request) (*http.Response, error) {
	ctx, m := request.Context(), mannerOf(request)
	c := m.access
	own := c != credential{}
	if !own && !m.anonymous {
		c = d.credential()
	}
	renewable := c.access != "" && !own
	for attempt := 0; ; attempt++ {
		response, err := d.send(request, m, c)
		if renewable && err == nil && response.StatusCode == http.StatusUnauthorized {
			renewed, failed := d.renew(ctx, c)
			if failed == nil {
				discard(response)
				c = renewed
				response, err = d.send(request, m, c)
			} else if !errors.Is(failed, ErrUnauthenticated) {
				discard(response)
				return nil, fmt.Errorf("renewing the session: %w", failed)
			}
		}
		wait, again := d.decide(m, attempt, response, err)
		if !again || !lasts(ctx, wait) {
			return response, err
		}
		if response != nil {
			discard(response)
		}
		if err := sleep(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// send sends a copy of the request once.
func (d *doer) send(request *http.Request, m manner, c credential) (*http.Response, error) {
	r := request.Clone(request.Context())
	if request.GetBody != nil {
		body, err := request.GetBody()
		if err != nil {
			return nil, fmt.Errorf("reading the request again: %w", err)
		}
		r.Body = body
	}
	r.Header.Set("User-Agent", userAgent)
	if c.header != "" {
		r.Header.Set(c.header, c.value)
	}
	if m.refresh != "" {
		r.AddCookie(&http.Cookie{Name: refreshCookie, Value: m.refresh})
	}
	h := d.http
	if m.lasting {
		unlimited := *h
		unlimited.Timeout = 0
		h = &unlimited
	}
	response, err := h.Do(r)
	if err != nil {
		// Without the address, which may hold the name of a credential.
		if e := new(url.Error); errors.As(err, &e) {
			err = e.Err
		}
		return nil, fmt.Errorf("calling the server: %w", err)
	}
	return response, nil
}

// Without a word from the server, the first wait is half to all of firstWait,
// and each later one is twice as long, up to lastWait. longestWait bounds what
// the server may ask for.
const (
	firstWait   = 200 * time.Millisecond
	lastWait    = 10 * time.Second
	longestWait = 2 * time.Minute
)

// decide says whether to send again, and after what time. A 429 is answered
// before anything is done. After a 503 or a broken connection it is unknown
// whether the request was carried out.
func (d *doer) decide(m manner, attempt int, response *http.Response, err error) (wait time.Duration, again bool) {
	if m.once || attempt >= d.retries {
		return 0, false
	}
	if err != nil {
		return backoff(attempt), m.repeatable && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
	}
	switch response.StatusCode {
	case http.StatusTooManyRequests:
		again = true
	case http.StatusServiceUnavailable:
		again = m.repeatable
	}
	wait = retryAfter(response)
	if wait > longestWait {
		return 0, false
	}
	if wait > 0 {
		return wait + spread(firstWait), again // so that many clients do not come back in the same instant
	}
	return backoff(attempt), again
}

func backoff(attempt int) time.Duration {
	full := lastWait
	if attempt < 10 {
		full = min(lastWait, firstWait<<attempt)
	}
	return full/2 + spread(full/2)
}

// spread returns a random part of d.
func spread(d time.Duration) time.Duration { return time.Duration(rand.Int64N(int64(d) + 1)) }

// lasts reports whether ctx may last longer than d. When it will not, the
// answer that is there says more than its end would.
func lasts(ctx context.Context, d time.Duration) bool {
	end, ok := ctx.Deadline()
	return !ok || time.Until(end) > d
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// discard reads the rest of a short answer, so that its connection can be used
// again.
func discard(r *http.Response) {
	_, _ = io.CopyN(io.Discard, r.Body, 64<<10)
	_ = r.Body.Close()
}
