package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"time"
)

// transport sends calls to one deployment. It adds the credential, renews the session, and repeats
// calls that are safe to repeat. A call keeps its principal to the end, even if a user signs in or
// out meanwhile.
type transport struct {
	base       string // URL to which paths are appended
	http       *http.Client
	retries    int
	credential func() credential
	// renew returns a new credential of the same principal for one that was rejected.
	renew func(ctx context.Context, refused credential) (credential, error)
}

// do sends a call and decodes its JSON answer.
func do[T any](ctx context.Context, t *transport, c call) (*T, error) {
	r, err := t.reply(ctx, c)
	if err != nil {
		return nil, err
	}
	return decode[T](r)
}

// run sends a call that has no answer besides success.
func (t *transport) run(ctx context.Context, c call) error {
	_, err := t.reply(ctx, c)
	return err
}

// raw sends a call and returns the bytes of its answer.
func (t *transport) raw(ctx context.Context, c call) ([]byte, error) {
	r, err := t.reply(ctx, c)
	if err != nil {
		return nil, err
	}
	return r.body, nil
}

// text sends a call and returns its answer as a string.
func (t *transport) text(ctx context.Context, c call) (string, error) {
	b, err := t.raw(ctx, c)
	return string(b), err
}

// stream sends a call and returns the body of its answer for reading as it arrives.
func (t *transport) stream(ctx context.Context, c call) (io.ReadCloser, error) {
	r, err := t.send(ctx, c)
	if err != nil {
		return nil, err
	}
	if r.StatusCode == http.StatusOK {
		return answerBody{r.Body}, nil
	}
	if _, err = read(r); err == nil {
		err = fmt.Errorf("reading the answer: unexpected status %d", r.StatusCode)
	}
	return nil, err
}

// answerBody is the body of an answer that is read as it arrives.
type answerBody struct{ io.ReadCloser }

// Read implements io.Reader.
func (b answerBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF { //nolint:errorlint // a Reader returns io.EOF itself
		err = noAnswer{err}
	}
	return n, err
}

// reply is a successful response.
type reply struct {
	body    []byte
	cookies []*http.Cookie
}

// reply sends a call and reads its answer. It returns an error for every answer other than a
// success.
func (t *transport) reply(ctx context.Context, c call) (*reply, error) {
	r, err := t.send(ctx, c)
	if err != nil {
		return nil, err
	}
	answer, err := read(r)
	if err == nil && c.entityTag != nil {
		*c.entityTag = r.Header.Get("ETag")
	}
	return answer, err
}

// read reads a response and closes it.
func read(r *http.Response) (*reply, error) {
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, fmt.Errorf("reading the answer: %w", noAnswer{err})
	}
	if r.StatusCode < 200 || r.StatusCode > 299 {
		return nil, errorOf(r, body)
	}
	return &reply{body, r.Cookies()}, nil
}

func decode[T any](r *reply) (*T, error) {
	t := new(T)
	if err := json.Unmarshal(r.body, t); err != nil {
		return nil, fmt.Errorf("reading the answer: %w", err)
	}
	return t, nil
}

// send sends a call, with retries, and returns the last answer.
func (t *transport) send(ctx context.Context, c call) (*http.Response, error) {
	request, err := c.request(ctx, t.base)
	if err != nil {
		return nil, err
	}
	who := c.credential
	if who == (credential{}) && !c.isAnonymous {
		who = t.credential()
	}
	renewable := who.access != "" && c.credential == credential{}
	for attempt := 0; ; attempt++ {
		response, err := t.sendOnce(request, c, who)
		if renewable && err == nil && response.StatusCode == http.StatusUnauthorized {
			renewed, failed := t.renew(ctx, who)
			if failed == nil {
				discard(response)
				who = renewed
				response, err = t.sendOnce(request, c, who)
			} else if !errors.Is(failed, ErrUnauthenticated) {
				discard(response)
				return nil, fmt.Errorf("renewing the session: %w", failed)
			}
		}
		wait, again := t.decide(c, attempt, response, err)
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

// sendOnce sends a copy of the request with a credential.
func (t *transport) sendOnce(request *http.Request, c call, who credential) (*http.Response, error) {
	r := request.Clone(request.Context())
	if request.GetBody != nil {
		body, err := request.GetBody()
		if err != nil {
			return nil, fmt.Errorf("reading the request again: %w", err)
		}
		r.Body = body
	}
	r.Header.Set("User-Agent", userAgent)
	if who.header != "" {
		r.Header.Set(who.header, who.value)
	}
	if c.refreshToken != "" {
		r.AddCookie(&http.Cookie{Name: refreshCookie, Value: c.refreshToken}) //nolint:gosec // a request has no attributes of cookies
	}
	h := t.http
	if c.isLasting {
		unlimited := *h
		unlimited.Timeout = 0
		h = &unlimited
	}
	response, err := h.Do(r)
	if err != nil {
		// Drop the address, which may contain the name of a credential.
		if e := new(url.Error); errors.As(err, &e) {
			err = e.Err
		}
		return nil, fmt.Errorf("calling the server: %w", noAnswer{err})
	}
	return response, nil
}

// If the server sets no pause, the first pause is half to all of firstWait, and each later one is
// twice as long, up to lastWait. longestWait bounds the pause that the server may set.
const (
	firstWait   = 200 * time.Millisecond
	lastWait    = 10 * time.Second
	longestWait = 2 * time.Minute
)

// decide reports whether to send the call again, and after what pause. The server answers 429
// before it does anything. After a 503 or a broken connection the outcome is unknown.
func (t *transport) decide(c call, attempt int, response *http.Response, err error) (wait time.Duration, again bool) {
	if c.isProbe || attempt >= t.retries {
		return 0, false
	}
	if err != nil {
		return backoff(attempt), c.isRepeatable && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
	}
	switch response.StatusCode {
	case http.StatusTooManyRequests:
		again = true
	case http.StatusServiceUnavailable:
		again = c.isRepeatable
	}
	wait = retryAfter(response)
	if wait > longestWait {
		return 0, false
	}
	if wait > 0 {
		return wait + spread(firstWait), again // so that many clients do not return at the same instant
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

// spread returns a random duration up to d.
func spread(d time.Duration) time.Duration {
	return rand.N(d + 1) //nolint:gosec // spreads retries, hides nothing
}

// lasts reports whether ctx lasts longer than d. If it does not, the present answer is more useful
// than the end of ctx.
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

// discard reads the rest of a short answer, so that its connection can be reused.
func discard(r *http.Response) {
	_, _ = io.CopyN(io.Discard, r.Body, 64<<10)
	_ = r.Body.Close()
}

const userAgent = "latticekeep-go"
